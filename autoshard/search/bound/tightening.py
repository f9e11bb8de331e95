"""The points that were solved, and raising their bounds where these keep the gap open, when all else is known."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autoshard.schedule.waves import Floats
from autoshard.search.bound.legal_space import RunVariant
from autoshard.search.bound.points import Points
from autoshard.search.bound.priced_layouts import Row
from autoshard.search.fill.split_bounds import SplitSearch
from autoshard.search.fill.stage_options import Effort

_FLOWS = 64  # that are looked for for a point whose bound keeps the gap open
PointKey = tuple[Row, RunVariant, int]  # its layout with the terms of its cut, its variant and its row of that


class SolvedPoints:
    """The points that were solved, each with the bound of its filling; and those whose bound flows raise no further."""

    def __init__(self) -> None:
        self._points: dict[PointKey, Points] = {}
        self._bounds: dict[PointKey, float] = {}
        self._tight: set[PointKey] = set()

    def add(self, points: Points, bounds: Floats) -> None:
        """Add points, or replace their bounds."""
        for number, (key, bound) in enumerate(zip(_keys(points), bounds.tolist(), strict=True)):
            self._points[key], self._bounds[key] = points.only(np.array([number])), bound

    def forget(self, row: Row) -> None:
        """Leave out the points of a layout: its blocks are cut in another way."""
        self._points = {key: points for key, points in self._points.items() if key[0] != row}
        self._bounds = {key: self._bounds[key] for key in self._points}

    def tighten(self, points: Points) -> None:
        """Record that flows raise the bounds of points no further."""
        self._tight.update(_keys(points))

    def is_tight(self, point: Points) -> bool:
        """Say whether flows raise the bound of a point no further."""
        return self._tight.issuperset(_keys(point))

    @property
    def least(self) -> float:
        """The lowest bound."""
        return min(self._bounds.values(), default=np.inf)

    @property
    def lowest(self) -> Points:
        """The point with the lowest bound."""
        key = min(self._bounds, key=self._bounds.__getitem__)
        return replace(self._points[key], bound=np.array([self._bounds[key]]))


def _keys(points: Points) -> list[PointKey]:
    rows = zip(points.layouts.tolist(), points.variant_rows.tolist(), strict=True)
    return [((points.variant.terms, layout), points.variant, row) for layout, row in rows]


class Tightening:
    """Raises the bounds of solved points, the lowest first, while there is time.

    Flows are not looked for much before, as they serve points that keep the gap open when all else is known.
    """

    def __init__(self, solved: SolvedPoints, splits: SplitSearch, effort: Effort) -> None:
        self._solved, self._splits, self._effort, self._more_s = solved, splits, effort, effort.wide_s

    def run(self, value: float, least_open: float, solve: Callable[[Points], None]) -> None:
        """Raise bounds up to what closes the gap of a value, or, with more time, to what leaves a wide one."""
        effort, splits = self._effort, self._splits
        splits.seconds_left, splits.most_flows = min(splits.seconds_left, effort.tight_s), _FLOWS
        self._raise_lowest(min(least_open, value * (1 - effort.gap)), solve)
        if self._solved.least < value * (1 - effort.wide_gap):
            splits.seconds_left, self._more_s = max(0.0, splits.seconds_left) + self._more_s, 0.0
            self._raise_lowest(min(least_open, value * (1 - effort.wide_gap)), solve)
        splits.most_flows = 0

    def _raise_lowest(self, limit: float, solve: Callable[[Points], None]) -> None:
        while self._splits.seconds_left > 0 and self._solved.least < limit:
            lowest = self._solved.lowest
            if self._solved.is_tight(lowest) or not lowest.looks_for_splits:
                break
            solve(lowest)
            if self._splits.seconds_left > 0:
                self._solved.tighten(lowest)
