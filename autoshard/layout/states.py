"""All layouts that a tensor can have on a mesh, and what the cheapest way between any two of them costs."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from autoshard.graph.op import Dims
from autoshard.layout.collective import Collective, CollectiveKind
from autoshard.layout.layout import Cuts, Layout
from autoshard.layout.redistribute import Change, Price, redistribute, single_changes

Matrix = Any  # numpy array of floats, one row and one column per state
Pending = Literal["sums", "maxima"]
_MOST_STATES = 1000  # beyond, the few ways that are asked for are found one by one


_WHOLE: Cuts = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Net:
    """All layouts of a tensor, and every single collective between two of them; ``groups`` holds their numbers."""

    atoms: frozenset[str]
    layouts: tuple[Layout, ...]
    number: Mapping[Layout, int]
    touched: Any  # per layout which of these atoms it names, a bit each
    groups: tuple[tuple[Collective, Any, Any], ...]  # of one kind over the same atoms: before, after

    @property
    def size(self) -> int:
        """How many layouts there are."""
        return len(self.layouts)

    def changes(self) -> Iterator[Change]:
        """Yield every single collective."""
        yield from (change for layout in self.layouts for change in single_changes(layout, self.atoms))


NetPrice = Callable[[Net], Matrix]  # what every single collective costs, infinity where there is none


def each(price: Price) -> NetPrice:
    """Price collectives one by one."""

    def prices(net: Net) -> Matrix:
        found = np.full((net.size, net.size), np.inf)
        for change in net.changes():
            place = net.number[_sorted(change.before)], net.number[_sorted(change.after)]
            found[place] = min(found[place], price(change))
        return found

    return prices


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
    def of(
        cls, dims: Dims, atoms: Sequence[str], prices: NetPrice, pending: Pending = "sums", outer: Cuts = _WHOLE
    ) -> "LayoutStates":
        """Find all shortest paths between all layouts (Floyd and Warshall), for each set of atoms that is touched.

        Further atoms may cut dims ``outer``most, in all of the layouts alike.
        """
        net = _net(dims, tuple(atoms), pending, tuple((dim, tuple(outer.get(dim, ()))) for dim in dims))
        used, steps = net.touched, prices(net)
        np.fill_diagonal(steps, 0.0)
        matrix = np.full(steps.shape, np.inf)
        for touched in range(1 << len(atoms)):
            inside = np.flatnonzero((used & ~touched) == 0)
            ways = steps[np.ix_(inside, inside)]
            for middle in range(len(inside)):
                np.minimum(ways, ways[:, middle, None] + ways[None, middle], out=ways)
            exact = (used[inside, None] | used[None, inside]) == touched
            place = np.ix_(inside, inside)
            matrix[place] = np.where(exact, ways, matrix[place])
        return cls(layouts=net.layouts, number=net.number, price=matrix)


class Ways:
    """What the cheapest ways between layouts of a tensor with these dims cost; atoms that stay in place cost nothing.

    What was found is remembered, because neighbours ask for the same.
    """

    def __init__(
        self, dims: Dims, sizes: Mapping[str, int], price: Price, prices: NetPrice, pending: Pending = "sums"
    ) -> None:
        self._dims, self._sizes, self._price, self._prices = dims, sizes, price, prices
        self._pending: Pending = pending
        self._known: dict[tuple[Layout, tuple[str, ...]], LayoutStates] = {}

    def between(self, befores: Sequence[Layout], afters: Sequence[Layout]) -> Matrix:
        """Return the price of every change from one of the first layouts to one of the others."""
        outer, free = _common((*befores, *afters), self._dims, self._sizes)
        if (len(self._dims) + 2) ** len(free) > _MOST_STATES:
            return np.array([[self._way(before, after) for after in afters] for before in befores])
        key = (Layout(dims=outer), free)
        if key not in self._known:
            found = LayoutStates.of(self._dims, free, self._prices, self._pending, dict(outer))
            self._known[key] = found
        states = self._known[key]
        numbers = ([states.number[layout] for layout in layouts] for layouts in (befores, afters))
        return states.price[np.ix_(*numbers)]

    def _way(self, before: Layout, after: Layout) -> float:
        if {*after.sums, *after.maxima} - {*before.sums, *before.maxima}:
            return math.inf
        return sum(self._price(change) for change in redistribute(before, after, self._sizes, self._price))


def _common(
    layouts: Sequence[Layout], dims: Dims, sizes: Mapping[str, int]
) -> tuple[tuple[tuple[str, tuple[str, ...]], ...], tuple[str, ...]]:
    """Return what cuts every dim outermost in all layouts, and the other atoms that any of them names."""
    cuts = [dict(layout.dims) for layout in layouts]
    outer = tuple((dim, _start([cut[dim] for cut in cuts])) for dim in dims)
    settled = {atom for _, cut in outer for atom in cut}
    named = {atom for layout in layouts for atom in (*layout.sums, *layout.maxima)}
    named |= {atom for cut in cuts for atoms in cut.values() for atom in atoms}
    return outer, tuple(atom for atom in sizes if atom in named - settled)


def _start(cuts: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the atoms with which all cuts begin."""
    alike = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*cuts, strict=False))
    return tuple(column[0] for column in alike)


def _inside(outer: Cuts, layout: Layout) -> Layout:
    if not outer:
        return layout
    return replace(layout, dims=tuple((dim, (*outer.get(dim, ()), *cut)) for dim, cut in layout.dims))


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


@lru_cache(maxsize=256)  # searches ask again and again for tensors of the same dims
def _net(dims: Dims, atoms: tuple[str, ...], pending: Pending, outer: tuple[tuple[str, tuple[str, ...]], ...]) -> Net:
    """Return the net of layouts with some atoms outermost; these change no way between the others."""
    inner = _inner_net(dims, atoms, pending)
    layouts = tuple(_inside(dict(outer), layout) for layout in inner.layouts)
    return replace(inner, layouts=layouts, number={layout: index for index, layout in enumerate(layouts)})


@lru_cache(maxsize=256)
def _inner_net(dims: Dims, atoms: tuple[str, ...], pending: Pending) -> Net:
    layouts = tuple(all_layouts(dims, atoms, pending))
    number = {layout: index for index, layout in enumerate(layouts)}
    groups: dict[tuple[CollectiveKind, tuple[str, ...]], list[tuple[int, int]]] = defaultdict(list)
    for layout, before in number.items():
        for change in single_changes(layout, set(atoms)):
            alike = change.collective.kind, change.collective.atoms
            groups[alike].append((before, number[_sorted(change.after)]))
    places = {Collective(kind=kind, dim=None, atoms=over): np.array(pairs).T for (kind, over), pairs in groups.items()}
    return Net(
        atoms=frozenset(atoms),
        layouts=layouts,
        number=number,
        touched=np.array([_mask(layout, atoms) for layout in layouts]),
        groups=tuple((collective, before, after) for collective, (before, after) in places.items()),
    )


def _mask(layout: Layout, atoms: Sequence[str]) -> int:
    """Return the atoms that a layout names, a bit each."""
    used = {atom for _, cut in layout.dims for atom in cut} | {*layout.sums, *layout.maxima}
    return sum(1 << place for place, atom in enumerate(atoms) if atom in used)


def _sorted(layout: Layout) -> Layout:
    sums, maxima = tuple(sorted(layout.sums)), tuple(sorted(layout.maxima))
    return Layout(dims=layout.dims, sums=sums, maxima=maxima)
