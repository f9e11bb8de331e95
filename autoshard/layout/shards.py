"""Which block of a dim a rank holds, the last ones smaller where it does not divide; collectives on virtual ranks."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.graph.op import Array, Dims
from autoshard.layout.layout import Collective, Layout
from autoshard.spec.mesh import Mesh

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


@functools.lru_cache(maxsize=1 << 14)
def rank_bounds(mesh: Mesh, size: int, atoms: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Return which part of a dim of this size each rank holds when the dim is cut over atoms.

    >>> rank_bounds(Mesh.virtual(cp=2, kv=2), 7, ("cp",))
    ((0, 4), (0, 4), (4, 7), (4, 7))
    """
    sizes = dict(mesh.axes)
    parts = [atom for atom in atoms if atom in sizes]
    where = (mesh.coordinates(rank) for rank in range(mesh.num_ranks))
    return tuple(block_bounds(size, [(sizes[atom], place[atom]) for atom in parts]) for place in where)


Shards = tuple[Array, ...]  # one array per rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """Runs collectives among virtual ranks; a dim's block sizes follow from its full size."""

    mesh: Mesh
    sizes: Mapping[str, int]

    def scatter(self, array: Array, dims: Dims, layout: Layout) -> Shards:
        """Give every rank its part of a whole array; where a sum is pending, one rank of each group has all of it."""
        cuts = dict(layout.dims)
        shards: list[Array] = []
        for rank in range(self.mesh.num_ranks):
            block = tuple(slice(*rank_bounds(self.mesh, self.sizes[dim], cuts[dim])[rank]) for dim in dims)
            here = self.mesh.coordinates(rank)
            first = all(here.get(atom, 0) == 0 for atom in layout.sums)
            shards.append(array[block] if first else np.zeros_like(array[block]))
        return tuple(shards)

    def gather(self, shards: Shards, dims: Dims, layout: Layout) -> Array:
        """Return the whole array that the ranks hold together, and check that replicas are equal."""
        cuts = dict(layout.dims)
        shape = [self.sizes[dim] for dim in dims]
        whole, seen = np.zeros(shape), np.zeros(shape, dtype=bool)
        if layout.sums:
            shards = self.run(Collective(kind="all_reduce", dim=None, atoms=layout.sums), shards, ())
        if layout.maxima:
            shards = self.run(Collective(kind="all_reduce_max", dim=None, atoms=layout.maxima), shards, ())
        for rank, shard in enumerate(shards):
            block = tuple(slice(*rank_bounds(self.mesh, self.sizes[dim], cuts[dim])[rank]) for dim in dims)
            held, is_known = whole[block], seen[block]
            assert held.shape == shard.shape, f"rank {rank} holds {shard.shape}, its block is {held.shape}"
            assert np.allclose(held[is_known], shard[is_known], rtol=1e-9, atol=1e-12), f"rank {rank} differs"
            whole[block], seen[block] = shard, True
        assert seen.all(), "some elements lie on no rank"
        return whole

    def check(self, shards: Shards, layout: Layout) -> None:
        """Verify that every rank holds as much as the layout says."""
        held = [rank_bounds(self.mesh, self.sizes[dim], cut) for dim, cut in layout.dims]
        for rank, shard in enumerate(shards):
            expected = tuple(stop - start for start, stop in (bounds[rank] for bounds in held))
            assert shard.shape == expected, f"rank {rank} holds {shard.shape}, {layout} says {expected}"

    def run(self, collective: Collective, shards: Shards, dims: Dims) -> Shards:
        """Execute one collective over arrays of these dims."""
        results: list[Array] = list(shards)
        for group in self.mesh.groups(collective.atoms):
            received = self._exchanged(collective, [shards[rank] for rank in group], dims)
            for rank, result in zip(group, received, strict=True):
                results[rank] = result
        return tuple(results)

    def _exchanged(self, collective: Collective, parts: Sequence[Array], dims: Dims) -> Sequence[Array]:
        """Return what the members of one group hold after a collective."""
        axis, atoms = dims.index(collective.dim) if collective.dim else 0, collective.atoms
        match collective.kind:
            case "all_gather":
                return [np.concatenate(parts, axis=axis)] * len(parts)
            case "all_reduce":
                return [_sum(parts)] * len(parts)
            case "all_reduce_max":
                return [np.max(np.stack(parts), axis=0)] * len(parts)
            case "reduce_scatter":
                return self._split(_sum(parts), axis, atoms)
            case "slice":
                return [self._split(part, axis, atoms)[number] for number, part in enumerate(parts)]
            case "all_to_all":
                assert collective.to_dim, "an all_to_all goes to another dim"
                split = [self._split(part, dims.index(collective.to_dim), atoms) for part in parts]
                return [np.concatenate([blocks[number] for blocks in split], axis=axis) for number in range(len(parts))]
            case _:
                raise AssertionError(f"{collective} is not between the ranks of a group")

    def _split(self, array: Array, axis: int, atoms: Sequence[str]) -> list[Array]:
        """Cut an array into one block per member of a group over atoms, in the group's order."""
        counts = [self.mesh.size(atom) for atom in atoms]
        blocks: list[Array] = []
        for index in np.ndindex(*counts):
            start, stop = block_bounds(array.shape[axis], list(zip(counts, index, strict=True)))
            blocks.append(array[(slice(None),) * axis + (slice(start, stop),)])
        return blocks


def _sum(parts: Sequence[Array]) -> Array:
    return np.sum(np.stack(parts), axis=0)
