"""Which plan is written and which are shown: by the doubt about the prediction, by what is measured, by evenness."""

import itertools
import re
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings, strategies as st

from autoshard.cost.built_in import built_in, measured_schedules
from autoshard.cost.calibration import Calibration, Reach
from autoshard.cost.outside import Seen
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.schedule.counts import counts_of
from autoshard.schedule.schedule import Schedule
from autoshard.search.ask.answers import answers_of
from autoshard.search.ask.choice.doubt import DOUBT, doubt_of, usual_schedules
from autoshard.search.ask.choice.evenness import more_even, unevenness
from autoshard.search.ask.choice.looking import FSDP, NO_PIPELINE, PLAIN_PIPELINE, kinds_to_add
from autoshard.search.ask.planner import SearchResult, search
from autoshard.search.bound.request import Request, plan_at
from tests.search.brute_force import EXACT, ask, peak, requests, time_s
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
