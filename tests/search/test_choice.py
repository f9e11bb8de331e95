"""Which plan is written and which are shown: the simplest within a share of the fastest; by doubt, by measurements."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import event, given, settings, strategies as st

from autoshard.cost.built_in import built_in, measured_schedules
from autoshard.cost.calibration import Calibration, Reach
from autoshard.cost.outside import Seen
from autoshard.plan.candidate import Candidate, even_stages
from autoshard.plan.codec import dump
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from autoshard.schedule.counts import counts_of
from autoshard.schedule.schedule import Schedule
from autoshard.search.ask.answers import answers_of
from autoshard.search.ask.choice.doubt import DOUBT, Within, doubt_of, usual_schedules
from autoshard.search.ask.choice.evenness import more_even, unevenness
from autoshard.search.ask.choice.looking import FSDP, NO_PIPELINE, PLAIN_PIPELINE, kinds_to_add
from autoshard.search.ask.planner import SearchResult, search
from autoshard.search.bound.request import Request, plan_at
from autoshard.search.bound.watch import Look
from tests.search.brute_force import EXACT, FULL, PLAIN, Point, Stages, Truth, ask, peak, requests, time_s
from tests.search.test_planner import limit
from tests.slower import rest_is_slow

SLACK = 1e-8  # relative: printed times are rounded to so much


def predicted(interval: float) -> Plan:
    """A plan whose prediction has this relative half-width, on a platform without measured rows."""
    constants = replace(built_in("local"), interval=interval)
    request = replace(ask("tiny-llama", ranks=2), calibration=constants)
    return plan_at(request, Candidate.parse("tp=1,dp=2", 2))


@pytest.mark.parametrize(
    ("interval", "doubt"), [(0.0, 0.02), (0.05, 0.02), (0.1, 0.02), (0.15, 0.03), (0.3, 0.06), (0.5, 0.1), (0.9, 0.1)]
)
def test_the_doubt_is_a_fifth_of_the_half_width_from_2_to_10_percent(interval: float, doubt: float):
    prediction = predicted(interval).prediction
    assert prediction and doubt_of(prediction) == doubt


@given(st.floats(0, 0.94), st.floats(0, 0.94))
@settings(max_examples=10, deadline=None)
def test_a_wider_interval_is_never_less_doubt(one: float, other: float):
    prediction = predicted(0.5).prediction
    assert prediction
    low, high = (
        doubt_of(replace(prediction, low_s=prediction.step_time_s * (1 - width), high_s=prediction.step_time_s))
        for width in sorted((one, other))
    )
    assert 0.02 <= low <= high <= 0.1


def rows_with(*schedules: str, axes: tuple[str, ...] = ("tp", "pp", "dp")) -> Calibration:
    """Constants that were fitted to rows with these schedules and axes."""
    reach = Reach(cluster="local", axes=axes, kernels=("torch_cuda",))
    return replace(built_in("local"), reach=reach, seen={"schedule": Seen(values=schedules)} if schedules else {})


def test_usual_schedules_are_1f1b_gpipe_and_those_that_rows_have():
    plain = {"1f1b", "gpipe"}
    assert usual_schedules(built_in("local")) == plain == usual_schedules(rows_with())
    assert usual_schedules(rows_with("zb_h1")) == {*plain, "zb_h1"}
    assert usual_schedules(rows_with("interleaved", "zb_v")) == plain, "no row has chunks"
    chunks = rows_with("interleaved", "zb_v", axes=("pp", "vp"))
    assert usual_schedules(chunks) == {*plain, "interleaved", "zb_v"}


def question(batch: int, *, pins: str = "tp=1,pp=2,mbs=1", constants: Calibration | None = None) -> Request:
    """A pipeline of two ranks, in which divided backwards save most of the bubble: much with few micro-batches."""
    asked = ask("tiny-llama", ranks=4, pins=pins, global_batch=batch)
    return replace(asked, calibration=constants or built_in("local"))


@cache
def found(batch: int, pins: str = "tp=1,pp=2,mbs=1") -> SearchResult:
    return search(question(batch, pins=pins), 3, simple_within=DOUBT)


def test_a_schedule_that_nobody_has_measured_is_not_chosen_for_a_gain_inside_the_doubt():
    answer = found(32)
    fastest, chosen = answer.plans[0], answer.preferred
    assert fastest.schedule.builder not in ("1f1b", "gpipe") and chosen.schedule.builder == "1f1b"
    assert 1 < time_s(chosen) / time_s(fastest) <= 1 + answer.simple_within == 1.1
    result = answers_of(question(32), answer)
    gain = 1 - time_s(fastest) / time_s(chosen)
    words = f"{fastest.schedule.builder} would be {gain:.1%} faster, which nobody has measured on any platform"
    assert words in result.remarks and words in result.summary()
    assert result.named("simple").why == "the simplest within 10% of the fastest"


def test_it_is_chosen_for_a_gain_beyond_the_doubt_and_the_answer_says_so():
    answer = found(4)
    builder = answer.preferred.schedule.builder
    assert builder not in ("1f1b", "gpipe")
    one = search(question(4, pins="tp=1,pp=2,mbs=1,schedule=1f1b"))
    assert time_s(one.plans[0]) > 1.1 * time_s(answer.plans[0])
    (remark,) = answers_of(question(4), answer).remarks
    assert f"nobody has measured {builder} on any platform" in remark and "more than 10% slower" in remark


@pytest.mark.slow
def test_where_1f1b_is_too_slow_a_schedule_that_was_measured_elsewhere_comes_before_one_that_nobody_measured():
    asked = question(12)
    answer = search(asked, 3, simple_within=DOUBT)
    fastest, chosen = answer.plans[0], answer.preferred
    plain = search(question(12, pins="tp=1,pp=2,mbs=1,schedule=1f1b"))
    assert time_s(plain.plans[0]) > 1.1 * time_s(fastest), "1f1b is beyond the doubt"
    assert fastest.schedule.builder not in measured_schedules() and chosen.schedule.builder == "interleaved"
    assert time_s(chosen) <= 1.1 * time_s(fastest)
    of_chosen, of_fastest = answers_of(asked, answer).remarks
    assert "nobody has measured interleaved on local" in of_chosen and "more than 10% slower" in of_chosen
    assert f"{fastest.schedule.builder} would be" in of_fastest and "nobody has measured on any platform" in of_fastest


@pytest.mark.parametrize("pins", rest_is_slow(["tp=1,pp=2,mbs=1,schedule=zb_v", "tp=1,pp=2,mbs=1,vp=2"]))
def test_a_pinned_schedule_is_obeyed_without_remark(pins: str):
    answer = found(32, pins)
    assert answer.preferred.schedule.builder in ("zb_v", "interleaved")
    assert not answers_of(question(32, pins=pins), answer).remarks


def test_a_schedule_that_rows_have_is_as_good_as_any():
    measured = question(32, constants=rows_with("zb_h1", "zb_v", "interleaved", axes=("tp", "pp", "dp", "vp")))
    answer = search(measured, simple_within=DOUBT)
    assert answer.plans[0].schedule.builder not in ("1f1b", "gpipe") and not answers_of(measured, answer).remarks


def test_a_tolerance_that_is_given_is_kept():
    given_one = search(question(32), simple_within=0.03)
    assert given_one.simple_within == 0.03 and time_s(given_one.preferred) <= 1.03 * time_s(given_one.plans[0])


def test_the_bound_that_is_proven_is_no_more_than_any_answer():
    for batch in (4, 32):
        answer = found(batch)
        for plan in (*answer.plans, answer.preferred):
            own = answer.certificate.about(plan)
            assert own.bound <= time_s(plan) * (1 + SLACK) and own.gap == pytest.approx(1 - own.bound / own.value)
        assert answer.certificate.value == pytest.approx(time_s(answer.plans[0]), rel=1e-7)


def test_kinds_are_added_that_none_of_the_plans_is_of():
    pipeline, chunks = (
        Candidate.parse(text, 8) for text in ("pp=2,tp=1,dp=4", "pp=2,tp=1,dp=4,vp=2,schedule=interleaved")
    )
    tensor, sharded = (Candidate.parse(text, 8) for text in ("tp=2,pp=1,dp=4", "tp=1,pp=1,dp=8,zero=3"))
    for has_fsdp in (False, True):
        assert kinds_to_add([chunks, chunks], has_fsdp=has_fsdp) == [NO_PIPELINE, PLAIN_PIPELINE]
        assert kinds_to_add([chunks, pipeline], has_fsdp=has_fsdp) == [NO_PIPELINE]
        assert kinds_to_add([tensor, chunks], has_fsdp=has_fsdp) == ([] if has_fsdp else [FSDP])
        assert kinds_to_add([sharded, chunks], has_fsdp=has_fsdp) == []


@pytest.mark.slow
def test_a_plan_of_another_kind_stands_beside_plans_of_one_kind():
    request = ask("tiny-llama", ranks=4, pins="mbs=8", global_batch=64)
    answer = search(request, 3, simple_within=DOUBT)
    shown = [one.candidate for one in (*answer.plans, answer.preferred)]
    kinds = kinds_to_add(shown, has_fsdp=False)
    assert kinds and answer.other
    plan, words = answer.other
    assert any(kind.has(plan.candidate) and words == f"the fastest found {kind.words}" for kind in kinds)
    other = answers_of(request, answer).named("other")
    assert other.plan.candidate == plan.candidate and other.slower == time_s(plan) / time_s(answer.plans[0]) - 1
    assert plan_at(request, plan.candidate).prediction == plan.prediction
    assert not search(request, 3, simple_within=0.02).other and not search(request, 3).other


def rank_totals(split: tuple[int, ...], stages: list[list[int]]) -> list[int]:
    return [sum(split[stage] for stage in own) for own in stages]


@given(
    st.sampled_from([("zb_v", 2, 2), ("interleaved", 2, 3), ("interleaved", 3, 2), ("zb_v", 3, 2)]),
    st.lists(st.integers(1, 6), min_size=6, max_size=6),
)
@settings(deadline=None)
def test_more_even_splits_are_all_of_them_in_order(shape: tuple[str, int, int], sizes: list[int]):
    builder, pp, vp = shape
    schedule = Schedule(builder=builder, num_ranks=pp, num_chunks=vp, num_micro_batches=6)
    stages = counts_of(schedule).stages
    split = tuple(sizes[: pp * vp])
    totals = rank_totals(split, stages.tolist())
    expected = [
        one
        for one in itertools.product(range(1, max(totals) + 1), repeat=len(split))
        if rank_totals(one, stages.tolist()) == totals and unevenness(one) < unevenness(split)
    ] if len(split) < 5 else None  # fmt: skip
    ours = list(more_even(split, stages, 10**9))
    assert ours == sorted(ours, key=unevenness)
    assert all(rank_totals(one, stages.tolist()) == totals and min(one) >= 1 for one in ours)
    if expected is not None:
        assert ours == sorted(expected, key=unevenness)


UNEVEN = requests().filter(
    lambda request: "recompute" not in request.pins and request.pins["pp"] in (2, 3) and request.model.num_layers > 3
)


@given(UNEVEN, st.sampled_from(["zb_v", "interleaved"]))
@settings(max_examples=max(4, settings().max_examples // 5), deadline=None)
def test_no_equal_split_is_more_even(asked: Request, schedule: str):
    pins = {**asked.pins, "schedule": schedule, "vp": 2}
    asked = replace(asked, model=replace(asked.model, kinds=(), order=""))  # splits are listed where layers differ
    if asked.model.num_layers < 2 * pins["pp"]:
        asked = replace(asked, model=asked.model.with_layers(2 * pins["pp"] + 1))
    request = replace(asked, pins=pins, effort=EXACT)
    answer = search(request, nearest=False)
    for plan in answer.plans:
        split = tuple(stage.num_layers for stage in plan.stages)
        shape = Schedule(builder=schedule, num_ranks=pins["pp"], num_chunks=2, num_micro_batches=6)
        for other in itertools.islice(more_even(split, counts_of(shape).stages, 10**6), 64):
            same = request.plan(replace(plan.candidate, stages=other), plan.engine, tables=False)
            is_equal = time_s(same) <= time_s(plan) * (1 + 1e-10) and peak(same) <= peak(plan)
            assert not is_equal, (other, split)


@cache
def experts(imbalance: float, pins: str) -> SearchResult:
    asked = ask("tiny-mixtral", ranks=4, global_batch=16, seq_len=64, pins=f"tp=1,pp=1,cp=1{pins}")
    return search(replace(asked, workload=replace(asked.workload, expert_imbalance=imbalance)), 1, simple_within=DOUBT)


@pytest.mark.parametrize(("now", "other", "kind"), rest_is_slow([(0.5, "0", "with"), (0.0, "0.5", "without")], 0, 2))
def test_an_imbalance_of_experts_that_turns_the_choice_is_named(now: float, other: str, kind: str):
    asked = experts(now, "")
    assert (
        (experts(float(other), "").plans[0].candidate.ep > 1) == (kind == "with") != (asked.plans[0].candidate.ep > 1)
    )
    assert f"--expert-imbalance {other} the fastest takes" in asked.hinge
    seconds = re.search(rf"and {kind} expert parallelism (\S+) takes ([\d.]+) ms \(([\d.]+) ms with", asked.hinge)
    assert seconds and ("ep=" in seconds[1]) == (kind == "with")
    (best,) = experts(float(other), "").plans
    assert f"{1000 * time_s(best):.1f}" == seconds[2], "this small question has one best plan"
    assert float(seconds[3]) / 1000 > time_s(asked.plans[0])


@pytest.mark.slow
def test_what_is_pinned_or_the_same_for_all_is_no_hinge():
    assert not experts(0.5, ",ep=1").hinge and not experts(0.5, ",ep=2").hinge
    assert not search(ask("tiny-llama", ranks=4, pins="mbs=8", global_batch=64), 1, simple_within=DOUBT).hinge


Key = tuple[int, ...]


def names(point: Point) -> dict[str, Recompute | int]:
    """What a stage may do: a kind of recompute for all of its layers, or full for so many of them, the others plain."""
    if point.is_pinned:
        return {"pinned": PLAIN}
    kinds: dict[str, Recompute | int] = {str(kind): kind for (kind,) in point.kinds}
    if {str(PLAIN), str(FULL)} <= kinds.keys():
        kinds |= {f"full:{count}": count for count in range(1, point.question.model.num_layers)}
    return kinds


def place(own: list[Recompute | int], *, even: bool, schedule: str) -> int | None:
    """Where stages that do this stand in the order of stages and recompute; None: that is not simple."""
    distinct, partly = len(set(own)), any(isinstance(one, int) for one in own)
    if distinct > 2 or (not even and (partly or schedule not in ("1f1b", "gpipe"))):
        return None
    offload = any(isinstance(one, Recompute) and one.offload for one in own)
    if not even:
        return None if offload else 4 + distinct
    if offload:
        return None if partly else 4
    if not partly:
        return 0 if distinct == 1 else 2
    others_plain_or_full = all(isinstance(one, int) or one.kind in ("none", "full") for one in own)
    return 1 if distinct == 1 else 3 if others_plain_or_full else None


def rest_of_key(point: Candidate) -> Key:
    """Schedule, chunks, axes, other keys."""
    axes = [point.tp, point.pp, point.cp, point.ep, point.dp]
    other = [point.sp is not None, point.zero != 1, point.cp_kind != "ring", point.cp_order != "contiguous"]
    return point.schedule != "1f1b", point.vp, sum(size > 1 for size in axes), sum(other)


def ways(point: Point, split: Stages, capacity: float) -> Iterator[tuple[int, float]]:
    """Each simple way to fill the stages of a split that fits: its place in the order, and its time."""
    known = names(point)
    even = point.candidate.stages is not None or split == even_stages(sum(split), len(split))
    numbers: list[dict[str, int]] = []
    for rank in range(point.candidate.pp):
        layers, fits = point.layers(rank, split), point.numbers(rank, split, capacity)
        found: dict[str, int] = {}
        for name, what in known.items():
            own = tuple(
                what
                if isinstance(what, Recompute)
                else FULL
                if what >= count
                else Recompute(kind="full", num_layers=what)
                for count in layers
            )
            for number in fits:
                if point.is_pinned or point.options[number][::2] == (layers, own):
                    found[name] = number
        numbers.append(found)
    for chosen in itertools.product(*numbers):
        where = place([known[name] for name in chosen], even=even, schedule=point.candidate.schedule)
        if where is not None:
            option = [[own[name]] for own, name in zip(numbers, chosen, strict=True)]
            yield where, float(point.timed(option).item())


def simplest(truth: Truth, capacity: float, below: float, near: float) -> tuple[Key, float] | None:
    """The least key of all simple plans that fit and take at most so long, and the least time with this key.

    Of keys that agree in stages, recompute, schedule and chunks, only those near the fastest of these count.
    """
    best: dict[Key, float] = {}
    for point in truth.legal:
        for split in point.splits:
            for where, seconds in ways(point, split, capacity):
                if seconds <= below:
                    key = (where, *rest_of_key(point.candidate))
                    best[key] = min(seconds, best.get(key, np.inf))
    alike = {key: seconds for key, seconds in best.items() if key[:3] == min(best)[:3]}
    fast = {key: seconds for key, seconds in alike.items() if seconds <= min(alike.values()) * (1 + near)}
    return min(fast.items(), default=None)


def key_of(truth: Truth, plan: Plan, capacity: float) -> Key:
    """The least key of a plan that was found; it is one of the ways of its point."""
    point = truth.point_of(replace(plan.candidate, stages=truth.request.pins.get("stages")))
    split = tuple(stage.num_layers for stage in plan.stages)
    alike = [where for where, seconds in ways(point, split, capacity) if abs(seconds / time_s(plan) - 1) < 1e-7]
    assert alike, plan.candidate
    return (min(alike), *rest_of_key(plan.candidate))


SMALL = requests().filter(lambda request: request.model.num_layers < 5 and request.pins["pp"] < 4)


def is_simplest(asked: Request, share: float, allowed: Within) -> None:
    """Compare with an enumeration; memory lies so far between what nothing and what everything fits in."""
    near = 0.02 if allowed == DOUBT else np.inf
    truth = Truth(asked)
    capacity = limit(truth, share)
    request = replace(asked, memory_bytes=capacity, effort=EXACT)
    found = search(request, simple_within=allowed)
    within = found.simple_within
    fastest = truth.fastest(capacity)
    if fastest is None:
        assert found.simple is None
        return
    best = simplest(truth, capacity, time_s(found.plans[0]) * (1 + within), near)
    event("simple" if best else "nothing simple")
    assert (found.simple is None) == (best is None), (best, found.simple and found.simple.candidate)
    if best and found.simple:
        assert key_of(truth, found.simple, capacity) == best[0], (found.simple.candidate, best)
        assert time_s(found.simple) == pytest.approx(best[1], rel=1e-7)
        assert peak(found.simple) <= capacity + 10
        assert dump(plan_at(request, found.simple.candidate)) == dump(found.simple)


@settings(max_examples=max(4, settings().max_examples // 4), deadline=None)
@given(SMALL, st.sampled_from([0.1, 0.6]), st.sampled_from([0.02, 0.1]))
def test_nothing_simpler_is_within_the_share_and_of_equals_nothing_is_faster(
    asked: Request, share: float, within: float
):
    is_simplest(asked, share, within)


USUAL = SMALL.filter(lambda request: request.pins.get("schedule") in ("1f1b", "gpipe"))


@pytest.mark.slow
@settings(max_examples=max(4, settings().max_examples // 8), deadline=None)
@given(USUAL, st.sampled_from([0.1, 0.6]))
def test_within_the_doubt_no_axis_is_saved_for_more_than_2_percent(asked: Request, share: float):
    is_simplest(asked, share, DOUBT)


@pytest.mark.parametrize("pins", rest_is_slow(["schedule=interleaved,pp=2,vp=2,dp=2", "tp=2,pp=2", ""]))
def test_asking_for_a_simple_plan_changes_no_other_answer(pins: str):
    request = ask("tiny-llama", ranks=4, pins=pins, global_batch=8)
    plain, both = search(request, 3), search(request, 3, simple_within=0.02)
    assert [dump(one) for one in plain.plans] == [dump(one) for one in both.plans]
    assert plain.certificate == both.certificate
    assert both.simple and time_s(both.simple) <= 1.02 * time_s(plain.plans[0]) and plain.simple is None


@pytest.mark.slow
def test_a_search_that_is_stopped_says_that_no_simpler_plan_was_looked_for():
    request = ask("tiny-llama", ranks=4, pins="mbs=2", global_batch=8)
    assert search(request).simple_ended
    assert not search(request, simple_within=0.02).simple_ended
    calls: list[float] = []

    def stop_later(look: Look) -> str:
        calls.append(look().bound)
        return "stopped" if len(calls) > after else ""

    after = 10**9
    search(request, 1, stop_later)
    after = len(calls)  # of the search for the fastest
    calls.clear()
    found = search(request, 1, stop_later, simple_within=0.02)
    assert (found.simple, found.simple_ended, found.certificate.ended) == (None, "stopped", "complete")


def test_a_share_of_nothing_leaves_the_fastest_or_what_is_as_fast():
    found = search(ask("tiny-llama", ranks=4, pins="mbs=2", global_batch=8), simple_within=0.0)
    assert found.simple and time_s(found.simple) == time_s(found.plans[0])


def test_of_one_kind_of_recompute_there_are_no_two():
    """Uneven stages with two kinds of recompute were asked for where only one may be used: numpy ended the search."""
    request = ask("tiny-llama", ranks=2, pins="pp=2,recompute=none", global_batch=32)
    found = search(request, simple_within=DOUBT)
    assert found.simple and found.simple.schedule.builder not in ("1f1b", "gpipe"), "1F1B was looked for in vain"
