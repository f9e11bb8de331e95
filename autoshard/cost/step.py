"""One optimizer step: the pipelined part, then the step phase; for a plan with named parts as well."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoshard.cost.collective import Number
from autoshard.cost.setting import BlockCost, Question, Setting
from autoshard.cost.stages import (
    BlockTotals,
    PerCandidate,
    PipelineBlocks,
    Sends,
    StageOptions,
    StagePrices,
    price_stages,
)
from autoshard.cost.update import UpdateCost, num_holders, num_shards, summed_weights, update_cost
from autoshard.graph.layer_order import layer_order
from autoshard.plan.lowering import split_pending
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from autoshard.schedule.counts import counts_of, most_kept
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.simulate import delays_of, makespan_s
from autoshard.schedule.waves import KINDS, Delays, Floats
from autoshard.spec.workload import DTYPE_BYTES

Price = Callable[[str, Recompute], BlockCost]  # block kind and recompute -> cost
PARTS = ("compute", "waiting", "tp", "cp", "ep", "host")
_PLAIN = Recompute()  # embedding and head compute nothing again


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSeconds(PerCandidate):
    """What a step of every candidate takes."""

    makespan_s: Floats  # of the micro-batches
    update: UpdateCost  # by rank
    fixed_s: Floats

    @property
    def update_s(self) -> Mapping[str, Floats]:
        """The longest of each part of the step phase over all ranks."""
        return {part: np.max(seconds, axis=0) for part, seconds in self.update.seconds.items()}

    @property
    def total_s(self) -> Floats:
        """The whole step."""
        return self.makespan_s + sum(self.update_s.values()) + self.fixed_s


def step_seconds(blocks: PipelineBlocks, prices: StagePrices) -> StepSeconds:
    """Time a step, given the prices of the option that each rank of every candidate has."""
    busy = np.broadcast_to(prices.pass_s, (blocks.schedule.num_ranks, blocks.num_candidates))
    count = blocks.schedule.num_micro_batches
    update = update_cost(prices.weights, blocks.setting, blocks.question, busy, count, prices.num_blocks)
    seconds = {part: np.broadcast_to(values, busy.shape) for part, values in update.seconds.items()}
    return StepSeconds(
        makespan_s=pipelined_s(blocks, work_by_stage(blocks.schedule, prices)),
        update=replace(update, seconds=seconds),
        fixed_s=blocks.fixed_s,
    )


def least_seconds(blocks: PipelineBlocks, prices: StagePrices, busy_s: Floats) -> Floats:
    """Return what a step takes at least whose passes take no less than these, and no longer than ``busy_s``."""
    count = blocks.schedule.num_micro_batches
    update = update_cost(prices.weights, blocks.setting, blocks.question, busy_s, count, prices.num_blocks)
    makespan = pipelined_s(blocks, work_by_stage(blocks.schedule, prices))
    return makespan + sum(np.max(part + 0.0 * busy_s, axis=0) for part in update.seconds.values()) + blocks.fixed_s


def work_by_stage(schedule: Schedule, prices: StagePrices) -> Floats:
    """Return what each kind of action takes at each stage: [kind, stage, candidate]."""
    counts = counts_of(schedule)
    forward, inputs, weight = (
        column[counts.ranks, counts.chunks] for column in (prices.forward_s, prices.input_s, prices.weight_s)
    )
    by_kind = {"F": forward, "I": inputs, "W": weight, "B": inputs + weight}
    return np.array([by_kind[kind] for kind in KINDS])


def pipelined_s(blocks: PipelineBlocks, work_s: Floats) -> Floats:
    """Return how long the micro-batches take, given what each kind of action takes at each stage."""
    schedule = blocks.schedule
    if schedule.num_ranks == 1 and schedule.actions is None:
        return schedule.num_micro_batches * (work_s[KINDS.index("F")] + work_s[KINDS.index("B")]).sum(axis=0)
    return makespan_s(schedule, pipeline_delays(schedule, blocks.sends, work_s))


def pipeline_delays(schedule: Schedule, sends: Sends, work_s: Floats) -> Delays:
    """Return the seconds along the way of a micro-batch, given what each kind of action takes at each stage."""
    hops = (schedule.num_stages - 1, work_s.shape[2])
    send, receive = (np.broadcast_to(time, hops) for time in (sends.time_s, sends.receive_s))
    return delays_of(schedule, work_s, send, receive, overlap=sends.hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """What a stage of a plan holds: the kinds of its layers and what they compute again, the embedding or the head.

    ``full:K`` is full for the first K layers and none for the others.
    """

    first: int = field(compare=False)  # the place of its first layer in the model; equal stages share their price
    kinds: tuple[str, ...]
    recompute: Recompute
    is_first: bool
    is_last: bool

    @classmethod
    def of(cls, plan: Plan) -> "tuple[StageLayers, ...]":
        """Return those of a plan."""
        order, last = plan.model.layer_order, len(plan.stages) - 1
        return tuple(
            cls(
                first=stage.first_layer,
                kinds=order[stage.first_layer : stage.first_layer + stage.num_layers],
                recompute=stage.recompute,
                is_first=number == 0,
                is_last=number == last,
            )
            for number, stage in enumerate(plan.stages)
        )

    @property
    def drops(self) -> Counter[Recompute]:
        """How many layers compute what again."""
        return Counter(self.recompute.of_layer(number) for number in range(len(self.kinds)))

    def contents(self) -> list[tuple[str, Recompute, int]]:
        """List its blocks: kind, recompute, how many."""
        embed, head = [("embed", _PLAIN, 1)] * self.is_first, [("head", _PLAIN, 1)] * self.is_last
        layers = Counter((kind, self.recompute.of_layer(number)) for number, kind in enumerate(self.kinds))
        return [*embed, *((kind, drop, count) for (kind, drop), count in layers.items()), *head]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPipeline:
    """How the stages of a plan follow each other: schedule, what each holds, the hidden state between them, buckets."""

    schedule: Schedule
    stages: tuple[StageLayers, ...]
    boundary_bytes: Number
    sends: Sends
    bucket_bytes: Number  # of the data-parallel buckets that stand ready


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanStep:
    """A plan's step: its blocks, what each rank takes and holds, and its seconds; columns of one candidate."""

    blocks: PipelineBlocks
    prices: StagePrices
    seconds: StepSeconds

    @classmethod
    def of(cls, question: Question, setting: Setting, pipeline: PlanPipeline, price: Price) -> "PlanStep":
        """Price a plan's stages, as the only option of each rank."""
        kinds = tuple(dict.fromkeys((_PLAIN, *(drop for stage in pipeline.stages for drop in stage.drops))))
        rows: list[tuple[int, ...]] = []  # of each stage: recompute, layers under it, layers without, the first layer
        for stage in pipeline.stages:
            drop = next((drop for drop in stage.drops if drop != _PLAIN), None)
            again = stage.drops[drop] if drop else 0
            rows.append((kinds.index(drop) if drop else 0, again, len(stage.kinds) - again, stage.first))
        table = np.array(rows, dtype=np.int64)[counts_of(pipeline.schedule).stages[:, None]]
        kind, recomputed, plain, first = np.moveaxis(table, -1, 0)
        options = StageOptions(kind=kind, recomputed=recomputed, plain=plain, plain_kind=0, first=first)
        blocks = priced_blocks(question, setting, pipeline, price, kinds)
        only = np.zeros((pipeline.schedule.num_ranks, 1), dtype=np.int64)
        prices = price_stages(blocks, options).of_options(only, only[0])
        return cls(blocks=blocks, prices=prices, seconds=step_seconds(blocks, prices))


def priced_blocks(
    question: Question, setting: Setting, pipeline: PlanPipeline, price: Price, kinds: Sequence[Recompute]
) -> PipelineBlocks:
    """Return the blocks of a plan, its layers under some kinds of recompute, as columns of one candidate."""
    layers = question.model.layer_counts
    return PipelineBlocks(
        question=question,
        setting=setting,
        schedule=pipeline.schedule,
        sends=replace(pipeline.sends, time_s=np.atleast_1d(pipeline.sends.time_s)),
        boundary_bytes=np.atleast_1d(pipeline.boundary_bytes),
        bucket_bytes=np.atleast_1d(pipeline.bucket_bytes),
        fixed_s=np.array([question.calibration.step_s]),
        embed=BlockTotals.of([price("embed", _PLAIN)], 1),
        layers=tuple(BlockTotals.of([price(layer, drop) for drop in kinds], 1) for layer in layers),
        head=BlockTotals.of([price("head", _PLAIN)], 1),
        order=layer_order(question.model.layer_order),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """One step: seconds by part; memory and bytes sent by pipeline rank, each by part or axis; their weights."""

    seconds: Mapping[str, float]
    memory: tuple[Mapping[str, float], ...]
    sent: tuple[Mapping[str, float], ...]
    weights: tuple[float, ...]
    host_bytes: tuple[float, ...]  # by pipeline rank

    @property
    def sent_bytes(self) -> Mapping[str, float]:
        """Along each axis what the rank sends that sends most there."""
        return {
            axis: max(rank_sent.get(axis, 0.0) for rank_sent in self.sent)
            for rank_sent in self.sent
            for axis in rank_sent
        }

    @property
    def time_s(self) -> float:
        """The whole step."""
        return sum(self.seconds.values())

    @property
    def peak_bytes(self) -> float:
        """Memory of the fullest pipeline rank."""
        return max(sum(parts.values()) for parts in self.memory)


def step_cost(question: Question, setting: Setting, pipeline: PlanPipeline, price: Price) -> StepCost:
    """Price a step with named parts."""
    step = PlanStep.of(question, setting, pipeline, price)
    blocks: list[list[tuple[int, BlockCost]]] = [[] for _ in range(pipeline.schedule.num_ranks)]
    for number, stage in enumerate(pipeline.stages):
        rank, _ = pipeline.schedule.place_of(number)
        blocks[rank] += [(count, price(kind, drop)) for kind, drop, count in stage.contents()]
    weights = sum(step.prices.weights.values()) + np.zeros((pipeline.schedule.num_ranks, 1))
    return StepCost(
        seconds=_seconds(step, blocks),
        memory=plan_memory(step),
        sent=_sent(step, blocks),
        weights=tuple(weights[:, 0].tolist()),
        host_bytes=tuple(np.broadcast_to(step.prices.host_bytes, weights.shape)[:, 0].tolist()),
    )


def _seconds(step: PlanStep, blocks: Sequence[Sequence[tuple[int, BlockCost]]]) -> dict[str, float]:
    """Return the parts of a step, given the blocks of every rank; those of the pipelined phase add up to its makespan.

    They are those of the rank that computes and sends longest (of the first such one), because that one decides how
    long a long step takes. ``pp`` is what it sends and receives while it does nothing else; ``bubble`` is the makespan
    without what it does: filling and draining the pipeline, and waiting for others and for hidden sends.
    """
    sends_s = step.blocks.hop_s[:, 0]
    rank = int((step.prices.pass_s[:, 0] + sends_s).argmax())
    count = step.blocks.schedule.num_micro_batches
    seconds = {part: count * sum(float(number * cost.part_s(part)) for number, cost in blocks[rank]) for part in PARTS}
    seconds["waiting"] += count * step.blocks.schedule.num_chunks * step.blocks.question.calibration.task_s
    seconds["pp"] = count * float(sends_s[rank])
    seconds["bubble"] = max(0.0, float(step.seconds.makespan_s[0]) - sum(seconds.values()))
    seconds["fixed"] = float(step.seconds.fixed_s[0])
    for part, value in step.seconds.update_s.items():
        seconds[part] = seconds.get(part, 0.0) + float(value[0])
    return seconds


def plan_memory(step: PlanStep) -> tuple[Mapping[str, float], ...]:
    """Return the parts of each rank's memory, with logits, which the head keeps, apart from activations."""
    prices, blocks = step.prices, step.blocks
    shape = (blocks.schedule.num_ranks, 1)
    heads = (counts_of(blocks.schedule).stages == blocks.schedule.num_stages - 1)[:, None, :, None]
    of_head = [heads * sizes[0] for sizes in (blocks.head.saved_bytes, blocks.head.waiting_bytes)]
    logits = most_kept(blocks.schedule, *of_head)[:, 0]
    parts = {**prices.memory, "logits": logits, "activations": prices.memory["activations"] - logits}
    whole = {part: np.broadcast_to(size, shape)[:, 0].tolist() for part, size in parts.items()}
    return tuple(dict(zip(whole, rank_bytes, strict=True)) for rank_bytes in zip(*whole.values(), strict=True))


def _sent(step: PlanStep, blocks: Sequence[Sequence[tuple[int, BlockCost]]]) -> tuple[Mapping[str, float], ...]:
    """Return the bytes that each pipeline rank sends along each axis, given the blocks of every rank."""
    schedule, setting, count = step.blocks.schedule, step.blocks.setting, step.blocks.schedule.num_micro_batches
    shape, update = (schedule.num_ranks, 1), step.seconds.update.sent_bytes
    step_phase = {axis: np.broadcast_to(size, shape)[:, 0] for axis, size in update.items()}
    # Gradients of tied weights go from one end to the other, unless one rank has both.
    tied = sum(float(np.max(size)) for size in summed_weights(step.blocks.head.tied_weights, setting).values())
    tied *= DTYPE_BYTES[step.blocks.question.workload.precision.gradients]
    hidden_bytes, counts = float(step.blocks.sends.share * step.blocks.boundary_bytes[0]), counts_of(schedule)
    by_rank: list[Mapping[str, float]] = []
    for rank, costs in enumerate(blocks):
        sent = {axis: float(sizes[rank]) for axis, sizes in step_phase.items()}
        for number, cost in costs:
            for axis, size in cost.sent_bytes.items():
                sent[axis] = sent.get(axis, 0.0) + count * float(number * size)
        if counts.ends[rank] == 2 and setting.zero == 3:
            sent["dp"] = sent.get("dp", 0.0) + count * _opened_again(step)
        if schedule.num_ranks > 1:
            sent["pp"] = count * float(counts.sends[rank]) * hidden_bytes + float(counts.ends[rank] == 1) * tied
        by_rank.append(sent)
    return tuple(by_rank)


def _opened_again(step: PlanStep) -> float:
    """Return what a rank sends per micro-batch under ZeRO-3 because its head opens the table of its embedding, too."""
    setting, precision, total = step.blocks.setting, step.blocks.question.workload.precision, 0.0
    for pending, size in step.blocks.head.tied_weights.items():
        atoms = split_pending(pending)[0]
        for ranks, element in (
            (num_shards(atoms, setting), DTYPE_BYTES[precision.gradients]),
            (num_holders(atoms, setting), 2 * DTYPE_BYTES[precision.weights]),
        ):
            total += float(np.max(size)) * element * (1 - 1 / float(np.max(ranks)))
    return total
