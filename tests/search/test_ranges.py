"""Layer ranges and recompute of stages: dynamic programming and labels find what trying all of them finds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.plan.recompute import Recompute
from autoshard.search.chosen import Chosen
from autoshard.search.exact_ranges import Effort, Exact
from autoshard.search.ranges import smallest_ranges, stages_below
from tests.search.brute_force import EXACT
from tests.search.frame_cases import Case, Everything, cases, every_filling


def solved(case: Case, truth: Everything, below_s: float, effort: Effort) -> Chosen:
    """Do what the search does for a group of points."""
    rest_s = truth.rest_s.min(axis=0) * (1 - 1e-12)
    limits = np.full(case.frame.num_candidates, below_s)
    stages = stages_below(case.frame, case.options, limits, case.capacity, rest_s)
    found = stages.chosen(rest_s)
    exact = [
        Exact(stages=stages, candidate=number, rest_s=float(rest_s[number]), effort=effort)
        for number in range(case.frame.num_candidates)
    ]
    return Chosen.side_by_side([one.improved(found, below_s) for one in exact])


@given(cases())
def test_nothing_is_faster_than_what_labels_find(case: Case):
    truth = every_filling(case)
    best = truth.time_s.min(axis=0)
    found = solved(case, truth, np.inf, EXACT)
    assert found.time_s == pytest.approx(best, rel=1e-9)
    assert np.all((found.bound_s <= best * (1 + 1e-12)) | (best == np.inf))
    fits = np.isfinite(best)
    assert found.bound_s[fits] == pytest.approx(best[fits], rel=1e-9)
    assert np.all(found.peak_bytes[fits] <= case.capacity)


@given(cases(most_ranks=3, hides=True))
def test_a_rank_may_compute_again_to_hide_what_it_sends(case: Case):
    truth = every_filling(case)
    best = truth.time_s.min(axis=0)
    found = solved(case, truth, np.inf, EXACT)
    assert found.time_s == pytest.approx(best, rel=1e-9)
    assert np.all((found.bound_s <= best * (1 + 1e-12)) | (best == np.inf))


@given(cases())
def test_with_less_effort_the_bound_covers_the_truth(case: Case):
    truth = every_filling(case)
    best = truth.time_s.min(axis=0)
    for effort in (Effort(), Effort(gap=0.0, most_labels=3, most_timed=2)):
        found = solved(case, truth, np.inf, effort)
        assert np.all(found.time_s >= best * (1 - 1e-9))
        assert np.all(np.isfinite(found.time_s) == np.isfinite(best)) or effort.most_labels < 10
        assert np.all((found.bound_s <= best * (1 + 1e-12)) | (best == np.inf))
        if effort.most_labels > 10:
            fits = np.isfinite(best)
            assert np.all(found.bound_s[fits] >= found.time_s[fits] * (1 - effort.gap) * (1 - 1e-9))


@given(cases(), st.sampled_from([0.9, 1.0, 1.0001, 1.05, 1.5]))
def test_what_is_faster_than_a_limit_is_found_and_nothing_faster_is_overlooked(case: Case, share: float):
    truth = every_filling(case)
    best = truth.time_s.min(axis=0)
    below_s = float(np.min(best)) * share
    found = solved(case, truth, below_s, EXACT)
    matters = best < below_s
    assert found.time_s[matters] == pytest.approx(best[matters], rel=1e-9)
    fits = np.isfinite(best)
    assert np.all(found.bound_s[fits] <= best[fits] * (1 + 1e-12))
    assert np.all(found.bound_s[fits] >= np.minimum(best[fits], below_s) * (1 - 1e-9))


@given(cases())
def test_nothing_holds_less_than_the_smallest_ranges(case: Case):
    truth = every_filling(case)
    assert smallest_ranges(case.frame, case.options, case.capacity).peak_bytes == pytest.approx(
        truth.peak_bytes.min(axis=0), rel=1e-12
    )


@given(cases())
def test_what_is_chosen_is_what_was_priced(case: Case):
    truth = every_filling(case)
    found = solved(case, truth, np.inf, EXACT)
    for number in np.flatnonzero(np.isfinite(found.time_s)).tolist():
        stages = found.stages(number)
        assert sum(stages) == case.options.num_layers and min(stages) >= 1
        for entry in found.recompute(number, case.options.kinds):
            assert all(case.options.allowed[case.options.kinds.index(kind), number] for kind in entry.kinds)
        same = np.isclose(truth.time_s[:, number], found.time_s[number], rtol=1e-9)
        assert np.any(same & np.isclose(truth.peak_bytes[:, number], found.peak_bytes[number], rtol=1e-9))


@given(cases(most_ranks=3), st.data())
def test_pinned_recompute_is_kept_to(case: Case, data: st.DataObject):
    entries = [Recompute(), *case.options.kinds]
    if Recompute(kind="full") in entries:
        entries.append(Recompute(kind="full", num_layers=1))
    ranks = case.frame.schedule.num_ranks
    pinned = tuple(data.draw(st.lists(st.sampled_from(entries), min_size=ranks, max_size=ranks)))
    options = replace(case.options, recompute=pinned, allowed=np.ones_like(case.options.allowed))
    mine = replace(case, options=options)
    found = solved(mine, every_filling(mine), np.inf, EXACT)
    for number in np.flatnonzero(np.isfinite(found.time_s)).tolist():
        for layers, entry, wanted in zip(
            found.stages(number), found.recompute(number, options.kinds), pinned, strict=True
        ):
            assert [entry.of_layer(one) for one in range(layers)] == [wanted.of_layer(one) for one in range(layers)]
            assert layers >= (wanted.num_layers or 1)
