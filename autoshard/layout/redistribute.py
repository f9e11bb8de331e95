"""From one layout of a tensor to another by the cheapest sequence of collectives: a shortest path under any price."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache

from autoshard.layout.layout import Collective, Cuts, Layout

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
        shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(cut, ends[dim], strict=False))
        settled |= {atom for atom, _ in shared}
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
    return layout_over(layout, cutting_atoms(atoms))


def cutting_atoms(atoms: Sizes) -> frozenset[str]:
    """Return the atoms that are larger than 1."""
    return frozenset([atom for atom, size in atoms.items() if size > 1])


@lru_cache(maxsize=1 << 14)  # a block has many values of few layouts
def layout_over(layout: Layout, atoms: frozenset[str]) -> Layout:
    """Return the part of a layout about some atoms, with what is pending in order."""

    def real(names: Sequence[str]) -> tuple[str, ...]:
        return tuple([atom for atom in names if atom in atoms])

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
    cutting, remaining = ({atom for _, cut in layout.dims for atom in cut} for layout in (before, after))
    return bool(cutting - remaining)


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
            rest, moved = cut[:-count], cut[-count:]
            yield _change(layout, Collective(kind="all_gather", dim=dim, atoms=moved), {dim: rest})
            for to_dim, to_cut in layout.dims:
                if to_dim != dim:
                    changed = {dim: rest, to_dim: (*to_cut, *moved)}
                    yield _change(layout, Collective(kind="all_to_all", dim=dim, atoms=moved, to_dim=to_dim), changed)


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
