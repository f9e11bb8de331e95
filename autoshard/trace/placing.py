"""Where parameters rest: a layout that DTensor's placements can say, and the layout in which a program takes them."""

import math
from collections.abc import Iterator, Mapping, Sequence

from torch.distributed.tensor.placement_types import (  # pyright: ignore[reportMissingTypeStubs]
    Placement,
    Replicate,
    Shard,
    _StridedShard,  # pyright: ignore[reportPrivateUsage]
)

from autoshard.layout.layout import Layout
from autoshard.trace.region import Positions


def resting(given: Layout, rest: Sequence[str], sizes: Mapping[str, int], atoms: Mapping[str, int]) -> Layout:
    """Return a layout in which ranks that use the same part of a parameter hold equal pieces of it, if one divides.

    Dims that nothing cuts yet come first: then a piece is a plain slice.
    """
    count = math.prod(atoms[atom] for atom in rest)
    local = {dim: sizes[dim] / math.prod(atoms[atom] for atom in cut) for dim, cut in given.dims}
    fitting = [(bool(cut), place) for place, (dim, cut) in enumerate(given.dims) if local[dim] % count == 0]
    if not rest or not fitting:
        return given
    chosen = min(fitting)[1]
    dims = ((dim, (*cut, *rest) if place == chosen else cut) for place, (dim, cut) in enumerate(given.dims))
    return Layout(dims=tuple(dims))


def placeable(layout: Layout, positions: Positions, sizes: Mapping[str, int], atoms: Mapping[str, int]) -> Layout:
    """Return a layout without the cuts that placements cannot say.

    Those are uneven ones inside a product of dims, and several of one position, unless they cut it one inside the other
    in the mesh's order, or in the other order as FSDP cuts what tensor parallelism has cut (torch 2.13 puts others
    together wrongly). Of these only that of the largest axis is kept.
    """
    kept: dict[str, tuple[str, ...]] = {}
    for position in positions:
        cuts = {dim: layout.cuts.get(dim, ()) for dim in position}
        even = all(sizes[dim] % math.prod(atoms[atom] for atom in cut) == 0 for dim, cut in cuts.items())
        if not even and not (len(position) == 1 and _in_order(cuts[position[0]], atoms)):
            cuts = dict.fromkeys(position, ())
        several = [atom for cut in cuts.values() for atom in cut]
        if len(several) > 1:
            own = [_placed(atom, layout, positions, sizes, atoms) for atom in atoms if atom in several]
            blocks = [getattr(found, "split_factor", 1) for one in own for found in one]
            nested = [math.prod(atoms[atom] for atom in atoms if atom in several[:-1])] + [1] * (len(several) - 1)
            if blocks not in ([1] * len(several), nested) or len([cut for cut in cuts.values() if cut]) > 1:
                largest = max(several, key=lambda atom: atoms[atom])
                cuts = {dim: tuple(atom for atom in cut if atom == largest) for dim, cut in cuts.items()}
        kept |= cuts
    return Layout(dims=tuple((dim, kept[dim]) for dim, _ in layout.dims))


def _in_order(cut: Sequence[str], atoms: Mapping[str, int]) -> bool:
    return list(cut) == [one for one in atoms if one in cut]


def placements(
    layout: Layout, positions: Positions, sizes: Mapping[str, int], atoms: Mapping[str, int]
) -> tuple[Placement, ...]:
    """Return DTensor's placement along each axis of the mesh; torch applies them in this order.

    An axis that cuts an inner dim of a product, or one that a later axis cuts further out, takes a piece of each block.
    """
    return tuple(next(_placed(atom, layout, positions, sizes, atoms), Replicate()) for atom in atoms)


def _placed(
    atom: str, layout: Layout, positions: Positions, sizes: Mapping[str, int], atoms: Mapping[str, int]
) -> Iterator[Placement]:
    before = list(atoms)[: list(atoms).index(atom)]
    for axis, position in enumerate(positions):
        blocks = 1  # of which the axis takes a piece each
        for dim in position:
            cut = layout.cuts.get(dim, ())
            if atom in cut:
                outer = [one for one in cut[: cut.index(atom)] if one not in before]
                blocks *= math.prod(atoms[one] for one in outer)
                yield Shard(axis) if blocks == 1 else _StridedShard(axis, split_factor=blocks)
            blocks *= sizes[dim] // math.prod(atoms[one] for one in cut if one in before)
