"""Bounds of all splits count what ranks compute again, whichever passes it lies in."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.schedule.counts import counts_of
from autoshard.search.fill import chunk_ways
from autoshard.search.fill.split_bounds import SplitBounds, SplitSearch
from autoshard.search.fill.split_times import SplitTimes, least_again_s
from autoshard.search.fill.stage_options import NEVER, ChunkLayers, RankOptions
from tests.search.brute_force import compositions
from tests.search.test_stage_filling import Case, cases

SPLIT = st.one_of(cases(("interleaved",), chunks=2, most_ranks=3), cases(("zb_h1",), most_ranks=3))


def bound_s(case: Case, again_s: tuple[float, float]) -> list[float]:
    """Bounds of all micro-batches of each candidate, if ranks compute so long again, by sort of recompute."""
    shape = least_again_s(case.blocks, case.choices, np.full(case.blocks.num_candidates, np.inf)).shape
    each = np.broadcast_to(np.array(again_s).reshape(2, 1, 1, 1), shape).copy()
    times = SplitTimes.each(case.blocks, replace(case.choices, again_s=each))
    every = [SplitBounds(candidate, SplitSearch()) for candidate in times]
    return [bounds.bound_s(bounds.paths(), np.inf) for bounds in every]


@given(SPLIT)
def test_a_rank_computes_again_in_every_micro_batch_if_no_option_is_of_another_sort(case: Case):
    again_s = 1e3 * float(case.blocks.layer.pass_s.max())
    without_s, with_s = bound_s(case, (0.0, np.inf)), bound_s(case, (again_s, np.inf))
    num_again = case.blocks.schedule.num_micro_batches
    for candidate_s, more_s in zip(without_s, with_s, strict=True):
        assert more_s >= num_again * again_s * (1 - 1e-9) and more_s > candidate_s


@given(SPLIT)
def test_of_two_sorts_the_one_that_takes_less_counts(case: Case):
    again_s = 1e3 * float(case.blocks.layer.pass_s.max())
    assert bound_s(case, (0.0, again_s)) == pytest.approx(bound_s(case, (0.0, np.inf)), rel=1e-9)


@given(cases(("interleaved", "zb_v"), chunks=2, most_ranks=3), st.floats(0.3, 1.2))
def test_layers_fit_on_a_rank_where_some_way_to_lay_them_in_its_chunks_fits(case: Case, share: float):
    """Against the price of every way; the rank of the head may be thought to have a little more room."""
    blocks, schedule = case.blocks.with_least_layers, case.blocks.schedule
    capacity = np.full(blocks.num_candidates, share * case.capacity)
    least_s = least_again_s(case.blocks, case.choices, capacity).min(axis=0)  # [rank, total, candidate]
    has_head = (counts_of(schedule).stages == schedule.num_stages - 1).any(axis=1)
    offloads = any(layer.host_bytes.any() for layer in blocks.layers)  # what host memory holds depends on the schedule
    for number, total in enumerate(range(2, case.choices.num_layers - 2 * (schedule.num_ranks - 1) + 1)):
        ways = np.array([*compositions(total, 2)])
        count = np.broadcast_to(ways, (schedule.num_ranks, *ways.shape)).copy()
        options = RankOptions.of(blocks, case.choices, ChunkLayers(count=count, first=0 * count), capacity)
        fits = (options.least_s < NEVER).any(axis=1)
        known = np.isfinite(least_s[:, number])
        assert not (fits & ~known).any(), "what fits is never left out"
        assert offloads or not (known & ~fits)[~has_head].any(), "and nothing else is thought to fit"


def test_ways_that_hold_more_than_another_at_all_times_are_left_out():
    sizes = np.array([[[1, 2, 1, 0], [1, 2, 1, 3]]])  # [rank, size, way]
    assert chunk_ways._undominated(sizes).tolist() == [True, False, False, True]
