"""The step phase: reducing gradients, updating the optimizer's shards, gathering the new weights; states at rest."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast

import numpy as np

from autoshard.cost.collective import Number, Ring
from autoshard.cost.setting import Question, Setting
from autoshard.graph.kinds.optimizer import UPDATES
from autoshard.layout.layout import Collective, CollectiveKind
from autoshard.plan.lowering import StepGraph, split_pending
from autoshard.spec.kernels import Kernels, load_kernels
from autoshard.spec.mesh import COPIES, PARTS
from autoshard.spec.workload import DTYPE_BYTES, Workload

Send = tuple[CollectiveKind, Number, Number]  # what, bytes, how often
Weights = Mapping[tuple[str, ...], Number]  # the atoms that a gradient's sum is pending over -> weights on the rank


def num_shards(shards: tuple[str, ...], setting: Setting) -> Number:
    """Return over how many ranks the optimizer's work is divided, given the atoms that may share it."""
    if not setting.zero:
        return 1
    return math.prod(setting.atoms[atom] for atom in shards) // (setting.copies if "edp" in shards else 1)


def num_holders(shards: tuple[str, ...], setting: Setting) -> Number:
    """Return over how many ranks weights at rest are divided under ZeRO-3, given the atoms that may share them."""
    return num_shards(shards, setting) // _parts(shards, setting)


def _parts(shards: tuple[str, ...], setting: Setting) -> Number:
    return setting.parts if "edp" in shards else 1


def stored_bytes(weights: Weights, setting: Setting, workload: Workload) -> Mapping[str, Number]:
    """Return a rank's weights, gradients, masters and moments in bytes; ZeRO-1 divides the last two, ZeRO-3 all.

    Weights may rest over fewer ranks than the others.
    """
    held, sums, shards = cast(Number, 0), cast(Number, 0), cast(Number, 0)
    for atoms, count in _grouped(weights, 0).items():
        shard = _rounded_up(count, num_shards(atoms, setting))
        held = held + (shard * _parts(atoms, setting) if setting.zero == 3 else count)
        sums, shards = sums + (shard if setting.zero == 3 else count), shards + shard
    part_bytes = workload.precision.state_bytes(UPDATES[workload.optimizer].num_moments)
    return {part: size * {"weights": held, "gradients": sums}.get(part, shards) for part, size in part_bytes.items()}


def _rounded_up(count: Number, num_parts: Number) -> Number:
    """Return the numbers of the largest of equal parts; of arrays, whose whole numbers a quotient rounds right."""
    if isinstance(count, np.ndarray) or isinstance(num_parts, np.ndarray):
        return np.ceil(count / num_parts)  # a tenth of the time of //
    return -(-count // num_parts)


def summed_weights(weights: Weights, setting: Setting) -> Weights:
    """Return of how many weights a rank has gradients when all micro-batches are done: pieces of them under ZeRO-3."""
    if setting.zero != 3:
        return weights
    return {
        pending: _rounded_up(count, num_shards(split_pending(pending)[0], setting))
        for pending, count in weights.items()
    }


def _grouped(weights: Weights, part: Literal[0, 1]) -> Weights:
    """Add up the weights whose gradients await the same atoms in one part of ``split_pending``: they travel as one."""
    counts: dict[tuple[str, ...], Number] = defaultdict(int)
    for pending, count in weights.items():
        counts[split_pending(pending)[part]] = counts[split_pending(pending)[part]] + count
    return counts


@cache
def per_weight(step: StepGraph) -> tuple[float, float]:
    """Return the FLOPs and bytes of norm, clip, update and cast for one weight of a layer, read off the graph."""
    graph = step.graph
    layer = graph.blocks[1]  # one of any kind: the update treats all weights alike
    calls = [(op.kind, layer.call(op, graph.sizes)) for op in layer.select("step")]
    count = sum(tensor.num_elements(graph.sizes) for tensor in layer.parameters)
    vector_flops = sum(kind.vector_flops(call) for kind, call in calls)
    return vector_flops / count, sum(kind.traffic_bytes(call) for kind, call in calls) / count


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCost:
    """One step phase of a rank: seconds by part, bytes sent by axis."""

    seconds: Mapping[str, Number]  # dp, tp, update
    sent_bytes: Mapping[str, Number]


def update_cost(
    weights: Weights,
    setting: Setting,
    question: Question,
    pass_s: Number,
    num_micro_batches: Number,
    num_blocks: Number,
) -> UpdateCost:
    """Price the step phase of a rank that holds these weights, in so many blocks.

    ZeRO-0 sums gradients everywhere; ZeRO-1 scatters the sums and gathers new weights; ZeRO-3 does so block by block in
    every micro-batch, and gathers the weights twice (forward and backward). What also awaits tp is summed there once,
    and so are the pieces of copies of the states. Parts of weights are gathered once, after the update.

    A part of data parallelism's traffic may hide behind passes, with which the rank is busy so long for each
    micro-batch: sums of gradients are whole in the last backward, and weights are awaited once; under ZeRO-3 both
    happen in every micro-batch.
    """
    seconds: dict[str, Number] = {"dp": 0.0, "tp": 0.0, "update": 0.0}
    sent: dict[str, Number] = defaultdict(float)
    rates, (flops, traffic_bytes) = question.rates, per_weight(question.step)
    kernels = load_kernels(question.kernels)
    messages = _messages(weights, setting, question, num_micro_batches, num_blocks)
    sums_s, last_s = cast(Number, 0.0), cast(Number, 0.0)
    for part, collective, size, times in messages:
        ring = _ring(setting, part, collective)
        taken_s = times * ring.time_s(collective, size) * (rates.dp_ratio if part == "dp" else 1.0) * (size > 0)
        seconds[part] = seconds[part] + taken_s
        sent[part] = sent[part] + times * ring.sent_bytes(collective, size)
        sums_s = sums_s + taken_s * (part == "dp" and collective.kind != "all_gather")
        last_s = last_s + taken_s * (collective.atoms == PARTS)
    if not (setting.zero == 1 and kernels.sums_whole):
        passes_s = pass_s * (num_micro_batches if setting.zero == 3 else 1)
        hidden_s = _hidden_s(kernels, setting.zero, (seconds["dp"] - last_s, sums_s), passes_s)
        seconds["dp"] = seconds["dp"] - hidden_s
    for shards, count in _grouped(weights, 0).items():
        other_shards = num_shards(shards, setting) - 1
        seconds["dp"] = seconds["dp"] + question.calibration.shard_s * other_shards * (count > 0)
        rank_share = count / num_shards(shards, setting)
        compute_s = rank_share * flops / rates.vector_flops_per_s
        memory_s = rank_share * traffic_bytes / rates.memory_bytes_per_s
        seconds["update"] = seconds["update"] + np.maximum(compute_s, memory_s)
    return UpdateCost(seconds=seconds, sent_bytes=sent)


def _hidden_s(kernels: Kernels, zero: int, dp_s: tuple[Number, Number], passes_s: Number) -> Number:
    """Return what hides behind passes of dp's seconds: of all of them, and of those that sum gradients."""
    all_s, sums_s = dp_s
    if zero == 3:
        share_s = kernels.hides.get("unit", 0.0) * all_s
    else:
        share_s = np.maximum(kernels.hides.get("sums", 0.0) * sums_s, kernels.hides.get("dp", 0.0) * all_s)
    return np.minimum(share_s, passes_s)


def _unit_sends(gradient_bytes: Number, weight_bytes: Number, times: Number) -> list[Send]:
    """Return what weights that rest in pieces send: they are gathered forward and backward, gradients scattered."""
    return [("reduce_scatter", gradient_bytes, times), ("all_gather", weight_bytes, 2 * times)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeight:
    """A weight of a block on one rank: what operations read of it, and what the sum of its gradient awaits.

    A frozen one has no ``gradient_bytes``. If it rests ``in_pieces``, it does so over the atoms in ``shared``; else its
    gradient is summed over these. A sum over the atoms in ``summed`` follows.
    """

    weight_bytes: Number
    gradient_bytes: Number
    shared: tuple[str, ...]
    summed: tuple[str, ...]
    in_pieces: bool


def held_weights_s(
    weights: Iterable[HeldWeight],
    rings: Mapping[tuple[str, ...], Ring],
    kernels: Kernels,
    pass_s: Number,
    num_micro_batches: Number,
    dp_ratio: float = 1.0,
) -> Number:
    """Return the seconds of one micro-batch in which the weights of a block are gathered, and their gradients summed.

    Weights that rest in pieces send as under ZeRO-3, all others as under ZeRO-0: once per step, of which this is a
    micro-batch's share. What goes over the same atoms travels as one, and a part may hide behind the block's passes.
    What replicas send takes ``dp_ratio`` times as long as links say.
    """
    units: dict[tuple[str, ...], list[Number]] = defaultdict(lambda: [0.0, 0.0])
    sums: dict[tuple[str, ...], Number] = defaultdict(float)
    last: dict[tuple[str, ...], Number] = defaultdict(float)
    for weight in weights:
        size = rings[weight.shared].size if weight.in_pieces else 1
        if weight.in_pieces:
            unit = units[weight.shared]
            unit[:] = unit[0] + weight.gradient_bytes, unit[1] + weight.weight_bytes
        else:
            sums[weight.shared] = sums[weight.shared] + weight.gradient_bytes
        last[weight.summed] = last[weight.summed] + weight.gradient_bytes / size
    units_s: Number = 0.0
    for atoms, (gradient_bytes, weight_bytes) in units.items():
        for kind, size, times in _unit_sends(gradient_bytes, weight_bytes, num_micro_batches):
            time_s = rings[atoms].time_s(Collective(kind=kind, dim=None, atoms=atoms), size)
            units_s = units_s + (size > 0) * times * time_s * dp_ratio
    sums_s, last_s = (
        sum(rings[atoms].time_s(_all_reduce(atoms), size) for atoms, size in sizes.items() if atoms)
        for sizes in (sums, last)
    )
    sums_s = sums_s * dp_ratio
    units_s = units_s - _hidden_s(kernels, 3, (units_s, units_s), num_micro_batches * pass_s)
    sums_s = sums_s - _hidden_s(kernels, 0, (sums_s, sums_s), pass_s)
    return (units_s + sums_s + last_s) / num_micro_batches


def _all_reduce(atoms: tuple[str, ...]) -> Collective:
    return Collective(kind="all_reduce", dim=None, atoms=atoms)


def gathering_share(weights: Weights, setting: Setting, question: Question) -> float:
    """Return how much of dp's seconds of a single candidate gathers weights: what waits for the update."""
    seconds: dict[CollectiveKind, float] = defaultdict(float)
    for part, collective, size, _ in _messages(weights, setting, question, 1, 1):
        if part == "dp":
            seconds[collective.kind] += float(_ring(setting, part, collective).time_s(collective, size))
    return seconds["all_gather"] / (sum(seconds.values()) or 1.0)


def _ring(setting: Setting, part: str, collective: Collective) -> Ring:
    """Return the ring of a message; those of dp are within a copy of the states or weights, or between copies."""
    rings, over_parts = (part == "dp" and setting.state_rings) or setting.rings, (*PARTS, *collective.atoms)
    return rings[over_parts if collective.kind != "all_gather" and over_parts in rings else collective.atoms]


def _messages(
    weights: Weights, setting: Setting, question: Question, num_micro_batches: Number, num_blocks: Number
) -> Iterator[tuple[str, Collective, Number, Number]]:
    """Yield what a rank sends in the step phase: part, collective, bytes, how often."""
    precision, summed = question.workload.precision, load_kernels(question.kernels).sums_whole
    per_gradient, per_weight = DTYPE_BYTES[precision.gradients], DTYPE_BYTES[precision.weights]
    for atoms, count in _grouped(weights, 0).items():
        gradients, whole = count * per_gradient, count * per_weight
        sends: list[Send] = [("all_reduce", gradients, 1)]
        if setting.zero == 3:
            sends = _unit_sends(gradients / num_blocks, whole / num_blocks, num_micro_batches * num_blocks)
        elif setting.zero == 1:
            sends = [("all_reduce" if summed else "reduce_scatter", gradients, 1), ("all_gather", whole, 1)]
        for kind, size, repeats in sends if atoms else ():
            yield "dp", Collective(kind=kind, dim=None, atoms=atoms), size, repeats
            if setting.state_rings and kind != "all_gather":
                piece = size / num_shards(atoms, setting) if kind == "reduce_scatter" else size
                yield "dp", _all_reduce(COPIES), piece, repeats / num_micro_batches if setting.zero == 3 else 1
        if setting.zero == 3 and PARTS in setting.state_rings and "edp" in atoms:
            piece = whole / num_holders(atoms, setting) / num_blocks
            yield "dp", Collective(kind="all_gather", dim=None, atoms=PARTS), piece, num_blocks
    for atoms, count in _grouped(summed_weights(weights, setting), 1).items():
        if atoms:
            yield "tp", _all_reduce(atoms), count * per_gradient, 1
