"""Where our weights lie in the tensors of files and of NxD: one map, read in both directions.

A patch says which part of a stored tensor holds which box of one of ours. As a view of that tensor it has the axes of
ours, so reading and writing are copies between views, whatever is cut, fused, interleaved or turned there.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from autoshard.layout.shards import Box, boxes_of

Range = tuple[int, int]
UNCUT: Mapping[str, Range] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Axes:
    """How the axes of a tensor are made of dims; a dim with a number stands for one slice along it.

    >>> axes = Axes.parse("hidden (qkv:1 kv_heads head_dim)")
    >>> axes.groups, axes.slices
    ((('hidden',), ('qkv', 'kv_heads', 'head_dim')), (('qkv', 1),))
    """

    groups: tuple[tuple[str, ...], ...]
    slices: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Axes":
        """Read the text form of the tables."""
        dims = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", text)]
        parts = [dim.partition(":") for group in dims for dim in group]
        groups = tuple(tuple(dim.partition(":")[0] for dim in group) for group in dims)
        return cls(groups, tuple((dim, int(number)) for dim, _, number in parts if number))


@dataclass(frozen=True, slots=True)
class Along:
    """A dim that an axis of a stored tensor is made of: its size there, and the selected part of it."""

    size: int
    first: int
    count: int
    dim: int | None  # which axis of ours it is; None where one place along it is meant
    at: int  # where the part begins in ours

    def within(self, offset: int, length: int) -> "Along":
        """Return this dim restricted to a part of the selected part; it may be empty."""
        first = min(max(self.first, offset), offset + length)
        count = min(self.first + self.count, offset + length) - first
        return replace(self, size=length, first=first - offset, count=count, at=self.at + first - self.first)


@dataclass(frozen=True, slots=True)
class Patch:
    """A box of one of our tensors, and where it lies in a stored one."""

    tensor: str
    starts: tuple[int, ...]  # along every axis of the stored tensor
    axes: tuple[tuple[Along, ...], ...]

    @property
    def box(self) -> Box:
        """Offsets and lengths in our tensor."""
        parts = sorted(
            (along.dim, along.at, along.count) for group in self.axes for along in group if along.dim is not None
        )
        return tuple(at for _, at, _ in parts), tuple(count for _, _, count in parts)

    @property
    def place(self) -> tuple[slice, ...]:
        """The box as an index of ours."""
        return tuple(slice(at, at + length) for at, length in zip(*self.box, strict=True))

    def view(self, stored: Any) -> Any:
        """Return the box as a view of a stored tensor or array, with the axes of our tensor."""
        alongs = [along for group in self.axes for along in group]
        lengths = [math.prod(along.size for along in group) for group in self.axes]
        part = stored[tuple(slice(at, at + length) for at, length in zip(self.starts, lengths, strict=True))]
        opened = part.reshape(tuple(along.size for along in alongs))
        parts = (
            along.first if along.dim is None else slice(along.first, along.first + along.count) for along in alongs
        )
        meant = opened[tuple(parts)]
        dims = [along.dim for along in alongs if along.dim is not None]
        order = tuple(dims.index(dim) for dim in range(len(dims)))
        return meant.permute(order) if hasattr(meant, "permute") else meant.transpose(order)

    def rows(self, low: int, high: int) -> Iterator["Patch"]:
        """Yield the parts of the patch in a range of rows of the stored tensor, as patches of these rows alone."""
        first, begin = self.axes[0], self.starts[0]
        total = math.prod(along.size for along in first)
        start, stop = (min(max(row - begin, 0), total) for row in (low, high))
        row = begin + start - low
        for offsets, lengths in boxes_of([along.size for along in first], start, stop):
            group = tuple(along.within(*part) for along, *part in zip(first, offsets, lengths, strict=True))
            if all(along.count > 0 for along in group):
                yield replace(self, starts=(row, *self.starts[1:]), axes=(group, *self.axes[1:]))
            row += math.prod(lengths)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table of names: which tensor of theirs, or part of one, holds the numbers of which tensor of ours.

    >>> row = Row("qkv", Axes.parse("(kv_heads qkv:1 head_dim) hidden"), "k", Axes.parse("kv_heads head_dim hidden"))
    >>> sizes = {"kv_heads": 2, "qkv": 3, "head_dim": 4, "hidden": 8}
    >>> row.shape(sizes), row.patch(sizes).box, row.patch(sizes, {"kv_heads": (1, 2)}).box
    ((24, 8), ((0, 0, 0), (2, 4, 8)), ((1, 0, 0), (1, 4, 8)))
    """

    theirs: str
    axes: Axes
    ours: str
    dims: Axes

    def shape(self, sizes: Mapping[str, int], cuts: Mapping[str, Range] = UNCUT) -> tuple[int, ...]:
        """Return the shape of the stored tensor, which has only these ranges of some dims."""
        local = {**sizes, **{dim: stop - start for dim, (start, stop) in cuts.items()}}
        return tuple(math.prod(local[dim] for dim in group) for group in self.axes.groups)

    def patch(
        self, sizes: Mapping[str, int], cuts: Mapping[str, Range] = UNCUT, starts: Sequence[int] = ()
    ) -> Patch | None:
        """Return where our tensor lies in the stored one, from ``starts`` on; None where only padding is stored."""
        slices, here = dict(self.axes.slices), [dim for group in self.dims.groups for dim in group]

        def along(dim: str) -> Along:
            low, high = cuts.get(dim, (0, sizes[dim]))
            if dim in slices:
                return Along(high - low, slices[dim], 1, None, 0)
            return Along(high - low, 0, min(high, sizes[dim]) - low, here.index(dim), low)

        groups = [tuple(along(dim) for dim in group) for group in self.axes.groups]
        lone = (Along(1, 0, 1, here.index(dim), number) for dim, number in self.dims.slices)
        groups[0] = (*lone, *groups[0])
        if any(piece.count <= 0 for group in groups for piece in group):
            return None
        return Patch(self.ours, tuple(starts) or (0,) * len(groups), tuple(groups))


def stacked(
    rows: Iterable[tuple[Row, Mapping[str, Range]]], axis: int, sizes: Mapping[str, int]
) -> tuple[tuple[int, ...], list[Patch]]:
    """Lay rows, each with its cuts, one behind the other along an axis of one tensor; return its shape and patches."""
    shape, patches, start = (), list[Patch](), 0
    for row, cuts in rows:
        shape = row.shape(sizes, cuts)
        starts = [start if number == axis else 0 for number in range(len(shape))]
        if patch := row.patch(sizes, cuts, starts):
            patches.append(patch)
        start += 0 if row.axes.slices else shape[axis]  # slices say by themselves where each part lies
    return (*shape[:axis], start or shape[axis], *shape[axis + 1 :]), patches


def whole(tensor: str, offsets: Sequence[int], lengths: Sequence[int]) -> Patch:
    """Return the patch of a stored tensor that is just a box of ours."""
    axes = [(Along(size, 0, size, dim, at),) for dim, (at, size) in enumerate(zip(offsets, lengths, strict=True))]
    return Patch(tensor, (0,) * len(axes), tuple(axes))
