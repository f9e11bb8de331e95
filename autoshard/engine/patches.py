"""Where our weights lie in the tensors of files and of NxD: one map, read in both directions.

A patch says which part of a stored tensor holds which box of one of ours. As a view of that tensor it has the axes of
ours, so reading and writing are copies between views, whatever is cut, fused, interleaved or turned there.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np

from autoshard.layout.shards import Box, boxes_of

Range = tuple[int, int]
Index = tuple[slice, ...]
UNCUT: Mapping[str, Range] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Axes:
    """How the axes of a tensor are made of dims; a dim with a number stands for one slice along it.

    A dim may be made of parts, each with a name and a size: ``a+b`` lie one behind the other, ``a*b`` by turns. Axes
    that begin with ``>`` lie ``behind`` what the rows before hold of the same tensor, along its first axis.

    >>> axes = Axes.parse("hidden (qkv:1 kv_heads head_dim)")
    >>> axes.groups, axes.slices
    ((('hidden',), ('qkv', 'kv_heads', 'head_dim')), (('qkv', 1),))
    """

    groups: tuple[tuple[str, ...], ...]
    slices: tuple[tuple[str, int], ...] = ()
    behind: bool = False

    @classmethod
    def parse(cls, text: str) -> "Axes":
        """Read the text form of the tables."""
        dims = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|[^\s>]+", text)]
        parts = [dim.partition(":") for group in dims for dim in group]
        groups = tuple(tuple(dim.partition(":")[0] for dim in group) for group in dims)
        return cls(groups, tuple((dim, int(number)) for dim, _, number in parts if number), text.startswith(">"))


@dataclass(frozen=True, slots=True)
class Along:
    """A dim that an axis of a stored tensor is made of: its size there, and the selected part of it."""

    size: int
    first: int
    count: int
    dim: int | None  # which axis of ours it is; None where one place along it is meant
    at: int  # where the part begins in ours
    step: int = 1  # from one number of the part to the next

    @property
    def slice(self) -> slice:
        """The selected part as an index of the stored dim."""
        return slice(self.first, self.first + self.step * self.count, self.step)

    def places(self, part: Index) -> range:
        """Return where a part of a box lies along this dim; the part is one slice for each axis of ours."""
        if self.dim is None:
            return range(self.first, self.first + 1)
        return range(self.first, self.first + self.step * self.count, self.step)[part[self.dim]]

    def within(self, offset: int, length: int) -> "Along":
        """Return this dim restricted to a range of it; nothing may be left of the selected part."""
        before, end = (-(-max(place - self.first, 0) // self.step) for place in (offset, offset + length))
        first, count = self.first + before * self.step - offset, min(end, self.count) - before
        return replace(self, size=length, first=first, count=count, at=self.at + before)


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
        parts = (along.first if along.dim is None else along.slice for along in alongs)
        return self._turned(opened[tuple(parts)])

    def places(self, part: Index) -> tuple[np.ndarray, ...]:
        """Return where the numbers of a part of the box lie along every axis of the stored tensor."""
        along_axes = list[np.ndarray]()
        for start, group in zip(self.starts, self.axes, strict=True):
            places = np.zeros(1, np.int64)
            for along in group:
                places = np.add.outer(places * along.size, along.places(part)).reshape(-1)
            along_axes.append(start + places)
        return tuple(along_axes)

    def arranged(self, numbers: Any, part: Index) -> Any:
        """Return the numbers at the ``places`` of a part of the box with the axes of our tensor."""
        alongs = [along for group in self.axes for along in group if along.dim is not None]
        return self._turned(numbers.reshape(tuple(len(along.places(part)) for along in alongs)))

    def _turned(self, numbers: Any) -> Any:
        """Bring the axes of selected numbers into the order of ours."""
        dims = [along.dim for group in self.axes for along in group if along.dim is not None]
        order = tuple(dims.index(dim) for dim in range(len(dims)))
        return numbers.permute(order) if hasattr(numbers, "permute") else numbers.transpose(order)

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
    >>> row.shape(sizes), [patch.box for cuts in ({}, {"kv_heads": (1, 2)}) for patch in row.patches(sizes, cuts)]
    ((24, 8), [((0, 0, 0), (2, 4, 8)), ((1, 0, 0), (1, 4, 8))])
    >>> row = Row("turned", Axes.parse("plain+even*odd"), "key", Axes.parse("even+odd+plain"))
    >>> parts = row.patches({"plain": 3, "even": 2, "odd": 2})
    >>> [(patch.axes[0][0].slice, patch.place) for patch in parts[1:]]
    [(slice(4, 8, 2), (slice(2, 4, None),)), (slice(0, 3, 1), (slice(4, 7, None),))]
    """

    theirs: str
    axes: Axes
    ours: str
    dims: Axes

    def shape(self, sizes: Mapping[str, int], cuts: Mapping[str, Range] = UNCUT) -> tuple[int, ...]:
        """Return the shape of the stored tensor, which has only these ranges of some dims."""
        local = {**sizes, **{dim: stop - start for dim, (start, stop) in cuts.items()}}
        return tuple(math.prod(_places(dim, local)[0] for dim in group) for group in self.axes.groups)

    def patches(
        self, sizes: Mapping[str, int], cuts: Mapping[str, Range] = UNCUT, starts: Sequence[int] = ()
    ) -> tuple[Patch, ...]:
        """Return where our tensor lies in the stored one, from ``starts`` on; nothing where only padding is stored.

        There is a patch for each part of a dim of ours that is made of parts.
        """
        local = {**sizes, **{dim: stop - start for dim, (start, stop) in cuts.items()}}
        slices, ours = dict(self.axes.slices), [dim for group in self.dims.groups for dim in group]
        here = [_places(dim, sizes)[1] for dim in ours]

        def along(dim: str, chosen: Sequence[str]) -> Along:
            size, places = _places(dim, local)
            if dim in slices:
                return Along(size, slices[dim], 1, None, 0)
            part = next(part for part in places if part in chosen)
            number, (first, step) = chosen.index(part), places[part]
            low, high = cuts.get(part, (0, sizes[part]))
            return Along(size, first, min(high, sizes[part]) - low, number, here[number][part][0] + low, step)

        patches: list[Patch] = []
        for chosen in product(*here):
            if not all(self._holds(part) for part in chosen):
                continue
            groups = [tuple(along(dim, chosen) for dim in group) for group in self.axes.groups]
            lone = (Along(1, 0, 1, chosen.index(dim), number) for dim, number in self.dims.slices)
            groups[0] = (*lone, *groups[0])
            if all(piece.count > 0 for group in groups for piece in group):
                patches.append(Patch(self.ours, tuple(starts) or (0,) * len(groups), tuple(groups)))
        return tuple(patches)

    def _holds(self, part: str) -> bool:
        """Say whether the stored tensor has a part of a dim of ours."""
        return part in dict(self.dims.slices) or any(
            part in parts_of(dim) for group in self.axes.groups for dim in group
        )


def parts_of(dim: str) -> tuple[str, ...]:
    """Return the parts of a dim; a dim without parts is one.

    >>> parts_of("plain+even*odd"), parts_of("hidden")
    (('plain', 'even', 'odd'), ('hidden',))
    """
    return tuple(re.split(r"[+*]", dim))


def _places(dim: str, sizes: Mapping[str, int]) -> tuple[int, Mapping[str, tuple[int, int]]]:
    """Return the size of a dim, and where each of its parts begins in it, with the step to the next number."""
    places, size = dict[str, tuple[int, int]](), 0
    for run in dim.split("+"):
        by_turns = run.split("*")
        places |= {part: (size + number, len(by_turns)) for number, part in enumerate(by_turns)}
        size += sum(sizes[part] for part in by_turns)
    return size, places


def stacked(
    rows: Iterable[tuple[Row, Mapping[str, Range]]], axis: int, sizes: Mapping[str, int]
) -> tuple[tuple[int, ...], list[Patch]]:
    """Lay rows, each with its cuts, one behind the other along an axis of one tensor; return its shape and patches."""
    shape, patches, start = (), list[Patch](), 0
    for row, cuts in rows:
        shape = row.shape(sizes, cuts)
        starts = [start if number == axis else 0 for number in range(len(shape))]
        patches += row.patches(sizes, cuts, starts)
        start += 0 if row.axes.slices else shape[axis]  # slices say by themselves where each part lies
    return (*shape[:axis], start or shape[axis], *shape[axis + 1 :]), patches


def whole(tensor: str, offsets: Sequence[int], lengths: Sequence[int]) -> Patch:
    """Return the patch of a stored tensor that is just a box of ours."""
    axes = [(Along(size, 0, size, dim, at),) for dim, (at, size) in enumerate(zip(offsets, lengths, strict=True))]
    return Patch(tensor, (0,) * len(axes), tuple(axes))
