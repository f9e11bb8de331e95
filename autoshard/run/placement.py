"""Which part of every tensor a rank holds: by its place on the mesh, by the order of the sequence, by its optimizer."""

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import require
from autoshard.graph.op import Array, Dims
from autoshard.layout.layout import Layout
from autoshard.layout.shards import block_bounds, boxes_of
from autoshard.plan.plan import Plan
from autoshard.spec.mesh import Mesh

Bounds = tuple[tuple[int, int], ...]  # start and stop along every dim
StatePart = Literal["weight", "moment1", "moment2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRank:
    """A rank of a mesh, and the full sizes of all dims.

    >>> mesh = Mesh.parse("pp=1,edp=1,ep=1,cp=1,kv=2,rep=1 on 0-1")
    >>> MeshRank(mesh=mesh, rank=1, sizes={"seq": 5, "hidden": 4}).bounds(Layout.parse("[seq/kv, hidden]"))
    ((3, 5), (0, 4))
    """

    mesh: Mesh
    rank: int
    sizes: Mapping[str, int]

    def at(self, rank: int) -> "MeshRank":
        """Return another rank of the mesh."""
        return replace(self, rank=rank)

    def coordinate(self, atom: str) -> int:
        """Return where the rank stands along an atom; 0 where the mesh does not have it."""
        return self.mesh.coordinates(self.rank).get(atom, 0)

    def is_first(self, atoms: Iterable[str]) -> bool:
        """Whether no rank stands before this one along these atoms."""
        return all(self.coordinate(atom) == 0 for atom in atoms)

    def dim_bounds(self, dim: str, atoms: Sequence[str]) -> tuple[int, int]:
        """Return which part of a dim the rank holds when the dim is cut over atoms."""
        cuts = [(self.mesh.size(atom), self.coordinate(atom)) for atom in atoms if self.mesh.atoms_of(atom)]
        return block_bounds(self.sizes[dim], cuts)

    def bounds(self, layout: Layout) -> Bounds:
        """Return the block that the rank holds of a tensor in this layout."""
        return tuple(self.dim_bounds(dim, atoms) for dim, atoms in layout.dims)

    def shape(self, layout: Layout) -> tuple[int, ...]:
        """Return the shape of that block."""
        return tuple(stop - start for start, stop in self.bounds(layout))

    def block(self, array: Array, layout: Layout) -> Array:
        """Cut the rank's block out of a whole array."""
        return array[tuple(slice(start, stop) for start, stop in self.bounds(layout))]


def dims_of(layout: Layout) -> Dims:
    """Return the dims of a layout, in order."""
    return tuple(dim for dim, _ in layout.dims)


def sequence_order(plan: Plan) -> NDArray[np.int64]:
    """Return the positions of a sequence in the order in which blocks of it lie on the ranks of cp."""
    count, parts = plan.workload.seq_len, 2 * plan.mesh.size("cp")
    if plan.cp_order == "contiguous" or parts == 2:
        return np.arange(count)
    require((count % parts == 0, "cp_order", f"zigzag cuts a sequence into {parts} parts, and {count} does not divide"))
    return zigzag(count, parts // 2)


def zigzag(count: int, num_ranks: int) -> NDArray[np.int64]:
    """Give every rank one part of the first half, and its mirror image in the second half.

    >>> zigzag(8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    parts = np.arange(count).reshape(2 * num_ranks, -1)
    return np.concatenate([part for rank in range(num_ranks) for part in (parts[rank], parts[-1 - rank])])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StatePiece:
    """A box of one tensor of a run's state; ``memory`` is a view of what the engine updates, so loading fills it."""

    weight: str  # as in ``OpGraph.instances``: layer.3.up.weight; weights that share their values have the owner's name
    part: StatePart  # the weight in the format in which it is updated, or a moment of the optimizer
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
    """Whether the replica of this number, of ``count``, saves a weight; each replica saves other weights."""
    return zlib.crc32(weight.encode()) % count == number


def placed_boxes(bounds: Bounds, low: int, high: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], slice]]:
    """Cut a range of a rank's block into boxes of the whole tensor, each with its slice of the range."""
    shape, start = tuple(stop - begin for begin, stop in bounds), 0
    for offsets, lengths in boxes_of(shape, low, high):
        stop = start + math.prod(lengths)
        yield tuple(at + begin for at, (begin, _) in zip(offsets, bounds, strict=True)), lengths, slice(start, stop)
        start = stop
