"""What a step takes or holds at least, for many layouts at once, before anything is known of their stages.

The layers of a pipeline are given to its ranks as their memory allows: those that recompute least first, each rank as
many as could fit if it held no others. The work that results is then spread in perfect balance, over a pipeline that
waits no longer than its schedule must. Every step of this errs to the fast side.
"""

import numpy as np

from autoshard.cost.stages import BlockTotals, PipelineBlocks
from autoshard.cost.step import rank_update
from autoshard.cost.update import Turns, state_bytes
from autoshard.plan.candidate import Zero
from autoshard.schedule.builders import BUILDERS
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.priced_layouts import PricedLayouts
from autoshard.search.stage_filling import SURE
from autoshard.search.stage_options import ALL_RANGES
from autoshard.spec.kernels import load_kernels

_FOREVER = 1e30  # seconds of passes behind which as much as possible hides
_ROUNDED = 64.0  # bytes that rounding up of shards may add to the states of a block, by group of weights


def least_seconds(priced: PricedLayouts, builder: str, zero: Zero, capacity: float) -> tuple[Floats, Floats]:
    """Return what a step of every layout takes at least without fixed seconds, and of that what is no micro-batch's.

    Infinite where nothing fits.
    """
    question, rows = priced.question, priced.space.rows
    counts = question.workload.global_batch // (rows["dp"] * rows["mbs"])
    alone = Schedule(builder="1f1b", num_ranks=1, num_micro_batches=1)
    blocks = priced.pipeline_blocks(slice(None), alone, zero)
    rest_s = _update_s(blocks, counts, -(-question.model.num_layers // rows["pp"]))
    work_s = np.full(len(counts), np.inf)
    for ranks in sorted(set(rows["pp"].tolist())):
        mine = np.flatnonzero(rows["pp"] == ranks)
        flight = _least_flight(builder, ranks, counts[mine])
        work_s[mine] = _work_s(blocks.only(mine), question.model.num_layers, flight, builder, capacity)
    sends = load_kernels(question.kernels)
    held_s = 0.0 if sends.hides_sends(builder) else blocks.sends.time_s * (1 + sends.receives_apart)
    passes = _passes(builder, counts, rows["pp"])
    return passes * (work_s + 2 * (rows["pp"] - 1) * held_s) + rest_s, rest_s


def least_bytes(priced: PricedLayouts, zero: Zero) -> Floats:
    """Return what the rank with the most layers holds at least: states, and what one micro-batch keeps."""
    question = priced.question
    layers, kernels = -(-question.model.num_layers // priced.space.rows["pp"]), load_kernels(question.kernels)
    alone = Schedule(builder="1f1b", num_ranks=1, num_micro_batches=1)
    blocks = priced.pipeline_blocks(slice(None), alone, zero)
    held = layers * (_states_bytes(blocks, priced.layer) + priced.layer.saved_bytes.min(axis=0))
    return (held + kernels.runtime_bytes + kernels.workspace_bytes) * (1 - SURE)


def _least_flight(builder: str, num_ranks: int, counts: Ints) -> Floats:
    """Return of how many micro-batches each rank keeps all its layers at a time, at least: [rank, layout].

    1F1B keeps fewest, but for schedules that turn at the last rank, of which this says nothing.
    """
    if BUILDERS[builder].turns:
        return np.ones((num_ranks, len(counts)))
    later = num_ranks - np.arange(num_ranks)[:, None]
    return np.maximum(1, counts if builder == "gpipe" else np.minimum(later, counts)) * np.ones((num_ranks, 1))


def _work_s(blocks: PipelineBlocks, num_layers: int, flight: Floats, builder: str, capacity: float) -> Floats:
    """Return what one micro-batch costs on all ranks together at least."""
    layer, kernels = blocks.layer, load_kernels(blocks.question.kernels)
    gathered = layer.num_weights * 2.0 if blocks.setting.zero == 3 else 0.0
    free = capacity * (1 + 1e-9) - (kernels.workspace_bytes + kernels.runtime_bytes + gathered)
    number, last_rank = np.arange(len(flight))[:, None], 0 if BUILDERS[builder].turns else len(flight) - 1
    first, last = (number == 0) * 1.0, (number == last_rank) * 1.0
    head_saved = flight * blocks.head.saved_bytes[0]
    ends = first * _states_bytes(blocks, blocks.embed) + last * (_states_bytes(blocks, blocks.head) + head_saved)
    moment = np.maximum(0.0, layer.moment_bytes - (last * blocks.head.saved_bytes[0])[:, None])
    each = _states_bytes(blocks, layer) + flight[:, None] * layer.saved_bytes  # [rank, kind, layout]
    fits = np.maximum(0.0, np.floor(((free - ends)[:, None] - moment) / np.maximum(each, 1.0)))
    order = layer.pass_s.argsort(axis=0)
    fits = np.maximum.accumulate(np.take_along_axis(fits, order[None], axis=1), axis=1).sum(axis=0)
    share = np.diff(np.minimum(fits, num_layers), axis=0, prepend=0.0)
    work = (share * np.take_along_axis(layer.pass_s, order, axis=0)).sum(axis=0)
    return np.where(fits[-1] >= num_layers, work + blocks.embed.pass_s[0] + blocks.head.pass_s[0], np.inf)


def _states_bytes(blocks: PipelineBlocks, block: BlockTotals) -> Floats:
    """Return the states of a block at least: rounding, and weights that meet their copies, left out."""
    parts = state_bytes(block.weights, blocks.setting, blocks.question.workload)
    return np.maximum(0.0, sum(parts.values()) - _ROUNDED * len(block.weights))


def _passes(builder: str, counts: Ints, ranks: Ints) -> Floats:
    """Return how often a step takes the work of one micro-batch at least, however that lies on the ranks.

    Of GPipe and 1F1B these are paths that are no longer than those of ``path_weights``, in the mixture in which all
    layers weigh the same; other schedules may have no bubble.
    """
    if builder not in ALL_RANGES:
        return counts / ranks
    few = (counts <= ranks) & (builder != "gpipe")
    return np.where(few, 1 + (counts - 1) / (2 * ranks - counts + 1).clip(1), (counts + ranks - 1) / ranks)


def _update_s(blocks: PipelineBlocks, counts: Ints, layers: Ints) -> Floats:
    """Return what the step phase of a rank with so many layers takes at least.

    Embedding and head may be there too: under ZeRO-3 they are more messages, but if they are small, messages of another
    size, which may go another way.
    """
    weights = {pending: layers * number for pending, number in blocks.layer.weights.items()}
    found: list[Floats] = []
    for ends in range(3) if blocks.setting.zero == 3 else (0,):
        turns = Turns(num_micro_batches=counts, num_blocks=layers + ends)
        update = rank_update(blocks.question, blocks.setting, weights, np.full(len(counts), _FOREVER), turns)
        found.append(sum(update.seconds.values()) + np.zeros(len(counts)))
    return np.min(found, axis=0)
