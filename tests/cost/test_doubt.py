"""The interval of a ratio: what both plans are off by together cancels, and what the chance of the faster one is."""

import math
from statistics import NormalDist

import pytest

from autoshard.cost.doubt import EIGHTY_PERCENT, compared, ratio_of
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.search.bound.request import plan_at
from tests.search.brute_force import ask

THEIRS = "tp=32,pp=8,dp=2,recompute=selective[CoreAttention,LlamaMLP]"


def made(text: str, model: str = "llama3-70b", cluster: str = "trn1.32xlarge", nodes: int = 16) -> Plan:
    return plan_at(ask(model, cluster, nodes), Candidate.parse(text))


def width(a: Plan, b: Plan) -> float:
    found = ratio_of(a, b)
    return math.log(found.high / found.low)


def half_width(plan: Plan) -> float:
    assert plan.prediction
    return plan.prediction.high_s / plan.prediction.step_time_s - 1


def test_a_plan_against_itself_is_certain_to_take_as_long():
    found = ratio_of(made(THEIRS), made(THEIRS))
    assert (found.value, found.low, found.high, found.faster) == (1.0, 1.0, 1.0, 0.5)


def test_the_ratio_is_that_of_the_predictions_and_the_chance_that_of_its_interval():
    ours, theirs = made("tp=8,pp=8,dp=8,recompute=full"), made(THEIRS)
    found = ratio_of(ours, theirs)
    assert ours.prediction and theirs.prediction
    assert found.value == pytest.approx(ours.prediction.step_time_s / theirs.prediction.step_time_s)
    assert found.high / found.value == pytest.approx(found.value / found.low)
    deviation = math.log(found.high / found.value) / EIGHTY_PERCENT
    assert found.faster == pytest.approx(NormalDist().cdf(-math.log(found.value) / deviation))
    back = ratio_of(theirs, ours).inverse
    assert [getattr(back, name) for name in ("value", "low", "high", "faster")] == pytest.approx(
        [getattr(found, name) for name in ("value", "low", "high", "faster")]
    )


def test_plans_that_are_alike_are_told_apart_better():
    ours = made("tp=8,pp=8,dp=8,recompute=full")
    near, far = made("tp=8,pp=16,dp=4,recompute=full"), made("tp=32,pp=4,dp=4,recompute=full")
    assert 0 < width(ours, near) < width(ours, far)


def test_what_both_plans_are_off_by_together_cancels():
    """A program that nobody has measured widens each interval, and says little about which of two plans is faster."""
    one, two = (made(text, "llama3-8b", "h100-80", 1) for text in ("tp=1,dp=8", "tp=2,dp=4"))
    assert half_width(one) >= 0.2499 and half_width(two) >= 0.2499
    assert width(one, two) / 2 < 0.5 * half_width(one)


def test_two_plans_are_compared_with_their_ratio_where_they_answer_one_question():
    ours, theirs = made("tp=8,pp=8,dp=8,recompute=full"), made(THEIRS)
    assert compared(theirs, ours).ratio == ratio_of(ours, theirs)
    assert compared(ours, ours).ratio is None
    assert compared(ours, made("tp=8,pp=8,dp=4,recompute=full", nodes=8)).ratio is None
