"""What the passes of stages take at least in any split: with the fastest recompute that memory leaves them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.stages import PASSES, PipelineBlocks, Sends, price_stages
from autoshard.plan.recompute import Recompute
from autoshard.schedule.counts import counts_of, in_flight_of
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.fill.chunk_ways import chunk_ways
from autoshard.search.fill.stage_options import ChunkLayers, StageChoices, stage_options
from autoshard.spec.kernels import load_kernels

_NEAR = 4  # layers by which a rank may be off an even share for it to be found what it must recompute


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitTimes:
    """What the passes of one candidate take at least, each with its fastest recompute: [pass]."""

    schedule: Schedule
    num_layers: int
    sends: Sends
    embed: Floats
    layer: Floats
    head: Floats
    started: Floats  # of every stage
    again_s: Floats  # as ``least_again_s`` returns it: [sort, rank, total]
    again_parts: Floats  # the least and the most of it that lies in each pass: [least or most, sort, pass]

    @classmethod
    def each(cls, blocks: PipelineBlocks, choices: StageChoices) -> "Iterator[SplitTimes]":
        """Yield those of each candidate."""
        assert choices.again_s is not None, "how much ranks compute again is known"
        blocks = blocks.with_least_layers
        embed, layer, head = fastest_passes(blocks, choices)
        parts, sends_s = _again_parts(blocks, choices), np.broadcast_to(blocks.sends.time_s, blocks.num_candidates)
        for number in range(blocks.num_candidates):
            yield cls(
                schedule=blocks.schedule,
                num_layers=choices.num_layers,
                sends=replace(blocks.sends, time_s=sends_s[number : number + 1]),
                embed=embed[:, number],
                layer=layer[:, number],
                head=head[:, number],
                started=_started_s(blocks),
                again_s=choices.again_s[..., number],
                again_parts=parts[..., number],
            )

    def again_runs(self, passes: Floats) -> Floats:
        """Return how often flows run at least what a stage computes again, in whatever passes: [sort, flow, stage].

        ``passes`` is how often they run each pass. What lies in no pass for certain may lie in any that has some of it.
        """
        least, most = self.again_parts
        some = np.where(most[:, None, :, None] > 0, passes, np.inf).min(axis=2)
        rest = np.maximum(1.0 - least.sum(axis=1), 0.0)[:, None, None]
        return np.einsum("kp,jps->kjs", least, passes) + rest * np.where(np.isfinite(some), some, 0.0)


def least_again_s(blocks: PipelineBlocks, choices: StageChoices, capacity: Floats) -> Floats:
    """Return the least seconds of recompute of ranks in a micro-batch, by their layers: [sort, rank, total, candidate].

    Options that take longer in I alone are a sort, all others another. What they take is infinite where so many layers
    do not fit. More layers hold more, so they recompute no less; far fewer than an even share may recompute nothing.
    """
    totals = rank_totals(blocks.schedule, choices.num_layers)
    if choices.recompute is not None:  # pinned: there is nothing to find
        return np.zeros((2, blocks.schedule.num_ranks, len(totals), blocks.num_candidates))
    near_even = np.flatnonzero(np.abs(totals - choices.num_layers / blocks.schedule.num_ranks) < _NEAR)
    held, extra_s, sorts, starts = _least_held(blocks, choices, totals[near_even])
    least_s = np.zeros((2, blocks.schedule.num_ranks, len(totals), blocks.num_candidates))
    for sort in (0, 1):
        fitting_s = np.where((held <= capacity) & (sorts == sort), extra_s, np.inf)
        again_s = np.minimum.reduceat(fitting_s, starts, axis=1)
        least_s[sort][:, near_even], least_s[sort][:, near_even[-1] + 1 :] = again_s, again_s[:, -1:]
    return least_s


def least_fullest_bytes(blocks: PipelineBlocks, choices: StageChoices) -> Floats:
    """Return the least bytes of the fullest rank of each candidate, for any split."""
    if choices.recompute is not None:
        return np.zeros(blocks.num_candidates)  # what is pinned may differ from chunk to chunk
    totals = rank_totals(blocks.schedule, choices.num_layers)
    held, _, _, starts = _least_held(blocks, choices, totals)
    by_total = np.minimum.reduceat(held, starts, axis=1)
    return np.array(
        [least_for_all(by_total[..., number], totals, choices.num_layers) for number in range(blocks.num_candidates)]
    )


def rank_totals(schedule: Schedule, num_layers: int) -> Ints:
    """Return how many layers a rank may have."""
    return np.arange(schedule.num_chunks, num_layers - schedule.num_chunks * (schedule.num_ranks - 1) + 1)


def _started_s(blocks: PipelineBlocks) -> Floats:
    return np.array([1.0, 1.0, 0.0]) * blocks.question.calibration.task_s / 2  # as ``price_stages`` has it


def _possible(blocks: PipelineBlocks, choices: StageChoices) -> NDArray[np.bool_]:
    """Say which recompute layers may use, [kind, candidate]: any kind where it is pinned, or none is allowed."""
    if choices.recompute is not None:
        return np.ones_like(blocks.layer.forward_s, dtype=bool)
    return choices.allowed | ~choices.allowed.any(axis=0)


def fastest_passes(blocks: PipelineBlocks, choices: StageChoices) -> tuple[Floats, Floats, Floats]:
    """Return the least time of embedding, layer and head in every pass, for any recompute: [pass, candidate]."""
    allowed = _possible(blocks, choices)
    embed, head = (np.stack([getattr(block, name)[0] for name in PASSES]) for block in (blocks.embed, blocks.head))
    columns = (np.where(allowed, getattr(blocks.layer, name), np.inf) for name in PASSES)
    return embed, np.stack([column.min(axis=0) for column in columns]), head


def _sorts_of(blocks: PipelineBlocks, fastest: Floats) -> Ints:
    """Return 0 for kinds of recompute that take longer than the fastest passes in I alone, or 1: [kind, candidate]."""
    forward_s, _, weight_s = fastest
    return 1 * ((blocks.layer.forward_s > forward_s) | (blocks.layer.weight_s > weight_s))


def _again_parts(blocks: PipelineBlocks, choices: StageChoices) -> Floats:
    """Return the least and most parts of recompute in each pass, of any kind of a sort: [2, sort, pass, candidate].

    Some layers of a stage may compute nothing again. Where that takes longer in some pass than another kind does, it
    counts among the kinds of both sorts.
    """
    _, fastest, _ = fastest_passes(blocks, choices)
    by_pass = np.stack([getattr(blocks.layer, name) for name in PASSES]) - fastest[:, None]  # [pass, kind, candidate]
    again_s, sorts, possible = by_pass.sum(axis=0), _sorts_of(blocks, fastest), _possible(blocks, choices)
    part = by_pass / np.maximum(again_s, 1e-30)
    plain = np.array([kind == Recompute() for kind in choices.kinds])[:, None]  # beside layers of either sort
    each_sort = [possible & ((sorts == sort) | plain) & (again_s > 0) for sort in (0, 1)]
    in_input = np.array([0.0, 1.0, 0.0])[:, None]  # where no kind of a sort may be used
    least = [np.where(of.any(axis=0), np.where(of, part, 1.0).min(axis=1), in_input) for of in each_sort]
    most = [np.where(of.any(axis=0), np.where(of, part, 0.0).max(axis=1), in_input) for of in each_sort]
    return np.array([least, most])


def _least_held(blocks: PipelineBlocks, choices: StageChoices, totals: Ints) -> tuple[Floats, Floats, Ints, Ints]:
    """Return the least bytes of every option, its recompute in a micro-batch, and its sort: [rank, option, candidate].

    All layers hold as little as any. Options are those of a number of layers, in order of it; the last value says where
    those of each number begin.
    Every chunk has a layer, all others lie where they are kept least.
    """
    blocks, schedule, chunks = blocks.with_least_layers, blocks.schedule, blocks.schedule.num_chunks
    count = np.ones((schedule.num_ranks, len(totals), chunks), dtype=np.int64)
    count[:, :, 0] = totals - chunks + 1
    options, divisions, allowed = stage_options(schedule, choices, ChunkLayers(count=count, first=0 * count))
    prices = price_stages(blocks, options)
    shape = (*prices.num_blocks.shape, blocks.num_candidates)
    kind = np.broadcast_to(options.kind[..., 0], shape[:2])
    again = np.broadcast_to(options.recomputed.sum(axis=2), shape[:2])
    plain = options.num_layers - again
    embed, layer, head = fastest_passes(blocks, choices)
    counts, ends_s = counts_of(schedule), np.full((schedule.num_ranks, 1, shape[2]), chunks * _started_s(blocks).sum())
    for stage, passes in ((0, embed), (-1, head)):
        ends_s[counts.ranks[stage]] += passes.sum(axis=0)
    extra_s = prices.pass_s - (again + plain)[..., None] * layer.sum(axis=0) - ends_s
    memory = {part: np.broadcast_to(size, shape) for part, size in prices.memory.items()}
    if chunks > 1:
        if ways := chunk_ways(schedule, tuple(totals.tolist())):
            pairs = [*zip((again + plain)[0].tolist(), again[0].tolist(), strict=True)]
            held = ways.held_bytes(blocks, pairs, kind[0], options.plain_kind)
            memory |= {"activations": held, "working": 0.0 * held}
        else:
            memory |= _least_memory(blocks, kind, again, plain, options.plain_kind)
            memory["working"] = np.minimum(prices.memory["working"], memory["working"])
        for part in ("host", "queued"):  # they depend on the chunk, and on the room that is left, as well
            memory.pop(part, None)
        reserved = load_kernels(blocks.question.kernels).reserved
        if reserved:
            excluded = memory.pop("reserved") * 0.0 + memory["runtime"]
            memory["reserved"] = reserved.share * (sum(memory.values()) - excluded)
    starts = np.flatnonzero(np.diff(divisions, prepend=-1))
    by_kind = _sorts_of(blocks, layer)
    sorts = np.maximum(by_kind[kind], np.where(plain[..., None] > 0, by_kind[options.plain_kind], 0))
    return np.where(allowed, sum(memory.values()), np.inf), np.maximum(extra_s, 0.0), sorts, starts


def _least_memory(
    blocks: PipelineBlocks, kind: Ints, num_recomputed: Ints, num_plain: Ints, plain_kind: int
) -> dict[str, Floats]:
    """Return lower bounds of the activations and the working memory of ranks: [rank, option, candidate].

    An option recomputes ``num_recomputed`` layers by ``kind``; ``num_plain`` layers are of ``plain_kind``. Every chunk
    has at least one layer; all further layers lie in the chunk with the fewest micro-batches in flight.
    """
    schedule, chunks, stages = blocks.schedule, blocks.schedule.num_chunks, counts_of(blocks.schedule).stages
    num_recomputed, num_plain = num_recomputed[..., None], num_plain[..., None]

    def least(name: str) -> tuple[Floats, Floats]:
        """Return a column summed over all layers, and its value for the smaller of the two sorts of layers."""
        column: Floats = getattr(blocks.layer, name)
        of_kind, of_plain = column[kind], column[plain_kind]
        smaller = np.where(
            num_plain == 0, of_kind, np.where(num_recomputed == 0, of_plain, np.minimum(of_kind, of_plain))
        )
        return num_recomputed * of_kind + num_plain * of_plain, smaller

    def kept_bytes(in_flight: Floats, name: str) -> Iterator[Floats]:
        """Yield a lower bound of the bytes that ranks keep for backward at each time."""
        all_bytes, smaller = least(name)
        for now in np.moveaxis(in_flight, 1, 0)[..., None, None]:
            fewest = now.min(axis=1)
            held = fewest * all_bytes + (now.sum(axis=1) - chunks * fewest) * smaller
            for stage, block in ((0, blocks.embed), (schedule.num_stages - 1, blocks.head)):
                runs_here = (stages == stage)[:, :, None, None]
                held = held + (now * runs_here).sum(axis=1) * getattr(block, name)[0]
            yield held

    saved = in_flight_of(schedule)[..., :chunks]  # two times: when most is in flight, and when every chunk has much
    times = np.stack([saved.sum(axis=2).argmax(axis=1), saved.min(axis=2).argmax(axis=1)], axis=1)
    in_flight = np.take_along_axis(in_flight_of(schedule), times[..., None], axis=1)
    activations = [*kept_bytes(in_flight[..., :chunks], "saved_bytes")]
    if schedule.splits_backward:
        pairs = zip(activations, kept_bytes(in_flight[..., chunks:], "waiting_bytes"), strict=True)
        activations = [saved_bytes + waiting_bytes for saved_bytes, waiting_bytes in pairs]
    return {"activations": np.maximum(*activations), "working": least("moment_bytes")[1]}


def least_for_all(cost: Floats, totals: Ints, num_layers: int) -> float:
    """Return the least value with which the ranks can have all layers, given the cost of each total on a rank."""
    values = np.unique(cost[np.isfinite(cost)])
    values = values[values >= cost.min(axis=1).max()]
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        most = np.where(cost <= values[middle], totals, 0).max(axis=1)
        low, high = (low, middle) if most.sum() >= num_layers else (middle + 1, high)
    return float(values[low]) if low < len(values) else np.inf
