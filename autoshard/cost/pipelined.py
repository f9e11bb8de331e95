"""The pipelined part of a step: how long its schedule takes, and what the rank with the most to do spends that on.

One plan is simulated, action by action. Columns of candidates, and plans with more actions than anybody would wait for,
take the makespan of ``schedule/makespan``, which is the same number for each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.cost.collective import Number
from autoshard.cost.pipeline import PARTS, Pipeline, Price, RankCost, StageLayers, StageSeconds, rank_cost
from autoshard.schedule.makespan import makespan_columns
from autoshard.schedule.simulate import Hop, PipelineTimes, StageTimes, delays_of, simulate
from autoshard.schedule.timeline import KINDS

_MOST_SIMULATED = 2**11  # micro-batches times stages: 0.01 CPU seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Pipeline ranks that hold the same blocks and send as much."""

    cost: RankCost
    ranks: tuple[int, ...]
    num_sends: int  # for one micro-batch


def alike_ranks(pipeline: Pipeline, price: Price) -> list[Alike]:
    """Group the pipeline ranks, and price each group once."""
    schedule = pipeline.schedule
    holding: dict[tuple[tuple[StageLayers, ...], int], list[int]] = {}
    for rank, num_sends in enumerate(schedule.num_sends()):
        stages = tuple(pipeline.stages[stage] for _, stage in sorted(schedule.stages_of(rank).items()))
        holding.setdefault((stages, num_sends), []).append(rank)
    return [
        Alike(cost=rank_cost(stages, price, splits=schedule.splits_backward), ranks=tuple(ranks), num_sends=num_sends)
        for (stages, num_sends), ranks in holding.items()
    ]


def pipeline_seconds(pipeline: Pipeline, alike: Sequence[Alike], price: Price) -> dict[str, Number]:
    """Return the parts of the pipelined phase; together they are its makespan.

    They are those of the rank that computes and sends longest (of the first such group), because that one decides how
    long a long step takes. ``pp`` is what it sends and receives while it does nothing else; ``bubble`` is the makespan
    without what it does: filling and draining the pipeline, and waiting for others and for hidden sends.
    """
    count, num_parts = pipeline.schedule.num_micro_batches, len(PARTS)
    sends = [group.num_sends * pipeline.sends.held_s for group in alike]
    busy = [group.cost.time_s + sent for group, sent in zip(alike, sends, strict=True)]
    most = np.max(busy, axis=0)
    first = np.array([one == most for one in busy]).argmax(axis=0)
    spent = [[*(group.cost.seconds[part] for part in PARTS), sent] for group, sent in zip(alike, sends, strict=True)]
    seconds: dict[str, Number] = {}
    for number, part in zip(range(num_parts + 1), (*PARTS, "pp"), strict=True):
        column = np.array([own[number] + 0.0 * most for own in spent])
        seconds[part] = count * np.take_along_axis(column, first[None], 0)[0]
    seconds["bubble"] = np.maximum(0.0, makespan_s(pipeline, price) - count * most)
    return seconds


def makespan_s(pipeline: Pipeline, price: Price) -> Number:
    """Return how long the micro-batches take, from the first forward to the end of the last action."""
    schedule = pipeline.schedule
    times = StageSeconds.of_all(pipeline.stages, price)
    if schedule.num_ranks == 1 and schedule.actions is None:
        return schedule.num_micro_batches * sum(times[stage].whole_s for stage in pipeline.stages)
    alone = all(np.ndim(number) == 0 for number in (pipeline.sends.time_s, *(one.whole_s for one in times.values())))
    few = schedule.num_stages * schedule.num_micro_batches <= _MOST_SIMULATED
    if alone and (few or schedule.actions is not None):
        return _simulated_s(pipeline, times)
    return _columns_s(pipeline, times)[0] if alone else _columns_s(pipeline, times)


Times = dict[StageLayers, StageSeconds]


def _simulated_s(pipeline: Pipeline, times: Times) -> float:
    return simulate(pipeline.schedule, pipeline_times(pipeline, times)).makespan_s


def pipeline_times(pipeline: Pipeline, times: Times) -> PipelineTimes:
    """Return what everything in the pipeline of a single candidate takes."""
    stages = tuple(
        StageTimes(forward_s=float(own.forward_s), input_s=float(own.input_s), weight_s=float(own.weight_s))
        for own in (times[stage] for stage in pipeline.stages)
    )
    sends = pipeline.sends
    hops = (Hop(send_s=float(sends.time_s), receive_s=float(sends.receive_s)),) * (len(stages) - 1)
    return PipelineTimes(stages=stages, hops=hops, overlap=sends.hidden)


def _columns_s(pipeline: Pipeline, times: Times) -> Number:
    sends = pipeline.sends
    shape = np.broadcast_shapes((1,), np.shape(sends.time_s), *(np.shape(one.whole_s) for one in times.values()))
    by_stage = [np.array([np.broadcast_to(one.of_kind(kind), shape) for one in times.values()]) for kind in KINDS]
    position = {stage: number for number, stage in enumerate(times)}
    work_s = np.array(by_stage)[:, [position[stage] for stage in pipeline.stages]]
    hops = (len(pipeline.stages) - 1, *shape)
    send_s, receive_s = np.broadcast_to(sends.time_s, hops), np.broadcast_to(sends.receive_s, hops)
    delays = delays_of(pipeline.schedule, work_s, send_s, receive_s, overlap=sends.hidden)
    return makespan_columns(pipeline.schedule, delays)
