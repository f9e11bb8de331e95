"""What every builder of schedules is given, and what it gives."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from autoshard.schedule.action import ActionKind

Counts = tuple[tuple[int, ...], ...]  # of micro-batches by chunk, at several times
Step = tuple[ActionKind, int, int]  # an action without its class: kind, stage (in an order: chunk), micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """What a builder needs to know: pipeline ranks, chunks per rank, micro-batches."""

    num_ranks: int
    num_chunks: int
    num_micro_batches: int

    @property
    def num_units(self) -> int:
        """Forward actions of one rank: micro-batches times chunks."""
        return self.num_micro_batches * self.num_chunks


def most_held(kinds: Iterable[str]) -> int:
    """Count what is held at most when F takes one and B, or W where the backward is split, gives one back.

    >>> most_held("FFIFWBB"), most_held("FFBB")
    (3, 2)
    """
    held = peak = 0
    for kind in kinds:
        held += {"F": 1, "B": -1, "W": -1, "I": 0}[kind]
        peak = max(peak, held)
    return peak


def most_held_by_chunk(steps: Iterable[tuple[str, int]], num_chunks: int, *, splits: bool = False) -> Counts:
    """Count what is held of each chunk, given kind and chunk of each action: all counts that no other exceeds.

    Where backwards are split, what only waits for its W counts apart, after the others.

    >>> most_held_by_chunk([("F", 0), ("F", 0), ("F", 1), ("B", 1), ("B", 0), ("B", 0)], 2)
    ((2, 1),)
    >>> most_held_by_chunk([("F", 0), ("F", 0), ("I", 0), ("I", 0), ("W", 0), ("W", 0)], 1, splits=True)
    ((2, 0), (1, 1), (0, 2))
    """
    import numpy as np  # only here: few schedules need it

    kinds, chunks = (np.array(one) for one in zip(*steps, strict=True))
    places = np.arange(num_chunks) == chunks[:, None]
    taken = np.select([kinds == "F", kinds == "W"], [1, 0], -1)[:, None] * places
    waiting = ((kinds == "I").astype(np.int64) - (kinds == "W"))[:, None] * places
    held = np.cumsum(np.hstack([taken, waiting] if splits else [taken]), axis=0)
    peaks = held[:-1][np.isin(kinds[:-1], ["F", "I"]) & (kinds[1:] != "F")]  # what is given back, or changed, ends one
    return unexceeded(set(map(tuple, peaks.tolist())))


def unexceeded(found: Collection[tuple[int, ...]]) -> Counts:
    """Return the counts that are not at most another's, chunk by chunk.

    >>> unexceeded({(2, 1), (1, 3), (1, 1)})
    ((2, 1), (1, 3))
    """
    import numpy as np  # only here: few schedules need it

    counts = np.array(sorted(found, reverse=True))
    fewer = (counts[:, None] <= counts).all(axis=2)  # each is as many as itself
    return tuple(map(tuple, counts[fewer.sum(axis=1) == 1].tolist()))
