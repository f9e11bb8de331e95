"""One optimizer step: blocks to stages, stages to the schedule, then the step phase; time and memory with named parts.

Everything works on numbers and on columns of candidates that share their stages and the number of micro-batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.cost.block import Setting
from autoshard.cost.pipeline import Pipeline, Price, RankCost
from autoshard.cost.pipelined import Alike, alike_ranks, pipeline_seconds
from autoshard.cost.rings import Number
from autoshard.cost.setting import Question
from autoshard.cost.sharded import per_weight
from autoshard.cost.update import UpdateCost, state_bytes, update_cost
from autoshard.spec.kernels import load_kernels
from autoshard.spec.workload import DTYPE_BYTES, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """One step: seconds by part, memory by pipeline rank and part, bytes sent by axis, weights by pipeline rank."""

    seconds: Mapping[str, Number]
    memory: tuple[Mapping[str, Number], ...]
    sent_bytes: Mapping[str, Number]
    weights: tuple[Number, ...]

    @property
    def time_s(self) -> Number:
        """The whole step."""
        return sum(self.seconds.values())

    @property
    def peak_bytes(self) -> Number:
        """Memory of the fullest pipeline rank."""
        return np.max([sum(parts.values()) for parts in self.memory], axis=0)


def step_cost(
    question: Question, setting: Setting, pipeline: Pipeline, price: Price, *, folded: bool = False
) -> StepCost:
    """Price a step; ``folded`` states memory once per group of equal ranks instead of for every rank."""
    alike = alike_ranks(pipeline, price)
    update = _slowest_update(question, setting, pipeline, alike)
    seconds = pipeline_seconds(pipeline, alike, price)
    for part, value in update.seconds.items():
        seconds[part] = seconds.get(part, 0.0) + value
    owner = {rank: group.cost for group in alike for rank in group.ranks}
    shown = [_fullest(pipeline, group) for group in alike] if folded else sorted(owner)
    return StepCost(
        seconds=seconds,
        memory=tuple(_memory(question, setting, pipeline, rank, owner[rank]) for rank in shown),
        sent_bytes=_sent(pipeline, alike, update),
        weights=tuple(sum(owner[rank].weights.values()) for rank in shown),
    )


def _fullest(pipeline: Pipeline, group: Alike) -> int:
    if len(group.ranks) == 1:
        return group.ranks[0]
    schedule = pipeline.schedule
    return max(group.ranks, key=lambda rank: (schedule.in_flight(rank), schedule.deferred(rank)))


def _slowest_update(question: Question, setting: Setting, pipeline: Pipeline, alike: Sequence[Alike]) -> UpdateCost:
    weight = per_weight(question.step)
    count = pipeline.schedule.num_micro_batches
    costs = [update_cost(group.cost.weights, setting, question, weight, count) for group in alike]
    seconds = {part: np.max([cost.seconds[part] for cost in costs], axis=0) for part in costs[0].seconds}
    axes = {axis for cost in costs for axis in cost.sent_bytes}
    sent = {axis: np.max([cost.sent_bytes.get(axis, 0.0) for cost in costs], axis=0) for axis in axes}
    return UpdateCost(seconds=seconds, sent_bytes=sent)


def _memory(
    question: Question, setting: Setting, pipeline: Pipeline, rank: int, cost: RankCost
) -> Mapping[str, Number]:
    """Return the parts of a pipeline rank's peak: states, kept activations in flight, the largest kernel, buffers."""
    precision = question.workload.precision
    return {
        **state_bytes(cost.weights, setting, precision),
        "activations": _kept_bytes(pipeline, rank, cost),
        "working": cost.working_bytes,
        "buffers": _boundary_buffers(pipeline) + _zero_buffers(setting.zero, pipeline, precision, cost),
        "runtime": load_kernels(question.kernels).runtime_bytes,
    }


def _kept_bytes(pipeline: Pipeline, rank: int, cost: RankCost) -> Number:
    """Return what a rank keeps of its micro-batches until their backward is over, W and what it reads with it."""
    schedule = pipeline.schedule
    return schedule.in_flight(rank) * cost.saved_bytes + schedule.deferred(rank) * cost.deferred_bytes


def _boundary_buffers(pipeline: Pipeline) -> Number:
    """Return what stands ready to be received from the stage before and the stage after."""
    return 2 * pipeline.boundary_bytes if pipeline.schedule.num_ranks > 1 else 0


def _zero_buffers(zero: int, pipeline: Pipeline, precision: Precision, cost: RankCost) -> Number:
    """Return the buckets of data parallelism; ZeRO-3 holds whole blocks: one at work, one on its way, a gradient."""
    if zero == 3:
        weight, gradient = DTYPE_BYTES[precision.weights], DTYPE_BYTES[precision.gradients]
        return pipeline.bucket_bytes + cost.largest_block * (2 * weight + gradient)
    return pipeline.bucket_bytes if zero else 0


def _sent(pipeline: Pipeline, alike: Sequence[Alike], update: UpdateCost) -> Mapping[str, Number]:
    """Return the bytes that the busiest rank sends along each axis."""
    count = pipeline.schedule.num_micro_batches
    axes = sorted({axis for group in alike for axis in group.cost.sent_bytes})
    sent: dict[str, Number] = {
        axis: count * np.max([group.cost.sent_bytes.get(axis, 0.0) for group in alike], axis=0) for axis in axes
    }
    for axis, size in update.sent_bytes.items():
        sent[axis] = sent.get(axis, 0.0) + size
    if pipeline.schedule.num_ranks > 1:
        sent["pp"] = 2 * count * pipeline.schedule.num_chunks * pipeline.boundary_bytes
    return sent
