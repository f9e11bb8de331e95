"""Why a plan is not another: what forbids it, what it loses, and changes that really turn the order."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from autoshard.cost.provenance import calibration_of
from autoshard.errors import InputError
from autoshard.plan.explanation import WhyNot
from autoshard.plan.plan import Plan
from autoshard.search import what_if
from autoshard.search.planner import search
from autoshard.search.what_if import (
    alternatives,
    best_time_s,
    circumstances,
    outer_pins,
    request_of_plan,
    why_not,
)
from tests.search.brute_force import ask


def time_s(plan: Plan) -> float:
    assert plan.prediction
    return plan.prediction.step_time_s


@pytest.fixture(scope="module", autouse=True)
def one_doubling() -> Iterator[None]:
    """Look at twice and half as much only, because every look is two searches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(what_if, "_DOUBLINGS", 1)
        yield


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(ask("tiny-llama", pins="tp=2")).plans[0]


@pytest.fixture(scope="module")
def found(plan: Plan) -> WhyNot:
    return why_not(plan, "pp=2", calibration_of(plan))


def test_the_best_with_these_keys_is_slower(plan: Plan, found: WhyNot):
    assert found.fits and found.other and not found.against
    assert found.other.mesh.size("pp") == 2
    assert time_s(found.other) > time_s(plan)


def test_nothing_has_to_change_where_the_other_is_faster(plan: Plan, found: WhyNot):
    assert found.other
    back = why_not(found.other, "tp=2", calibration_of(plan))
    assert back.other and time_s(back.other) < time_s(found.other)
    assert not back.flips and not back.unmoved


def test_every_change_that_is_named_turns_the_order_and_a_unit_less_does_not(plan: Plan, found: WhyNot):
    assert found.flips and found.other
    names = {flip.name for flip in found.flips} | set(found.unmoved)
    request = request_of_plan(plan, calibration_of(plan))
    known = {one.name: one for one in circumstances(request, plan.candidate, found.other.candidate)}
    assert names == known.keys() >= {"memory of a rank", "bandwidth of all links"}
    for flip in found.flips:
        one = known[flip.name]
        units = round(flip.then / one.unit)
        nearer = units + (1 if flip.then < flip.now else -1)
        assert flip.factor == pytest.approx(units / one.now)
        for count, turned in ((units, True), (nearer, False)):
            changed = one.changed(count)
            own, other = (best_time_s(changed, outer_pins(it.candidate)) for it in (plan, found.other))
            assert (other < own) is turned, (flip, count)


def test_a_rule_that_forbids_it_is_named_under_its_option(plan: Plan):
    (reason,) = why_not(plan, "tp=3", calibration_of(plan)).against
    assert reason.startswith("--why-not tp=3: 8 query heads of tiny-llama do not divide by 3. Use tp 1, 2 or 4")


def test_bytes_that_forbid_it_are_named(plan: Plan):
    model = replace(plan.model, num_layers=4 * plan.model.num_layers, hidden=8 * plan.model.hidden)
    small = replace(plan.cluster, chip=replace(plan.cluster.chip, memory_bytes=2**30))
    found = why_not(replace(plan, model=model, cluster=small), "tp=1,pp=1,zero=1", calibration_of(plan))
    (reason,) = found.against
    assert not found.fits and found.other and "none of the" in reason and "more than the" in reason
    assert all(flip.then > flip.now for flip in found.flips if flip.name == "memory of a rank")


def test_a_plan_is_no_other_than_itself(plan: Plan):
    found = why_not(plan, str(plan.candidate), calibration_of(plan))
    assert found.other and found.other.candidate == plan.candidate
    assert not found.flips and not found.unmoved


@pytest.mark.parametrize("text", ["", "tp", "tp=x", "zork=1"])
def test_what_cannot_be_read_is_said_with_its_option(plan: Plan, text: str):
    with pytest.raises(InputError, match="--why-not"):
        why_not(plan, text, calibration_of(plan))


def test_runners_up_are_others_and_more_memory_never_slows(plan: Plan):
    beside = alternatives(plan, calibration_of(plan))
    assert beside.unlimited_s <= time_s(plan) * (1 + 1e-9)
    assert beside.others and plan.candidate not in {other.candidate for other in beside.others}
    times = [time_s(other) for other in beside.others]
    assert times == sorted(times)


def test_other_kernels_stay_pinned(plan: Plan):
    assert request_of_plan(replace(plan, kernels="te"), calibration_of(plan)).pins == {"kernels": "te"}


def test_nothing_is_infinitely_slow():
    assert best_time_s(ask("tiny-llama"), {"tp": 3}) == float("inf")
