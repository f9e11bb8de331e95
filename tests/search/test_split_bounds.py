"""Bounds of all splits: what ranks compute again, which layers flows are found for, and which sums are least."""

import itertools
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from autoshard.schedule.counts import counts_of
from autoshard.search.fill import chunk_ways, split_times
from autoshard.search.fill.split_bounds import SplitBounds, SplitSearch
from autoshard.search.fill.split_times import SplitTimes, rank_ways
from autoshard.search.fill.stage_options import NEVER, ChunkLayers, RankOptions
from autoshard.search.fill.way_costs import FlowTimes, WayCosts, cheapest_totals
from tests.search.brute_force import compositions
from tests.search.test_stage_filling import Case, cases, every_filling

SPLIT = st.one_of(cases(("interleaved",), chunks=2, most_ranks=3), cases(("zb_h1",), most_ranks=3))


def times_of(case: Case, capacity: float = np.inf, near: int = 8) -> list[SplitTimes]:
    """The times of each candidate in a memory; how far from an even share ways are looked at one by one."""
    with patch.object(split_times, "_NEAR", near):
        ways = rank_ways(case.blocks, case.choices, np.full(case.blocks.num_candidates, capacity))
    return list(SplitTimes.each(case.blocks, replace(case.choices, ways=ways)))


@given(SPLIT, st.sampled_from([0.5, 0.98, 1.0001, 1.0001, 1.02, 10.0]), st.sampled_from([1, 8]))
def test_flows_raise_bounds_and_none_is_above_the_fastest_filling_or_the_limit(case: Case, share: float, near: int):
    truth = every_filling(case)
    least_s = (truth.time_s - truth.rest_s.min(axis=0) - case.blocks.fixed_s).min(axis=0)
    for times, fastest_s in zip(times_of(case, case.capacity, near), least_s.tolist(), strict=True):
        below_s = share * fastest_s if np.isfinite(fastest_s) else np.inf
        bounds = SplitBounds(times, SplitSearch(), below_s)
        bounds.mix()
        first_s = bounds.bound_s()
        bounds.find_flows(3)
        second_s = bounds.bound_s()
        assert second_s >= min(first_s, below_s) * (1 - 1e-9)
        assert second_s <= max(fastest_s, 0.0) * (1 + 1e-9) and (second_s <= below_s or np.isinf(fastest_s))


@given(SPLIT, st.integers(0, 10**6))
def test_no_split_in_which_a_rank_has_so_many_layers_is_shorter_in_all_flows_than_is_said(case: Case, seed: int):
    """Against splits that are drawn, with the ways that fit and places of their layers in the chunks of a rank."""
    schedule, random = case.blocks.schedule, np.random.default_rng(seed)
    stages, num_layers = counts_of(schedule).stages, case.choices.num_layers
    capacity = case.capacity * float(random.choice([1.0, 1e6]))
    for times in times_of(case, capacity, int(random.integers(1, 9))):
        bounds = SplitBounds(times, SplitSearch(), np.inf)
        bounds.use_known()
        bounds.bound_s()
        ways, first = WayCosts.of(times, np.inf), int(bounds._ways.totals[0])
        columns = np.array([ways.rows.totals, ways.rows.kind, ways.rows.again, ways.rows.plain])
        for _ in range(30):
            shares = random.multinomial(num_layers - stages.size, np.full(len(stages), 1 / len(stages)))
            totals, layers = shares + stages.shape[1], np.zeros((len(times.kinds_s), schedule.num_stages))
            fitting = [np.flatnonzero(ways.fits[:, rank] & (columns[0] == t)) for rank, t in enumerate(totals.tolist())]
            if not all(len(numbers) for numbers in fitting):
                continue
            for rank_stages, numbers in zip(stages, fitting, strict=True):
                total, kind, again, plain = columns[:, random.choice(numbers)].tolist()
                layers[kind, rank_stages] += 1
                counts = ((kind, again - len(rank_stages)), (times.plain_kind, plain), (-1, total - again - plain))
                for row, count in counts:
                    places = np.full(len(rank_stages), 1 / len(rank_stages))
                    layers[row, rank_stages] += random.multinomial(count, places)
            longest_s = float(bounds._flows.lengths_s(layers[None]).max())
            said_s = bounds._by_rank_s[np.arange(len(stages)), totals - first]
            assert np.all(said_s <= longest_s * (1 + 1e-9)), (said_s, longest_s)


@given(SPLIT)
def test_a_rank_computes_again_in_every_micro_batch_if_no_other_way_fits(case: Case):
    again_s = 1e3 * float(case.blocks.layer.pass_s.max())
    for times in times_of(case):
        plain = times.rows.kind == times.plain_kind
        some = replace(times, fits=times.fits & ~plain, kinds_s=times.kinds_s + np.array([0.0, again_s, 0.0]))
        kinds_s = some.kinds_s.copy()
        kinds_s[[times.plain_kind, -1]] = times.kinds_s[[times.plain_kind, -1]]
        bounds = SplitBounds(replace(some, kinds_s=kinds_s), SplitSearch(), np.inf)
        everywhere = all(some.fits[:, some.rows.totals == total].any() for total in np.unique(some.rows.totals))
        near = np.abs(some.rows.totals - case.choices.num_layers / case.blocks.schedule.num_ranks) < 8
        if everywhere and near.all():
            assert bounds.bound_s() >= case.blocks.schedule.num_micro_batches * again_s * (1 - 1e-9)


@given(cases(("interleaved",), chunks=2, most_ranks=3), st.integers(0, 10**6))
def test_a_way_costs_no_more_than_any_place_of_its_layers_and_its_answer_costs_just_that(case: Case, seed: int):
    (times, *_), stages = times_of(case, near=1 + seed % 3), counts_of(case.blocks.schedule).stages
    passes = np.random.default_rng(seed).random((1, 3 * case.blocks.schedule.num_stages + 1))
    flow, ways = FlowTimes.of(times, passes), WayCosts.of(times, np.inf)
    costs_s = ways.costs_s(flow.layer_s[0][:, stages])
    columns = (ways.rows.totals, ways.rows.kind, ways.rows.again, ways.rows.plain)
    for way, (total, kind, again, plain) in enumerate(np.array(columns).T.tolist()):
        for rank in np.flatnonzero(ways.fits[way]).tolist():
            at_s = flow.layer_s[0][:, stages[rank]]
            placed_s = [
                at_s[kind] @ np.array(kinds) + at_s[times.plain_kind] @ np.array(plains) + at_s[-1] @ np.array(rests)
                for kinds in compositions(again, 2)
                for plains in ((plain - count, count) for count in range(plain + 1))
                for rests in ((total - again - plain - count, count) for count in range(total - again - plain + 1))
            ]
            assert costs_s[way, rank] == pytest.approx(min(placed_s), rel=1e-9)
    by_total_s = ways.by_total_s(costs_s)
    least_s, totals = cheapest_totals(by_total_s, case.choices.num_layers, int(ways.totals[0]))
    layers = ways.layers(flow.layer_s[0], totals)
    assert layers.sum() == case.choices.num_layers and layers.sum(axis=0).min() >= 1
    assert float(flow.lengths_s(layers[None])[0, 0]) == pytest.approx(float(flow.fixed_s[0]) + least_s, rel=1e-9)


@given(SPLIT, st.integers(0, 10**6))
def test_ways_that_are_not_looked_at_one_by_one_cost_no_more_than_those_that_are(case: Case, seed: int):
    stages = counts_of(case.blocks.schedule).stages
    passes = np.random.default_rng(seed).random((1, 3 * case.blocks.schedule.num_stages + 1))
    each_near = [times_of(case, case.capacity, near) for near in (1, 8)]
    for both in zip(*each_near, strict=True):
        costs_s: list[np.ndarray] = []
        for times in both:
            ways = WayCosts.of(times, np.inf)
            costs_s.append(ways.by_total_s(ways.costs_s(FlowTimes.of(times, passes).layer_s[0][:, stages])))
        assert np.all(costs_s[0] <= costs_s[1] * (1 + 1e-9))


@given(
    st.integers(1, 4).flatmap(
        lambda ranks: arrays(
            np.float64,
            st.tuples(st.just(ranks), st.integers(1, 4)),
            elements=st.one_of(st.just(np.inf), st.floats(0.0, 9.0)),
        )
    ),
    st.integers(0, 3),
    st.integers(0, 20),
)
def test_the_least_sum_of_all_layers_is_that_of_every_choice(own_s: np.ndarray, first: int, num_layers: int):
    sums = {
        sum(own_s[rank, more] for rank, more in enumerate(chosen))
        for chosen in itertools.product(range(own_s.shape[1]), repeat=len(own_s))
        if sum(chosen) + first * len(own_s) == num_layers
    }
    least, totals = cheapest_totals(own_s, num_layers, first)
    assert least == pytest.approx(min(sums, default=np.inf))
    if np.isfinite(least):
        assert totals.sum() == num_layers
        assert sum(own_s[rank, total - first] for rank, total in enumerate(totals.tolist())) == pytest.approx(least)


@given(cases(("interleaved", "zb_v"), chunks=2, most_ranks=3), st.floats(0.3, 1.2))
def test_layers_fit_on_a_rank_where_some_way_to_lay_them_in_its_chunks_fits(case: Case, share: float):
    """Against the price of every way; the rank of the head may be thought to have a little more room."""
    blocks, schedule = case.blocks.with_least_layers, case.blocks.schedule
    capacity = np.full(blocks.num_candidates, share * case.capacity)
    ways = rank_ways(case.blocks, case.choices, capacity)
    has_head = (counts_of(schedule).stages == schedule.num_stages - 1).any(axis=1)
    offloads = any(layer.host_bytes.any() for layer in blocks.layers)  # what host memory holds depends on the schedule
    for total in range(2, case.choices.num_layers - 2 * (schedule.num_ranks - 1) + 1):
        chunks = np.array([*compositions(total, 2)])
        count = np.broadcast_to(chunks, (schedule.num_ranks, *chunks.shape)).copy()
        options = RankOptions.of(blocks, case.choices, ChunkLayers(count=count, first=0 * count), capacity)
        fits = (options.least_s < NEVER).any(axis=1)
        known = np.any(ways.fits[:, ways.rows.totals == total], axis=1)
        assert not (fits & ~known).any(), "what fits is never left out"
        assert offloads or not (known & ~fits)[~has_head].any(), "and nothing else is thought to fit"


def test_ways_that_hold_more_than_another_at_all_times_are_left_out():
    sizes = np.array([[[1, 2, 1, 0], [1, 2, 1, 3]]])  # [rank, size, way]
    assert chunk_ways._undominated(sizes).tolist() == [True, False, False, True]
