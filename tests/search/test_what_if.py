"""Why a plan is not another: what forbids it, what it loses, and changes that really turn the order."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

import autoshard
from autoshard.cost.built_in import calibration_of
from autoshard.errors import InputError
from autoshard.plan.candidate import Candidate
from autoshard.plan.explanation import WhyNot
from autoshard.plan.plan import Plan
from autoshard.search.ask import what_if
from autoshard.search.ask.planner import search
from autoshard.search.ask.what_if import (
    Circumstance,
    alternatives,
    best_time_s,
    circumstances,
    outer_pins,
    request_of_plan,
    why_not,
)
from autoshard.search.bound.request import Request
from tests.search.brute_force import ask, time_s


@pytest.fixture(scope="module", autouse=True)
def few_looks() -> Iterator[None]:
    """Look at twice and half as much of two things only, because every look is two searches."""

    def two(request: Request, own: Candidate, other: Candidate) -> list[Circumstance]:
        return [*circumstances(request, own, other)][::3]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(what_if, "_DOUBLINGS", 1)
        patch.setattr(what_if, "_FINE", 8)
        patch.setattr(what_if, "circumstances", two)
        yield


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(ask("tiny-llama", pins="tp=2")).plans[0]


@pytest.fixture(scope="module")
def found(plan: Plan) -> WhyNot:
    return why_not(plan, "pp=2", calibration_of(plan))


@pytest.mark.slow
def test_the_best_with_these_keys_is_slower_and_every_change_that_is_named_turns_the_order(plan: Plan, found: WhyNot):
    assert found.fits and found.rival and not found.against
    assert found.rival.mesh.size("pp") == 2 and time_s(found.rival) > time_s(plan)
    request = request_of_plan(plan, calibration_of(plan))
    known = {one.name: one for one in circumstances(request, plan.candidate, found.rival.candidate)}
    assert [*known] == ["global batch", "sequence length", "memory of a rank", "bandwidth of all links"]
    assert found.unmoved == ("global batch",)
    (flip,) = found.flips
    one = known[flip.name]
    units = round(flip.then / one.unit)
    assert flip.factor == pytest.approx(units / one.now)
    for count, turned in ((units, True), (units + (1 if flip.then < flip.now else -1), False)):
        own, other = (best_time_s(one.changed(count), outer_pins(it.candidate)) for it in (plan, found.rival))
        assert (other < own) is turned, (flip, count)


def test_numbers_of_a_question_are_counted_in_units_that_both_can_take(plan: Plan):
    request = request_of_plan(plan, calibration_of(plan))
    known = {one.name: one for one in circumstances(request, plan.candidate, Candidate(dp=4, mbs=2))}
    batch, length, memory, bandwidth = known.values()
    assert batch.now * batch.unit == 32 and batch.changed(2).workload.global_batch == 2 * batch.unit
    assert length.now * length.unit == 256 and length.changed(1).workload.seq_len == length.unit
    assert memory.changed(4).memory_bytes == request.capacity_bytes(plan.kernels) / 2
    links = [link.bandwidth_bytes_per_s for link in bandwidth.changed(16).cluster.links]
    assert links == [2 * link.bandwidth_bytes_per_s for link in plan.cluster.links]


@pytest.mark.slow
def test_nothing_has_to_change_where_the_other_is_faster_or_the_plan_itself(plan: Plan, found: WhyNot):
    assert found.rival
    for text in ("tp=2", str(found.rival.candidate)):
        back = why_not(found.rival, text, calibration_of(plan))
        assert back.rival and time_s(back.rival) <= time_s(found.rival)
        assert not back.flips and not back.unmoved


def test_a_rule_that_forbids_it_is_named_under_its_option(plan: Plan):
    (reason,) = why_not(plan, "tp=3", calibration_of(plan)).against
    assert reason.startswith("--why-not tp=3: 8 query heads of tiny-llama do not divide by 3. Use tp 1, 2 or 4")


def test_bytes_that_forbid_it_are_named(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(what_if, "circumstances", lambda *_: ())
    small = replace(plan.cluster, chip=replace(plan.cluster.chip, memory_bytes=2**28))
    found = why_not(replace(plan, cluster=small), "tp=1,pp=1,mbs=8", calibration_of(plan))
    (reason,) = found.against
    assert not found.fits and found.rival and "none of the" in reason and "more than the" in reason


def test_an_answer_of_the_question_is_asked_for_by_its_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(what_if, "circumstances", lambda *_: ())
    result = autoshard.plan("tiny-llama", "h100-80")
    (answered,) = [answer for answer in result.answers if answer.name == "fsdp"]
    asked = why_not(result.plan, "fsdp", calibration_of(result.plan))
    assert asked.rival and asked.rival.candidate == answered.plan.candidate
    assert asked.pins == str(answered.plan.candidate)
    with pytest.raises(InputError, match=r"'vendor' is no answer beside this plan: those are .*fsdp.* Write keys"):
        why_not(result.plan, "vendor", calibration_of(result.plan))


@pytest.mark.slow
def test_the_name_of_an_answer_means_all_of_its_keys_and_its_own_logical_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(what_if, "circumstances", lambda *_: ())
    result = autoshard.plan("llama3.2-1b", "trn2.48xlarge", top=5, objective="memory")
    assert {answer.plan.cluster.lnc for answer in result.answers} == {1, 2}
    for answer in result.answers[1:]:
        found = why_not(result.plan, answer.name, calibration_of(result.plan))
        assert found.fits and found.rival and found.rival.candidate == answer.plan.candidate
    assert "lnc=2" in str({rival.candidate for rival in beside_of(result.plan)} | {result.plan.candidate})


def beside_of(plan: Plan) -> list[Plan]:
    return list(alternatives(plan, calibration_of(plan)).rivals.values())


@pytest.mark.parametrize("text", ["", "tp", "tp=x", "zork=1"])
def test_what_cannot_be_read_is_said_with_its_option(plan: Plan, text: str):
    with pytest.raises(InputError, match="--why-not"):
        why_not(plan, text, calibration_of(plan))


@pytest.mark.slow
def test_runners_up_are_others_and_more_memory_never_slows(plan: Plan):
    beside = alternatives(plan, calibration_of(plan))
    assert beside.unlimited_s <= time_s(plan) * (1 + 1e-9)
    assert beside.rivals and plan.candidate not in {other.candidate for other in beside.rivals.values()}
    times = [time_s(other) for other in beside.rivals.values()]
    assert times == sorted(times)
