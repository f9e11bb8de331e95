"""The least time of the slowest rank of a pipeline, whose layers are whole and compute again what memory asks for.

The layers of a rank compute again alike, or some of them in full and the others nothing: so stages are filled.
"""

from collections.abc import Sequence

import numpy as np

from autoshard.cost.stages import PipelineBlocks
from autoshard.plan.recompute import Recompute
from autoshard.schedule.builders import builders
from autoshard.schedule.counts import counts_of
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.bound.held_layers import HeldLayers, PipelineRanks
from autoshard.search.fill.split_times import least_for_all, rank_totals
from autoshard.search.fill.stage_options import SURE

_FULL = Recompute(kind="full")


def slowest_rank_s(blocks: PipelineBlocks, kinds: Sequence[Recompute], capacity: float, below_s: float) -> Floats:
    """Return the least time of all micro-batches on the slowest rank of each candidate, for any split of the layers.

    What takes more than ``below_s`` or does not fit is said to take that. Layers may use these ``kinds`` of recompute.
    """
    schedule, layer = blocks.schedule, blocks.layer
    ranks = PipelineRanks.of(schedule)
    held, numbers = HeldLayers.of(blocks, layer, ranks), _numbers(blocks, below_s)
    layers_s = layers_of_rank_s(layer.pass_s, held, capacity, numbers, kinds)
    ends_s = ranks.first * blocks.embed.pass_s[0] + ranks.last * blocks.head.pass_s[0]
    ends_s = ends_s + schedule.num_chunks * blocks.question.calibration.task_s
    by_rank_s = schedule.num_micro_batches * (layers_s + ends_s[:, None]) + _once_s(blocks)[:, None]
    least = [
        least_for_all(of_candidate, numbers, blocks.order.num_layers) for of_candidate in np.moveaxis(by_rank_s, 2, 0)
    ]
    return np.minimum(below_s, least)


def _numbers(blocks: PipelineBlocks, below_s: float) -> Ints:
    """Return the numbers of layers that a rank may have, but for those that take more than ``below_s`` anyway."""
    totals = rank_totals(blocks.schedule, blocks.order.num_layers)
    fewest_s = blocks.schedule.num_micro_batches * float(blocks.layer.pass_s.min())
    even = -(-blocks.order.num_layers // blocks.schedule.num_ranks)
    return totals[totals <= max(even, below_s / fewest_s)]


def _once_s(blocks: PipelineBlocks) -> Floats:
    """Return how long each rank waits for the stages before its first, and what its sends block: [rank, candidate].

    These pass the first micro-batch to it, and the last one back, unless its weight gradients come later. Each has a
    layer.
    """
    schedule, blocked_s = blocks.schedule, (blocks.schedule.num_micro_batches - 1) * blocks.hop_s
    before = counts_of(schedule).stages.min(axis=1)[:, None]
    embed, layer = blocks.embed, blocks.layer
    splits = builders()[schedule.builder].splits
    embed_s, layer_s = (block.forward_s if splits else block.pass_s for block in (embed, layer))
    return before * layer_s.min(axis=0) + (before > 0) * embed_s[0] + blocked_s


def layers_of_rank_s(
    pass_s: Floats, held: HeldLayers, capacity: float, numbers: Ints, kinds: Sequence[Recompute]
) -> Floats:
    """Return the least time of so many layers on each rank: [rank, number, candidate]; infinite where they do not fit.

    ``pass_s`` is that of one layer under each kind of recompute: [kind, candidate].
    """
    order, count = pass_s.argsort(axis=0), numbers[:, None]
    most = np.broadcast_to(held.most(capacity), (len(held.layer_bytes), *pass_s.shape))
    seconds = np.vstack([np.take_along_axis(pass_s, order, axis=0), np.full(order.shape[1], np.inf)])
    fitting = np.maximum.accumulate(np.take_along_axis(most, order[None], axis=1), axis=1)
    fastest = (fitting[:, :, None] < count).sum(axis=1)  # the first under which so many fit
    layer_s: Floats = np.take_along_axis(seconds[None], fastest, axis=1)
    alike_s = layer_s * count
    if _FULL not in kinds:
        return alike_s
    plain, full = kinds.index(Recompute()), kinds.index(_FULL)
    besides_bytes = np.minimum(held.besides_bytes[:, plain], held.besides_bytes[:, full])
    room = (held.free_bytes(capacity) - besides_bytes)[:, None]
    plain_bytes, full_bytes = held.layer_bytes[:, plain, None], held.layer_bytes[:, full, None]
    again = np.maximum(0.0, count * plain_bytes - room) / np.maximum(plain_bytes - full_bytes, 1.0)
    partly_s = count * pass_s[plain] + np.ceil(again * (1 - SURE)) * (pass_s[full] - pass_s[plain])
    return np.minimum(alike_s, np.where((again <= count) & (count * full_bytes <= room), partly_s, np.inf))
