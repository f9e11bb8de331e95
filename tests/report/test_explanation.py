"""What explain prints: golden, and no wider than a terminal."""

import re

from autoshard.cost.calibration import calibration_of
from autoshard.plan.candidate import Candidate
from autoshard.plan.explanation import Alternatives
from autoshard.report.explanation import explanation_report
from autoshard.search.explain import explain
from autoshard.search.request import plan_at
from autoshard.search.what_if import alternatives
from tests.report.printed import printed
from tests.search.brute_force import ask


def explained(request, text, *, searched=False):
    plan = plan_at(request, Candidate.parse(text))
    beside = alternatives(plan, calibration_of(plan)) if searched else Alternatives(others=(), unlimited_s=1e-3)
    return printed(explanation_report(plan, explain(plan), beside))


def test_the_whole_explanation(golden):
    text = explained(ask("llama3-70b", "trn1.32xlarge", 16), "tp=32,pp=8,dp=2", searched=True)
    golden("report/explain-llama3-70b-trn1-16.txt", text)


def test_what_waits_and_what_hides_is_said_only_where_it_is():
    one_by_one = explained(ask("llama3-8b", "h100-80"), "tp=8,dp=1,kernels=mcore")
    assert re.search(r"^layer, 32 times: .* \(compute .*, waiting .*, sending .*, .* of it hidden\)$", one_by_one, re.M)
    compiled = explained(ask("llama3-8b", "trn1.32xlarge"), "tp=32,dp=1")
    assert re.search(r"^layer, 32 times: .* \(compute [0-9.]+ ms, sending [0-9.]+ ms\)$", compiled, re.M)
