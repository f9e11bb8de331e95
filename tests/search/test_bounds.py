"""Bounds never promise more than there is: nothing is faster or smaller than they say."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autoshard.schedule.makespan import makespan_columns
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.simulate import delays_of
from autoshard.schedule.timeline import KINDS
from autoshard.search.bounds import Ideal
from autoshard.search.exact_ranges import Labels, extended
from autoshard.search.goals import Fastest, Smallest
from autoshard.search.planner import Request
from autoshard.search.points import groups
from autoshard.search.ranges import Ways, own_paths_s, path_weights
from autoshard.search.splits import listed_ranges, quickest_listed_s, smallest_listed, splits
from tests.search.brute_force import Truth, ask, near_even
from tests.search.frame_cases import Case, cases, single_frames
from tests.search.question_cases import Asked, requests

WAYS = 50  # random pipelines for each shape
SURE = 1 + 1e-9


@given(
    builder=st.sampled_from(["1f1b", "gpipe"]),
    ranks=st.integers(2, 7),
    count=st.integers(1, 16),
    seed=st.integers(0, 10**6),
    power=st.sampled_from([0.2, 1.0, 5.0]),
    same=st.booleans(),
)
def test_a_pipeline_takes_at_least_each_of_its_paths(
    builder: str, ranks: int, count: int, seed: int, power: float, same: bool
):
    random = np.random.default_rng(seed)
    forward, backward = random.random((2, ranks, WAYS)) ** power
    if same:
        backward = 2 * forward
    schedule = Schedule(builder=builder, num_ranks=ranks, num_micro_batches=count)
    passes = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    work, nothing = np.array([passes[kind] for kind in KINDS]), np.zeros((ranks - 1, WAYS))
    true_s = makespan_columns(schedule, delays_of(schedule, work, nothing, nothing, overlap=False))
    weights, both, each = path_weights(schedule), forward + backward, (forward, backward)
    later = both[::-1].cumsum(axis=0)[::-1] - both
    waiting = np.where(weights.waits[:, None], weights.both[:, None] * both + later, 0.0)
    paths = both.sum(axis=0) + np.maximum(waiting, own_paths_s(schedule, np.maximum(*each), both))
    assert np.all(paths <= true_s * SURE), (paths / true_s).max(axis=1)
    least_s = [labelled_s(schedule, column) for column in np.stack(each, axis=-1).swapaxes(0, 1)]
    assert np.all(least_s <= true_s * SURE)
    if builder == "1f1b" and same:  # the labels know all paths that matter
        assert np.all(least_s >= true_s / SURE)


def labelled_s(schedule: Schedule, each: Any) -> float:
    """Return what the labels of one way come to: ``each`` is F and B by rank."""
    labels, weights = Labels.nothing(0.0), path_weights(schedule)
    for rank, (forward, backward) in enumerate(each):
        columns = {"both_s": forward + backward, "ahead_s": forward, "back_s": backward, "update_s": 0.0}
        one = {name: np.array([value]) for name, value in columns.items()}
        labels = extended(labels, Ways(layers=np.array([1]), option=np.array([0]), **one), weights, rank, 0)
    return float(labels.path_s[0])


def is_bounded(request: Request, share: float) -> None:
    """Compare every point's bound with the best way to fill its stages, in as much memory as it needs or some more."""
    for point, legal, place, family in single_frames(Truth(request)):
        fastest, small = point.fastest(), point.smallest()
        if fastest is None or small is None:
            continue
        capacity = small.peak_bytes + share * max(0.0, fastest.peak_bytes - small.peak_bytes)
        ideal = Ideal.of(family, legal.variant.space.base.zero, capacity)
        for goal, best in (
            (Fastest(capacity=capacity), point.fastest(capacity)),
            (Smallest(capacity=capacity), small),
        ):
            found, _, _ = groups(ideal, legal.only(np.array([place])), goal.bound, np.inf)
            assert best and found, (str(small.candidate), "is said not to fit in what it takes")
            value = best.time_s if isinstance(goal, Fastest) else best.peak_bytes
            assert float(found[0].bound[0]) <= value * SURE, str(best.candidate)


@settings(max_examples=40)
@given(requests(), st.sampled_from([0.0, 0.02, 0.2, 1.1]))
def test_no_filling_of_a_point_is_below_its_bound(asked: Asked, share: float):
    is_bounded(asked.request, share)


@pytest.mark.parametrize("layers", [4, 5])
@pytest.mark.parametrize("kind", ["none", "full"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zb_v", "interleaved"])
def test_what_just_fits_is_not_said_to_be_too_large(schedule: str, kind: str, layers: int):
    pins = f"pp=2,tp=4,zero=0,schedule={schedule},recompute={kind}"
    request = ask("tiny-llama", ranks=8, global_batch=4, seq_len=8, pins=pins)
    is_bounded(replace(request, model=replace(request.model, num_layers=layers)), 0.0)


LISTED = st.one_of(
    cases(("zb_h1", "gpipe")), cases(("zb_v",), chunks=2, most_ranks=3), cases(("interleaved",), chunks=2),
    cases(("interleaved",), chunks=3, most_ranks=3),
)  # fmt: skip


@given(LISTED)
def test_what_a_list_leaves_out_early_is_no_faster(case: Case):
    whole = listed_ranges(case.frame, case.options, np.inf, case.capacity)
    for number in np.flatnonzero(np.isfinite(whole.time_s)).tolist():
        time_s = float(whole.time_s[number])
        again = listed_ranges(case.frame, case.options, time_s * (1 + 1e-11), case.capacity)
        assert again.time_s[number] == time_s
        assert again.bound_s[number] <= time_s * SURE
        for split in splits(case.options.num_layers, case.frame.schedule.num_stages):
            only = replace(case.options, stages=split)
            one = listed_ranges(case.frame, only, np.inf, case.capacity)
            assert time_s <= one.time_s[number]
            assert quickest_listed_s(case.frame, only, case.capacity)[number] <= one.time_s[number] * SURE


@given(LISTED)
def test_the_smallest_of_a_list_fits_where_anything_does(case: Case):
    whole = listed_ranges(case.frame, case.options, np.inf, case.capacity)
    small = smallest_listed(case.frame, case.options, case.capacity)
    assert np.all(np.isfinite(small.peak_bytes) == np.isfinite(whole.time_s))
    assert np.all(small.peak_bytes <= whole.peak_bytes * SURE)


@pytest.mark.parametrize("stages", range(1, 9))
def test_near_even_splits_are_those_that_were_promised(stages: int):
    for layers in range(stages, 30):
        listed = splits(layers, stages)
        assert len(set(listed)) == len(listed)
        assert set(listed) == set(near_even(layers, stages))
        assert all(sum(split) == layers and min(split) >= 1 for split in listed)
