"""What every builder of schedules is given, and what it gives."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from autoshard.schedule.action import ActionKind

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


def most_held_by_chunk(steps: Iterable[tuple[str, int]], num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Count what is held of each chunk, given kind and chunk of each action: all counts that no other exceeds.

    >>> most_held_by_chunk([("F", 0), ("F", 0), ("F", 1), ("B", 1), ("B", 0), ("B", 0)], 2)
    ((2, 1),)
    """
    held = [0] * num_chunks
    found: set[tuple[int, ...]] = set()
    rises = False
    for kind, chunk in steps:
        if kind in "BW" and rises:
            found.add(tuple(held))  # only what is given back ends a peak
        rises = kind == "F" or (rises and kind == "I")
        held[chunk] += {"F": 1, "B": -1, "W": -1, "I": 0}[kind]
    kept: list[tuple[int, ...]] = []
    for one in sorted(found, key=lambda counts: (-sum(counts), [-count for count in counts])):
        # Only one that holds more in all can exceed it.
        larger = (other for other in kept if sum(other) > sum(one))
        if not any(all(few <= many for few, many in zip(one, other, strict=True)) for other in larger):
            kept.append(one)
    return tuple(sorted(kept, reverse=True))


def most_deferred(kinds: Iterable[str]) -> int:
    """Count what at most has had its I and not its W yet.

    >>> most_deferred("FFIIWW"), most_deferred("FBFB")
    (2, 0)
    """
    change = {"I": 1, "W": -1}
    return max(accumulate((change.get(kind, 0) for kind in kinds), initial=0))
