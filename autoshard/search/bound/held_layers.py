"""How many layers fit on each rank of a pipeline at most, by what these keep at least under each recompute."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.stages import ON_THEIR_WAY, BlockTotals, PipelineBlocks
from autoshard.cost.update import stored_bytes
from autoshard.schedule.counts import counts_of, in_flight_of
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.waves import Floats, Ints
from autoshard.spec.kernels import load_kernels

_ROUNDED = 64.0  # bytes that rounding up of shards may add to the states of a block, by group of weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineRanks:
    """The ranks of pipelines: [rank, candidate], or 1 for all candidates; ranks that are alike may stand once."""

    first: NDArray[np.bool_]  # which have the embedding
    last: NDArray[np.bool_]  # and the head
    flight: Ints  # of how many micro-batches each keeps every layer
    waiting: Ints  # and every layer that waits for W
    times: Ints  # how many such ranks there are

    @classmethod
    def with_one_in_flight(cls, pp: Ints, *, turns: bool) -> "PipelineRanks":
        """Return the ranks of pipelines of any length that keep one micro-batch; the head may be on the first one."""
        if turns:
            first, times = [True, False], [np.ones_like(pp), pp - 1]
            last = first
        else:
            first, last = [True, False, False, True], [False, False, True, True]
            times = [1 * (pp > 1), np.maximum(pp - 2, 0), 1 * (pp > 1), 1 * (pp == 1)]
        return cls(
            first=np.array(first)[:, None],
            last=np.array(last)[:, None],
            flight=np.ones((len(first), 1), dtype=np.int64),
            waiting=np.zeros((len(first), 1), dtype=np.int64),
            times=np.array(times),
        )

    @classmethod
    def of(cls, schedule: Schedule) -> "PipelineRanks":
        """Return the ranks of a schedule; each keeps all its layers as often as the chunk that it keeps least often."""
        in_flight, counts, ranks = in_flight_of(schedule), counts_of(schedule), np.arange(schedule.num_ranks)
        by_chunk = in_flight.reshape(*in_flight.shape[:2], -1, schedule.num_chunks)
        fewest = by_chunk.min(axis=3)  # [rank, time, saved or waiting]
        most = fewest[ranks, fewest[:, :, 0].argmax(axis=1)]
        flight, waiting = most[:, :1], most[:, 1:] if schedule.splits_backward else 0 * most
        first, last = ((counts.stages == stage).any(axis=1)[:, None] for stage in (0, schedule.num_stages - 1))
        return cls(first=first, last=last, flight=flight, waiting=waiting, times=np.ones_like(flight))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldLayers:
    """What ranks hold at least beside their layers, and for each layer: [rank, kind of recompute, candidate]."""

    besides_bytes: Floats
    layer_bytes: Floats
    share: float  # of all of it that an allocator reserves
    runtime_bytes: float

    @classmethod
    def of(cls, blocks: PipelineBlocks, layer: BlockTotals, ranks: PipelineRanks) -> "HeldLayers":
        """Return what ranks hold that have no other layers than these, but embedding and head."""
        kernels, first, last, flight = load_kernels(blocks.question.kernels), ranks.first, ranks.last, ranks.flight
        gathered = layer.num_weights * (2.0 if blocks.setting.zero == 3 else 0.0)
        of_embed, of_layer, of_head = (states_bytes(blocks, block) for block in (blocks.embed, layer, blocks.head))
        head_saved = blocks.head.saved_bytes[0]
        ends_bytes = first * of_embed + last * (of_head + flight * head_saved)
        at_work = mixed_moments(layer.moment_bytes, layer.saved_bytes, flight)
        moment = np.maximum(0.0, at_work - (last * head_saved)[:, None]) + ON_THEIR_WAY * layer.host_bytes
        layer_bytes = of_layer + flight[:, None] * layer.saved_bytes + ranks.waiting[:, None] * layer.waiting_bytes
        return cls(
            besides_bytes=ends_bytes[:, None] + moment + (kernels.workspace_bytes + gathered),
            layer_bytes=np.maximum(layer_bytes, 1.0),
            share=kernels.reserved.share if kernels.reserved else 0.0,
            runtime_bytes=kernels.runtime_bytes,
        )

    def most(self, capacity: Floats | float) -> Floats:
        """Return how many layers fit on each rank: [rank, kind of recompute, candidate]."""
        return np.floor(self.room(capacity))

    def room(self, capacity: Floats | float) -> Floats:
        """Return how many layers, and parts of a layer, fill each rank: [rank, kind of recompute, candidate]."""
        return np.maximum(0.0, (self.free_bytes(capacity) - self.besides_bytes) / self.layer_bytes)

    def free_bytes(self, capacity: Floats | float) -> Floats:
        """Return the memory that tensors may fill."""
        return (np.asarray(capacity) * (1 + 1e-9) - self.runtime_bytes) / (1 + self.share)

    def holding(self, count: int) -> Floats:
        """Return the memory in which every rank alone could hold so many layers."""
        held = (self.besides_bytes + count * self.layer_bytes).min(axis=1).max(axis=0)
        return held * (1 + self.share) + self.runtime_bytes


def mixed_moments(moment_bytes: Floats, saved_bytes: Floats, flight: Ints) -> Floats:
    """Return the least that layers of a kind hold at work, though layers behind them keep all: [rank, kind, candidate].

    Those behind, of the first kind, have freed what they kept by then. Each keeps as much more than it would otherwise
    for every micro-batch in flight, so that only a part of that is won.
    """
    more_bytes = np.maximum(0.0, moment_bytes - moment_bytes[0])
    part = np.minimum(1.0, saved_bytes / np.maximum(saved_bytes[0], 1.0))
    return moment_bytes - more_bytes * np.where(flight[:, None] > 0, part, 1.0)


def states_bytes(blocks: PipelineBlocks, block: BlockTotals) -> Floats:
    """Return the least bytes of a block's states: without rounding, and without weights that meet their copies."""
    parts = stored_bytes(block.weights, blocks.setting, blocks.question.workload)
    return np.maximum(0.0, sum(parts.values()) - _ROUNDED * len(block.weights))
