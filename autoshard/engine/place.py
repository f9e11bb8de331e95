"""Where a rank stands on the mesh, and which block of a tensor it therefore holds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.graph.op import Array, Dims
from autoshard.layout.layout import Layout
from autoshard.layout.shards import block_bounds
from autoshard.spec.mesh import Mesh

Bounds = tuple[tuple[int, int], ...]  # start and stop along every dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank of a mesh, and the full sizes of all dims.

    >>> mesh = Mesh.parse("pp=1,edp=1,ep=1,cp=1,kv=2,rep=1 on 0-1")
    >>> Place(mesh=mesh, rank=1, sizes={"seq": 5, "hidden": 4}).bounds(Layout.parse("[seq/kv, hidden]"))
    ((3, 5), (0, 4))
    """

    mesh: Mesh
    rank: int
    sizes: Mapping[str, int]

    def at(self, rank: int) -> "Place":
        """Return the place of another rank."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one rank holds of a tensor: a block, or a ``piece`` of the block in storage order (ZeRO)."""

    bounds: Bounds
    array: Array
    piece: tuple[int, int] | None = None


def dims_of(layout: Layout) -> Dims:
    """Return the dims of a layout, in order."""
    return tuple(dim for dim, _ in layout.dims)


def assemble(shape: Sequence[int], parts: Iterable[Held]) -> Array:
    """Put a whole tensor together from what ranks hold; replicas must be equal to the last bit.

    >>> held = (Held(bounds=((0, 2),), array=np.ones(2)), Held(bounds=((2, 4),), array=np.zeros(1), piece=(1, 2)))
    >>> assemble((4,), held)
    Traceback (most recent call last):
    ...
    AssertionError: 1 of 4 elements lie on no rank
    """
    whole, known = np.zeros(shape), np.zeros(shape, dtype=bool)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    for part in parts:
        places = numbers[tuple(slice(start, stop) for start, stop in part.bounds)].reshape(-1)
        places = places if part.piece is None else places[slice(*part.piece)]
        values = part.array.reshape(-1)
        assert len(values) == len(places), f"{len(values)} numbers for a place of {len(places)}"
        seen = known.reshape(-1)[places]
        assert np.array_equal(whole.reshape(-1)[places][seen], values[seen]), "two ranks hold different replicas"
        whole.reshape(-1)[places], known.reshape(-1)[places] = values, True
    assert known.all(), f"{np.count_nonzero(~known)} of {known.size} elements lie on no rank"
    return whole
