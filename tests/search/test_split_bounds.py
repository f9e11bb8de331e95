"""Bounds of all splits count what ranks compute again, whichever passes it lies in."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.search.fill.split_bounds import SplitBounds, SplitSearch
from autoshard.search.fill.split_times import SplitTimes, least_again_s
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
