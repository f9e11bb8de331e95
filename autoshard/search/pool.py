"""Best first: outer points by their bounds, each solved in full, until none that is left can be better.

The block solver is asked about a layout of every kind of mesh, then about those that come out best, until it has been
asked about all that stay there; the others are priced with the best of its answers. Tables are solved for time alone:
memory is saved by the outer search.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.blocks.cutting import Terms
from autoshard.cost.setting import Question
from autoshard.layout.pin import Pin
from autoshard.search.cuttings import Cuttings
from autoshard.search.points import Points, Solution
from autoshard.search.priced_layouts import LayoutPricer, SolvedCutting
from autoshard.search.rule_filter import LegalSpace
from autoshard.search.stage_filling import Goal
from autoshard.search.variants import RunVariant

_ALWAYS = 3  # of the best layouts are solved for, however few are shown, so that the best one does not depend on that
_FIRST = 4  # groups of points that are solved before points of the next variant are opened
_AT_ONCE = 8  # points of a group that are solved together, those with the best bounds
_TIE = 1e-8  # by how much times that count as equal differ at most


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProgress:
    """How far a search has come."""

    num_done: int  # points that need no more work
    num_points: int
    best: float
    bound: float


Watch = Callable[[SearchProgress], str]  # asked between any two steps: why to stop, or nothing


class Pool:
    """The points of a space, and what is known of them so far."""

    def __init__(self, question: Question, legal: LegalSpace, goal: Goal, pins: tuple[Pin, ...] = ()) -> None:
        self._legal, self._goal, self._pins = legal, goal, pins
        self._pricer = LayoutPricer(question)
        self._cuttings = Cuttings(question, legal, pins)
        self._waiting: list[Points] = []  # all points of a variant, or those that are left of them
        self._open: list[tuple[float, int, Points]] = []
        self._passed: list[Points] = []  # no better than what is known: opened again if that is forgotten
        self._best: dict[int, Solution] = {}
        self._least: dict[
            tuple[Terms, SolvedCutting, int], float
        ] = {}  # what a layout's solved points come to at least
        self._number = self._num_open = 0
        self._bounded, self._solved, self._fits = ({one: _none_of(one) for one in legal.variants} for _ in range(3))

    def settle(self, count: int, watch: Watch) -> str:
        """Solve points until so many of the best layouts are known, each with its own cutting; say why it ended."""
        wanted = max(count, _ALWAYS)
        for terms in dict.fromkeys(one.terms for one in self._legal.variants):
            for layouts in self._cuttings.kinds(terms):
                self._learn(layouts, terms)
        if self._cuttings.faults and not self._waiting:
            raise self._cuttings.faults[0]
        while True:
            # A few points of a variant give a limit that leaves out most of the next.
            while self._open_next(self._limit(wanted)):
                ended = self._explore(wanted, watch, most=_FIRST)
                if ended:
                    return ended
            ended = self._explore(wanted, watch)
            own = self._cuttings.has_own
            left = [one for one in self.solutions[:wanted] if not own(one.layout, one.point.variant.terms)]
            if ended or not left:
                return ended
            self._learn([left[0].layout], left[0].point.variant.terms)

    @property
    def solutions(self) -> list[Solution]:
        """The best of every layout so far, best first."""
        return sorted(self._best.values(), key=lambda one: one.order)

    @property
    def bound(self) -> float:
        """What any point comes to at least, those solved and those left open."""
        left = [float(one.bound.min()) for one in self._waiting] + [self._open[0][0] if self._open else np.inf]
        return min([*self._least.values(), *left])

    @property
    def num_tables(self) -> int:
        """How many answers of the block solver differ."""
        return self._cuttings.num_tables

    @property
    def num_too_large(self) -> int:
        """Points that no filling fits, by their bound."""
        return self._legal.num_legal - _count(self._bounded)

    @property
    def num_solved(self) -> int:
        """Points that were solved."""
        return _count(self._solved)

    @property
    def num_fitting(self) -> int:
        """Solved points of which a filling fits."""
        return _count(self._fits)

    def _open_next(self, limit: float) -> bool:
        """Open the points below a limit of the variant that promises most; say whether there was one."""
        least, points = min(
            ((float(one.bound.min()), one) for one in self._waiting), key=lambda one: one[0], default=(np.inf, None)
        )
        if points is None or least >= limit:
            return False
        self._waiting.remove(points)
        for group in points.only(points.bound < limit).by_schedule():
            self._push(group)
        if np.any(points.bound >= limit):
            self._waiting.append(points.only(points.bound >= limit))
        return True

    def _explore(self, count: int, watch: Watch, most: float = np.inf) -> str:
        """Solve what may be among so many best layouts, group by group, or at most so many groups of it."""
        while self._open and most > 0:
            limit = self._limit(count)
            if self._open[0][0] >= limit:
                return ""
            points = heapq.heappop(self._open)[-1]
            self._num_open -= len(points.rows)
            points, limits = self._near(points, limit)
            at_once = _AT_ONCE if np.isfinite(limit) or self._goal.effort.exhaustive else 1
            self._push(points.only(slice(at_once, None)))
            self._solve(points.only(slice(at_once)), float(limits[:at_once].max(initial=-np.inf)))
            most -= 1
            ended = watch(self._progress())
            if ended:
                return ended
        return ""

    def _near(self, points: Points, limit: float) -> tuple[Points, NDArray[np.float64]]:
        """Return the points that may be better than what is known of their layouts, best first, and these limits."""
        limits = np.array([self._limit_of(layout, limit) for layout in points.layouts.tolist()])
        order = np.argsort(points.bound, kind="stable")
        near = points.bound[order] < limits[order]
        self._pass(points.only(order[~near]))
        return points.only(order[near]), limits[order[near]]

    def _progress(self) -> SearchProgress:
        best = min((one.value for one in self._best.values()), default=np.inf)
        waiting = self._num_open + sum(len(one.rows) for one in self._waiting)
        total = self._legal.num_legal
        return SearchProgress(
            num_done=max(0, total - waiting), num_points=total, best=best, bound=min(best, self.bound)
        )

    def _limit(self, count: int) -> float:
        """Return what a point must stay below to matter."""
        if self._goal.effort.exhaustive or len(self._best) < count:
            return np.inf
        return sorted(one.value for one in self._best.values())[count - 1] * (1 + _TIE)

    def _limit_of(self, layout: int, limit: float) -> float:
        """Return what a point of a layout must stay below: only the best of each layout is wanted."""
        known = self._best.get(layout)
        return min(limit, known.value * (1 + _TIE)) if known and not self._goal.effort.exhaustive else limit

    def _solve(self, points: Points, limit: float) -> None:
        terms, cutting = points.variant.terms, points.priced.cutting
        points = points.only(self._cuttings.may_use(points.layouts, terms, cutting))
        if not len(points.rows):
            return
        found = points.solved(self._goal, limit)
        values = self._goal.value(found)
        fits = np.isfinite(values)
        self._solved[points.variant][points.places] = True
        self._fits[points.variant][points.places] |= fits
        for number, (layout, bound) in enumerate(zip(points.layouts.tolist(), found.bound.tolist(), strict=True)):
            key = (terms, cutting, layout)
            self._least[key] = min(bound, self._least.get(key, np.inf))
            if fits[number]:
                one, value = np.array([number]), float(values[number])
                self._keep(Solution(layout=layout, point=points.only(one), filling=found.only(one), value=value))
        # What is left is no better than the limit, but may be once that has risen.
        left = ~fits & np.isfinite(found.bound)
        self._pass(replace(points, bound=np.maximum(found.bound, limit)).only(left))

    def _keep(self, one: Solution) -> None:
        """Keep the best of a layout; one with another cutting may become that, if this one is forgotten."""
        known = self._best.get(one.layout)
        first, second = (one, known) if known is None or one.order < known.order else (known, one)
        self._best[one.layout] = first
        if second and second.point.priced.cutting is not first.point.priced.cutting:
            self._pass(replace(second.point, bound=np.array([second.value])))

    def _pass(self, points: Points) -> None:
        if len(points.rows):
            self._passed.append(points)

    def _learn(self, layouts: list[int], terms: Terms) -> None:
        """Solve for the first of some layouts; if the cutting is new, the layouts that it serves are priced with it."""
        answer = self._cuttings.solve_first(layouts, terms)
        if answer:
            layout, cutting, is_new = answer
            self._forget(layout, terms, cutting)
            if is_new:
                self._price(cutting, terms)

    def _forget(self, layout: int, terms: Terms, cutting: SolvedCutting) -> None:
        """Drop what a layout came to with another cutting than its own, and open again what was passed over for it."""
        for other in self._cuttings.known(terms):
            if other is not cutting:
                self._least.pop((terms, other, layout), None)
        known = self._best.get(layout)
        if known and known.point.variant.terms == terms and known.point.priced.cutting is not cutting:
            del self._best[layout]
            for points in self._passed:
                self._push(points)
            self._passed.clear()

    def _price(self, cutting: SolvedCutting, terms: Terms) -> None:
        """Price the blocks of all layouts that a cutting serves, and let their points wait."""
        layouts = self._cuttings.served(cutting, terms)
        if not layouts:
            return
        alike = [one for one in self._legal.variants if one.terms == terms]
        base = replace(self._legal.space.base, cp_kind=terms.cp_kind)
        space = replace(self._legal.space, base=base, sp=alike[0].space.sp)
        for priced in self._pricer.priced(space, cutting, layouts, apart=bool(self._pins)):
            for variant in alike:
                if variant.space.base.cp_order == priced.space.base.cp_order:
                    points = Points.of(priced, variant, self._goal)
                    if len(points.rows):
                        self._bounded[variant][points.places] = True
                        self._waiting.append(points)

    def _push(self, points: Points) -> None:
        if len(points.rows):
            self._number += 1
            self._num_open += len(points.rows)
            heapq.heappush(self._open, (float(points.bound.min()), self._number, points))


def _none_of(variant: RunVariant) -> NDArray[np.bool_]:
    return np.zeros(len(variant.layouts), dtype=bool)


def _count(known: dict[RunVariant, NDArray[np.bool_]]) -> int:
    return sum(int(column.sum()) for column in known.values())
