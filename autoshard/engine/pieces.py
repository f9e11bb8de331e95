"""What a rank holds of the state of a run, as boxes of whole tensors: what checkpoints are made of and filled from."""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from autoshard.engine.place import Bounds
from autoshard.layout.shards import boxes_of

Part = Literal["weight", "moment1", "moment2"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A box of one tensor of the state; ``memory`` is a view of what the engine updates, so loading fills it."""

    weight: str  # as in ``graph/evaluate``: layer.3.up.weight; weights that share their values have the owner's name
    part: Part  # the weight in the format in which it is updated, or a moment of the optimizer
    whole: tuple[int, ...]  # the shape of the whole tensor
    offsets: tuple[int, ...]
    memory: Any  # a tensor of torch, of the shape of the box
    saves: bool = True  # one of all ranks that hold the same saves it
    reads: bool = True  # whether this rank reads it, or is given it by another rank

    @property
    def name(self) -> str:
        """The tensor's name in a checkpoint."""
        return f"{self.part}/{self.weight}"


def saves_alone(weight: str, number: int, count: int) -> bool:
    """Whether the one of this number saves a weight that so many ranks hold alike: others save others."""
    return zlib.crc32(weight.encode()) % count == number


def placed_boxes(bounds: Bounds, low: int, high: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], slice]]:
    """Cut a range of a rank's block into boxes of the whole tensor, each with its slice of the range."""
    shape, start = tuple(stop - begin for begin, stop in bounds), 0
    for offsets, lengths in boxes_of(shape, low, high):
        stop = start + math.prod(lengths)
        yield tuple(at + begin for at, (begin, _) in zip(offsets, bounds, strict=True)), lengths, slice(start, stop)
        start = stop
