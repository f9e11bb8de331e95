"""One optimizer step: blocks to stages, stages to the schedule, then the step phase; time and memory with named parts.

Everything works on numbers and on columns of candidates that share their stages and the number of micro-batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.cost.block import Setting, exposed_s
from autoshard.cost.collective import Number
from autoshard.cost.memory import rank_memory
from autoshard.cost.pipeline import Pipeline, Price
from autoshard.cost.pipelined import Alike, alike_ranks, pipeline_seconds
from autoshard.cost.setting import Question
from autoshard.cost.sharded import per_weight
from autoshard.cost.update import Turns, UpdateCost, Weights, exchanged_bytes, update_cost
from autoshard.spec.kernels import load_kernels


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


def step_cost(question: Question, setting: Setting, pipeline: Pipeline, price: Price) -> StepCost:
    """Price a step."""
    alike = alike_ranks(pipeline, price)
    update = _slowest_update(update_costs(question, setting, pipeline, alike))
    seconds = _seconds(question, pipeline, alike, price, update)
    owner = {rank: group.cost for group in alike for rank in group.ranks}
    ranks = sorted(owner)
    return StepCost(
        seconds=seconds,
        memory=tuple(rank_memory(question, setting, pipeline, rank, owner[rank]) for rank in ranks),
        sent_bytes=_sent(question, setting, pipeline, alike, update),
        weights=tuple(sum(owner[rank].weights.values()) for rank in ranks),
    )


def step_s(question: Question, setting: Setting, pipeline: Pipeline, price: Price) -> Number:
    """Return only what a step takes."""
    alike = alike_ranks(pipeline, price)
    update = _slowest_update(update_costs(question, setting, pipeline, alike))
    return sum(_seconds(question, pipeline, alike, price, update).values())


def _seconds(
    question: Question, pipeline: Pipeline, alike: Sequence[Alike], price: Price, update: UpdateCost
) -> Mapping[str, Number]:
    seconds = {**pipeline_seconds(pipeline, alike, price), "fixed": question.calibration.step_s}
    for part, value in update.seconds.items():
        seconds[part] = seconds.get(part, 0.0) + value
    return seconds


def update_costs(question: Question, setting: Setting, pipeline: Pipeline, alike: Sequence[Alike]) -> list[UpdateCost]:
    """Price the step phase of each group of ranks."""
    count = pipeline.schedule.num_micro_batches
    found: list[UpdateCost] = []
    for cost in (group.cost for group in alike):
        turns = Turns(num_micro_batches=count, num_blocks=cost.num_blocks)
        found.append(rank_update(question, setting, cost.weights, cost.time_s, turns))
    return found


def _slowest_update(costs: Sequence[UpdateCost]) -> UpdateCost:
    """Take the longest of each part over all ranks."""
    seconds = {part: np.max([cost.seconds[part] for cost in costs], axis=0) for part in costs[0].seconds}
    axes = {axis for cost in costs for axis in cost.sent_bytes}
    sent = {axis: np.max([cost.sent_bytes.get(axis, 0.0) for cost in costs], axis=0) for axis in axes}
    return UpdateCost(seconds=seconds, sent_bytes=sent)


def rank_update(question: Question, setting: Setting, weights: Weights, pass_s: Number, turns: Turns) -> UpdateCost:
    """Price the step phase of a rank that holds these weights and is busy so long with each micro-batch.

    A part of data parallelism's traffic may hide behind passes.
    """
    found = update_cost(weights, setting, question, per_weight(question.step), turns)
    share = load_kernels(question.kernels).hides.get("unit" if setting.zero == 3 else "dp", 0.0)
    passes = (
        turns.num_micro_batches if setting.zero == 3 else 1
    )  # sums are whole in the last backward, weights awaited once
    hidden = exposed_s(found.seconds["dp"], passes * pass_s, share)
    return replace(found, seconds={**found.seconds, "dp": hidden})


def _sent(
    question: Question, setting: Setting, pipeline: Pipeline, alike: Sequence[Alike], update: UpdateCost
) -> Mapping[str, Number]:
    """Return the bytes that the busiest rank sends along each axis."""
    count = pipeline.schedule.num_micro_batches
    axes = sorted({axis for group in alike for axis in group.cost.sent_bytes})
    sent: dict[str, Number] = {
        axis: count * np.max([group.cost.sent_bytes.get(axis, 0.0) for group in alike], axis=0) for axis in axes
    }
    for axis, size in update.sent_bytes.items():
        sent[axis] = sent.get(axis, 0.0) + size
    if pipeline.schedule.num_ranks > 1:
        precision = question.workload.precision
        hidden = [count * group.num_sends * pipeline.boundary_bytes for group in alike]
        tied = [exchanged_bytes(group.cost.tied_apart, setting, precision) for group in alike]
        sent["pp"] = np.max([one + other for one, other in zip(hidden, tied, strict=True)], axis=0)
    return sent
