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
from autoshard.search.fill.stage_options import ChunkLayers, RankWays, StageChoices, WayRows, stage_options
from autoshard.spec.kernels import load_kernels

_NEAR = 8  # layers by which a rank may be off an even share for it to be found what it must recompute


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitTimes:
    """What the passes of one candidate take, and the ways of its ranks that fit in memory."""

    schedule: Schedule
    num_layers: int
    sends: Sends
    embed: Floats  # [pass], like the head: with the fastest recompute
    head: Floats
    started: Floats  # of every stage
    kinds_s: Floats  # of a layer under each kind of recompute, and in the last row under any: [kind, pass]
    plain_kind: int
    rows: WayRows
    fits: NDArray[np.bool_]  # [rank, way]

    @classmethod
    def each(cls, blocks: PipelineBlocks, choices: StageChoices) -> "Iterator[SplitTimes]":
        """Yield those of each candidate."""
        assert choices.ways is not None, "the ways of ranks are known"
        blocks = blocks.with_least_layers
        embed, least, head = fastest_passes(blocks, choices)
        kinds_s = np.stack([*np.stack([getattr(blocks.layer, name) for name in PASSES], axis=1), least])
        sends_s = np.broadcast_to(blocks.sends.time_s, blocks.num_candidates)
        for number in range(blocks.num_candidates):
            yield cls(
                schedule=blocks.schedule,
                num_layers=choices.num_layers,
                sends=replace(blocks.sends, time_s=sends_s[number : number + 1]),
                embed=embed[:, number],
                head=head[:, number],
                started=_started_s(blocks),
                kinds_s=kinds_s[..., number],
                plain_kind=choices.kinds.index(Recompute()),
                rows=choices.ways.rows,
                fits=choices.ways.fits[..., number],
            )


def rank_ways(blocks: PipelineBlocks, choices: StageChoices, capacity: Floats) -> RankWays:
    """Return the ways of ranks, and which of them fit.

    More layers hold more, so they recompute no less; far fewer than an even share may recompute nothing.
    """
    totals, any_kind = rank_totals(blocks.schedule, choices.num_layers), len(choices.kinds)
    num_ranks, count = blocks.schedule.num_ranks, blocks.num_candidates
    if choices.recompute is not None:  # pinned: there is nothing to find
        rows = WayRows(totals=totals, kind=0 * totals + any_kind, again=totals, plain=0 * totals)
        return RankWays(rows=rows, fits=np.ones((num_ranks, len(totals), count), dtype=bool))
    near_even = np.flatnonzero(np.abs(totals - choices.num_layers / num_ranks) < _NEAR)
    fewer, more = totals[: near_even[0]], totals[near_even[-1] + 1 :]
    held, ways = _least_held(blocks, choices, totals[near_even])
    fits = held <= capacity
    last = np.flatnonzero(ways.totals == totals[near_even[-1]])

    def joined(name: str, of_fewer: Ints) -> Ints:
        column: Ints = getattr(ways, name)
        return np.concatenate([of_fewer, column, np.tile(column[last], len(more))])

    rows = WayRows(
        totals=np.concatenate([fewer, ways.totals, np.repeat(more, len(last))]),
        kind=joined("kind", 0 * fewer + any_kind),
        again=joined("again", fewer),
        plain=joined("plain", 0 * fewer),
    )
    few_fit = np.ones((num_ranks, len(fewer), count), dtype=bool)
    return RankWays(rows=rows, fits=np.concatenate([few_fit, fits, np.tile(fits[:, last], (1, len(more), 1))], axis=1))


def least_fullest_bytes(blocks: PipelineBlocks, choices: StageChoices) -> Floats:
    """Return the least bytes of the fullest rank of each candidate, for any split."""
    if choices.recompute is not None:
        return np.zeros(blocks.num_candidates)  # what is pinned may differ from chunk to chunk
    totals = rank_totals(blocks.schedule, choices.num_layers)
    held, ways = _least_held(blocks, choices, totals)
    by_total = np.minimum.reduceat(held, np.flatnonzero(np.diff(ways.totals, prepend=0)), axis=1)
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


def _least_held(blocks: PipelineBlocks, choices: StageChoices, totals: Ints) -> tuple[Floats, WayRows]:
    """Return the ways of ranks with so many layers, and the least bytes of each: [rank, way, candidate].

    All layers hold as little as any. Every chunk has a layer, all others lie where they are kept least.
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
    rows = WayRows(totals=totals[divisions], kind=kind[0], again=again[0], plain=plain[0])
    return np.where(allowed, sum(memory.values()), np.inf), rows


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
