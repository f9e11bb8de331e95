"""The predicted step before it is added up: when every action of every pipeline rank runs, and what ranks hold then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from autoshard.cost.built_in import calibration_of
from autoshard.cost.predict import priced, question_of
from autoshard.cost.setting import Question, Setting
from autoshard.cost.step import PARTS, PlanPipeline, PlanStep, Price, StageLayers, plan_memory, work_by_stage
from autoshard.cost.terms import term_seconds
from autoshard.cost.update import gathering_share
from autoshard.errors import require
from autoshard.plan.plan import Plan
from autoshard.schedule.counts import counts_of
from autoshard.schedule.simulate import PipelineTimes, RankRun, simulate
from autoshard.schedule.waves import KINDS, Coded, Floats, Ints, coded

MOST_ACTIONS = 2**22  # of all ranks: 20 CPU seconds and 2 GB to simulate and draw
_HALVES = {"F": ("F",), "I": ("I",), "W": ("W",), "B": ("I", "W")}
_TOWARDS = {"F": 1, "B": -1, "I": -1, "W": 0}  # from a stage to the one that takes what an action makes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """What a pipeline rank does while the micro-batches of a step run, in seconds."""

    work_s: float  # computing, and communication inside its stages
    sending_s: float  # to other stages, while it computes nothing
    idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What an action of one kind takes at one stage, and which other ranks it takes its input from and sends to."""

    parts: Mapping[str, float] = field(hash=False)  # seconds
    takes_from: int | None
    sends_to: int | None

    @property
    def time_s(self) -> float:
        """Seconds of all parts together."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTimeline:
    """One pipeline rank. The arrays have an entry for each of its actions, in order."""

    kinds: str  # letters: F, B, I, W
    stages: Ints
    micro_batches: Ints
    start_s: Floats
    end_s: Floats
    held_from_s: Floats  # when it changes what the rank holds
    held_bytes: Ints  # what the rank holds from then on
    idle_bytes: int  # what it holds while no micro-batch is in flight
    predicted_bytes: int  # its predicted peak
    busy_s: float  # in actions
    sending_s: float  # sending and receiving, while it computes nothing

    @property
    def most_bytes(self) -> int:
        """What it holds at most.

        That is the predicted peak, but where backwards are split: the prediction adds the most that is kept and the
        most that waits from I to W, which some schedules do not reach at the same time.
        """
        return int(self.held_bytes.max(initial=self.idle_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One part of the step after the pipeline; the next begins when the slowest rank has ended this one."""

    part: str  # of the prediction's seconds
    name: str
    start_s: float
    seconds: tuple[float, ...]  # by pipeline rank

    @property
    def end_s(self) -> float:
        """When its slowest rank ends."""
        return self.start_s + max(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTimeline:
    """One step: the pipelined part, then the phases after it."""

    passes: Mapping[tuple[str, int], Pass]  # by kind and stage
    ranks: tuple[RankTimeline, ...]
    phases: tuple[Phase, ...]
    send_s: float  # of each message between ranks
    receive_s: float  # for how long it then holds the receiver
    hides_sends: bool  # otherwise the sender does nothing else meanwhile

    @property
    def makespan_s(self) -> float:
        """When the last action of the pipeline ends."""
        return max(float(rank.end_s[-1]) for rank in self.ranks)

    @property
    def end_s(self) -> float:
        """When the step ends."""
        return self.phases[-1].end_s if self.phases else self.makespan_s


def timeline_of(plan: Plan) -> StepTimeline:
    """Return the step that a plan's prediction adds up, with the constants and the terms that the plan carries."""
    question = question_of(plan, calibration_of(plan))
    timeline = step_timeline(question, *priced(plan, question))
    terms = [(name, name, (time_s,) * len(timeline.ranks)) for name, time_s in term_seconds(plan.provenance).items()]
    return replace(timeline, phases=(*timeline.phases, *_in_turn(terms, timeline.end_s)))


def rank_times(plan: Plan) -> tuple[RankTime, ...]:
    """Return for how long each pipeline rank computes, sends and waits while the micro-batches of a step run."""
    question = question_of(plan, calibration_of(plan))
    step = PlanStep.of(question, *priced(plan, question))
    count, makespan_s = plan.schedule.num_micro_batches, float(step.seconds.makespan_s[0])
    columns = np.broadcast_arrays(step.prices.pass_s, step.blocks.hop_s)
    pairs = zip(*((count * column[:, 0]).tolist() for column in columns), strict=True)
    return tuple(
        RankTime(work_s=work_s, sending_s=sending_s, idle_s=max(0.0, makespan_s - work_s - sending_s))
        for work_s, sending_s in pairs
    )


def step_timeline(question: Question, setting: Setting, pipeline: PlanPipeline, price: Price) -> StepTimeline:
    """Return the step that ``step_cost`` adds up."""
    schedule, sends = pipeline.schedule, pipeline.sends
    expected = schedule.num_stages * schedule.num_micro_batches * (3 if schedule.splits_backward else 2)
    count = sum(map(len, schedule.actions)) if schedule.actions else expected
    message = f"its pipeline has {count} actions, more than the {MOST_ACTIONS} that are traced one by one"
    require((count <= MOST_ACTIONS, "", message))
    step, counts = PlanStep.of(question, setting, pipeline, price), counts_of(schedule)
    work_s = dict(zip(KINDS, work_by_stage(schedule, step.prices)[..., 0].tolist(), strict=True))
    send_s, receive_s, hops = float(sends.time_s), float(sends.receive_s), len(pipeline.stages) - 1
    times = PipelineTimes(
        forward_s=tuple(work_s["F"]),
        input_s=tuple(work_s["I"]),
        weight_s=tuple(work_s["W"]),
        send_s=(send_s,) * hops,
        receive_s=(receive_s,) * hops,
        overlap=sends.hidden,
    )
    run = simulate(schedule, times)
    kept_bytes, waiting = (
        column[counts.ranks, counts.chunks, 0] for column in (step.prices.saved_bytes, step.prices.waiting_bytes)
    )
    # By kind and stage by how much an action changes what its rank keeps of micro-batches.
    changes = {"F": kept_bytes, "B": -kept_bytes, "I": waiting - kept_bytes, "W": -waiting}
    return StepTimeline(
        passes=_passes(pipeline, price, question.calibration.task_s),
        ranks=tuple(
            _rank_timeline(coded(schedule.steps_of(number)), rank, np.array([changes[kind] for kind in KINDS]), parts)
            for number, (rank, parts) in enumerate(zip(run.ranks, plan_memory(step), strict=True))
        ),
        phases=_in_turn(_updates(step), run.makespan_s),
        send_s=send_s,
        receive_s=receive_s,
        hides_sends=sends.hidden,
    )


def _passes(pipeline: PlanPipeline, price: Price, task_s: float) -> Mapping[tuple[str, int], Pass]:
    """Return what each kind of action takes at each stage; stages that hold the same are priced once."""
    ranks = counts_of(pipeline.schedule).ranks.tolist()

    @cache
    def parts_of(stage: StageLayers, kind: str) -> Mapping[str, float]:
        blocks = [(count, price(block, drop).seconds) for block, drop, count in stage.contents()]
        halves = [(count, seconds[half]) for count, seconds in blocks for half in _HALVES[kind]]
        parts = {part: sum(float(count * seconds.get(part, 0.0)) for count, seconds in halves) for part in PARTS}
        return {**parts, "waiting": parts["waiting"] + ("F" in _HALVES[kind] or "I" in _HALVES[kind]) * task_s / 2}

    def neighbour(stage: int, towards: int) -> int | None:
        """Return the rank of the next stage, if that is another rank."""
        neighbour_rank = ranks[stage + towards] if 0 <= stage + towards < len(ranks) else ranks[stage]
        return neighbour_rank if neighbour_rank != ranks[stage] else None

    return {
        (kind, number): Pass(
            parts=parts_of(stage, kind),
            takes_from=neighbour(number, -_TOWARDS[kind]),
            sends_to=neighbour(number, _TOWARDS[kind]),
        )
        for kind in KINDS
        for number, stage in enumerate(pipeline.stages)
    }


def _rank_timeline(actions: Coded, run: RankRun, changes: Floats, memory: Mapping[str, float]) -> RankTimeline:
    kinds, stages, micro_batches = actions
    parts = {name: round(float(size)) for name, size in memory.items()}
    in_flight = parts["activations"] + parts["logits"]  # what comes and goes with micro-batches
    change = changes[kinds, stages]
    idle = sum(parts.values()) - in_flight
    return RankTimeline(
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


def _updates(step: PlanStep) -> list[tuple[str, str, tuple[float, ...]]]:
    """List the parts of the step phase in their order: part of the prediction, name, seconds by pipeline rank."""
    setting, question = step.blocks.setting, step.blocks.question

    def seconds(part: str, share: float = 1.0) -> tuple[float, ...]:
        return tuple((share * step.seconds.update.seconds[part][:, 0]).tolist())

    dp = seconds("dp")
    weights = {pending: numbers[dp.index(max(dp)), 0] for pending, numbers in step.prices.weights.items()}
    gathers = gathering_share(weights, setting, question) if setting.zero == 1 else 0.0
    reduces = "dp: gather weights, reduce gradients" if setting.zero == 3 else "dp: reduce gradients"
    return [
        ("dp", reduces, seconds("dp", 1 - gathers)),
        ("tp", "tp: sum gradients", seconds("tp")),
        ("update", "update", seconds("update")),
        ("dp", "dp: gather weights", seconds("dp", gathers)),
        ("fixed", "fixed", (question.calibration.step_s,) * len(dp)),
    ]


def _in_turn(parts: Sequence[tuple[str, str, tuple[float, ...]]], start_s: float) -> tuple[Phase, ...]:
    """Lay parts one after the other, without those that take no time."""
    phases: list[Phase] = []
    for part, name, seconds in parts:
        if max(seconds) > 0.0:
            phases.append(Phase(part=part, name=name, start_s=start_s, seconds=seconds))
            start_s = phases[-1].end_s
    return tuple(phases)
