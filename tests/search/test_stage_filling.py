"""Stages are filled in the best way, of blocks that are drawn at random; every way is tried and timed as plans are."""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note, strategies as st

from autoshard.cost.stages import BlockTotals, PipelineBlocks, Sends, StageOptions, price_stages
from autoshard.cost.step import pipelined_s, step_seconds, work_by_stage
from autoshard.graph.layer_order import layer_order
from autoshard.plan.candidate import Candidate
from autoshard.plan.recompute import Recompute
from autoshard.schedule.schedule import Schedule
from autoshard.search.bound.legal_space import legal_space
from autoshard.search.bound.priced_layouts import LayoutPricer, PricedLayouts
from autoshard.search.fill.stage_filling import Effort, Goal, fill_stages, path_weights
from autoshard.search.fill.stage_options import StageChoices, StageFilling, not_dominated
from tests.search.brute_force import EXACT, FULL, PLAIN, ask, compositions, with_host_memory

GIB = 2.0**30
SURE = 1 + 1e-9
NORMS, MLP = (Recompute(kind="selective", ops=(name,)) for name in ("norms", "mlp"))
HOST = PLAIN.offloaded
KINDS = (
    (PLAIN,), (PLAIN, FULL), (PLAIN, NORMS, FULL), (PLAIN, NORMS, MLP), (PLAIN, FULL, HOST), (PLAIN, NORMS, MLP, FULL),
    (PLAIN, NORMS, FULL, HOST),
)  # fmt: skip


@functools.cache
def priced(kernels: str, zero: int) -> PricedLayouts:
    """A real layout of a small model, whose sizes and links serve made-up blocks."""
    request = ask("tiny-llama", ranks=8, global_batch=16, pins=f"mbs=1,tp=2,dp=2,zero={zero},kernels={kernels}")
    space = legal_space(request, "torch").space
    candidate = space.candidate(0, 0)
    cutting, pricer = request.cutting(candidate, "torch"), LayoutPricer(request.question(candidate), space)
    return pricer.with_recompute(pricer.priced(space, [(cutting, {"contiguous": np.arange(1)})]))[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Stages to fill, for several candidates at once."""

    blocks: PipelineBlocks
    choices: StageChoices
    capacity: float
    rest_share: float  # of the least step phase that the search is told


def totals(
    random: np.random.Generator, count: int, kinds: tuple[Recompute, ...], weights: Mapping[Any, Any], scale: float
) -> BlockTotals:
    """Draw a block: computed again it takes longer and keeps less, mostly."""
    shape, offload = (len(kinds), count), np.array([[kind.offload] for kind in kinds])
    steps = random.choice([0.0, 0.1, 0.25, 0.5], shape)
    steps[0] = 0.0
    forward = np.broadcast_to(random.choice([0.5, 1.0, 1.0, 2.0], count), shape) * scale
    if random.random() < 0.2:
        forward = forward * random.choice([1.0, 1.1], shape)  # no kernels that we know, but nothing forbids them
    saved = np.sort(random.choice([1.0, 2.0, 4.0], shape) * GIB / 64, axis=0)[::-1] * min(1.0, scale * 1e3)
    return BlockTotals(
        forward_s=forward,
        input_s=forward * (1 + steps),
        weight_s=np.broadcast_to(forward[0], shape) * random.choice([0.5, 1.0]),
        saved_bytes=saved * ~offload,
        host_bytes=saved * offload,
        moment_bytes=random.choice([0.0, 1.0, 3.0], shape) * GIB / 64,
        waiting_bytes=random.choice([0.0, 1.0], shape) * GIB / 128,
        placeholder_bytes=np.zeros(shape),
        started_s=np.zeros(shape),
        starts=np.zeros(shape),
        scattered_bytes=np.zeros(shape),
        weights={pending: np.full(count, float(random.integers(10**5, 10**6))) for pending in weights},
        tied_weights={},
    )


ORDERS = ((0, 1, 0, 1, 0, 1), (0, 1, 1, 1, 1, 1), (0, 0, 1, 0, 0, 1), (0, 1, 2, 2, 1, 0))  # kinds of layers


@st.composite
def cases(draw: Any, builders: tuple[str, ...] = ("1f1b", "gpipe"), *, most_ranks: int = 4, chunks: int = 1) -> Case:
    """Few layers over few ranks; of some kernels, a part of the step phase hides behind them."""
    builder, ranks = draw(st.sampled_from(builders)), draw(st.integers(2, most_ranks))
    layers = draw(st.integers(ranks * chunks, 6 if chunks == 1 else ranks * chunks + 3))
    kinds = draw(st.sampled_from(KINDS if ranks < 4 or chunks > 1 else KINDS[:3]))
    seed, count = draw(st.integers(0, 10**6)), draw(st.integers(1, 3))
    number = draw(st.integers(1, 9)) if builder != "interleaved" else ranks * draw(st.integers(1, 3))
    hiding = [("mcore", 0), ("mcore", 1), ("torch_cuda", 3)]
    kernels, zero = draw(st.sampled_from([*hiding, ("torch_cuda", 0), ("te", 1), ("torch_cuda", 3)]))
    random = np.random.default_rng(seed)
    real = priced(kernels, zero)
    model = replace(real.question.model, num_layers=layers)
    host_bytes = draw(st.sampled_from([2**28, 2**40]))  # of 8 ranks
    cluster = with_host_memory(real.question.cluster, host_bytes, 1e9)
    schedule = Schedule(builder=builder, num_ranks=ranks, num_chunks=chunks, num_micro_batches=number)
    weights, scale = real.layers[0].weights, float(random.choice([1e-3, 1e-2]))
    order = draw(st.sampled_from([(0,) * layers, (0,) * layers, *ORDERS]))[:layers]
    order = order + order[-1:] * (layers - len(order))
    sends = Sends(
        time_s=random.choice([0.0, 1e-5, 1e-4, 1e-3], count),
        hidden=draw(st.booleans()),
        receives_apart=draw(st.booleans()),
    )
    blocks = replace(
        real.pipeline_blocks(np.zeros(count, dtype=int), schedule, Candidate(zero=zero)),
        question=replace(real.question, model=model, cluster=cluster),
        sends=sends,
        embed=totals(random, count, (PLAIN,), weights, scale * float(random.choice([0.0, 0.1, 1.0]))),
        layers=tuple(totals(random, count, kinds, weights, scale) for _ in dict.fromkeys(order)),
        order=layer_order(tuple(map(str, order))),
        head=totals(random, count, (PLAIN,), weights, scale * float(random.choice([0.1, 1.0, 2.0]))),
    )
    allowed = random.random((len(kinds), count)) < draw(st.sampled_from([0.7, 1.0, 1.0]))
    choices = StageChoices(
        kinds=kinds, allowed=allowed, num_layers=layers, stages=None, recompute=None, differ=len(blocks.layers) > 1
    )
    capacity = GIB * draw(st.sampled_from([1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, 9.0, 1e3]))
    note(f"{schedule}, {layers} layers, {count} candidates, {kinds}, seed {seed}, {kernels} zero {zero}, {capacity}")
    share = draw(st.sampled_from([0.0, 1.0]))
    return Case(blocks=blocks, choices=choices, capacity=capacity, rest_share=share)


@dataclass(frozen=True, kw_only=True, eq=False)
class Everything:
    """All ways to fill the stages of a case, a column per candidate."""

    time_s: Any  # infinite where it does not fit
    peak_bytes: Any
    rest_s: Any  # what no way spends less on beside its micro-batches


Row = tuple[tuple[int, ...], tuple[int, ...], int, int]  # of chunks: layers, their first; kind, how many it has at most


def every_filling(case: Case) -> Everything:
    """Try all layers of all stages with every recompute of every rank, whose chunks recompute alike."""
    blocks, choices, schedule = case.blocks, case.choices, case.blocks.schedule
    kinds, chunks = choices.kinds, range(schedule.num_chunks)
    places = [[schedule.stages_of(rank)[chunk] for chunk in chunks] for rank in range(schedule.num_ranks)]
    rows: dict[Row, None] = {}
    ways: list[list[Row]] = []
    splits = choices.listed_splits(schedule) or compositions(choices.num_layers, schedule.num_stages)
    for split in splits:
        each: list[list[Row]] = []
        for own in places:
            layers = tuple(split[stage] for stage in own)
            first = tuple(sum(split[:stage]) if len(blocks.layers) > 1 else 0 for stage in own)
            some = [(layers, first, kind, max(layers)) for kind in range(len(kinds))]
            some += [(layers, first, kinds.index(FULL), count) for count in range(1, max(layers)) if FULL in kinds]
            rows |= dict.fromkeys(some)
            each.append(some)
        ways += [list(way) for way in itertools.product(*each)]
    number = {row: place for place, row in enumerate(rows)}
    option = np.array([[number[row] for row in way] for way in ways]).T  # [rank, way]
    layers = np.array([row[0] for row in rows])
    again = np.minimum(layers, np.array([row[3] for row in rows])[:, None])
    kind, first = np.array([row[2] for row in rows]), np.array([row[1] for row in rows])
    counts = {"recomputed": again[None], "plain": (layers - again)[None], "first": first[None]}
    options = StageOptions(kind=kind[None, :, None], plain_kind=0, **counts)
    prices = price_stages(blocks, options)
    legal = choices.allowed[kind] & ((layers == again).all(axis=1)[:, None] | choices.allowed[0])
    cluster = blocks.question.cluster
    on_host = prices.host_bytes * cluster.ranks_per_node <= 0.75 * (cluster.host_memory_bytes or np.inf)
    fits = legal[None] & (prices.peak_bytes <= case.capacity) & on_host
    columns: list[tuple[Any, ...]] = []
    for candidate in range(blocks.num_candidates):
        same = np.full(len(ways), candidate)
        own, some = prices.of_options(option, same), blocks.only(same)
        ok = fits[np.arange(schedule.num_ranks)[:, None], option, candidate].all(axis=0)
        time_s = step_seconds(some, own).total_s
        rest_s = time_s - pipelined_s(some, work_by_stage(schedule, own)) - some.fixed_s
        columns.append((np.where(ok, time_s, np.inf), np.where(ok, own.peak_bytes.max(axis=0), np.inf), rest_s))
    time_s, peak_bytes, rest_s = (np.stack(column, axis=1) for column in zip(*columns, strict=True))
    return Everything(time_s=time_s, peak_bytes=peak_bytes, rest_s=case.rest_share * rest_s)


def filled(case: Case, truth: Everything | None = None, below_s: float = np.inf, **goal: Any) -> StageFilling:
    """Do what the search does for a group of points."""
    rest_s = truth.rest_s.min(axis=0) * (1 - 1e-12) if truth else np.zeros(case.blocks.num_candidates)
    return fill_stages(case.blocks, case.choices, Goal(capacity=case.capacity, **goal), (0.0, below_s), rest_s)


@given(cases())
def test_the_least_layers_take_and_hold_no_more_than_any_kind_of_layer(case: Case):
    least = case.blocks.with_least_layers
    assert least.layers == (least.layer,)
    assert least.order.totals == [case.choices.num_layers]
    for layer in case.blocks.layers:
        for name in ("forward_s", "input_s", "weight_s", "saved_bytes", "moment_bytes", "host_bytes"):
            assert np.all(getattr(least.layer, name) <= getattr(layer, name)), name


@given(cases())
def test_kinds_of_recompute_that_another_dominates_are_in_no_better_filling(case: Case):
    allowed = not_dominated(
        case.blocks.layers, np.arange(case.blocks.num_candidates), case.choices.allowed, case.choices.kinds
    )
    assert np.all(allowed <= case.choices.allowed)
    fewer = replace(case, choices=replace(case.choices, allowed=allowed))
    every, remaining = every_filling(case), every_filling(fewer)
    assert remaining.time_s.min(axis=0) == pytest.approx(every.time_s.min(axis=0), rel=1e-9)
    assert remaining.peak_bytes.min(axis=0) == pytest.approx(every.peak_bytes.min(axis=0), rel=1e-9)


def test_a_kind_that_saves_nothing_is_dominated_and_one_that_is_not_allowed_dominates_nothing():
    real = priced("torch_cuda", 0)
    columns = real.layers[0].only(np.array([0, 0]))
    rows = {name: np.repeat(getattr(columns, name)[:1], 3, axis=0) for name in ("forward_s", "input_s", "weight_s")}
    saved = np.array([[8.0, 8.0], [2.0, 2.0], [2.0, 2.0]])
    flat = {name: np.ones((3, 2)) for name in ("moment_bytes", "waiting_bytes", "placeholder_bytes", "host_bytes")}
    layer = replace(columns, **rows, **flat, saved_bytes=saved)
    kinds = (PLAIN, Recompute(kind="selective", ops=("mlp",)), Recompute(kind="selective", ops=("norms",)))
    allowed = np.array([[True, True], [True, False], [True, True]])
    assert not_dominated((layer,), np.arange(2), allowed, kinds).tolist() == [
        [True, True],
        [True, False],
        [False, True],
    ]


@given(cases())
def test_nothing_holds_less_than_the_smallest_and_of_those_nothing_known_is_faster(case: Case):
    truth, found = every_filling(case), filled(case, objective="memory")
    peak = truth.peak_bytes.min(axis=0)
    assert found.peak_bytes == pytest.approx(peak, rel=1e-12)
    assert found.bound == pytest.approx(peak, rel=1e-12)


@given(cases(most_ranks=3), st.data())
def test_pinned_recompute_is_kept_to(case: Case, data: st.DataObject):
    entries = [Recompute(), *case.choices.kinds]
    if FULL in entries:
        entries.append(Recompute(kind="full", num_layers=1))
    ranks = case.blocks.schedule.num_ranks
    pinned = tuple(data.draw(st.lists(st.sampled_from(entries), min_size=ranks, max_size=ranks)))
    choices = replace(case.choices, recompute=pinned, allowed=np.ones_like(case.choices.allowed))
    found = filled(replace(case, choices=choices))
    for number in np.flatnonzero(np.isfinite(found.time_s)).tolist():
        rows = zip(found.stages(number), found.recompute(number, choices.kinds), pinned, strict=True)
        for layers, entry, wanted in rows:
            assert [entry.of_layer(one) for one in range(layers)] == [wanted.of_layer(one) for one in range(layers)]
            assert layers >= (wanted.num_layers or 1)


OTHERS = st.one_of(
    cases(("zb_h1",), most_ranks=3), cases(("zb_v", "interleaved"), chunks=2, most_ranks=3),
    cases(("interleaved",), chunks=3, most_ranks=2),
)  # fmt: skip
ANY = st.one_of(cases(), OTHERS)


@given(ANY, st.sampled_from([Effort(), EXACT, Effort(gap=0.0, most_splits=1), Effort(gap=1.0)]))
def test_of_all_splits_none_is_below_the_bound_and_of_few_the_fastest_is_found(case: Case, effort: Effort):
    truth = every_filling(case)
    best, found = truth.time_s.min(axis=0), filled(case, truth, effort=effort)
    assert np.all(found.bound <= best * SURE), (found.bound, best)
    assert np.all(found.time_s >= best * (1 - 1e-9))
    assert np.all(np.isfinite(best) | np.isinf(found.time_s))
    if effort == EXACT:  # what takes longer may hide more of the update; but for that, the fastest recompute is best
        assert np.all(np.isfinite(found.time_s) == np.isfinite(best))
        if case.blocks.question.kernels not in ("mcore", "torch_cuda"):
            fits = np.isfinite(best)
            assert found.time_s[fits] == pytest.approx(best[fits], rel=1e-9)
            assert found.bound[fits] == pytest.approx(best[fits], rel=1e-9)
    for number in np.flatnonzero(np.isfinite(found.time_s)).tolist():
        stages, kinds = found.stages(number), case.choices.kinds
        assert sum(stages) == case.choices.num_layers and min(stages) >= 1
        allowed = case.choices.allowed[:, number]
        assert all(allowed[kinds.index(kind)] for one in found.recompute(number, kinds) for kind in one.kinds)
        same = np.isclose(truth.time_s[:, number], found.time_s[number], rtol=1e-9)
        assert np.any(same & np.isclose(truth.peak_bytes[:, number], found.peak_bytes[number], rtol=1e-9))


@given(ANY, st.sampled_from([0.9, 1.0001, 1.05]))
def test_what_is_left_out_below_a_limit_is_covered_by_the_bound(case: Case, share: float):
    truth = every_filling(case)
    best = truth.time_s.min(axis=0)
    found = filled(case, truth, float(np.min(best)) * share)
    assert np.all(found.bound <= best * SURE)


@given(OTHERS)
def test_no_split_of_other_schedules_holds_less_than_the_bound(case: Case):
    peak, found = every_filling(case).peak_bytes.min(axis=0), filled(case, objective="memory")
    assert np.all(found.bound <= peak * SURE)
    assert np.all(found.peak_bytes >= peak * (1 - 1e-12))
    assert np.all(np.isfinite(peak) | np.isinf(found.peak_bytes))


@given(
    builder=st.sampled_from(["1f1b", "gpipe"]), ranks=st.integers(2, 7), count=st.integers(1, 16),
    seed=st.integers(0, 10**6), power=st.sampled_from([0.2, 1.0, 5.0]),
)  # fmt: skip
def test_a_pipeline_takes_at_least_each_of_its_paths(builder: str, ranks: int, count: int, seed: int, power: float):
    ways = 50
    forward, backward = np.random.default_rng(seed).random((2, ranks, ways)) ** power
    schedule = Schedule(builder=builder, num_ranks=ranks, num_micro_batches=count)
    some = priced("te", 1).pipeline_blocks(np.zeros(ways, dtype=int), schedule, Candidate())
    blocks = replace(some, sends=Sends(time_s=np.zeros(ways), hidden=False, receives_apart=False))
    true_s = pipelined_s(blocks, np.array([backward, forward, backward / 2, backward / 2]))
    both = forward + backward
    before, later = np.cumsum(both, axis=0) - both, np.cumsum(both[::-1], axis=0)[::-1] - both
    for passes, waits in path_weights(schedule):
        paths = before + passes[:, None] * both + waits[:, None] * later
        assert np.all(paths <= true_s * SURE), (paths / true_s).max(axis=1)
