"""Dims found by what operations do: equal ones become one, and a dim that is split becomes a product of smaller ones.

A position of a tensor's shape is a product of dims, outermost first: a view that merges or splits positions only groups
the same dims otherwise. Positions of size 1 hold no dim.
"""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Position = tuple["Dim", ...]


class NotAligned(Exception):
    """Two products of dims that cannot be made of the same dims, as 2 x 3 read as 3 x 2."""


class Collision(Exception):
    """Two dims that cannot be one, because a tensor has both."""


@dataclass(eq=False)
class Dim:
    """One dim while a program is read; ``parts`` are the dims that it turned out to be a product of."""

    size: int
    hint: str = ""  # of a name
    is_given: bool = False  # whether the user gave the hint
    weight: int = 2  # of the hint: 2 for a name of the dim, 1 for a place in a tensor of the code, 0 in a result
    same: "Dim | None" = None
    parts: Position | None = None
    tensors: set[object] = field(default_factory=set[object])  # that have it, by number

    def says(self) -> tuple[bool, int]:
        """Return how much the hint says: one that the user gave most."""
        return self.is_given, self.weight if self.hint else -1

    def root(self) -> "Dim":
        """Return the dim that stands for all that are equal to this one."""
        dim = self
        while dim.same is not None:
            if dim.same.same is not None:
                dim.same = dim.same.same  # chains grow with the layers, and are asked for at each
            dim = dim.same
        return dim


def factors(dims: Iterable[Dim]) -> Position:
    """Return the dims that a product is made of."""
    leaf_dims: list[Dim] = []
    for dim in dims:
        root = dim.root()
        leaf_dims += factors(root.parts) if root.parts is not None else [root]
    return tuple(leaf_dims)


def fresh(size: int, hint: str = "", *, is_given: bool = False) -> Position:
    """Return a position with a dim of its own; none of size 1."""
    return (Dim(size, hint, is_given),) if size != 1 else ()


def size_of(position: Position) -> int:
    """Return how long a position is."""
    return math.prod(dim.size for dim in factors(position))


def unify(first: Position, second: Position) -> None:
    """Make two products the same, dim by dim from the outermost; split a dim where the other has a factor of it.

    >>> whole, outer, inner = fresh(12), fresh(4), fresh(3)
    >>> unify(whole, (*outer, *inner))
    >>> factors(whole) == factors((*outer, *inner))
    True
    """
    place = 0
    while True:
        first_dims, second_dims = factors(first), factors(second)
        if place == len(first_dims) == len(second_dims):
            return
        if place >= min(len(first_dims), len(second_dims)):
            raise NotAligned
        a, b = first_dims[place], second_dims[place]
        if a is b:
            place += 1
        elif a.size == b.size:
            _join(a, b)
            place += 1
        else:
            large, small = (a, b) if a.size > b.size else (b, a)
            if large.size % small.size:
                raise NotAligned
            _split(large, small.size)


def name_places(tensor: str, positions: Sequence[Position], weight: int) -> None:
    """Name dims that nothing names after a tensor that has them, and their place in it.

    >>> name_places("x", [rows := fresh(8), columns := fresh(4, "up")], 1)
    >>> rows[0].hint, columns[0].hint
    ('x_dim0', 'up')
    """
    for axis, position in enumerate(positions):
        for dim in factors(position):
            if not dim.hint:
                dim.hint, dim.weight = f"{tensor.lstrip('_')}_dim{axis}", weight


def shown_hint(dim: Dim) -> str:
    """Return the hint of a dim as a name: products by the name of what they make, as ``q`` for ``q_proj``.

    >>> [shown_hint(Dim(4, hint)) for hint in ("q_proj", "in_proj", "layer 1", "")]
    ['q', 'in_proj', 'layer_1', 'dim']
    """
    name = re.sub(r"\W", "_", dim.hint) or "dim"
    return name if name in ("in_proj", "out_proj") else name.removesuffix("_proj")


def separate(first: Dim, second: Dim) -> None:
    """Keep two dims from ever becoming one."""
    mark = object()
    first.tensors.add(mark)
    second.tensors.add(mark)


def match_sizes(first: Dim, second: Dim) -> None:
    """Split two dims into factors of the same sizes, without making them one."""
    place = 0
    while True:
        first_dims, second_dims = factors((first,)), factors((second,))
        if place == len(first_dims) == len(second_dims):
            return
        a, b = first_dims[place], second_dims[place]
        if a.size == b.size:
            place += 1
        else:
            large, small = (a, b) if a.size > b.size else (b, a)
            if large.size % small.size:
                raise NotAligned
            _split(large, small.size)


def note(number: int, positions: Sequence[Position]) -> None:
    """Note that a tensor has these dims, which must be different ones."""
    dims = factors(itertools.chain(*positions))
    if len(set(dims)) < len(dims):
        raise Collision
    for dim in dims:
        dim.tensors.add(number)


def _join(a: Dim, b: Dim) -> None:
    if a.tensors & b.tensors:
        raise Collision
    a.tensors |= b.tensors
    if b.says() > a.says():
        a.hint, a.is_given, a.weight = b.hint, b.is_given, b.weight
    b.same = a


def _split(dim: Dim, outer: int) -> None:
    sizes = outer, dim.size // outer
    parts = tuple(Dim(size, dim.hint, dim.is_given, dim.weight) for size in sizes)
    for part in parts:
        part.tensors |= dim.tensors
    dim.parts = parts
