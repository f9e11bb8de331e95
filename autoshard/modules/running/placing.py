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
from autoshard.modules.region import Positions


def resting(
    places: Mapping[str, Positions],
    sizes: Mapping[str, int],
    atoms: Mapping[str, int],
    weight: str,
    used: Layout,
    rest: Sequence[str],
) -> Layout:
    """Return the layout in which a parameter rests, from the layout in which the program uses it.

    Ranks along the axes in ``rest`` hold a piece each, as far as DTensor's placements can say so. Where placements
    cannot say a cut, ranks along its axes hold pieces along another dim.
    """
    pieces, positions = _in_pieces(used, rest, sizes, atoms), places[weight]
    said = placeable(pieces, positions, sizes, atoms)
    return _elsewhere(said, _cutting(pieces) - _cutting(said), positions, sizes, atoms)


def _cutting(layout: Layout) -> set[str]:
    return {atom for _, cut in layout.dims for atom in cut}


def _elsewhere(
    layout: Layout, axes: set[str], positions: Positions, sizes: Mapping[str, int], atoms: Mapping[str, int]
) -> Layout:
    """Return a layout in which ranks along these axes hold plain slices of the first position that is whole."""
    count, cuts = math.prod(atoms[axis] for axis in axes), layout.cuts
    whole = (position for position in positions if position and not any(cuts.get(dim) for dim in position))
    first = next((position[0] for position in whole if sizes[position[0]] % count == 0), None)
    if not axes or first is None:
        return layout
    ordered = tuple(atom for atom in atoms if atom in axes)
    return Layout(dims=tuple((dim, ordered if dim == first else cut) for dim, cut in layout.dims))


def _in_pieces(used: Layout, rest: Sequence[str], sizes: Mapping[str, int], atoms: Mapping[str, int]) -> Layout:
    """Return a layout in which ranks that use the same part of a parameter hold equal pieces of it, if a dim divides.

    Dims that nothing cuts yet come first: then a piece is a plain slice.
    """
    count = math.prod(atoms[atom] for atom in rest)
    local = {dim: sizes[dim] / math.prod(atoms[atom] for atom in cut) for dim, cut in used.dims}
    fitting = [(bool(cut), place) for place, (dim, cut) in enumerate(used.dims) if local[dim] % count == 0]
    if not rest or not fitting:
        return used
    chosen = min(fitting)[1]
    dims = ((dim, (*cut, *rest) if place == chosen else cut) for place, (dim, cut) in enumerate(used.dims))
    return Layout(dims=tuple(dims))


def placeable(layout: Layout, positions: Positions, sizes: Mapping[str, int], atoms: Mapping[str, int]) -> Layout:
    """Return a layout without the cuts that placements cannot say.

    Placements cannot say:

    - an uneven cut of a dim that is part of a product of dims, such as heads of 3 ranks in ``heads * head_dim``;
    - a cut of an inner dim of a product, such as ``head_dim`` in ``heads * head_dim``;
    - several cuts of one position, unless each lies inside the one before in the mesh's order (``hidden/dp.tp``), or
      in the reverse order that FSDP makes of a dim which tensor parallelism has cut (``hidden/tp.dp``).

    Such cuts would be strided: torch 2.13 does not save strided placements in checkpoints, and joins two of them
    wrongly. Only the largest cut of the outermost dim is kept.
    """
    sayable: dict[str, tuple[str, ...]] = {}
    for position in positions:
        cuts = {dim: layout.cuts.get(dim, ()) for dim in position}
        even = all(sizes[dim] % math.prod(atoms[atom] for atom in cut) == 0 for dim, cut in cuts.items())
        if not even and not (len(position) == 1 and _in_order(cuts[position[0]], atoms)):
            cuts = dict.fromkeys(position, ())
        several = [atom for cut in cuts.values() for atom in cut]
        places = (_placed(atom, layout, positions, sizes, atoms) for atom in atoms if atom in several)
        blocks = [getattr(placement, "split_factor", 1) for place in places for placement in place]
        inside = math.prod(atoms[atom] for atom in several[:-1])  # as FSDP cuts what tensor parallelism has cut
        nested = [inside] + [1] * (len(several) - 1) if len([cut for cut in cuts.values() if cut]) == 1 else []
        if blocks not in ([1] * len(several), nested):
            first = position[0]  # a plain slice
            largest = max(cuts[first], key=lambda atom: atoms[atom], default=None)
            cuts = {dim: (largest,) if dim == first and largest else () for dim in position}
        sayable |= cuts
    return Layout(dims=tuple((dim, sayable[dim]) for dim, _ in layout.dims))


def _in_order(cut: Sequence[str], atoms: Mapping[str, int]) -> bool:
    return list(cut) == [atom for atom in atoms if atom in cut]


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
                outer = [name for name in cut[: cut.index(atom)] if name not in before]
                blocks *= math.prod(atoms[name] for name in outer)
                yield Shard(axis) if blocks == 1 else _StridedShard(axis, split_factor=blocks)
            blocks *= sizes[dim] // math.prod(atoms[name] for name in cut if name in before)
