"""The predicted step before it is added up: when every action of every pipeline rank runs, and what is held then."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from autoshard.cost.block import Setting
from autoshard.cost.collective import Number
from autoshard.cost.memory import rank_memory
from autoshard.cost.pipeline import PARTS, Pipeline, Price, RankCost, StageLayers, StageSeconds
from autoshard.cost.pipelined import Alike, alike_ranks, pipeline_times
from autoshard.cost.predict import priced, question_of
from autoshard.cost.provenance import calibration_of, term_seconds
from autoshard.cost.setting import Question
from autoshard.cost.step import update_costs
from autoshard.cost.update import gathering_share
from autoshard.errors import require
from autoshard.plan.plan import Plan
from autoshard.plan.trace import Pass, Phase, RankTrace, Trace
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.simulate import RankRun, simulate
from autoshard.schedule.timeline import KINDS, Coded, Floats, coded

MOST_ACTIONS = 2**22  # of all ranks: 20 CPU seconds and 2 GB to simulate and draw
_HALVES = {"F": ("F",), "I": ("I",), "W": ("W",), "B": ("I", "W")}
_IN_FLIGHT = ("activations", "logits")  # parts of memory that come and go with micro-batches
_TOWARDS = {"F": 1, "B": -1, "I": -1, "W": 0}  # from a stage to the one that takes what an action makes


def trace(plan: Plan) -> Trace:
    """Return the step that a plan's prediction adds up, with the constants and the terms that the plan carries."""
    question = question_of(plan, calibration_of(plan))
    found = step_trace(question, *priced(plan, question))
    terms = [(name, name, (time_s,) * len(found.ranks)) for name, time_s in term_seconds(plan.provenance).items()]
    return replace(found, phases=(*found.phases, *_in_turn(terms, found.end_s)))


def step_trace(question: Question, setting: Setting, pipeline: Pipeline, price: Price) -> Trace:
    """Return the step that ``step_cost`` adds up."""
    schedule = pipeline.schedule
    each = schedule.num_stages * schedule.num_micro_batches * (3 if schedule.splits_backward else 2)
    count = sum(map(len, schedule.actions)) if schedule.actions else each
    message = f"its pipeline has {count} actions, more than the {MOST_ACTIONS} that are traced one by one"
    require((count <= MOST_ACTIONS, "", message))
    run = simulate(schedule, pipeline_times(pipeline, StageSeconds.of_all(pipeline.stages, price)))
    alike = alike_ranks(pipeline, price)
    owner = {rank: group.cost for group in alike for rank in group.ranks}
    changes = _changes(schedule, owner)
    memory = [rank_memory(question, setting, pipeline, rank, owner[rank]) for rank in range(schedule.num_ranks)]
    return Trace(
        passes=_passes(pipeline, price),
        ranks=tuple(
            _rank_trace(coded(schedule.steps_of(number)), rank, changes, parts)
            for number, (rank, parts) in enumerate(zip(run.ranks, memory, strict=True))
        ),
        phases=_in_turn(_updates(question, setting, pipeline, alike), run.makespan_s),
        send_s=float(pipeline.sends.time_s),
        receive_s=float(pipeline.sends.receive_s),
        hides_sends=pipeline.sends.hidden,
    )


def _passes(pipeline: Pipeline, price: Price) -> Mapping[tuple[str, int], Pass]:
    """Return what each kind of action takes at each stage; stages that hold the same are priced once."""
    schedule = pipeline.schedule

    @cache
    def parts_of(stage: StageLayers, kind: str) -> Mapping[str, float]:
        blocks = [(count, price(block, drop).seconds) for block, drop, count in stage.contents()]
        halves = [(count, seconds[half]) for count, seconds in blocks for half in _HALVES[kind]]
        return {part: sum(float(count * seconds.get(part, 0.0)) for count, seconds in halves) for part in PARTS}

    def neighbour(stage: int, towards: int) -> int | None:
        """Return the rank of the next stage, if that is another rank."""
        if not 0 <= stage + towards < schedule.num_stages:
            return None
        own, other = schedule.place_of(stage)[0], schedule.place_of(stage + towards)[0]
        return other if other != own else None

    return {
        (kind, number): Pass(
            parts=parts_of(stage, kind),
            takes_from=neighbour(number, -_TOWARDS[kind]),
            sends_to=neighbour(number, _TOWARDS[kind]),
        )
        for kind in KINDS
        for number, stage in enumerate(pipeline.stages)
    }


def _changes(schedule: Schedule, owner: Mapping[int, RankCost]) -> Floats:
    """Return by kind and stage by how much an action changes what its rank keeps of micro-batches."""
    kept, waiting = np.zeros(schedule.num_stages), np.zeros(schedule.num_stages)
    for rank, cost in owner.items():
        for chunk, stage in schedule.stages_of(rank).items():
            kept[stage], waiting[stage] = cost.saved_bytes[chunk], cost.waiting_bytes[chunk]
    by_kind = {"F": kept, "B": -kept, "I": waiting - kept, "W": -waiting}
    return np.array([by_kind[kind] for kind in KINDS])


def _rank_trace(actions: Coded, run: RankRun, changes: Floats, memory: Mapping[str, Number]) -> RankTrace:
    kinds, stages, micro_batches = actions
    parts = {name: round(float(size)) for name, size in memory.items()}
    in_flight = sum(parts[name] for name in _IN_FLIGHT)
    change = changes[kinds, stages]
    idle = sum(parts.values()) - in_flight
    return RankTrace(
        kinds="".join(KINDS[kind] for kind in kinds.tolist()),
        stages=stages,
        micro_batches=micro_batches,
        start_s=run.start_s,
        end_s=run.end_s,
        held_from_s=np.where(change > 0, run.start_s, run.end_s),  # what is given back is given back at the end
        held_bytes=idle + np.rint(np.cumsum(change)).astype(np.int64),
        idle_bytes=idle,
        predicted_bytes=idle + in_flight,
        busy_s=run.busy_s,
        sending_s=run.exposed_s,
    )


def _updates(
    question: Question, setting: Setting, pipeline: Pipeline, alike: Sequence[Alike]
) -> list[tuple[str, str, tuple[float, ...]]]:
    """List the parts of the step phase in their order: part of the prediction, name, seconds by pipeline rank."""
    costs = update_costs(question, setting, pipeline, alike)
    by_rank = dict(sorted((rank, cost) for group, cost in zip(alike, costs, strict=True) for rank in group.ranks))

    def seconds(part: str, share: float = 1.0) -> tuple[float, ...]:
        return tuple(share * float(cost.seconds[part]) for cost in by_rank.values())

    dp = seconds("dp")
    slowest = next(group for group in alike if dp.index(max(dp)) in group.ranks)
    gathers = gathering_share(slowest.cost.weights, setting, question.workload.precision) if setting.zero == 1 else 0.0
    reduces = "dp: gather weights, reduce gradients" if setting.zero == 3 else "dp: reduce gradients"
    return [
        ("dp", reduces, seconds("dp", 1 - gathers)),
        ("tp", "tp: sum gradients", seconds("tp")),
        ("update", "update", seconds("update")),
        ("dp", "dp: gather weights", seconds("dp", gathers)),
        ("fixed", "fixed", (question.calibration.step_s,) * len(by_rank)),
    ]


def _in_turn(parts: Sequence[tuple[str, str, tuple[float, ...]]], start_s: float) -> tuple[Phase, ...]:
    """Lay parts one after the other, without those that take no time."""
    phases: list[Phase] = []
    for part, name, seconds in parts:
        if max(seconds) > 0.0:
            phases.append(Phase(part=part, name=name, start_s=start_s, seconds=seconds))
            start_s = phases[-1].end_s
    return tuple(phases)
