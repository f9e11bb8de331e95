"""Which part of our tensors a rank's parameters of NxD hold, in both directions; numpy only."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.engine.patches import Axes, Patch, Row
from autoshard.graph.op import Array
from autoshard.plan.nxd.form import TP, FormParameter, FormPiece
from autoshard.spec.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class TpRank:
    """A rank of a tp group, and how the atoms of tp are counted along it: on trn1 ``rep`` is outermost, on trn2 ``kv``.

    >>> TpRank(atoms=(("rep", 2), ("kv", 2)), index=1).coordinate(("kv",)), TpRank(
    ...     atoms=(("kv", 2), ("rep", 2)), index=1
    ... ).coordinate(("kv",))
    (1, 0)
    """

    atoms: tuple[tuple[str, int], ...]  # outermost first
    index: int

    @classmethod
    def of(cls, mesh: Mesh, index: int) -> "TpRank":
        """Take the order of the atoms from a mesh."""
        return cls(atoms=tuple((atom, size) for atom, size in mesh.axes if atom in TP), index=index)

    def size(self, atoms: Sequence[str]) -> int:
        """Return into how many parts these atoms cut."""
        return math.prod(size for atom, size in self.atoms if atom in atoms)

    def coordinate(self, atoms: Sequence[str]) -> int:
        """Return which of the parts is this rank's: over several atoms in the order of the ranks, as NxD cuts."""
        found, rest = 0, self.index
        weight = 1
        for atom, size in reversed(self.atoms):
            rest, place = divmod(rest, size)
            if atom in atoms:
                found += weight * place
                weight *= size
        return found

    def bounds(self, piece: FormPiece, sizes: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        """Return the rank's block of our tensor along its dims."""
        return tuple(self._bounds(sizes[dim], piece.cuts.get(dim, ())) for dim in piece.dims)

    def _bounds(self, size: int, atoms: Sequence[str]) -> tuple[int, int]:
        count, place = self.size(atoms), self.coordinate(atoms)
        assert size % count == 0, f"{size} does not divide by {count}"
        return place * (size // count), (place + 1) * (size // count)


def local_shape(parameter: FormParameter, rank: TpRank, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of a rank's parameter."""
    shapes = [_shape(piece, rank, sizes) for piece in parameter.pieces]
    shape = list(shapes[0])
    shape[parameter.axis] = sum(one[parameter.axis] for one in shapes)
    return tuple(shape)


def local_of(parameter: FormParameter, rank: TpRank, sizes: Mapping[str, int], whole: Mapping[str, Array]) -> Array:
    """Cut a rank's parameter out of our whole tensors; what is padded is zero."""
    own = {dim: size for one in parameter.pieces for dim, size in zip(one.dims, whole[one.tensor].shape, strict=True)}
    local = np.zeros(local_shape(parameter, rank, sizes), dtype=whole[parameter.pieces[0].tensor].dtype)
    for patch, _ in patches_of(parameter, rank, sizes, own):
        patch.view(local)[...] = whole[patch.tensor][patch.place]
    return local


def patches_of(
    parameter: FormParameter, rank: TpRank, sizes: Mapping[str, int], whole: Mapping[str, int]
) -> Iterator[tuple[Patch, FormPiece]]:
    """Yield what a rank's parameter holds; ``sizes`` are padded, those of our ``whole`` are not."""
    start = 0
    for piece in parameter.pieces:
        shape = _shape(piece, rank, sizes)
        starts = [start if axis == parameter.axis else 0 for axis in range(len(shape))]
        row = Row(parameter.name, Axes(piece.axes), piece.tensor, Axes(tuple((dim,) for dim in piece.dims)))
        if patch := row.patch(whole, dict(zip(piece.dims, rank.bounds(piece, sizes), strict=True)), starts):
            yield patch, piece
        start += shape[parameter.axis]


def _shape(piece: FormPiece, rank: TpRank, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dim] // rank.size(piece.cuts.get(dim, ())) for dim in group) for group in piece.axes)
