"""The step phase: reducing gradients, updating the optimizer's shards, gathering the new weights."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autoshard.cost.block import Setting
from autoshard.cost.collective import Number
from autoshard.cost.setting import Question
from autoshard.cost.sharded import PerWeight
from autoshard.graph.kinds.optimizer import UPDATES
from autoshard.layout.collective import Collective, CollectiveKind
from autoshard.plan.lowering import split_pending
from autoshard.spec.workload import DTYPE_BYTES, Precision, Workload

Weights = Mapping[tuple[str, ...], Number]  # the atoms that a gradient's sum is pending over -> weights on the rank


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCost:
    """One step phase of a rank: seconds by part, bytes sent by axis."""

    seconds: Mapping[str, Number]  # dp, tp, update
    sent_bytes: Mapping[str, Number]


def num_shards(shards: tuple[str, ...], setting: Setting) -> Number:
    """Return over how many ranks the optimizer's work is divided, given the atoms that may share it."""
    return math.prod(setting.atoms[atom] for atom in shards) if setting.zero else 1


def state_bytes(weights: Weights, setting: Setting, workload: Workload) -> Mapping[str, Number]:
    """Return a rank's weights, gradients, masters and moments in bytes; ZeRO-1 divides the last two, ZeRO-3 all."""
    precision = workload.precision
    per_master = DTYPE_BYTES[precision.masters] if precision.masters else 0
    per_state = UPDATES[workload.optimizer].num_moments * DTYPE_BYTES[precision.moments]
    parts: dict[str, Number] = {"weights": 0, "gradients": 0, "masters": 0, "optimizer": 0}
    for shards, count in _grouped(weights, 0).items():
        shard = -(-count // num_shards(shards, setting))
        resident = shard if setting.zero == 3 else count
        parts["weights"] = parts["weights"] + resident * DTYPE_BYTES[precision.weights]
        parts["gradients"] = parts["gradients"] + resident * DTYPE_BYTES[precision.gradients]
        parts["masters"] = parts["masters"] + shard * per_master
        parts["optimizer"] = parts["optimizer"] + shard * per_state
    return parts


def exchanged_bytes(tied_apart: Weights, setting: Setting, precision: Precision) -> Number:
    """Return what a rank sends of the gradients of weights that it shares with another stage: what it holds of them."""
    return sum(_resting(tied_apart, setting).values()) * DTYPE_BYTES[precision.gradients]


def _resting(weights: Weights, setting: Setting) -> Weights:
    """Return of how many weights a rank has gradients when all micro-batches are done: pieces of them under ZeRO-3."""
    if setting.zero != 3:
        return weights
    return {pending: -(-count // num_shards(split_pending(pending)[0], setting)) for pending, count in weights.items()}


def _grouped(weights: Weights, part: Literal[0, 1]) -> Weights:
    """Add up the weights whose gradients await the same atoms in one part of ``split_pending``: they travel as one."""
    counts: dict[tuple[str, ...], Number] = defaultdict(int)
    for pending, count in weights.items():
        counts[split_pending(pending)[part]] = counts[split_pending(pending)[part]] + count
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """How often a step comes by the weights of a rank: micro-batches, and the blocks that each goes through there."""

    num_micro_batches: Number
    num_blocks: Number


def update_cost(
    weights: Weights, setting: Setting, question: Question, per_weight: PerWeight, turns: Turns
) -> UpdateCost:
    """Price the step phase of a rank that holds these weights.

    ZeRO-0 sums gradients everywhere; ZeRO-1 scatters the sums and gathers new weights; ZeRO-3 does so block by block in
    every micro-batch, and gathers the weights twice (forward and backward). What also awaits tp is summed there once.
    """
    seconds: dict[str, Number] = {"dp": 0.0, "tp": 0.0, "update": 0.0}
    sent: dict[str, Number] = defaultdict(float)
    rates = question.rates
    for part, collective, size, times in _collectives(weights, setting, question.workload.precision, turns):
        ring = setting.rings[collective.atoms]
        seconds[part] = seconds[part] + times * ring.time_s(collective, size)
        sent[part] = sent[part] + times * ring.sent_bytes(collective, size)
    for shards, count in _grouped(weights, 0).items():
        share = count / num_shards(shards, setting)
        compute_s = share * per_weight.vector_flops / rates.vector_flops_per_s
        memory_s = share * per_weight.traffic_bytes / rates.memory_bytes_per_s
        seconds["update"] = seconds["update"] + np.maximum(compute_s, memory_s)
    return UpdateCost(seconds=seconds, sent_bytes=sent)


def gathering_share(weights: Weights, setting: Setting, precision: Precision) -> float:
    """Return how much of dp's seconds of a single candidate gathers weights: what waits for the update."""
    seconds: dict[CollectiveKind, float] = defaultdict(float)
    once = Turns(num_micro_batches=1, num_blocks=1)
    for part, collective, size, _ in _collectives(weights, setting, precision, once):
        if part == "dp":
            seconds[collective.kind] += float(setting.rings[collective.atoms].time_s(collective, size))
    return seconds["all_gather"] / (sum(seconds.values()) or 1.0)


def _collectives(
    weights: Weights, setting: Setting, precision: Precision, turns: Turns
) -> Iterator[tuple[str, Collective, Number, Number]]:
    """Yield what a rank sends in the step phase: part, collective, bytes, how often."""
    gradient, weight = DTYPE_BYTES[precision.gradients], DTYPE_BYTES[precision.weights]
    traffic = [
        ("dp", atoms, _traffic(setting.zero, count * gradient, count * weight, turns))
        for atoms, count in _grouped(weights, 0).items()
    ]
    traffic += [
        ("tp", atoms, _traffic(0, count * gradient, 0, turns))
        for atoms, count in _grouped(_resting(weights, setting), 1).items()
    ]
    for part, atoms, entries in traffic:
        for kind, size, times in entries if atoms else ():
            yield part, Collective(kind=kind, dim=None, atoms=atoms), size, times


def _traffic(
    zero: int, gradient_bytes: Number, weight_bytes: Number, turns: Turns
) -> Sequence[tuple[CollectiveKind, Number, Number]]:
    """List what data parallelism sends in a step: kind, bytes, how often."""
    if zero == 0:
        return [("all_reduce", gradient_bytes, 1)]
    if zero == 1:
        return [("reduce_scatter", gradient_bytes, 1), ("all_gather", weight_bytes, 1)]
    blocks, times = turns.num_blocks, turns.num_micro_batches * turns.num_blocks
    return [("reduce_scatter", gradient_bytes / blocks, times), ("all_gather", weight_bytes / blocks, 2 * times)]
