"""Which part of our tensors a rank's parameters of NxD hold, in both directions; numpy only."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.graph.op import Array, Dims
from autoshard.layout.layout import Cuts
from autoshard.layout.shards import boxes_of
from autoshard.plan.nxd.form import FormParameter, Piece
from autoshard.plan.nxd.matching import TP
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

    def bounds(self, piece: Piece, sizes: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
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
    parts: list[Array] = []
    for piece in parameter.pieces:
        missing = [(0, sizes[dim] - have) for dim, have in zip(piece.dims, whole[piece.tensor].shape, strict=True)]
        array = np.pad(whole[piece.tensor], missing) if any(more for _, more in missing) else whole[piece.tensor]
        block = array[tuple(slice(*bounds) for bounds in rank.bounds(piece, sizes))]
        parts.append(block.transpose(_places(piece.dims, piece.moved)).reshape(_shape(piece, rank, sizes)))
    return np.concatenate(parts, axis=parameter.axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A box of one of our whole tensors, and where it lies in some rows of a rank's parameter.

    The rows at ``region`` are opened to ``shape``, their dims put in the ``order`` of ours, and padding is left out.
    """

    tensor: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    region: tuple[slice, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]
    kept: tuple[slice, ...]
    cuts: Cuts = field(hash=False)  # by atoms of tp: ranks along the others hold the same box


def boxes_in(
    parameter: FormParameter, rank: TpRank, sizes: Mapping[str, int], whole: Mapping[str, int], rows: tuple[int, int]
) -> Iterator[Box]:
    """Yield what a range of rows of a rank's parameter holds; ``sizes`` are padded, those of our ``whole`` are not."""
    start = 0
    for piece in parameter.pieces:
        shape = _shape(piece, rank, sizes)
        bounds = dict(zip(piece.dims, rank.bounds(piece, sizes), strict=True))
        begins = start if parameter.axis == 0 else 0  # the row where the piece does
        low, high = (min(max(row - begins, 0), shape[0]) for row in rows)
        region = [slice(None)] * len(shape)
        region[parameter.axis] = slice(start, start + shape[parameter.axis])
        row = begins + low - rows[0]
        for offsets, lengths in boxes_of([bounds[dim][1] - bounds[dim][0] for dim in piece.axes[0]], low, high):
            region[0] = slice(row, row + math.prod(lengths))
            row = region[0].stop
            at, size = {dim: begin for dim, (begin, _) in bounds.items()}, dict[str, int]()
            for dim, offset, length in zip(piece.axes[0], offsets, lengths, strict=True):
                at[dim], size[dim] = at[dim] + offset, length
            size = {dim: stop - begin for dim, (begin, stop) in bounds.items()} | size
            left = [min(size[dim], whole[dim] - at[dim]) for dim in piece.dims]
            if min(left) > 0:
                yield Box(
                    tensor=piece.tensor, whole=tuple(whole[dim] for dim in piece.dims),
                    offsets=tuple(at[dim] for dim in piece.dims), region=tuple(region),
                    shape=tuple(size[dim] for dim in piece.moved), order=tuple(_places(piece.moved, piece.dims)),
                    kept=tuple(slice(count) for count in left), cuts=piece.cuts,
                )  # fmt: skip
        start += shape[parameter.axis]


def _shape(piece: Piece, rank: TpRank, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dim] // rank.size(piece.cuts.get(dim, ())) for dim in group) for group in piece.axes)


def _places(before: Dims, after: Dims) -> list[int]:
    """Return where each dim stands before it is moved."""
    return [before.index(dim) for dim in after]
