"""The simplest plan within a share of the fastest, against every simple plan of small questions, named one by one."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given, settings, strategies as st

from autoshard.plan.candidate import Candidate, even_stages
from autoshard.plan.codec import dump
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from autoshard.search.ask.choice.doubt import DOUBT, Within
from autoshard.search.ask.planner import search
from autoshard.search.bound.request import Request, plan_at
from autoshard.search.bound.watch import Look
from tests.search.brute_force import EXACT, FULL, PLAIN, Point, Stages, Truth, ask, peak, requests, time_s
from tests.search.test_joint import limit
from tests.slower import rest_is_slow

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
