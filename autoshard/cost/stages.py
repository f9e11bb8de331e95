"""What the ranks of a pipeline take and hold: one pricer for a single plan and for many candidates.

Candidates share a schedule, and each pipeline rank has one or more options: how many layers each of its chunks has and
what they compute again. Arrays have the axes rank, option, chunk, candidate, in this order and without those that they
do not need; the candidate's is always the last one. A single plan is one option per rank and one candidate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import groupby
from typing import Any, Literal, cast

import numpy as np

from autoshard.cost.collective import Number
from autoshard.cost.setting import BlockCost, PerCandidate, Question, Rows, Setting
from autoshard.cost.update import Weights, stored_bytes
from autoshard.graph.layer_order import LayerOrder, layer_order
from autoshard.schedule.counts import boundary_states, counts_of, most_kept
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.waves import Floats, Ints
from autoshard.spec.kernels import Kernels, load_kernels
from autoshard.spec.model import LAYER
from autoshard.spec.workload import DTYPE_BYTES

Part = Literal["embed", "recomputed", "plain", "head"]  # of the blocks of a chunk
PASSES = ("forward_s", "input_s", "weight_s")  # fields of blocks and stages
# Layers whose kept tensors are on the device although they rest in host memory: one at work, one on its way to the
# host, and one that is fetched for the next backward (autoshard/engine/torch/offloading.py).
ON_THEIR_WAY = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sends(PerCandidate):
    """What handing the hidden state on costs, once: on its way, the rank that sends, and the rank that receives."""

    time_s: Number
    hidden: bool  # both compute meanwhile
    receives_apart: bool  # otherwise a rank receives while it sends the other way
    share: Number = 1.0  # of the hidden state that one rank sends

    @classmethod
    def of(cls, time_s: Number, builder: str, kernels: Kernels) -> "Sends":
        """Take from a platform's table how it sends in a schedule."""
        return cls(time_s=time_s, hidden=kernels.hides_sends(builder), receives_apart=kernels.receives_apart)

    @property
    def receive_s(self) -> Number:
        """Seconds for which an arrived message blocks its receiver, as an all-gather of two ranks does."""
        return self.time_s if self.receives_apart and not self.hidden else 0.0 * self.time_s

    @property
    def blocked_s(self) -> Number:
        """Seconds for which a send, and the receive that matches it, keep a rank from computing."""
        return 0.0 * self.time_s if self.hidden else self.time_s + self.receive_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockTotals(PerCandidate):
    """What a block takes and holds, its parts added up: [recompute kind, candidate]."""

    forward_s: Floats
    input_s: Floats
    weight_s: Floats
    saved_bytes: Floats
    moment_bytes: Floats  # beside all that is kept, while it is at work: with what is computed again
    waiting_bytes: Floats  # instead of what is saved, from I to W
    placeholder_bytes: Floats
    host_bytes: Floats  # instead of what is saved
    started_s: Floats  # of hosts
    starts: Floats  # of kernels and messages
    scattered_bytes: Floats
    weights: Weights  # whatever is computed again
    tied_weights: Weights  # likewise those that are another block's as well

    @classmethod
    def of(cls, costs: Sequence[BlockCost], count: int) -> "BlockTotals":
        """Add up the parts of a block under several kinds of recompute, for so many candidates."""
        first = costs[0].memory
        weights, tied = (
            {pending: np.broadcast_to(number, count) for pending, number in by_pending.items()}
            for by_pending in (first.weights, first.tied_weights)
        )
        columns: dict[str, list[Number]] = {
            "forward_s": [sum(cost.seconds["F"].values()) for cost in costs],
            "input_s": [sum(cost.seconds["I"].values()) for cost in costs],
            "weight_s": [sum(cost.seconds["W"].values()) for cost in costs],
            "saved_bytes": [cost.memory.saved_bytes for cost in costs],
            "moment_bytes": [cost.memory.working_bytes + cost.memory.remade_bytes for cost in costs],
            "waiting_bytes": [cost.memory.waiting_bytes for cost in costs],
            "placeholder_bytes": [cost.memory.placeholder_bytes for cost in costs],
            "host_bytes": [cost.memory.host_bytes for cost in costs],
            **{name: [getattr(cost, name) for cost in costs] for name in ("started_s", "starts", "scattered_bytes")},
        }
        rows: dict[str, Any] = {
            name: np.array([np.broadcast_to(number, count) for number in column], dtype=np.float64)
            for name, column in columns.items()
        }
        return cls(**rows, weights=weights, tied_weights=tied)

    @classmethod
    def least(cls, blocks: "Sequence[BlockTotals]") -> "BlockTotals":
        """Return the least of each of the totals of some blocks."""
        if len(blocks) == 1:
            return blocks[0]
        columns = {
            column.name: np.min([getattr(block, column.name) for block in blocks], axis=0)
            for column in fields(cls)
            if column.name not in ("weights", "tied_weights")
        }
        shared = [pending for pending in blocks[0].weights if all(pending in block.weights for block in blocks)]
        weights = {pending: np.min([block.weights[pending] for block in blocks], axis=0) for pending in shared}
        return cls(**columns, weights=weights, tied_weights={})

    @property
    def pass_s(self) -> Floats:
        """Forward and backward."""
        return self.forward_s + self.input_s + self.weight_s

    @property
    def num_weights(self) -> Floats:
        """Weights on the rank, those that are another block's as well included."""
        return sum(self.weights.values()) + sum(self.tied_weights.values()) + np.zeros(self.forward_s.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineBlocks(PerCandidate):
    """The blocks of candidates that share a schedule and ZeRO, and what lies between their stages."""

    question: Question
    setting: Setting
    schedule: Schedule
    sends: Sends
    boundary_bytes: Floats
    bucket_bytes: Floats
    fixed_s: Floats  # of every step, whatever its stages hold
    embed: BlockTotals
    layers: tuple[BlockTotals, ...]  # of each kind of layer; a row for every kind of recompute
    head: BlockTotals
    order: LayerOrder

    @property
    def num_candidates(self) -> int:
        """How many there are."""
        return self.embed.forward_s.shape[1]

    @property
    def layer(self) -> BlockTotals:
        """What any layer takes and holds at least."""
        return BlockTotals.least(self.layers)

    @property
    def with_least_layers(self) -> "PipelineBlocks":
        """The blocks of a model whose layers all take and hold as little as any of these layers."""
        uniform = layer_order((LAYER,) * self.order.num_layers)
        return self if len(self.layers) == 1 else replace(self, layers=(self.layer,), order=uniform)

    @property
    def hop_s(self) -> Floats:
        """For how long the sends of one micro-batch block each rank: [rank, candidate]."""
        return counts_of(self.schedule).sends[:, None] * self.sends.blocked_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageOptions:
    """Options of every pipeline rank: the layers of each chunk, the first of which compute something again."""

    kind: Ints  # [rank, option, chunk], broadcast: the row of what is computed again
    recomputed: Ints  # likewise layers that compute this again
    plain: Ints  # likewise layers behind them, that keep everything
    plain_kind: int  # the row of no recompute
    first: Ints = field(default_factory=lambda: np.zeros((1, 1, 1), dtype=np.int64))  # likewise the place of the first

    @property
    def num_layers(self) -> Ints:
        """Layers of a rank: [rank, option]."""
        return (self.recomputed + self.plain).sum(axis=2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagePrices(PerCandidate):
    """Seconds of one micro-batch by rank, option and chunk; memory and weights by rank and option."""

    forward_s: Floats
    input_s: Floats
    weight_s: Floats
    saved_bytes: Floats  # of one micro-batch, by chunk
    waiting_bytes: Floats
    memory: Mapping[str, Floats]  # by part, where the rank is fullest
    host_bytes: Floats  # by rank and option, in host memory
    weights: Weights
    num_blocks: Ints  # [rank, option]

    @property
    def pass_s(self) -> Floats:
        """Forward and backward of all chunks of a rank."""
        return (self.forward_s + self.input_s + self.weight_s).sum(axis=-2)

    @property
    def peak_bytes(self) -> Floats:
        """All parts of memory."""
        return sum(self.memory.values()) + np.zeros(1)

    def of_options(self, option: Ints, candidates: Rows) -> "StagePrices":
        """Return the prices of one option per rank and column, [rank, column], each of its own candidate."""
        ranks = np.arange(len(option))[:, None]

        def chosen(column: Floats) -> Floats:
            shape = (*self.num_blocks.shape, self.forward_s.shape[-1])
            return np.broadcast_to(column, shape)[ranks, option, candidates]

        def by_chunk(column: Floats) -> Floats:
            return column[ranks, option, :, candidates].swapaxes(1, 2)

        return StagePrices(
            forward_s=by_chunk(self.forward_s),
            input_s=by_chunk(self.input_s),
            weight_s=by_chunk(self.weight_s),
            saved_bytes=by_chunk(self.saved_bytes),
            waiting_bytes=by_chunk(self.waiting_bytes),
            memory={part: chosen(size) for part, size in self.memory.items()},
            host_bytes=chosen(self.host_bytes),
            weights={pending: chosen(number) for pending, number in self.weights.items()},
            num_blocks=self.num_blocks[ranks, option],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkBlock:
    """A block in the chunks of ranks: how many each has, [rank, option, chunk, 1], and the row of its recompute.

    The layers of one ``part`` follow each other in any order of their kinds.
    """

    count: Floats
    block: BlockTotals
    row: Ints | int
    part: Part

    def of_rank(self) -> Floats:
        """Return how many a rank has: [rank, option, 1]."""
        return self.count.sum(axis=2)


def _slots(blocks: PipelineBlocks, options: StageOptions) -> tuple[ChunkBlock, ...]:
    """Return the blocks of chunks, in the order of the forward pass."""
    schedule, order, stage = blocks.schedule, blocks.order, counts_of(blocks.schedule).stages[:, None, :, None]
    shape = (schedule.num_ranks, *options.recomputed.shape[1:])

    def layers(first: Ints, length: Ints, row: Ints | int, part: Part) -> Iterator[ChunkBlock]:
        for count, block in zip(order.counts(first, length), blocks.layers, strict=True):
            wide = np.broadcast_to(count, shape)[..., None].astype(np.float64)
            yield ChunkBlock(count=wide, block=block, row=row, part=part)

    return (
        ChunkBlock(count=(stage == 0).astype(np.float64), block=blocks.embed, row=0, part="embed"),
        *layers(options.first, options.recomputed, options.kind, "recomputed"),
        *layers(options.first + options.recomputed, options.plain, options.plain_kind, "plain"),
        ChunkBlock(count=(stage == schedule.num_stages - 1).astype(np.float64), block=blocks.head, row=0, part="head"),
    )


def price_stages(blocks: PipelineBlocks, options: StageOptions) -> StagePrices:
    """Price all options of all ranks."""
    schedule, counts, slots = blocks.schedule, counts_of(blocks.schedule), _slots(blocks, options)
    # tied weights that meet on a rank count once
    tied_factor = 1.0 - slots[0].of_rank() * slots[-1].of_rank()
    weights: dict[tuple[str, ...], Any] = {}
    for slot in slots:
        for block_weights, factor in ((slot.block.weights, 1.0), (slot.block.tied_weights, tied_factor)):
            for pending, number in block_weights.items():
                weights[pending] = weights.get(pending, 0.0) + factor * slot.of_rank() * number

    def total(name: str) -> Floats:
        embed, *layers, head = (slot.count * getattr(slot.block, name)[slot.row] for slot in slots)
        return sum(layers[1:], start=layers[0]) + embed + head

    started_s = blocks.question.calibration.task_s / 2  # forward and backward of a stage are a graph each
    saved, waiting = total("saved_bytes"), total("waiting_bytes")
    memory: dict[str, Any] = {
        "activations": most_kept(schedule, saved, waiting),
        **_other_memory(blocks, slots),
        **stored_bytes(weights, blocks.setting, blocks.question.workload),
    }
    kernels = load_kernels(blocks.question.kernels)
    host_bytes: Floats = np.zeros(1)
    if any(layer.host_bytes.any() for layer in blocks.layers):
        memory["moving"], host_bytes = _in_host_memory(schedule, slots)
        if kernels.host_computes:  # host memory is that of the rank
            memory["host"] = host_bytes
    share = kernels.reserved.share if kernels.reserved else 0.0
    if kernels.queued_starts:
        free = blocks.question.cluster.rank_memory_bytes - kernels.runtime_bytes - (1 + share) * sum(memory.values())
        queued = _queued_bytes(blocks, total, kernels)
        memory["queued"] = np.minimum(queued, np.maximum(0.0, free / (1 + share)))
    if kernels.reserved:
        memory["reserved"] = share * sum(memory.values())
    memory["runtime"] = kernels.runtime_bytes
    return StagePrices(
        forward_s=total("forward_s") + started_s,
        input_s=total("input_s") + started_s,
        weight_s=total("weight_s"),
        saved_bytes=saved,
        waiting_bytes=waiting,
        memory=memory,
        host_bytes=host_bytes,
        weights=weights,
        num_blocks=np.broadcast_to(options.num_layers, slots[1].count.shape[:2]) + counts.ends[:, None],
    )


def _in_host_memory(schedule: Schedule, slots: Sequence[ChunkBlock]) -> tuple[Floats, Floats]:
    """Return what is on its way to or from host memory, and the most that lies there: [rank, option, candidate].

    Few options have any.
    """
    layers = [slot for slot in slots if slot.part == "recomputed"]
    rows = [np.atleast_3d(slot.row) for slot in layers]
    used = [slot.block.host_bytes.max(axis=1)[row] for slot, row in zip(layers, rows, strict=True)]
    options = np.flatnonzero(np.max(used, axis=(0, 1, 3)))
    sizes = [slot.block.host_bytes[row[:, options]] for slot, row in zip(layers, rows, strict=True)]
    counts = [slot.count[:, options] for slot in layers]
    moving, most = np.zeros((2, *layers[0].count.shape[:2], layers[0].block.host_bytes.shape[1]))
    kept: Floats = reduce(np.add, (count * size for count, size in zip(counts, sizes, strict=True)))
    most[:, options] = most_kept(schedule, kept, 0.0 * kept)
    on_their_way = (np.where(count > 0, size, 0.0) for count, size in zip(counts, sizes, strict=True))
    moving[:, options] = ON_THEIR_WAY * reduce(np.maximum, on_their_way).max(axis=2)
    return moving, most


def _queued_bytes(blocks: PipelineBlocks, total: Callable[[str], Floats], kernels: Kernels) -> Floats:
    """Return what ranks have sent, as hosts see it, and devices still need: no more than their memory has room for.

    Hosts run ahead where the device is the slower one, in so many of all micro-batches, and while it waits for others:
    in pipelines of more than two stages.
    """
    pass_s, started_s, starts, scattered = (
        total(name).sum(axis=2) for name in ("pass_s", "started_s", "starts", "scattered_bytes")
    )
    behind = 1.0 - (started_s / pass_s) ** 2  # pass_s is the root of both squares
    behind = np.maximum(behind, 1.0 - 2.0 / blocks.schedule.num_ranks)
    over_nodes = blocks.setting.atoms["kv"] * blocks.setting.atoms["rep"] > blocks.question.cluster.ranks_per_node
    most = np.where(over_nodes, kernels.queued_over_nodes, kernels.queued_starts)
    ahead = np.minimum(most, starts * (blocks.schedule.num_micro_batches - 0.5))
    return behind * ahead / starts * scattered


def _other_memory(blocks: PipelineBlocks, slots: Sequence[ChunkBlock]) -> Mapping[str, Number]:
    """Return the parts of a rank's memory beside states, activations, and what its platform keeps for itself.

    ZeRO-3 has two whole blocks at a time, one at work and one on its way, and a gradient, two where that of the block
    before is sent from its own memory; or all blocks of the rank and their gradients in a pipeline, where a framework
    does not gather and sum them for every micro-batch. Copies in buckets stand ready unless gradients are summed in
    place, or there is nobody to share them with.
    """
    question, setting, schedule = blocks.question, blocks.setting, blocks.schedule
    precision, kernels = question.workload.precision, load_kernels(question.kernels)
    messages = boundary_states(schedule, keeps_outputs=kernels.keeps_outputs)
    # A rank has layers of most kinds; a buffer that one lacks is counted all the same.
    placeholders: Any = sum(block.placeholder_bytes[0] for block in blocks.layers)
    largest: Any = np.max([block.num_weights for block in blocks.layers], axis=0)
    for slot in (slots[0], slots[-1]):
        placeholders = placeholders + slot.count.any(axis=2) * slot.block.placeholder_bytes[0]
        largest = np.maximum(largest, slot.count.any(axis=2) * slot.block.num_weights)
    per_weight, per_gradient = DTYPE_BYTES[precision.weights], DTYPE_BYTES[precision.gradients]
    num_gradients = 1 if kernels.copies_buckets else 2
    gathered = largest * (2 * per_weight + num_gradients * per_gradient)
    if kernels.keeps_units and schedule.num_ranks > 1:
        gathered = sum(slot.of_rank() * slot.block.num_weights for slot in slots) * (per_weight + per_gradient)
    replicas = setting.atoms["edp"] * setting.atoms["ep"] * setting.atoms["cp"]
    copied: Any = 0
    if kernels.copies_weights and setting.zero != 3:
        weights = sum(slot.of_rank() * slot.block.num_weights for slot in slots)
        copied = weights * per_weight * (replicas > 1)
    return {
        "working": _working_bytes(schedule, slots).max(axis=2),
        "placeholders": placeholders,
        "pipeline": messages[:, None, None] * blocks.boundary_bytes,
        "gathered": gathered if setting.zero == 3 else 0,
        "buckets": copied + (blocks.bucket_bytes * (replicas > 1) if kernels.copies_buckets and setting.zero else 0),
        "workspace": kernels.workspace_bytes,
    }


def _working_bytes(schedule: Schedule, slots: Sequence[ChunkBlock]) -> Any:
    """Return the most that a block of each chunk holds while it is at work, beside all that is kept.

    Backward runs from a chunk's last block to its first, and frees what each has kept. Layers of several kinds are all
    taken to be the last one of their part.
    """
    working, freed = cast(Any, 0.0), cast(Any, 0.0)
    for _, part in groupby(reversed(slots), key=lambda slot: slot.part):
        blocks = [*part]
        for slot in blocks:
            working = np.maximum(working, np.where(slot.count > 0, slot.block.moment_bytes[slot.row] - freed, 0.0))
        for slot in () if schedule.splits_backward else blocks:
            freed = freed + slot.count * slot.block.saved_bytes[slot.row]
    return working
