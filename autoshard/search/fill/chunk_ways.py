"""How the layers of a rank may lie in its chunks, and the least that such ways keep of micro-batches in flight.

One chunk keeps most while another keeps little. So the fullest moment of the best way keeps more than each moment
would keep if the layers lay best for that moment alone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.stages import PipelineBlocks
from autoshard.schedule.counts import counts_of, fullest_times
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.waves import Floats, Ints

Pair = tuple[int, int]  # layers of a rank, and those of them that compute again
_MOST = 300  # divisions of layers over chunks that are looked at one by one
_KEPT = ("saved_bytes", "waiting_bytes")  # in flight; and between the halves of backward, where that is split


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkWays:
    """All ways in which the layers of a rank may lie in its chunks, each of which has one or more.

    The layers that compute again are equally many in all chunks, or all that a chunk has.
    """

    ways: Mapping[Pair, Ints]  # the numbers of the ways of a pair
    flights: Floats  # layers times micro-batches: [what is kept, again or not, rank, time, way]
    behind: Floats  # layers of a chunk that keep all, the fewest, and whether some do, without the head: [2, rank, way]

    def held_bytes(self, blocks: PipelineBlocks, pairs: Sequence[Pair], kinds: Ints, plain_kind: int) -> Floats:
        """Return the least that ranks keep and work with, in any way of each pair: [rank, pair, candidate].

        ``kinds`` are those of the recompute of each pair.
        """
        layer, ends, held = blocks.layer, _of_ends(blocks), dict[int, Floats]()
        for kind in dict.fromkeys(kinds.tolist()):
            numbers: list[int] = np.flatnonzero(kinds == kind).tolist()
            each_ways = [self.ways[pairs[number]] for number in numbers]
            ways, flight_bytes = np.concatenate(each_ways), ends[:, :, None]
            for name, (again, plain) in zip(_KEPT, self.flights[..., ways], strict=False):
                column: Floats = getattr(layer, name)
                layer_bytes = again[..., None] * column[kind] + plain[..., None] * column[plain_kind]
                flight_bytes = flight_bytes + layer_bytes
            fewest, has_plain = self.behind[..., ways, None]
            freed = 0.0 if blocks.schedule.splits_backward else fewest * layer.saved_bytes[plain_kind]
            working = np.maximum(has_plain * layer.moment_bytes[plain_kind], layer.moment_bytes[kind] - freed)
            starts = np.cumsum([0, *map(len, each_ways[:-1])])
            least = np.minimum.reduceat(flight_bytes.max(axis=1) + working, starts, axis=1)
            held |= dict(zip(numbers, np.moveaxis(least, 1, 0), strict=True))
        return np.stack([held[number] for number in range(len(pairs))], axis=1)


def chunk_ways(schedule: Schedule, totals: tuple[int, ...]) -> ChunkWays | None:
    """Return the ways of ranks with so many layers; None where they are too many to be looked at one by one."""
    chunks = schedule.num_chunks
    if chunks == 1 or sum(math.comb(total - 1, chunks - 1) for total in totals) > _MOST:
        return None
    head = counts_of(schedule).stages == schedule.num_stages - 1
    flights = fullest_times(schedule)
    return _least_ways(flights.tobytes(), flights.shape, head.tobytes(), totals)


@lru_cache(maxsize=256)
def _least_ways(flights: bytes, shape: tuple[int, int, int], head: bytes, totals: tuple[int, ...]) -> ChunkWays:
    """Return the ways of which no other holds less on all ranks; with enough micro-batches their number is no matter.

    ``flights`` are how many micro-batches chunks keep, of a ``shape`` of ranks, times and chunks, or twice the chunks;
    ``head`` says where the head lies.
    """
    has_head = np.frombuffer(head, dtype=np.bool_).reshape(shape[0], 1, -1)
    chunks = has_head.shape[2]
    by_kept = np.stack(np.split(np.frombuffer(flights).reshape(shape), shape[2] // chunks, axis=2))
    parts: dict[Pair, tuple[Floats, Floats]] = {}
    for pair, ways in _all_ways(totals, chunks).items():
        again, plain = np.array(ways, dtype=np.float64).swapaxes(0, 1)
        fewest = np.where(has_head, np.inf, plain).min(axis=2)
        has_plain = np.where(has_head, 0.0, plain > 0).max(axis=2)
        behind = np.stack([fewest, has_plain])
        flight = np.einsum("krtc,awc->kartw", by_kept, np.stack([again, plain]))
        by_rank = np.moveaxis(flight, 2, 0).reshape(shape[0], -1, len(ways))
        needed = _undominated(np.concatenate([by_rank, -fewest[:, None], has_plain[:, None]], axis=1))
        parts[pair] = flight[..., needed], behind[..., needed]
    ends = np.cumsum([behind.shape[2] for _, behind in parts.values()]).tolist()
    numbers: dict[Pair, Ints] = {
        pair: np.arange(end - behind.shape[2], end)
        for (pair, (_, behind)), end in zip(parts.items(), ends, strict=True)
    }
    return ChunkWays(
        ways=numbers,
        flights=np.concatenate([flight for flight, _ in parts.values()], axis=-1),
        behind=np.concatenate([behind for _, behind in parts.values()], axis=-1),
    )


def _all_ways(totals: Sequence[int], chunks: int) -> Mapping[Pair, Sequence[tuple[Ints, Ints]]]:
    """Return the layers of each chunk that compute again, and the others, in all ways of each pair."""
    ways: dict[Pair, list[tuple[Ints, Ints]]] = {}
    for total in totals:
        for layers in map(np.array, _divisions(total, chunks)):
            for most in range(1, layers.max() + 1):
                again = np.minimum(layers, most)
                ways.setdefault((total, int(again.sum())), []).append((again, layers - again))
    return ways


def _undominated(sizes: Floats) -> NDArray[np.bool_]:
    """Say which ways are on some rank larger in some size than each other way: sizes are [rank, size, way]."""
    no_larger = np.all(sizes[:, :, :, None] <= sizes[:, :, None], axis=1)  # [rank, way, other way]
    first = np.tri(sizes.shape[2], k=-1, dtype=np.bool_).T  # of equal ways the first stays
    beaten = no_larger & (~no_larger.swapaxes(1, 2) | first)
    return ~beaten.any(axis=1).all(axis=0)


def _of_ends(blocks: PipelineBlocks) -> Floats:
    """Return what ranks keep of embedding and head: [rank, time, candidate]."""
    schedule, flights, stages = blocks.schedule, fullest_times(blocks.schedule), counts_of(blocks.schedule).stages
    by_kept, ends_bytes = np.split(flights, flights.shape[2] // schedule.num_chunks, axis=2), np.zeros(1)
    for stage, block in ((0, blocks.embed), (schedule.num_stages - 1, blocks.head)):
        for name, flight in zip(_KEPT, by_kept, strict=False):
            of_stage = (flight * (stages == stage)[:, None]).sum(axis=2)
            ends_bytes = ends_bytes + of_stage[..., None] * getattr(block, name)[0]
    return ends_bytes


def _divisions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a total as a sum of so many numbers, each at least 1.

    >>> list(_divisions(4, 2))
    [(1, 3), (2, 2), (3, 1)]
    """
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        yield from ((first, *rest) for rest in _divisions(total - first, parts - 1))
