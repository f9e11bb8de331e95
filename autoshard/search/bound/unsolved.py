"""Points that are not solved yet: layouts that are priced without recompute, and points that wait or are open."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from autoshard.blocks.cutting import Terms
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.bound.bounds import least_bytes, least_of_any, states_of
from autoshard.search.bound.legal_space import RunVariant
from autoshard.search.bound.points import Points
from autoshard.search.bound.priced_layouts import PricedLayouts
from autoshard.search.fill.stage_filling import Goal

_WORTH = 3  # lowerings of which the bounds are sharpened; of fewer, the prices themselves take as long
Truths = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainPoints:
    """Layouts that are priced without recompute only, the variants that run them, and the least bound over these."""

    priced: PricedLayouts
    rows: Ints  # of what is priced; the rest has been opened
    variants: Sequence[RunVariant]
    bounds: Floats
    sharp: bool  # whether the bounds count what each kind of recompute takes and keeps at least

    @classmethod
    def of(
        cls, parts: Sequence[PricedLayouts], joined: PricedLayouts, variants: Sequence[RunVariant], goal: Goal
    ) -> "list[PlainPoints]":
        """Return layouts, which ``joined`` has in one piece, with bounds that hold for any recompute and schedule."""
        each_states = list({states_of(variant.space.base): None for variant in variants})
        is_final = goal.effort.exhaustive or goal.objective == "memory"
        if goal.effort.exhaustive:
            bounds = np.zeros(len(joined.numbers))
        elif goal.objective == "memory":
            bounds = np.min([least_bytes(joined.at_least, states) for states in each_states], axis=0)
        else:
            bounds = least_of_any(joined.at_least, each_states, cast(float, goal.capacity))
        ends = np.cumsum([len(part.numbers) for part in parts])[:-1]
        pairs = zip(parts, np.split(bounds, ends), strict=True)
        return [
            cls(priced=part, rows=np.arange(len(part_bounds)), variants=variants, bounds=part_bounds, sharp=is_final)
            for part, part_bounds in pairs
        ]

    def with_bounds(self, bounds: Floats) -> "PlainPoints":
        """Return the layouts with sharper bounds."""
        return replace(self, bounds=np.maximum(self.bounds, bounds), sharp=True)

    @cached_property
    def least(self) -> float:
        """The least bound of them. The search asks for it far more often than there are layouts."""
        return float(self.bounds.min(initial=np.inf))

    def parted(self, near: Truths) -> "list[PlainPoints]":
        """Return some of the layouts, and the rest apart from them, if there is a rest."""
        return [self] if near.all() or not near.any() else [self.only(near), self.only(~near)]

    def only(self, rows: Truths) -> "PlainPoints":
        """Return some of the layouts."""
        return self if rows.all() else replace(self, rows=self.rows[rows], bounds=self.bounds[rows])

    @property
    def terms(self) -> Terms:
        """What their blocks are cut under."""
        return self.variants[0].terms

    @property
    def layouts(self) -> Ints:
        """The numbers of the layouts in the space of the search."""
        return self.priced.numbers[self.rows]

    def may_fit(self, variant: RunVariant) -> Truths:
        """Say which points of a variant may fit in memory."""
        return np.isin(variant.layouts, self.layouts[np.isfinite(self.bounds)])


def least_bounds(least: PricedLayouts, variants: Sequence[RunVariant], goal: Goal, limit: float) -> Floats:
    """Return the least bound of the points of each layout, given bounds of the layers under every recompute.

    Bounds are made no sharper than a limit asks for.
    """
    bounds = np.full(len(least.numbers), np.inf)
    for variant in variants:
        points = Points.of(least, variant, goal, limit)
        np.minimum.at(bounds, points.rows, points.bound)
    return bounds


@dataclass(slots=True, kw_only=True, eq=False)
class UnsolvedPoints:
    """The unsolved points: they begin as plain layouts, wait as points, and are opened in the order of their bounds.

    Of the open points, those are taken that look fastest: bounds of some schedules are closer than those of others.
    """

    plain: list[PlainPoints] = field(default_factory=list[PlainPoints])
    waiting: list[tuple[float, Points]] = field(default_factory=list[tuple[float, Points]])  # with the least bound
    opened: dict[str, list[tuple[float, int, Points]]] = field(  # a heap by schedule; the points of an entry share it
        default_factory=lambda: defaultdict[str, list[tuple[float, int, Points]]](list)
    )
    passed: list[Points] = field(default_factory=list[Points])  # not better than what is known, as long as that is
    num_pushed: int = 0

    @property
    def least_opened(self) -> float:
        """The least bound of the open points."""
        return min((heap[0][0] for heap in self.opened.values() if heap), default=np.inf)

    @property
    def least(self) -> float:
        """The least bound of all points but those that were passed."""
        return min([self.least_opened, *(least for least, _ in self.waiting), *(plain.least for plain in self.plain)])

    def sharpen(self, limit: float, goal: Goal, least: Callable[[Sequence[PricedLayouts]], PricedLayouts]) -> None:
        """Raise bounds of layouts below a limit, given how layers are bounded under every recompute, in one piece."""
        self.plain = [
            part for plain in self.plain for part in ([plain] if plain.sharp else plain.parted(plain.bounds < limit))
        ]
        groups: dict[tuple[RunVariant, ...], list[PlainPoints]] = defaultdict(list)
        for plain in self.plain:
            if plain.least < limit and not plain.sharp:
                groups[tuple(plain.variants)].append(plain)
        for variants, group in groups.items():
            if len(group) < _WORTH:
                continue
            parts = [plain.priced.only(plain.rows) for plain in group]
            bounds = least_bounds(least(parts), variants, goal, limit)
            ends = np.cumsum([len(plain.bounds) for plain in group])[:-1]
            self.plain = [plain for plain in self.plain if plain not in group]
            pairs = zip(group, np.split(bounds, ends), strict=True)
            self.plain += [plain.with_bounds(of_plain) for plain, of_plain in pairs]
        self.plain = [replace(plain, sharp=plain.sharp or plain.least < limit) for plain in self.plain]

    def take(
        self, groups: Iterable[PlainPoints], runs: Sequence[RunVariant], near: Callable[[PlainPoints], Truths]
    ) -> Mapping[tuple[RunVariant, ...], Sequence[PlainPoints]]:
        """Take plain layouts that are near, to be run by some variants; return them by these variants.

        Other layouts stay, and so do these where other variants may run them.
        """
        taken: dict[tuple[RunVariant, ...], list[PlainPoints]] = defaultdict(list)
        for plain in [*groups]:
            variants, is_near = tuple(run for run in plain.variants if run in runs), near(plain)
            if variants and is_near.any():
                self.plain.remove(plain)
                chosen, *rest = plain.parted(is_near)
                unused = [run for run in plain.variants if run not in variants]
                self.plain += [*rest, *([replace(chosen, variants=unused)] if unused else [])]
                taken[variants].append(chosen)
        return taken

    def wait(self, points: Points) -> None:
        """Add points that are to be opened later."""
        if len(points.rows):
            self.waiting.append((float(points.bound.min()), points))

    def open(self, points: Points) -> None:
        """Add points that share a schedule."""
        if len(points.rows):
            self.num_pushed += 1
            heap = self.opened[points.variant.space.base.schedule]
            heapq.heappush(heap, (float(points.bound.min()), self.num_pushed, points))

    def pop(self, times: Callable[[str], float]) -> Points:
        """Take the open points that look fastest, given how many times their bound points of a schedule take."""
        seconds = {schedule: heap[0][0] * times(schedule) for schedule, heap in self.opened.items() if heap}
        return heapq.heappop(self.opened[min(seconds, key=seconds.__getitem__)])[-1]

    @property
    def groups(self) -> Iterator[Points]:
        """All points that are open, or wait to be."""
        yield from (points for heap in self.opened.values() for *_, points in heap)
        yield from (points for _, points in self.waiting)

    def open_again(self) -> None:
        """Open the points that were passed, because slower solutions than before matter."""
        for points in self.passed:
            self.open(points)
        self.passed.clear()

    def below(self, value: float) -> Iterator[tuple[RunVariant, Ints]]:
        """Yield the variants and rows of the points whose bound is below a value; a point may come twice."""
        for points in self.groups:
            yield points.variant, points.variant_rows[points.bound < value]
        for plain in self.plain:
            layouts = plain.layouts[plain.bounds < value]
            yield from ((variant, np.flatnonzero(np.isin(variant.layouts, layouts))) for variant in plain.variants)
