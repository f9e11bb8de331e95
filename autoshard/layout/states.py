"""The price of the cheapest change from any layout of a tensor to any other: all shortest paths at once."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autoshard.graph.op import Dims
from autoshard.layout.collective import Collective, CollectiveKind
from autoshard.layout.layout import Layout
from autoshard.layout.redistribute import Price, redistribute, single_changes

Matrix = NDArray[np.float64]
Pending = Literal["sums", "maxima"]
_MOST_LAYOUTS = 1000  # beyond, the few ways that are needed are found one by one
_DimCuts = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutGraph:
    """All layouts of a tensor, and every single collective between two of them.

    ``groups`` holds one Collective for all of its kind over the same atoms, with the numbers of the layouts before and
    after each.
    """

    layouts: tuple[Layout, ...]
    number: Mapping[Layout, int]
    touched: NDArray[np.intp]  # the atoms that each layout names, a bit each
    groups: tuple[tuple[Collective, NDArray[np.intp], NDArray[np.intp]], ...]

    @property
    def size(self) -> int:
        """How many layouts there are."""
        return len(self.layouts)


MatrixPrice = Callable[[LayoutGraph], Matrix]  # the price of every single collective, infinity where there is none


class ChangePrices:
    """The prices of changes between layouts of a tensor with these dims, those of ``redistribute``.

    Atoms that stay in place cost nothing. Found prices are remembered, because neighbours need the same.
    """

    def __init__(
        self, dims: Dims, sizes: Mapping[str, int], price: Price, prices: MatrixPrice, pending: Pending = "sums"
    ) -> None:
        self._dims, self._sizes, self._price, self._prices = dims, sizes, price, prices
        self._pending: Pending = pending
        self._known: dict[tuple[_DimCuts, tuple[str, ...]], tuple[LayoutGraph, Matrix]] = {}

    def between(self, befores: Sequence[Layout], afters: Sequence[Layout]) -> Matrix:
        """Return the price of every change from one of the first layouts to one of the others; infinity for no way."""
        outer, free = _common((*befores, *afters), self._dims, self._sizes)
        if (len(self._dims) + 2) ** len(free) > _MOST_LAYOUTS:
            return np.array([[self._one(before, after) for after in afters] for before in befores])
        if (outer, free) not in self._known:
            graph = _graph(self._dims, free, self._pending, outer)
            self._known[outer, free] = graph, _shortest(graph, self._prices(graph), len(free))
        graph, matrix = self._known[outer, free]
        return matrix[np.ix_(*([graph.number[layout] for layout in layouts] for layouts in (befores, afters)))]

    def _one(self, before: Layout, after: Layout) -> float:
        if {*after.sums, *after.maxima} - {*before.sums, *before.maxima}:
            return math.inf
        return sum(self._price(change) for change in redistribute(before, after, self._sizes, self._price))


def all_layouts(dims: Dims, atoms: Sequence[str], pending: Pending = "sums") -> Iterator[Layout]:
    """Yield every layout: each atom cuts one dim, is pending, or does neither; cuts of one dim in every order.

    >>> [str(layout) for layout in all_layouts(("seq",), ("cp",))]
    ['[seq/cp]', '[seq] +cp', '[seq]']
    """
    for uses in itertools.product((*dims, "+", ""), repeat=len(atoms)):
        using = {use: [atom for atom, at in zip(atoms, uses, strict=True) if at == use] for use in (*dims, "+")}
        waiting = tuple(sorted(using["+"]))
        for orders in itertools.product(*(itertools.permutations(using[dim]) for dim in dims)):
            cuts = tuple(zip(dims, orders, strict=True))
            yield Layout(dims=cuts, sums=waiting) if pending == "sums" else Layout(dims=cuts, maxima=waiting)


def _shortest(graph: LayoutGraph, steps: Matrix, num_atoms: int) -> Matrix:
    """Find all shortest paths (Floyd and Warshall), each over layouts that name only the atoms of its two ends."""
    used = graph.touched
    np.fill_diagonal(steps, 0.0)
    matrix = np.full(steps.shape, np.inf)
    for touched in range(1 << num_atoms):
        inside = np.flatnonzero((used & ~touched) == 0)
        ways = steps[np.ix_(inside, inside)]
        for middle in range(len(inside)):
            np.minimum(ways, ways[:, middle, None] + ways[None, middle], out=ways)
        exact = (used[inside, None] | used[None, inside]) == touched
        place = np.ix_(inside, inside)
        matrix[place] = np.where(exact, ways, matrix[place])
    return matrix


def _common(layouts: Sequence[Layout], dims: Dims, sizes: Mapping[str, int]) -> tuple[_DimCuts, tuple[str, ...]]:
    """Return the atoms that cut every dim outermost in all layouts, and the other atoms that any of them names."""
    cuts = [dict(layout.dims) for layout in layouts]
    outer: list[tuple[str, tuple[str, ...]]] = []
    for dim in dims:
        columns = zip(*(cut[dim] for cut in cuts), strict=False)
        alike = itertools.takewhile(lambda column: len(set(column)) == 1, columns)
        outer.append((dim, tuple(column[0] for column in alike)))
    settled = {atom for _, cut in outer for atom in cut}
    named = {atom for layout in layouts for atom in (*layout.sums, *layout.maxima)}
    named |= {atom for cut in cuts for atoms in cut.values() for atom in atoms}
    return tuple(outer), tuple(atom for atom in sizes if atom in named - settled)


@lru_cache(maxsize=256)  # searches need tensors of the same dims again and again
def _graph(dims: Dims, atoms: tuple[str, ...], pending: Pending, outer: _DimCuts) -> LayoutGraph:
    """Return the graph of layouts with some atoms outermost in all; these change no way between the others."""
    inner, start = _inner_graph(dims, atoms, pending), dict(outer)
    layouts = tuple(
        replace(layout, dims=tuple((dim, (*start[dim], *cut)) for dim, cut in layout.dims)) for layout in inner.layouts
    )
    return replace(inner, layouts=layouts, number={layout: index for index, layout in enumerate(layouts)})


@lru_cache(maxsize=256)
def _inner_graph(dims: Dims, atoms: tuple[str, ...], pending: Pending) -> LayoutGraph:
    layouts = tuple(all_layouts(dims, atoms, pending))
    number = {layout: index for index, layout in enumerate(layouts)}
    pairs: dict[tuple[CollectiveKind, tuple[str, ...]], list[tuple[int, int]]] = defaultdict(list)
    for layout, before in number.items():
        for change in single_changes(layout, set(atoms)):
            after = replace(
                change.after, sums=tuple(sorted(change.after.sums)), maxima=tuple(sorted(change.after.maxima))
            )
            pairs[change.collective.kind, change.collective.atoms].append((before, number[after]))
    masks: list[int] = []
    for layout in layouts:
        named = {atom for _, cut in layout.dims for atom in cut} | {*layout.sums, *layout.maxima}
        masks.append(sum(1 << place for place, atom in enumerate(atoms) if atom in named))
    groups: list[tuple[Collective, NDArray[np.intp], NDArray[np.intp]]] = []
    for (kind, over), found in pairs.items():
        befores, afters = np.array(found, np.intp).T
        groups.append((Collective(kind=kind, dim=None, atoms=over), befores, afters))
    return LayoutGraph(layouts=layouts, number=number, touched=np.array(masks, np.intp), groups=tuple(groups))
