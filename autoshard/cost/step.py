"""One optimizer step: blocks to stages, stages to the schedule, then the step phase; time and memory with named parts.

Everything works on numbers and on columns of candidates that share their stages and the number of micro-batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.cost.block import Setting
from autoshard.cost.memory import rank_memory
from autoshard.cost.pipeline import PARTS, Pipeline, Price, RankCost, StageLayers, rank_cost
from autoshard.cost.rings import Number
from autoshard.cost.setting import Question
from autoshard.cost.sharded import per_weight
from autoshard.cost.update import UpdateCost, update_cost


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alike:
    """Pipeline ranks that hold the same blocks."""

    cost: RankCost
    ranks: tuple[int, ...]


def step_cost(
    question: Question, setting: Setting, pipeline: Pipeline, price: Price, *, folded: bool = False
) -> StepCost:
    """Price a step; ``folded`` states memory once per group of equal ranks instead of for every rank."""
    alike = _alike(pipeline, price)
    update = _slowest_update(question, setting, pipeline, alike)
    seconds = _pipeline_seconds(pipeline, alike)
    for part, value in update.seconds.items():
        seconds[part] = seconds.get(part, 0.0) + value
    owner = {rank: group.cost for group in alike for rank in group.ranks}
    shown = [rank for group in alike for rank in _fullest(pipeline, group)] if folded else sorted(owner)
    return StepCost(
        seconds=seconds,
        memory=tuple(rank_memory(question, setting, pipeline, rank, owner[rank]) for rank in shown),
        sent_bytes=_sent(pipeline, alike, update),
        weights=tuple(sum(owner[rank].weights.values()) for rank in shown),
    )


def _alike(pipeline: Pipeline, price: Price) -> list[_Alike]:
    schedule = pipeline.schedule
    holding: dict[tuple[StageLayers, ...], list[int]] = {}
    for rank in range(schedule.num_ranks):
        stages = tuple(pipeline.stages[stage] for _, stage in sorted(schedule.stages_of(rank).items()))
        holding.setdefault(stages, []).append(rank)
    splits = schedule.splits_backward
    return [
        _Alike(cost=rank_cost(stages, price, splits=splits), ranks=tuple(ranks)) for stages, ranks in holding.items()
    ]


def _fullest(pipeline: Pipeline, group: _Alike) -> Sequence[int]:
    """Return a rank of alike ones that holds as much as any; all of them where that depends on sizes of chunks."""
    return (max(group.ranks, key=pipeline.schedule.in_flight),) if group.cost.alike else group.ranks


def _pipeline_seconds(pipeline: Pipeline, alike: Sequence[_Alike]) -> dict[str, Number]:
    """Return the parts of the pipelined phase: what the slowest rank does, and how long it waits.

    The slowest rank is never idle but at the ends, where each other rank's work on one micro-batch passes by once (for
    equal stages: (pp - 1) / m of the work; with chunks in 1/vp of it). Sends are not hidden behind compute.
    """
    schedule = pipeline.schedule
    sends = 2 * schedule.num_chunks * pipeline.send_s if schedule.num_ranks > 1 else 0.0
    times = [group.cost.time_s + sends for group in alike]
    slowest = np.max(times, axis=0)
    seconds: dict[str, Number] = {}
    for part in PARTS:
        ties = np.array([time_s == slowest for time_s in times])
        spent: Number = np.array([group.cost.seconds[part] + 0.0 * slowest for group in alike])
        seconds[part] = schedule.num_micro_batches * np.take_along_axis(spent, ties.argmax(axis=0)[None], 0)[0]
    passing = sum(len(group.ranks) * time_s for group, time_s in zip(alike, times, strict=True))
    seconds["pp"] = schedule.num_micro_batches * sends + 0.0 * slowest
    seconds["bubble"] = (passing - slowest) / schedule.num_chunks
    return seconds


def _slowest_update(question: Question, setting: Setting, pipeline: Pipeline, alike: Sequence[_Alike]) -> UpdateCost:
    weight = per_weight(question.step)
    count = pipeline.schedule.num_micro_batches
    costs = [update_cost(group.cost.weights, setting, question, weight, count) for group in alike]
    seconds = {part: np.max([cost.seconds[part] for cost in costs], axis=0) for part in costs[0].seconds}
    axes = {axis for cost in costs for axis in cost.sent_bytes}
    sent = {axis: np.max([cost.sent_bytes.get(axis, 0.0) for cost in costs], axis=0) for axis in axes}
    return UpdateCost(seconds=seconds, sent_bytes=sent)


def _sent(pipeline: Pipeline, alike: Sequence[_Alike], update: UpdateCost) -> Mapping[str, Number]:
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
