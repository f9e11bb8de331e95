"""The adversary of certificates prices what ``--at`` prices, and refutes a certificate that promises too much."""

from dataclasses import replace

import pytest

from autoshard.plan.candidate import Candidate
from autoshard.search.planner import search
from autoshard.search.request import plan_at
from benchmarks import certificate
from benchmarks.certificate import Adversary, Finding, attack, judge, task

EASY = 1  # a question that has an answer
FOUND = Finding(question="1", value=2.0, bound=1.9, least=1.95, candidate="tp=1", num_priced=3)


def test_a_plan_below_the_bound_refutes_a_certificate_and_one_within_the_gap_does_not() -> None:
    refuted = replace(FOUND, least=1.8)
    nothing = replace(FOUND, value=float("inf"), bound=float("inf"), least=1.0)  # the search found no plan
    result = judge([FOUND, refuted, nothing])
    assert result.value == 2 and not result.holds
    assert result.extras["plan_beaten"] == 2 and result.extras["largest_gap"] == 0.05
    assert judge([FOUND]).holds


def test_the_adversary_prices_a_candidate_as_the_command_line_does() -> None:
    request = task(EASY)
    answer = search(request).plans[0]
    candidate = Candidate.parse("tp=2,pp=2,vp=2,schedule=zb_v,stages=5/5/4/3,recompute=full:2", num_ranks=24)
    adversary = Adversary.of(request, EASY)
    for one in (candidate, answer.candidate):
        prediction = plan_at(request, one).prediction
        assert prediction and adversary.time_s(one) == prediction.step_time_s
    assert adversary.time_s(replace(candidate, tp=5)) == float("inf")  # no shape


def test_a_search_that_promises_too_much_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    def boastful(request: object) -> object:
        answer = search(task(EASY))
        own = answer.certificate
        return replace(answer, plans=(), certificate=replace(own, value=2 * own.value, bound=2 * own.bound))

    assert not attack(task(EASY), EASY, (3, 10)).refuted
    monkeypatch.setattr(certificate, "search", boastful)
    assert attack(task(EASY), EASY, (10, 20)).refuted


@pytest.mark.slow
@pytest.mark.parametrize("number", range(100, 120))
def test_no_certificate_is_refuted(number: int) -> None:
    finding = attack(task(number), number)
    assert not finding.refuted, finding
