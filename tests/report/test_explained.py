"""What explain prints: golden, and no wider than a terminal."""

import io

from autoshard.plan.candidate import Candidate
from autoshard.report.explained import explanation_report
from autoshard.report.terminal import make_console
from autoshard.search.explain import explain
from autoshard.search.planner import plan_at
from tests.search.brute_force import ask


def test_the_whole_explanation(golden):
    plan = plan_at(ask("llama3-70b", "trn1.32xlarge", 16), Candidate.parse("tp=32,pp=8,dp=2"))
    console = make_console()
    console.file = io.StringIO()
    console.print(explanation_report(plan, explain(plan)))
    text = "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())
    golden("report/explain-llama3-70b-trn1-16.txt", text)
    assert max(map(len, text.splitlines())) <= 120
