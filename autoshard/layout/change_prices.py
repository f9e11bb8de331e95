"""The prices of all changes of the layout of a tensor at once: shortest paths in a graph of all of its layouts."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, reduce
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autoshard.graph.op import Dims
from autoshard.layout.layout import Collective, CollectiveKind, Layout
from autoshard.layout.redistribute import Change, redistribute, single_changes

Matrix = NDArray[np.float64]
Pending = Literal["sums", "maxima"]
_MOST_LAYOUTS = 1000  # above this number, each price that is needed is computed separately
_TIE = 1e-9  # relative: prices that differ by less count as equal
_DimCuts = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutGraph:
    """All layouts of a tensor, and every collective that leads from one layout to another.

    ``before`` and ``after`` hold the numbers of the two layouts of each collective; collectives are sorted by
    ``after``. Collectives of one kind over the same atoms form a group, and share one Collective.
    """

    layouts: tuple[Layout, ...]
    number: Mapping[Layout, int]
    touched: NDArray[np.intp]  # the atoms that each layout names, a bit each
    before: NDArray[np.intp]
    after: NDArray[np.intp]
    group: NDArray[np.intp]
    collectives: tuple[Collective, ...]  # by group

    def change(self, step: int) -> Change:
        """Return a single collective by its number."""
        before, after = self.layouts[int(self.before[step])], self.layouts[int(self.after[step])]
        return Change(collective=self.collectives[int(self.group[step])], before=before, after=after)


GraphPrice = Callable[[LayoutGraph], Matrix]  # of every single collective, in columns a row each


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of collectives: a function for a single one, and a function for all collectives of a graph.

    A price may be a column with a number for each mesh. ``few`` then prices a graph for a few of these meshes: the
    cheapest ways between layouts are searched for the few, and every mesh takes the cheapest of these ways.
    """

    of_change: Callable[[Change], Any]
    of_graph: GraphPrice
    few: GraphPrice | None = None
    shape: tuple[int, ...] = ()  # of a column


class ChangePrices:
    """The prices of changes between layouts of a tensor with these dims, those of ``redistribute``.

    Atoms that stay in place cost nothing. Prices are remembered, because neighbouring operations ask for the same
    changes.
    """

    def __init__(self, dims: Dims, atoms: Sequence[str], prices: Prices, pending: Pending = "sums") -> None:
        self._dims, self._atoms, self._prices = dims, atoms, prices
        self._pending: Pending = pending
        self._graphs: dict[tuple[_DimCuts, tuple[str, ...]], tuple[LayoutGraph, Matrix]] = {}
        self._known: dict[tuple[LayoutGraph, int], Matrix] = {}  # from a layout to all others
        self._one: dict[tuple[LayoutGraph, int, int], Any] = {}

    def between(self, befores: Sequence[Layout], afters: Sequence[Layout]) -> Matrix:
        """Return the prices from each of ``befores`` (rows) to each of ``afters`` (columns); infinity for no way.

        If a price is a column of meshes, the last axis counts the meshes.
        """
        outer, free = _common((*befores, *afters), self._dims, self._atoms)
        shape, few = (len(befores), len(afters), *self._prices.shape), self._prices.few
        if not few and (len(self._dims) + 2) ** len(free) > _MOST_LAYOUTS:
            prices = [self._one_by_one(before, after) for before in befores for after in afters]
            return np.array(prices, np.float64).reshape(shape)
        if (outer, free) not in self._graphs:
            graph = _graph(self._dims, free, self._pending, outer)
            self._graphs[outer, free] = graph, (few or self._prices.of_graph)(graph)
        graph, steps = self._graphs[outer, free]
        starts, goals = ([graph.number[layout] for layout in layouts] for layouts in (befores, afters))
        if few:
            self._learn(graph, steps, dict.fromkeys(starts), dict.fromkeys(goals))
            columns = [self._one[graph, start, goal] for start in starts for goal in goals]
            return np.array(columns, np.float64).reshape(shape)
        new = [start for start in dict.fromkeys(starts) if (graph, start) not in self._known]
        for start, row in zip(new, _shortest_from(graph, steps, np.array(new, np.intp)), strict=True):
            self._known[graph, start] = row
        return np.array([self._known[graph, start][goals] for start in starts]).reshape(shape)

    def _learn(self, graph: LayoutGraph, steps: Matrix, starts: Iterable[int], goals: Iterable[int]) -> None:
        """Find the ways that are the cheapest for one of the few meshes, and price them for all meshes."""
        new = [pair for pair in itertools.product(starts, goals) if (graph, *pair) not in self._one]

        @cache
        def price(step: int) -> Any:
            return self._prices.of_change(graph.change(step))

        for (start, goal), ways in _few_shortest(graph, steps, new).items():
            way_prices = [sum(map(price, way), np.zeros(self._prices.shape)) for way in ways]
            self._one[graph, start, goal] = reduce(np.minimum, way_prices, np.full(self._prices.shape, np.inf))

    def _one_by_one(self, before: Layout, after: Layout) -> float:
        price, possible = self._prices.of_change, {*after.sums, *after.maxima} <= {*before.sums, *before.maxima}
        sizes = dict.fromkeys(self._atoms, 2)
        return sum(map(price, redistribute(before, after, sizes, price))) if possible else math.inf


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


def _shortest_from(graph: LayoutGraph, steps: Matrix, starts: NDArray[np.intp]) -> Matrix:
    """Find the shortest paths from some layouts to all, a row for each layout.

    Each path is over layouts that name only the atoms of its two ends.
    """
    used, start_atoms = graph.touched, graph.touched[starts]
    lengths = np.full((len(starts), len(used), *steps.shape[1:]), np.inf)
    for touched in np.unique(start_atoms[:, None] | used):
        rows = np.flatnonzero((start_atoms & ~touched) == 0)
        ways = _ways_within(graph, steps, _inside(graph, touched), starts[rows])
        row, goal = np.nonzero((start_atoms[rows, None] | used) == touched)
        lengths[rows[row], goal] = ways[row, goal]
    return lengths


def _inside(graph: LayoutGraph, touched: int) -> NDArray[np.intp]:
    """Return the collectives between layouts that name no other atoms than these."""
    return np.flatnonzero(((graph.touched[graph.before] | graph.touched[graph.after]) & ~touched) == 0)


def _ways_within(graph: LayoutGraph, steps: Matrix, inside: NDArray[np.intp], starts: NDArray[np.intp]) -> Matrix:
    """Return the lengths of the shortest paths from some layouts over some collectives (Bellman and Ford)."""
    ways = np.full((len(starts), len(graph.touched), *steps.shape[1:]), np.inf)
    ways[np.arange(len(starts)), starts] = 0.0
    first = np.flatnonzero(np.diff(graph.after[inside], prepend=-1))
    goals, come_from, by = graph.after[inside][first], graph.before[inside], steps[inside]
    while len(goals):
        reached = np.minimum.reduceat(ways[:, come_from] + by, first, axis=1)
        better = reached < ways[:, goals]
        if not better.any():
            break
        ways[:, goals] = np.where(better, reached, ways[:, goals])
    return ways


def _few_shortest(
    graph: LayoutGraph, steps: Matrix, pairs: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], set[tuple[int, ...]]]:
    """Return, for each pair of layouts, every sequence of collectives that is the cheapest in some column."""
    ways_by_pair: dict[tuple[int, int], set[tuple[int, ...]]] = {pair: set() for pair in pairs}
    by_touched: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for start, goal in pairs:
        by_touched[int(graph.touched[start] | graph.touched[goal])].append((start, goal))
    for touched, same_pairs in by_touched.items():
        starts, inside = list(dict.fromkeys(start for start, _ in same_pairs)), _inside(graph, touched)
        ways = dict(zip(starts, _ways_within(graph, steps, inside, np.array(starts, np.intp)), strict=True))
        trees: dict[tuple[int, int], NDArray[np.intp]] = {}
        for start, goal in same_pairs:
            missing = np.isfinite(ways[start][goal])
            while missing.any():
                column, here, way = int(missing.argmax()), goal, list[int]()
                if (start, column) not in trees:
                    trees[start, column] = _tree(graph, inside, ways[start][:, column], steps[inside, column], start)
                while here != start:
                    way.append(int(trees[start, column][here]))
                    here = int(graph.before[way[-1]])
                ways_by_pair[start, goal].add(tuple(way))
                missing &= steps[way].sum(axis=0) > ways[start][goal] * (1 + _TIE)
                missing[column] = False
    return ways_by_pair


def _tree(
    graph: LayoutGraph, inside: NDArray[np.intp], ways: NDArray[np.float64], steps: NDArray[np.float64], start: int
) -> NDArray[np.intp]:
    """Return the last collective of the shortest path to each layout; of equal paths, the one with fewest collectives.

    Collectives that cost nothing, or so little that a sum does not change, can form circles: so layouts are taken in
    the order of their distance from the first, in collectives.
    """
    before, after = graph.before[inside], graph.after[inside]
    shortest = np.isfinite(ways[after]) & (ways[before] + steps == ways[after])
    last = np.full(len(ways), -1, np.intp)
    reached = np.zeros(len(ways), np.bool_)
    reached[start] = True
    while True:
        (leads,) = np.nonzero(shortest & reached[before] & ~reached[after])
        if not len(leads):
            return last
        last[after[leads[::-1]]] = inside[leads[::-1]]  # of several, the first
        reached[after[leads]] = True


def _common(layouts: Sequence[Layout], dims: Dims, atoms: Sequence[str]) -> tuple[_DimCuts, tuple[str, ...]]:
    """Return for every dim the outermost atoms that all layouts share, and all other atoms that some layout names."""
    cuts = [dict(layout.dims) for layout in layouts]
    outer: list[tuple[str, tuple[str, ...]]] = []
    for dim in dims:
        columns = zip(*(cut[dim] for cut in cuts), strict=False)
        shared = itertools.takewhile(lambda column: len(set(column)) == 1, columns)
        outer.append((dim, tuple(column[0] for column in shared)))
    settled = {atom for _, cut in outer for atom in cut}
    named = {atom for layout in layouts for atom in (*layout.sums, *layout.maxima)}
    named |= {atom for cut in cuts for over in cut.values() for atom in over}
    return tuple(outer), tuple(atom for atom in atoms if atom in named - settled)


@lru_cache(maxsize=256)  # searches need tensors of the same dims again and again
def _graph(dims: Dims, atoms: tuple[str, ...], pending: Pending, outer: _DimCuts) -> LayoutGraph:
    """Return the graph of layouts with some atoms outermost in all; they do not affect changes between the others."""
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
            after = change.after
            if len(after.sums) > 1 or len(after.maxima) > 1:
                after = replace(after, sums=tuple(sorted(after.sums)), maxima=tuple(sorted(after.maxima)))
            pairs[change.collective.kind, change.collective.atoms].append((before, number[after]))
    masks: list[int] = []
    for layout in layouts:
        named = {atom for _, cut in layout.dims for atom in cut} | {*layout.sums, *layout.maxima}
        masks.append(sum(1 << place for place, atom in enumerate(atoms) if atom in named))
    befores, afters = np.array([pair for edges in pairs.values() for pair in edges], np.intp).reshape(-1, 2).T
    order = np.argsort(afters, kind="stable")
    return LayoutGraph(
        layouts=layouts,
        number=number,
        touched=np.array(masks, np.intp),
        before=befores[order],
        after=afters[order],
        group=np.repeat(np.arange(len(pairs)), [len(edges) for edges in pairs.values()])[order],
        collectives=tuple(Collective(kind=kind, dim=None, atoms=over) for kind, over in pairs),
    )
