"""Which block of a dim a rank holds: contiguous, nested, the last ones smaller where a size does not divide."""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.errors import require

Coordinates = Mapping[str, int]
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and lengths along every dim


def block_bounds(size: int, parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return where a block starts and stops, for ``(number of blocks, which one)`` from the outermost cut inwards.

    >>> block_bounds(10, [(2, 1)]), block_bounds(10, [(4, 3)]), block_bounds(12, [(2, 1), (3, 2)])
    ((5, 10), (9, 10), (10, 12))
    """
    start, stop = 0, size
    for count, index in parts:
        block = -(-(stop - start) // count)
        start, stop = min(start + index * block, stop), min(start + (index + 1) * block, stop)
    return start, stop


def boxes_of(shape: Sequence[int], low: int, high: int) -> Iterator[Box]:
    """Cut a range of a tensor in storage order into boxes, in storage order.

    >>> list(boxes_of((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if low >= high:
        return
    if not shape:
        yield (), ()
        return
    row, inner = math.prod(shape[1:]), shape[1:]
    first, last = -(-low // row), high // row  # rows that are whole
    if first > last:  # inside one row
        yield from _in_row(last, boxes_of(inner, low - last * row, high - last * row))
        return
    if low < first * row:
        yield from _in_row(first - 1, boxes_of(inner, low - (first - 1) * row, row))
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    if last * row < high:
        yield from _in_row(last, boxes_of(inner, 0, high - last * row))


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    return (((row, *offsets), (1, *lengths)) for offsets, lengths in boxes)


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualMesh:
    """Ranks that exist only as coordinates along atoms; numbered with the last atom fastest.

    >>> mesh = VirtualMesh(atoms=(("dp", 2), ("tp", 2)))
    >>> [list(group) for group in mesh.groups(("dp",))]
    [[0, 2], [1, 3]]
    """

    atoms: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        """Refuse atoms that stand twice and sizes below 1."""
        names = [name for name, _ in self.atoms]
        require(
            (len(set(names)) == len(names), "atoms", f"an atom stands twice in {names}"),
            *((size >= 1, f"atoms.{name}", f"must be at least 1, not {size}") for name, size in self.atoms),
        )

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return math.prod(size for _, size in self.atoms)

    def size(self, atoms: Sequence[str]) -> int:
        """Return how many ranks a group over these atoms has; an atom that is not there has size 1."""
        sizes = dict(self.atoms)
        return math.prod(sizes.get(atom, 1) for atom in atoms)

    def coordinates(self, rank: int) -> Coordinates:
        """Return where a rank stands."""
        found: dict[str, int] = {}
        for name, size in reversed(self.atoms):
            rank, found[name] = divmod(rank, size)
        return found

    def groups(self, atoms: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Yield the groups of ranks that differ only along these atoms, members in the order of the atoms given."""
        sizes = dict(self.atoms)
        strides = self._strides()
        present = [atom for atom in atoms if atom in sizes]
        others = [name for name, _ in self.atoms if name not in present]
        for base in itertools.product(*(range(sizes[name]) for name in others)):
            start = sum(strides[name] * index for name, index in zip(others, base, strict=True))
            members = itertools.product(*(range(sizes[name]) for name in present))
            yield tuple(
                start + sum(strides[name] * index for name, index in zip(present, member, strict=True))
                for member in members
            )

    def bounds(self, rank: int, size: int, atoms: Sequence[str]) -> tuple[int, int]:
        """Return which part of a dim of this size a rank holds when the dim is cut over atoms."""
        return self.all_bounds(size, tuple(atoms))[rank]

    def all_bounds(self, size: int, atoms: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
        """Return for every rank which part of a dim of this size it holds."""
        return _all_bounds(self, size, atoms)

    def _strides(self) -> dict[str, int]:
        strides, stride = dict[str, int](), 1
        for name, size in reversed(self.atoms):
            strides[name] = stride
            stride *= size
        return strides


@functools.lru_cache(maxsize=1 << 14)
def _all_bounds(mesh: VirtualMesh, size: int, atoms: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    sizes = dict(mesh.atoms)
    parts = [atom for atom in atoms if atom in sizes]
    places = (mesh.coordinates(rank) for rank in range(mesh.num_ranks))
    return tuple(block_bounds(size, [(sizes[atom], place[atom]) for atom in parts]) for place in places)
