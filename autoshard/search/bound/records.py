"""What has become of every point of a space: bounded, solved or open, whether it fits; and the best solutions."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autoshard.layout.layout import Cutting
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.bound.legal_space import LegalSpace, RunVariant
from autoshard.search.bound.points import Points, Solution
from autoshard.search.bound.priced_layouts import Row
from autoshard.search.bound.unsolved import PlainPoints, UnsolvedPoints
from autoshard.search.fill.stage_options import StageFilling

_OLD = 0.75  # the part of earlier points in what points of a schedule take beyond their bounds
_TIE = 1e-8  # relative: times that differ by less count as equal
Priced = TypeVar("Priced", Points, PlainPoints)


class PointRecords:
    """A record of each point of a space; the points of a variant have numbers in a row."""

    def __init__(self, legal: LegalSpace) -> None:
        self._first: dict[RunVariant, int] = {}  # the number of a variant's first point
        for variant in legal.variants:
            self._first[variant] = sum(len(earlier.layouts) for earlier in self._first)
        self._bounded, self._solved, self._fits = np.zeros((3, legal.num_legal), dtype=bool)
        self._raised = np.zeros(legal.num_legal)  # bounds of points that were made sharper, or solved

    def bound(self, points: Points) -> None:
        """Record that points have a bound, perhaps a sharper one than before: they may fit."""
        numbers = self._numbers(points)
        self._bounded[numbers] = True
        self._raised[numbers] = np.maximum(self._raised[numbers], points.bound)

    def bound_layouts(self, variant: RunVariant, layouts: Ints) -> None:
        """Record that all points of a variant with some layouts have a bound: they may fit."""
        self._bounded[self._first[variant] + np.flatnonzero(np.isin(variant.layouts, layouts))] = True

    def solve(self, points: Points, fits: NDArray[np.bool_], least: Floats) -> None:
        """Record that points were solved, whether they fit under what was asked, and what they take at least."""
        numbers = self._numbers(points)
        self._solved[numbers] = True
        self._fits[numbers] |= fits
        self._raised[numbers] = np.maximum(self._raised[numbers], least)

    def forget_layout(self, layout: int, variants: Iterable[RunVariant]) -> None:
        """Forget what points of a layout take at least: its blocks are cut in another way."""
        for variant in variants:
            self._raised[self._first[variant] + np.flatnonzero(variant.layouts == layout)] = 0.0

    def least(self, points: Points) -> Floats:
        """Return what points take at least, as far as is known."""
        return np.maximum(points.bound, self._raised[self._numbers(points)])

    def solved(self, points: Points) -> NDArray[np.bool_]:
        """Say which points were solved."""
        return self._solved[self._numbers(points)]

    def counts(
        self, unsolved: UnsolvedPoints, value: float, unpriced: Iterable[tuple[Ints, RunVariant]]
    ) -> Mapping[str, int]:
        """Count points for a certificate, given those not solved yet, the best value, and layouts without a price."""
        num_left = sum(int(np.isin(variant.layouts, layouts).sum()) for layouts, variant in unpriced)
        bounded = self._bounded.copy()
        for plain in unsolved.plain:
            for variant in plain.variants:
                first = self._first[variant]
                bounded[first : first + len(variant.layouts)] |= plain.may_fit(variant)
        num_too_large, num_solved = int((~bounded).sum()) - num_left, int(self._solved.sum())
        is_open = np.zeros_like(self._solved)
        for variant, variant_rows in unsolved.below(value):
            is_open[self._first[variant] + variant_rows] = True
        num_open = int((is_open & ~self._solved).sum())
        return {
            "num_too_large": num_too_large,
            "num_bounded": max(0, len(bounded) - num_too_large - num_solved - num_open - num_left),
            "num_open": num_open,
            "num_left": num_left,
            "num_solved": num_solved,
            "num_fitting": int(self._fits.sum()),
        }

    def _numbers(self, points: Points) -> Ints:
        return self._first[points.variant] + points.variant_rows


class OwnCuttings(dict[Row, Cutting]):
    """The layouts that are priced with the cutting that is best for them, instead of one that serves several."""

    def in_use(self, points: Priced) -> Priced:
        """Leave out layouts whose own cutting differs from the cutting of these points."""
        gone = np.zeros(len(points.rows), dtype=bool)
        for (terms, layout), cutting in self.items():
            for place in np.flatnonzero(points.layouts == layout) if terms == points.terms else ():
                gone[place] = points.priced.cutting(int(points.rows[place])) != cutting
        return points.only(~gone) if gone.any() else points


class SolvingOrder:
    """What solved points say of the order in which to take the others."""

    def __init__(self, most_idle: float) -> None:
        self._most_idle, self._num_idle = most_idle, 0  # groups of points that were solved since one was among the best
        self._times: dict[str, float] = {}

    def learn(self, points: Points, values: Floats, *, is_better: bool) -> None:
        """Learn from points what they take, and whether one of them is among the best."""
        schedule, value, least = points.variant.space.base.schedule, float(values.min()), float(points.bound.min())
        if np.isfinite(value) and least > 0:
            self._times[schedule] = _OLD * self._times.get(schedule, 1.0) + (1 - _OLD) * value / least
        self._num_idle = 0 if is_better else self._num_idle + 1

    def times(self, schedule: str) -> float:
        """Return how many times their bound points of a schedule take, as the last ones that were solved did."""
        return 1.0 if self.is_idle else self._times.get(schedule, 1.0)

    @property
    def is_idle(self) -> bool:
        """Say whether nothing better was found for long: then only the bound of all points is still to be raised."""
        return self._num_idle >= self._most_idle


class BestSolutions:
    """The best solution of every layout under every choice of terms, beside the values of rivals of other spaces.

    A layout that is known early, by one look at a few of its points, sets no limit for other points: with such limits
    a search solves fewer points, and the runners-up that it shows are slower.
    """

    def __init__(self, rival_values: Sequence[float]) -> None:
        self._rival_values, self._best, self._early = rival_values, dict[Row, Solution](), dict[Row, Solution]()
        self._of_layout: dict[int, float] = {}

    def keep(self, points: Points, filling: StageFilling, values: Floats, *, early: bool = False) -> None:
        """Keep the best solution of each layout, given what is minimised of each filling."""
        for number in np.flatnonzero(np.isfinite(values)).tolist():
            column, layout, value = np.array([number]), int(points.layouts[number]), float(values[number])
            solution = Solution(layout=layout, point=points.only(column), filling=filling.only(column), value=value)
            self.add(solution, early=early)

    def add(self, solution: Solution, *, early: bool = False) -> None:
        """Keep a solution, if none of its layout is better."""
        solutions = self._early if early else self._best
        best = solutions.get(solution.row)
        solutions[solution.row] = solution if best is None or solution.order < best.order else best
        if early:
            return
        self._of_layout[solution.layout] = min(solution.value, self._of_layout.get(solution.layout, np.inf))

    def forget(self, row: Row) -> None:
        """Forget the solution of a layout under some terms."""
        self._best.pop(row, None)
        self._early.pop(row, None)
        _, layout = row
        values = (solution.value for solution in self._best.values() if solution.layout == layout)
        self._of_layout[layout] = min(values, default=np.inf)

    @property
    def value(self) -> float:
        """The best value; infinite where nothing fits."""
        return min((solution.value for solution in self._all), default=np.inf)

    @property
    def ranked(self) -> list[Solution]:
        """The best solution of every layout, best first."""
        by_layout: dict[int, Solution] = {}
        for solution in sorted(self._all, key=lambda best: best.order):
            by_layout.setdefault(solution.layout, solution)
        return list(by_layout.values())

    @property
    def _all(self) -> Iterator[Solution]:
        return itertools.chain(self._best.values(), self._early.values())

    def limits(self, points: Points, limit: float) -> Floats:
        """Return for each point the value above which it does not matter: its layout has a better solution."""
        rows: list[Row] = [(points.variant.terms, layout) for layout in points.layouts.tolist()]
        best = (self._best[row].value * (1 + _TIE) if row in self._best else limit for row in rows)
        return np.array([min(limit, value) for value in best])

    def limit(self, count: int) -> float:
        """Return the value of the layout at place ``count``; a point above it does not matter."""
        values = sorted((*self._rival_values, *(value for value in self._of_layout.values() if value < np.inf)))
        return np.inf if len(values) < count else values[count - 1] * (1 + _TIE)
