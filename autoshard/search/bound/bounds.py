"""Lower bounds of the time and memory of a step, for many points at once, before their stages are filled.

The layers of a pipeline lie on its ranks as memory allows: each rank mixes kinds of recompute, and parts of layers. The
resulting work is then spread in perfect balance, over a pipeline that
waits no longer than its schedule must. As layers are whole, some rank has most work, which is another bound. Each of
these assumptions can only make a step faster.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.stages import BlockTotals, PipelineBlocks
from autoshard.cost.update import update_cost
from autoshard.plan.candidate import Candidate
from autoshard.schedule.builders import builders
from autoshard.schedule.counts import counts_of
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.bound.held_layers import HeldLayers, PipelineRanks, states_bytes
from autoshard.search.bound.priced_layouts import PricedLayouts
from autoshard.search.bound.space import Space
from autoshard.search.fill.stage_options import ALL_RANGES, SURE
from autoshard.spec.kernels import load_kernels

_FOREVER = 1e30  # seconds of passes behind which as much as possible hides
_PRICES, _LEAST = 4, 1e-9  # of a layer that are tried, and layers by which two mixtures differ at least
_HALVINGS = 12  # of the memory of a rank, until a bound of it is near enough
_ALONE = Schedule(builder="1f1b", num_ranks=1, num_micro_batches=1)


def bound_seconds(
    priced: PricedLayouts, rows: Ints, space: Space, capacity: float, limit_s: float = np.inf
) -> tuple[Floats, Floats]:
    """Return a lower bound of the step of every point, and the part of it beside micro-batches, without fixed seconds.

    A point is a row of the priced layouts, run as a variant says. The bound is infinite where nothing fits.
    Which rank takes longest is only asked for points that may take less than a limit.
    """
    question, base, pp = priced.question, space.base, space.rows["pp"]
    counts = question.workload.global_batch // (space.rows["dp"] * space.rows["mbs"])
    least_work = _least_work(
        priced, states_of(base), _holds_as_1f1b(base.schedule), builders()[base.schedule].turns, capacity
    )
    work_s, rest_s = (column[rows] for column in least_work)
    work_s = work_s + pp * space.rows["vp"] * question.calibration.task_s
    blocks = priced.pipeline_blocks(slice(None), _ALONE, base)
    kernels = load_kernels(question.kernels)
    hidden = kernels.hides_sends(base.schedule)
    held_s = np.zeros(len(rows)) if hidden else (blocks.sends.time_s * (1 + kernels.receives_apart))[rows]
    passes_s = _passes(base.schedule, counts, pp) * (work_s + 2 * (pp - 1) * held_s)
    besides_s = rest_s + priced.fixed_s(rows, base, space.rows["vp"])
    near = np.flatnonzero(passes_s + besides_s < limit_s)
    fullest_s = _fullest_rank_s(blocks, rows[near], space.only(near), counts[near], held_s[near])
    passes_s[near] = np.maximum(passes_s[near], fullest_s)
    return (passes_s + besides_s) * (1 - SURE), rest_s


def states_of(base: Candidate) -> Candidate:
    """Return what is shared over dp, and over how many ranks, as a candidate of nothing else."""
    return Candidate(zero=base.zero, zero_group=base.zero_group, weight_group=base.weight_group)


def least_of_any(priced: PricedLayouts, each_states: Sequence[Candidate], capacity: float) -> Floats:
    """Return a lower bound of the step of every layout, for any schedule; if priced without, for any recompute.

    ``each_states`` are the ways to share states, as ``states_of`` returns them.
    """
    rows = priced.space.rows
    counts = priced.question.workload.global_batch // (rows["dp"] * rows["mbs"])
    least_s = np.full(len(counts), np.inf)
    for states, turns in itertools.product(each_states, (False, True)):
        work_s, rest_s = _least_work(priced, states, False, turns, capacity)
        least_s = np.minimum(least_s, counts / rows["pp"] * work_s + rest_s)
    return least_s * (1 - SURE)


def least_bytes(priced: PricedLayouts, states: Candidate) -> Floats:
    """Return the least bytes of the rank with the most layers: states, and activations of one micro-batch."""
    kernels = load_kernels(priced.question.kernels)
    blocks = priced.pipeline_blocks(slice(None), _ALONE, states)
    each_kind = [
        -(-count // priced.space.rows["pp"]) * (states_bytes(blocks, layer) + layer.saved_bytes.min(axis=0))
        for layer, count in _kinds_of_layers(blocks)
    ]
    held = np.max(each_kind, axis=0)
    share = kernels.reserved.share if kernels.reserved else 0.0
    return ((held + kernels.workspace_bytes) * (1 + share) + kernels.runtime_bytes) * (1 - SURE)


@cache
def _holds_as_1f1b(builder: str) -> bool:
    """Say whether every rank of a schedule keeps all its layers as often as under 1F1B, counted with four ranks."""
    chunks = builders()[builder].num_chunks or 2
    schedule = Schedule(builder=builder, num_ranks=4, num_chunks=chunks, num_micro_batches=16)
    return all(max(min(held[:chunks]) for held in schedule.in_flight_by_chunk(rank)) >= 4 - rank for rank in range(4))


@lru_cache(maxsize=16)  # variants of the same layouts differ in little else
def _least_work(
    priced: PricedLayouts, states: Candidate, as_1f1b: bool, turns: bool, capacity: float
) -> tuple[Floats, Floats]:
    """Return the least time of one micro-batch of every layout on all ranks together, and of the step phase.

    Ranks keep as many micro-batches as under 1F1B, or one. A schedule that turns has the head on its first rank.
    """
    question, rows = priced.question, priced.space.rows
    counts = question.workload.global_batch // (rows["dp"] * rows["mbs"])
    blocks = priced.pipeline_blocks(slice(None), _ALONE, states)
    if as_1f1b:
        work_s = np.full(len(counts), np.inf)
        each_pp: list[int] = sorted(set(rows["pp"].tolist()))
        for num_ranks in each_pp:
            columns = np.flatnonzero(rows["pp"] == num_ranks)
            rank = np.arange(num_ranks)[:, None]
            flight = np.maximum(1, np.minimum(num_ranks - rank, counts[columns]))
            last = rank == (0 if turns else num_ranks - 1)
            ranks = PipelineRanks(
                first=rank == 0, last=last, flight=flight, waiting=0 * flight, times=np.ones_like(flight)
            )
            work_s[columns] = _pass_s(blocks.only(columns), ranks, capacity)
    else:
        work_s = _pass_s(blocks, PipelineRanks.with_one_in_flight(rows["pp"], turns=turns), capacity)
    each_kind = [_update_s(blocks, layer, counts, -(-count // rows["pp"])) for layer, count in _kinds_of_layers(blocks)]
    return work_s, np.max(each_kind, axis=0)


def _pass_s(blocks: PipelineBlocks, ranks: PipelineRanks, capacity: float) -> Floats:
    """Return the least time of a micro-batch on all ranks together, if each holds as many layers as it can alone.

    Of several kinds of layers, each has all memory.
    """
    by_kind: list[Floats] = []
    for layer, count in zip(blocks.layers, blocks.order.totals, strict=True):
        by_kind.append(_layers_s(blocks, (layer, count), ranks, capacity))
    layers_s = sum(by_kind[1:], start=by_kind[0])
    if len(by_kind) > 1:  # layers of all kinds share it, and no kind holds less than the least
        least, again_s = blocks.layer, np.array([layer.pass_s - layer.pass_s.min(axis=0) for layer in blocks.layers])
        more = replace(least, forward_s=again_s.min(axis=0), input_s=0 * least.input_s, weight_s=0 * least.weight_s)
        more_s = _layers_s(blocks, (more, blocks.order.num_layers), ranks, capacity)
        counts = zip(blocks.layers, blocks.order.totals, strict=True)
        layers_s = np.maximum(layers_s, more_s + sum(count * layer.pass_s.min(axis=0) for layer, count in counts))
    return layers_s + blocks.embed.pass_s[0] + blocks.head.pass_s[0]


def _layers_s(blocks: PipelineBlocks, layers: tuple[BlockTotals, int], ranks: PipelineRanks, capacity: float) -> Floats:
    """Return the least time of so many layers, in a memory in which there are no others but embedding and head."""
    (layer, num_layers), held = layers, HeldLayers.of(blocks, layers[0], ranks)
    shape = (len(ranks.first), *layer.pass_s.shape)
    times = np.broadcast_to(ranks.times[:, None], (shape[0], 1, shape[2]))
    whole = np.where(times > 0, held.most(capacity), 0.0) * times  # without a limit of memory infinitely many fit
    fastest = np.take_along_axis(whole.sum(axis=0), layer.pass_s.argmin(axis=0)[None], axis=0)[0]
    fits = whole.max(axis=1).sum(axis=0) >= num_layers
    pass_s = num_layers * layer.pass_s.min(axis=0)
    short = np.flatnonzero(fits & (fastest < num_layers))
    if len(short):
        room = np.broadcast_to(held.room(capacity), shape)[..., short] * times[..., short]
        pass_s[short] = np.maximum(pass_s[short], mixed_layers_s(room, layer.pass_s[:, short], num_layers))
    return np.where(fits, pass_s, np.inf)


def mixed_layers_s(room: Floats, pass_s: Floats, num_layers: float) -> Floats:
    """Return a lower bound of the time of layers that ranks compute again in any mixture: [candidate].

    ``room`` is how many layers of each kind of recompute fill ranks: [rank, kind, candidate]. Every price of a layer
    gives a bound: that of all layers, less what each rank gains by the kind with which it gains most (Lagrange). Prices
    are tried at which too few and too many layers would lie on the ranks.
    """

    def lying(kind: Ints) -> tuple[Floats, Floats]:  # [rank, candidate]
        number = np.take_along_axis(room, kind[:, None], axis=1)[:, 0]
        return number.sum(axis=0), (number * np.take_along_axis(pass_s, kind, axis=0)).sum(axis=0)

    fastest, largest = pass_s.argmin(axis=0), room.argmax(axis=1)
    few, many = lying(np.broadcast_to(fastest, largest.shape)), lying(largest)
    bound_s = np.zeros(pass_s.shape[1])
    for _ in range(_PRICES):
        price = (many[1] - few[1]) / np.maximum(many[0] - few[0], _LEAST)
        gains = room * np.maximum(0.0, price - pass_s)
        bound_s = np.maximum(bound_s, price * num_layers - gains.max(axis=1).sum(axis=0))
        number, seconds = lying(gains.argmax(axis=1))
        too_few = number < num_layers
        few = np.where(too_few, (number, seconds), few)
        many = np.where(too_few, many, (number, seconds))
    return bound_s


def _kinds_of_layers(blocks: PipelineBlocks) -> list[tuple[BlockTotals, int]]:
    """Return layers of which some rank has at least an even share: those of each kind, and the least of any."""
    kinds = [*zip(blocks.layers, blocks.order.totals, strict=True)]
    return kinds if len(kinds) == 1 else [*kinds, (blocks.layer, blocks.order.num_layers)]


def least_in_flight(blocks: PipelineBlocks, rest_s: Floats, capacity: float) -> Floats:
    """Return a lower bound of the step of each candidate that counts what its ranks keep of micro-batches in flight."""
    schedule, ranks = blocks.schedule, PipelineRanks.of(blocks.schedule)
    pass_s = _pass_s(blocks, ranks, capacity)
    pass_s = pass_s + schedule.num_stages * blocks.question.calibration.task_s + blocks.hop_s.sum(axis=0)
    return (schedule.num_micro_batches / schedule.num_ranks * pass_s + rest_s + blocks.fixed_s) * (1 - SURE)


def least_held(blocks: PipelineBlocks, capacity: float) -> Floats:
    """Return a lower bound of the bytes of the fullest rank of each candidate, with what is in flight; or infinity.

    It is the least memory of every rank in which all layers of each kind fit, whatever they compute again.
    """
    ranks = PipelineRanks.of(blocks.schedule)
    kinds = [(HeldLayers.of(blocks, layer, ranks), count) for layer, count in _kinds_of_layers(blocks)]

    def fits(memory: Floats) -> NDArray[np.bool_]:
        return np.all([layers.most(memory).max(axis=1).sum(axis=0) >= count for layers, count in kinds], axis=0)

    high: Floats = np.minimum(capacity, np.max([layers.holding(count) for layers, count in kinds], axis=0))
    low: Floats = np.zeros_like(high)
    too_large = ~fits(high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = fits(middle)
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where(too_large, np.inf, low)


def _passes(builder: str, counts: Ints, ranks: Ints) -> Floats:
    """Return the least number of times that a step takes the work of one micro-batch, for any split over the ranks.

    Of GPipe and 1F1B these are paths that are no longer than those of ``path_weights``, in the flow in which all
    layers weigh the same; other schedules may have no bubble.
    """
    if builder not in ALL_RANGES:
        return counts / ranks
    few = (counts <= ranks) & (builder != "gpipe")
    return np.where(few, 1 + (counts - 1) / (2 * ranks - counts + 1).clip(1), (counts + ranks - 1) / ranks)


def _fullest_rank_s(blocks: PipelineBlocks, rows: Ints, space: Space, counts: Ints, held_s: Floats) -> Floats:
    """Return the least time of all micro-batches on the slowest rank, with the fastest recompute.

    Layers are whole, and every stage has one. A rank begins when the stages before its first one have passed a
    micro-batch, and ends before these have passed the last one back, unless its weight gradients come later.
    """
    forward_s = blocks.layer.forward_s if builders()[space.base.schedule].splits else blocks.layer.pass_s
    embed, layer, head, ahead = (
        seconds.min(axis=0)[rows]
        for seconds in (blocks.embed.pass_s, blocks.layer.pass_s, blocks.head.pass_s, forward_s)
    )
    fullest_s, num_layers = np.zeros(len(rows)), blocks.question.model.num_layers
    shapes, shape = np.unique(np.stack([space.rows["pp"], space.rows["vp"]]), axis=1, return_inverse=True)
    for number, (pp, vp) in enumerate(shapes.T.tolist()):
        schedule = Schedule(builder=space.base.schedule, num_ranks=pp, num_chunks=vp, num_micro_batches=pp)
        columns = np.flatnonzero(shape.reshape(-1) == number)
        stages, sends = counts_of(schedule).stages, counts_of(schedule).sends[:, None]
        split = space.base.stages or (1,) * schedule.num_stages
        before = np.cumsum([0, *split])[stages.min(axis=1)][:, None] * ahead[columns]
        first, last = ((stages == stage).any(axis=1)[:, None] for stage in (0, schedule.num_stages - 1))
        ends = first * embed[columns] + last * head[columns] + sends * held_s[columns]
        ends = ends + vp * blocks.question.calibration.task_s
        each_s = counts[columns] * layer[columns]
        least_s = before + counts[columns] * ends + np.array(split)[stages].sum(axis=1)[:, None] * each_s
        num_left = num_layers - sum(split)  # these go where a rank is soonest done
        share_s = (least_s.sum(axis=0) + num_left * each_s) / pp
        more = np.maximum(0.0, np.floor((share_s - least_s) / each_s))
        next_s = np.sort(least_s + (more + 1) * each_s, axis=0)
        num_more = (num_left - more.sum(axis=0)).astype(np.int64)
        after_s = np.take_along_axis(next_s, np.clip(num_more - 1, 0, pp - 1)[None], axis=0)[0]
        fullest_s[columns] = np.maximum(least_s.max(axis=0), np.where(num_more > 0, after_s, 0.0))
    return fullest_s


def _update_s(blocks: PipelineBlocks, layer: BlockTotals, counts: Ints, layers: Ints) -> Floats:
    """Return the least time of the step phase of a rank with so many layers.

    Embedding and head may be there too: under ZeRO-3 they are more messages, but if they are small, messages of another
    size, which may go another way.
    """
    weights = {pending: layers * number for pending, number in layer.weights.items()}
    updates_s: list[Floats] = []
    for ends in range(3) if blocks.setting.zero == 3 else (0,):
        forever = np.full(len(counts), _FOREVER)
        update = update_cost(weights, blocks.setting, blocks.question, forever, counts, layers + ends)
        updates_s.append(sum(update.seconds.values()) + np.zeros(len(counts)))
    return np.min(updates_s, axis=0)
