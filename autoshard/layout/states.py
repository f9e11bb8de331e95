"""All layouts that a tensor can have on a mesh, and the cheapest way between any two of them."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from autoshard.graph.op import Dims
from autoshard.layout.layout import Layout
from autoshard.layout.redistribute import Price, single_changes

Matrix = Any  # numpy array of floats, one row and one column per state
Pending = Literal["sums", "maxima"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutStates:
    """The layouts of a tensor with these dims, numbered, with the price of getting from each to each.

    The price is that of ``redistribute``, which touches only atoms that one of the two layouts names; infinity where
    there is no way.
    """

    layouts: tuple[Layout, ...]
    number: Mapping[Layout, int]
    price: Matrix

    @classmethod
    def of(cls, dims: Dims, atoms: Sequence[str], price: Price, pending: Pending = "sums") -> "LayoutStates":
        """Find all shortest paths between all layouts (Floyd and Warshall), for each set of atoms that is touched."""
        layouts = tuple(all_layouts(dims, atoms, pending))
        number = {layout: index for index, layout in enumerate(layouts)}
        used = np.array([_mask(layout, atoms) for layout in layouts])
        steps = _steps(layouts, number, set(atoms), price)
        matrix = np.full(steps.shape, np.inf)
        for touched in range(1 << len(atoms)):
            inside = np.flatnonzero((used & ~touched) == 0)
            ways = steps[np.ix_(inside, inside)]
            for middle in range(len(inside)):
                np.minimum(ways, ways[:, middle, None] + ways[None, middle], out=ways)
            exact = (used[inside, None] | used[None, inside]) == touched
            place = np.ix_(inside, inside)
            matrix[place] = np.where(exact, ways, matrix[place])
        return cls(layouts=layouts, number=number, price=matrix)


def all_layouts(dims: Dims, atoms: Sequence[str], pending: Pending = "sums") -> Iterator[Layout]:
    """Yield every layout: each atom cuts one dim, is pending, or does neither; cuts of one dim in every order.

    >>> [str(layout) for layout in all_layouts(("seq",), ("cp",))]
    ['[seq/cp]', '[seq] +cp', '[seq]']
    """
    for places in itertools.product((*dims, "+", ""), repeat=len(atoms)):
        held = {place: [atom for atom, at in zip(atoms, places, strict=True) if at == place] for place in (*dims, "+")}
        waiting = tuple(sorted(held["+"]))
        for orders in itertools.product(*(itertools.permutations(held[dim]) for dim in dims)):
            cuts = tuple(zip(dims, orders, strict=True))
            yield Layout(dims=cuts, sums=waiting) if pending == "sums" else Layout(dims=cuts, maxima=waiting)


def _steps(layouts: Sequence[Layout], number: Mapping[Layout, int], atoms: set[str], price: Price) -> Matrix:
    """Return the price of every single collective between two layouts."""
    matrix = np.full((len(layouts), len(layouts)), np.inf)
    np.fill_diagonal(matrix, 0.0)
    for layout, index in number.items():
        for change in single_changes(layout, atoms):
            after = number[_sorted(change.after)]
            matrix[index, after] = min(matrix[index, after], price(change))
    return matrix


def _mask(layout: Layout, atoms: Sequence[str]) -> int:
    """Return the atoms that a layout names, a bit each."""
    used = {atom for _, cut in layout.dims for atom in cut} | {*layout.sums, *layout.maxima}
    return sum(1 << place for place, atom in enumerate(atoms) if atom in used)


def _sorted(layout: Layout) -> Layout:
    sums, maxima = tuple(sorted(layout.sums)), tuple(sorted(layout.maxima))
    return Layout(dims=layout.dims, sums=sums, maxima=maxima)
