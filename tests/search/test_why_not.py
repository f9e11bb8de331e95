"""Why a plan is not another: what forbids it, what it loses, and changes that really turn the order."""

from dataclasses import replace

import pytest

from autoshard.cost.worth import calibration_of
from autoshard.errors import InputError
from autoshard.plan.explanation import Flip, WhyNot
from autoshard.plan.plan import Plan
from autoshard.search.alternatives import alternatives
from autoshard.search.contest import best_time_s, outer_pins, pinned, request_of_plan
from autoshard.search.flips import circumstances
from autoshard.search.planner import search
from autoshard.search.why_not import why_not
from tests.search.brute_force import ask


def time_s(plan: Plan) -> float:
    assert plan.prediction
    return plan.prediction.step_time_s


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(ask("llama3-8b", "trn1.32xlarge", 2, pins="pp=1,mbs=1,cp=1")).plans[0]


@pytest.fixture(scope="module")
def found(plan: Plan) -> WhyNot:
    return why_not(plan, "tp=32,pp=1,cp=1", calibration_of(plan))


def test_the_best_with_these_keys_is_slower(plan: Plan, found: WhyNot):
    assert found.fits and found.other and not found.against
    assert found.other.mesh.size("tp") == 32
    assert time_s(found.other) > time_s(plan)


def test_every_change_that_is_named_turns_the_order_and_a_unit_less_does_not(plan: Plan, found: WhyNot):
    assert found.flips and found.other
    names = {flip.name for flip in found.flips} | set(found.unmoved)
    request = request_of_plan(plan, calibration_of(plan))
    known = {one.name: one for one in circumstances(request, plan.candidate, found.other.candidate)}
    assert names == known.keys()
    for flip in found.flips:
        one = known[flip.name]
        units = round(flip.then / one.unit)
        nearer = units + (1 if flip.then < flip.now else -1)
        for count, turned in ((units, True), (nearer, False)):
            changed = one.changed(count)
            own = best_time_s(pinned(changed, outer_pins(plan.candidate, {})))
            other = best_time_s(pinned(changed, outer_pins(found.other.candidate, {})))
            assert (other < own) is turned, (flip, count)


def test_a_rule_that_forbids_it_is_named(plan: Plan):
    (reason,) = why_not(plan, "tp=16", calibration_of(plan)).against
    assert reason.startswith("--fix tp=16: trn1 runs tp 1, 8 or 32.")


def test_bytes_that_forbid_it_are_named_and_memory_turns_it(plan: Plan):
    found = why_not(plan, "tp=1,pp=2,zero=1,cp=1,dp=32,mbs=1", calibration_of(plan))
    (reason,) = found.against
    assert not found.fits and found.other and "none of the" in reason and "more than the 16.00 GiB" in reason
    assert all(flip.then > flip.now for flip in found.flips if flip.name == "memory of a rank")
    assert {flip.name for flip in found.flips} | set(found.unmoved) >= {"memory of a rank", "bandwidth of all links"}


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


def test_other_kernels_stay_pinned():
    plan = search(ask("llama2-7b", "trn1.32xlarge", pins="kernels=nxd_core,tp=8", seq_len=4096)).plans[0]
    assert request_of_plan(plan, calibration_of(plan)).pins == {"kernels": "nxd_core"}


def test_a_flip_says_by_how_much():
    assert Flip(name="global batch", now=1024, then=128).factor == 0.125


def test_nothing_is_infinitely_slow():
    request = ask("llama3-70b", "trn1.32xlarge")
    assert best_time_s(request) == float("inf")
    assert best_time_s(replace(request, pins={"tp": 3})) == float("inf")
