"""From one layout of a tensor to another by the cheapest sequence of collectives: a shortest path under any price."""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autoshard.graph.op import Dims
from autoshard.layout.layout import Collective, CollectiveKind, Cuts, Layout

Sizes = Mapping[str, int]
_FAR = (math.inf, 0, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One collective with the layouts before and after it."""

    collective: Collective
    before: Layout
    after: Layout


Price = Callable[[Change], float]


def redistribute(before: Layout, after: Layout, atoms: Sizes, price: Price) -> tuple[Change, ...]:
    """Return the cheapest changes from one layout to the other; of equals the fewest, then the first in text.

    ``atoms`` gives the sizes of all atoms of the mesh. Only atoms that one of the layouts names are touched. Atoms that
    cut a dim outermost both before and after stay, because no rank needs what other ranks hold there.
    """
    start, goal = normal_layout(before, atoms), normal_layout(after, atoms)
    return _shortest(start, goal, price)


@lru_cache(maxsize=4096)  # a model's blocks ask for the same few changes again and again
def _shortest(start: Layout, goal: Layout, price: Price) -> tuple[Change, ...]:
    new = {*goal.sums, *goal.maxima} - {*start.sums, *start.maxima}
    assert not new, f"{goal} waits for {sorted(new)}, which {start} does not"
    settled = {*start.sums, *start.maxima} & {*goal.sums, *goal.maxima}  # pending in both, or cutting alike outermost
    ends = dict(goal.dims)
    for dim, cut in start.dims:
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(cut, ends[dim], strict=False))
        settled |= {atom for atom, _ in alike}
    allowed = frozenset((*_used(start), *_used(goal))) - settled
    queue: list[tuple[float, int, str, Layout, tuple[Change, ...]]] = [(0.0, 0, "", start, ())]
    done: set[Layout] = set()
    best: dict[Layout, tuple[float, int, str]] = {}
    while queue:
        cost, count, text, layout, path = heapq.heappop(queue)
        if layout == goal:
            return path
        if layout in done:
            continue
        done.add(layout)
        for name, change in _named_changes(layout, allowed):
            if change.after in done:
                continue
            key = (cost + price(change), count + 1, f"{text}|{name}")
            if key < best.get(change.after, _FAR) and key < best.get(goal, _FAR):  # prices are never negative
                best[change.after] = key
                heapq.heappush(queue, (*key, change.after, (*path, change)))
    raise AssertionError(f"no way from {start} to {goal}")


def bytes_price(tensor_bytes: float, atoms: Sizes) -> Price:
    """Price a change by the bytes that a rank sends in a ring; slices are free.

    >>> price = bytes_price(1024, {"kv": 2, "rep": 2})
    >>> pending, cut = Layout.parse("[seq, hidden] +tp"), Layout.parse("[seq/tp, hidden]")
    >>> [str(change.collective) for change in redistribute(pending, cut, {"kv": 2, "rep": 2}, price)]
    ['reduce_scatter seq/tp']
    """

    def price(change: Change) -> float:
        kind = change.collective.kind
        if kind == "slice":
            return 0.0
        count = math.prod(atoms.get(atom, 1) for atom in change.collective.atoms)
        shares = [
            math.prod([atoms.get(atom, 1) for _, cut in layout.dims for atom in cut])
            for layout in (change.before, change.after)
        ]
        largest = tensor_bytes / min(shares)
        if kind == "permute":
            return largest
        return (2 if kind.startswith("all_reduce") else 1) * largest * (count - 1) / count

    return price


def normal_layout(layout: Layout, atoms: Sizes) -> Layout:
    """Drop atoms of size 1, which cut nothing and wait for nobody, and order what is pending."""

    def real(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(atom for atom in names if atoms.get(atom, 1) > 1)

    dims = tuple((dim, real(cut)) for dim, cut in layout.dims)
    return Layout(dims=dims, sums=tuple(sorted(real(layout.sums))), maxima=tuple(sorted(real(layout.maxima))))


def _used(layout: Layout) -> Iterator[str]:
    yield from (atom for _, cut in layout.dims for atom in cut)
    yield from (*layout.sums, *layout.maxima)


def only_gathers(before: Layout, after: Layout) -> bool:
    """Return whether a change only gathers: no sum is made, and ranks hold more than before.

    >>> only_gathers(Layout.parse("[seq/tp, hidden]"), Layout.parse("[seq, hidden]"))
    True
    >>> only_gathers(Layout.parse("[seq/tp, hidden]"), Layout.parse("[seq, hidden/tp]"))
    False
    """
    if (before.sums, before.maxima) != (after.sums, after.maxima):
        return False
    cutting, left = ({atom for _, cut in layout.dims for atom in cut} for layout in (before, after))
    return bool(cutting - left)


def single_changes(layout: Layout, allowed: Set[str]) -> tuple[Change, ...]:
    """Return every single collective that may follow: gathers and moves of inner cuts, sums resolved, free slices."""
    return tuple(change for _, change in _named_changes(layout, frozenset(allowed)))


@lru_cache(maxsize=1 << 14)
def _named_changes(layout: Layout, allowed: frozenset[str]) -> tuple[tuple[str, Change], ...]:
    """Return these changes with the text of each; cached, because searches pass the same layouts often."""
    changes = (*_gathers_and_moves(layout, allowed), *_sums_and_slices(layout, allowed))
    return tuple((_text(change.collective), change) for change in changes)


@lru_cache(maxsize=1 << 12)  # of many changes there are few collectives
def _text(collective: Collective) -> str:
    return str(collective)


def _gathers_and_moves(layout: Layout, allowed: Set[str]) -> Iterator[Change]:
    for dim, cut in layout.dims:
        movable = len(tuple(itertools.takewhile(allowed.__contains__, reversed(cut))))
        for count in range(1, movable + 1):
            kept, moved = cut[:-count], cut[-count:]
            yield _change(layout, Collective(kind="all_gather", dim=dim, atoms=moved), {dim: kept})
            for other, others in layout.dims:
                if other != dim:
                    changed = {dim: kept, other: (*others, *moved)}
                    yield _change(layout, Collective(kind="all_to_all", dim=dim, atoms=moved, to_dim=other), changed)


def _sums_and_slices(layout: Layout, allowed: Set[str]) -> Iterator[Change]:
    for pending in _subsets(tuple(atom for atom in layout.sums if atom in allowed)):
        rest = tuple(atom for atom in layout.sums if atom not in pending)
        yield _change(layout, Collective(kind="all_reduce", dim=None, atoms=pending), {}, sums=rest)
        for (dim, cut), order in itertools.product(layout.dims, itertools.permutations(pending)):
            scatter = Collective(kind="reduce_scatter", dim=dim, atoms=order)
            yield _change(layout, scatter, {dim: (*cut, *order)}, sums=rest)
    for pending in _subsets(tuple(atom for atom in layout.maxima if atom in allowed)):
        rest = tuple(atom for atom in layout.maxima if atom not in pending)
        yield _change(layout, Collective(kind="all_reduce_max", dim=None, atoms=pending), {}, maxima=rest)
    for atom, (dim, cut) in itertools.product(sorted(allowed - set(_used(layout))), layout.dims):
        yield _change(layout, Collective(kind="slice", dim=dim, atoms=(atom,)), {dim: (*cut, atom)})


def _change(
    layout: Layout,
    collective: Collective,
    cuts: Cuts,
    *,
    sums: tuple[str, ...] | None = None,
    maxima: tuple[str, ...] | None = None,
) -> Change:
    """Return a collective with the layout after it: some dims cut otherwise, other ``sums`` or ``maxima`` pending."""
    after = Layout(
        dims=tuple([(name, cuts.get(name, cut)) for name, cut in layout.dims]),
        sums=layout.sums if sums is None else sums,
        maxima=layout.maxima if maxima is None else maxima,
    )
    return Change(collective=collective, before=layout, after=after)


def _subsets(atoms: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(atoms) + 1):
        yield from itertools.combinations(atoms, count)


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
        self._known: dict[tuple[_DimCuts, tuple[str, ...]], tuple[LayoutGraph, Matrix, dict[int, Matrix]]] = {}

    def between(self, befores: Sequence[Layout], afters: Sequence[Layout]) -> Matrix:
        """Return the price of every change from one of the first layouts to one of the others; infinity for no way."""
        outer, free = _common((*befores, *afters), self._dims, self._sizes)
        if (len(self._dims) + 2) ** len(free) > _MOST_LAYOUTS:
            waits = [{*layout.sums, *layout.maxima} for layout in befores]
            return np.array(
                [
                    [
                        sum(map(self._price, redistribute(before, after, self._sizes, self._price)))
                        if {*after.sums, *after.maxima} <= waiting
                        else math.inf
                        for after in afters
                    ]
                    for before, waiting in zip(befores, waits, strict=True)
                ]
            )
        if (outer, free) not in self._known:
            graph = _graph(self._dims, free, self._pending, outer)
            self._known[outer, free] = graph, self._prices(graph), {}
        graph, steps, known = self._known[outer, free]
        starts, goals = ([graph.number[layout] for layout in layouts] for layouts in (befores, afters))
        new = [start for start in dict.fromkeys(starts) if start not in known]
        known |= zip(new, _shortest_from(graph, steps, np.array(new, np.intp)), strict=True)
        return np.array([known[start][goals] for start in starts]).reshape(len(starts), len(goals))


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
    """Find the shortest paths from some layouts to all (Bellman and Ford), a row for each layout.

    Each path is over layouts that name only the atoms of its two ends.
    """
    used, own = graph.touched, graph.touched[starts]
    found = np.full((len(starts), graph.size), np.inf)
    after, before = np.nonzero(np.isfinite(steps.T))
    price = steps[before, after]
    for touched in np.unique(own[:, None] | used):
        inside = ((used[before] | used[after]) & ~touched) == 0
        rows = np.flatnonzero((own & ~touched) == 0)
        ways = np.full((len(rows), graph.size), np.inf)
        ways[np.arange(len(rows)), starts[rows]] = 0.0
        first = np.flatnonzero(np.diff(after[inside], prepend=-1))
        goals, come_from, by = after[inside][first], before[inside], price[inside]
        while len(goals):
            reached = np.minimum(ways[:, goals], np.minimum.reduceat(ways[:, come_from] + by, first, axis=1))
            if np.array_equal(reached, ways[:, goals]):
                break
            ways[:, goals] = reached
        exact = (own[rows, None] | used) == touched
        found[rows] = np.where(exact, ways, found[rows])
    return found


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
    groups: list[tuple[Collective, NDArray[np.intp], NDArray[np.intp]]] = []
    for (kind, over), found in pairs.items():
        befores, afters = np.array(found, np.intp).T
        groups.append((Collective(kind=kind, dim=None, atoms=over), befores, afters))
    return LayoutGraph(layouts=layouts, number=number, touched=np.array(masks, np.intp), groups=tuple(groups))
