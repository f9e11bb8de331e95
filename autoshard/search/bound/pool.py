"""Best-first search: solve outer points in the order of their bounds, until no open bound is better.

The block solver finds the cuts of all layouts of a kind at once. A cutting names atoms, not sizes, so that one serves
many layouts; the best layouts get cuttings of their own. It minimises time alone; the outer search saves memory.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autoshard.blocks.cutting import Terms, solved_cutting
from autoshard.errors import InputError
from autoshard.layout.layout import Cutting
from autoshard.layout.pin import Pin
from autoshard.plan.candidate import CpOrder
from autoshard.plan.explanation import Certificate
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.bound.legal_space import LegalSpace, RunVariant
from autoshard.search.bound.points import SHARPEST, PlainPoints, Points, Solution, UnsolvedPoints, likely, likely_s
from autoshard.search.bound.priced_layouts import LayoutPricer, PricedLayouts, Row
from autoshard.search.bound.records import BestSolutions, PointRecords, SolvingOrder
from autoshard.search.bound.rough import rough_seconds
from autoshard.search.bound.watch import SearchProgress, SearchStopped, Watch, go_on, never_stop
from autoshard.search.fill.split_bounds import SplitSearch
from autoshard.search.fill.stage_filling import Goal
from autoshard.search.fill.stage_options import ALL_RANGES

_ALWAYS = 3  # best layouts get their own cutting, even if fewer are shown, so that the best one does not depend on it
_QUICK = ("1f1b", "interleaved")  # schedules of which even stages are seldom far from the best
_FIRST = 4  # groups of points that are solved before points of the next variant are opened
_LIKELY = 8  # layouts that are timed before all others, once for each kind of mesh
_LOOKS = 8  # times that points are opened to find the one that misses memory by least
_AT_ONCE = 8  # points of a group that are solved together, those with the best bounds
_NEAR, _MOST_NEAR = 3, 16  # sizes in which layouts differ from the best, and groups of these that are solved
_TIE = 1e-8  # relative: times that differ by less count as equal
Priced = TypeVar("Priced", Points, PlainPoints)


class Pool:
    """The points of a space: waiting, open or solved, and the best solution of each layout."""

    def __init__(
        self,
        pricer: LayoutPricer,
        legal: LegalSpace,
        goal: Goal,
        pins: tuple[Pin, ...] = (),
        watch: Watch = never_stop,
        rival_values: Sequence[float] = (),
    ) -> None:
        """``rival_values`` are those of the best layouts of other spaces, with which these compete."""
        self.pricer, self.legal, self.goal, self._pins, self._watch = pricer, legal, goal, pins, watch
        pricer.between = self.between
        self._variants: dict[Terms, list[RunVariant]] = defaultdict(list)
        for variant in legal.variants:
            self._variants[variant.terms].append(variant)
        self._records = PointRecords(legal)
        self.points: list[Points] = []  # all that are priced and may fit
        self.left, self._count = UnsolvedPoints(), _ALWAYS
        self._order = SolvingOrder(goal.effort.most_idle)
        self._best, self.splits = BestSolutions(rival_values), SplitSearch(seconds_left=goal.effort.split_s)
        self._least: dict[Row, float] = {}  # the least bound of the solved points of a layout
        self._cuttings: list[tuple[Terms, Cutting, Ints]] = []  # with the layouts that they serve
        self._own: dict[Row, Cutting] = {}  # of layouts that have just their own
        self._refused: list[InputError] = []  # why kinds of mesh cannot keep to what is pinned
        self._rough_s: dict[int, Floats] = {}
        # Kinds of mesh of which nothing is priced yet.
        self._unpriced = [
            (terms, layouts)
            for terms in self._variants
            for layouts in self.pricer.kinds(self._layouts(terms), pinned=bool(pins))
        ]
        self._unpriced.sort(key=lambda kind: float(self.rough_s(legal.space.base.zero)[kind[1]].min()))

    def settle(self, count: int) -> None:
        """Solve points until the ``count`` best layouts are known, each with its own cutting.

        The watching caller may stop this between any two steps; then the solutions known so far count.
        """
        self._count = num_best = max(count, _ALWAYS)
        while self._unpriced:
            self._price_kind(*self._unpriced[0])
            del self._unpriced[0]
            if not self._unpriced or not np.isfinite(self._limit(num_best)):
                self._look_first(num_best)
        if self._refused and not self._cuttings:
            raise self._refused[0]
        while True:
            # The first points of a variant give a limit that excludes most points of the next variant.
            while not self._gives_up and self._open_next(self._limit(num_best)):
                self._explore(num_best, most=np.inf if self._order.is_idle else _FIRST)
            self._explore(num_best)
            solution = next((best for best in self.solutions[:num_best] if best.row not in self._own), None)
            if solution:
                self._refine(solution.row, solution.point.priced.cutting)
                continue
            if self.left.least >= self._limit(num_best):
                break
            if self._gives_up and not any(self._look_near(best) for best in self.solutions[:1]):
                break

    def _look_first(self, num_best: int) -> None:
        """Time even stages of likely layouts: a limit for all other points, and an answer if the search is stopped."""
        quick = [run for run in self.legal.variants if run.space.base.schedule in _QUICK] or self.legal.variants
        most = _LIKELY
        while self._look_at_likely(most, quick, num_best) and not np.isfinite(self._limit(num_best)):
            most *= 2

    def _look_at_likely(self, most: int, quick: Sequence[RunVariant], num_best: int) -> bool:
        """Time even stages of so many layouts that look fastest; return whether there were some."""
        limit, before = self._limit(num_best), len(self.points)
        runs = [(plain, [run for run in plain.variants if run in quick]) for plain in self.left.plain]
        runs = [(plain, variants) for plain, variants in runs if variants]
        near = np.concatenate([np.zeros(0, int), *(plain.layouts[plain.bounds < limit] for plain, _ in runs)])
        rough_s = self.rough_s(self.legal.space.base.zero)[near]
        chosen = near[np.argsort(rough_s, kind="stable")][:most]
        for plain, variants in runs:
            is_chosen = np.isin(plain.layouts, chosen)
            if is_chosen.any():
                self._add_recompute(plain, variants, is_chosen)
        new = [points.only(np.isin(points.layouts, chosen)) for points in self.points[before:]]
        for group in likely(points for points in new if len(points.rows)):
            if group.bound.min() < self._limit(num_best):
                self.between()
                first = group.only(np.argsort(group.bound, kind="stable")[: 2 * _AT_ONCE])
                filling = first.evenly_solved(self.goal)
                self._best.keep(first, filling, self.goal.value(filling))
        return len(self.points) > before

    def _look_near(self, best: Solution) -> bool:
        """Solve some points near the best solution, those that look fastest; say whether one is better.

        Points of the same schedule are near if few sizes differ: a factor has moved between axes, or mbs has changed.
        """
        rows, sizes = self.legal.space.rows, ("tp", "pp", "cp", "ep", "dp", "mbs")
        num_changed = sum(rows[key] != rows[key][best.layout] for key in sizes)
        near = np.flatnonzero(num_changed <= _NEAR)
        for plain in [*self.left.plain]:
            is_open = np.isin(plain.layouts, near) & (plain.bounds < best.value)
            runs = [run for run in plain.variants if run.space.base.schedule == best.candidate.schedule]
            if runs and is_open.any():
                self._add_recompute(plain, runs, is_open)
        groups: list[Points] = []
        for points in [group for group in self.points if group.variant.space.base.schedule == best.candidate.schedule]:
            is_open = np.isin(points.layouts, near) & ~self._records.solved(points)
            is_open &= self._records.least(points) < best.value
            groups += [*self.in_use(points.only(is_open)).by_schedule()] if is_open.any() else []
        for group in sorted(groups, key=likely_s)[:_MOST_NEAR]:
            self.between()
            self._solve(group.only(np.argsort(group.bound, kind="stable")[:_AT_ONCE]), best.value)
        return self.solutions[0].value < best.value

    def settled(self, solution: Solution) -> bool:
        """Say whether the layout of a solution has its own cutting; if not, give it that and settle all again."""
        row, used = solution.row, solution.point.priced.cutting
        if row not in self._own:
            self._refine(row, used)
        if self._own[row] != used:
            self.settle(self._count)  # the fastest may be this layout with its own cutting
        return self._own[row] == used

    def below(self, limit: float, schedules: frozenset[str] | None = None) -> Iterator[Points]:
        """Yield the points of some schedules, or of all, whose bound is below a limit; a group shares its schedule."""
        runs = [run for run in self.legal.variants if schedules is None or run.space.base.schedule in schedules]
        self.left.sharpen(limit, self.goal, self.pricer.least_with_recompute)
        for plain in [group for group in self.left.plain if group.least < limit]:
            variants = [run for run in plain.variants if run in runs]
            if variants:
                self._add_recompute(plain, variants)
        for points in [group for group in self.points if group.variant in runs]:
            near = self.in_use(points.only(self._records.least(points) < limit))
            if len(near.rows):
                yield from near.by_schedule()

    def smallest(self) -> Solution | None:
        """Return the smallest solution that a short search finds among points that keep little in flight.

        These are the points under 1F1B with the smallest micro-batches, if there are any.
        """
        legal = self.legal
        plain = [variant for variant in legal.variants if variant.space.base.schedule == "1f1b"] or legal.variants
        least = min(int(variant.space.rows["mbs"].min()) for variant in plain)
        selected = (variant.only(np.flatnonzero(variant.space.rows["mbs"] == least)) for variant in plain)
        few = replace(legal, variants=tuple(variant for variant in selected if len(variant.layouts)))
        goal = Goal(objective="memory", capacity=np.inf)
        pool = Pool(self.pricer, few, goal, self._pins, lambda _: self._watch(SearchProgress))
        pool._unpriced = []
        for terms, cutting, layouts in self._cuttings:
            common = np.intersect1d(layouts, pool._layouts(terms)) if terms in pool._variants else layouts[:0]
            if len(common):
                pool._price(terms, [(cutting, common)])
        for _ in range(_LOOKS):
            if not pool._open_next(pool._limit(1)):
                break
            pool._explore(1, most=_FIRST)
        return next(iter(pool.solutions), None)

    def rough_s(self, zero: int) -> Floats:
        """Return rough seconds of all layouts, if states are shared over dp in one way."""
        if zero not in self._rough_s:
            self._rough_s[zero] = rough_seconds(self.pricer.question, self.legal.space.rows, zero)
        return self._rough_s[zero]

    @property
    def solutions(self) -> list[Solution]:
        """The best solution of every layout so far, best first."""
        return self._best.ranked

    @property
    def bound(self) -> float:
        """A lower bound of all points: solved, open and waiting. Of points that are not priced nothing is known."""
        if self._unpriced:
            return 0.0
        return min([self.left.least, *self._least.values()])

    def certificate(self, legal: Certificate) -> Certificate:
        """Add to a certificate how many points were solved, left out by their bounds, and too large."""
        value = self._best.value
        unpriced = ((layouts, run) for terms, layouts in self._unpriced for run in self._variants[terms])
        return replace(
            legal,
            **self._records.counts(self.left, value, unpriced),
            num_tables=len(self._cuttings),
            value=float(value),
            bound=float(min(value, self.bound)),
        )

    def _open_next(self, limit: float) -> bool:
        """Open the points below a limit of the variant with the least bound; return whether there was one."""
        while True:
            least, points = min(self.left.waiting, key=lambda entry: entry[0], default=(np.inf, None))
            plain = min(self.left.plain, key=lambda group: group.least, default=None)
            if plain is None or plain.least >= limit or plain.least > least:
                break
            if plain.sharp:
                self._add_recompute(plain, plain.variants)
            else:
                self.left.sharpen(limit, self.goal, self.pricer.least_with_recompute)
        if points is None or least >= limit:
            return False
        self.left.waiting.remove((least, points))
        points = self.in_use(points)
        for group in points.only(points.bound < limit).by_schedule():
            self.left.open(group)
        self.left.wait(points.only(points.bound >= limit))
        return True

    def _add_recompute(
        self, plain: PlainPoints, variants: Sequence[RunVariant], near: NDArray[np.bool_] | None = None
    ) -> None:
        """Price some layouts under every recompute, and let their points of some variants wait.

        Layouts that are not ``near``, or not below the limit, stay as they are.
        """
        limit = self._limit(self._count)
        self.left.plain.remove(plain)
        opened, *rest = plain.parted(plain.bounds < limit if near is None else near)
        unused = [run for run in plain.variants if run not in variants]
        self.left.plain += [*rest, *([replace(opened, variants=unused)] if unused else [])]
        priced = self.pricer.with_recompute(plain.priced)
        priced = priced if len(opened.rows) == len(priced.numbers) else priced.only(opened.rows)
        for variant in variants:
            points = Points.of(priced, variant, self.goal, limit)
            self._records.bound(points)
            self.points.append(points)
            self.left.wait(points)

    def _explore(self, count: int, most: float = np.inf) -> None:
        """Solve the points that may be among the ``count`` best layouts, at most ``most`` groups of them."""
        while np.isfinite(self.left.least_opened) and most > 0:
            limit = self._limit(count)
            held_down = self._order.is_idle and self.left.least < self.left.least_opened  # by points not open yet
            if self.left.least_opened >= limit or held_down or self._gives_up:
                return
            points = self.in_use(self.left.pop(self._order.times))
            whole, beyond = self.goal.effort.exhaustive, np.full(len(points.rows), np.inf)
            limits = beyond if whole else self._best.limits(points, limit)  # only the best point of each layout
            order = np.argsort(points.bound, kind="stable")
            near = points.bound[order] < limits[order]
            self.left.passed.append(points.only(order[~near]))
            order = order[near]
            by_split = points.sharpness == SHARPEST and points.variant.space.base.schedule not in ALL_RANGES
            at_once = 1 if by_split else _AT_ONCE  # each split that is found excludes others
            self.left.open(points.only(order[at_once:]))
            first = points.only(order[:at_once])
            try:
                below = float(limits[order[:at_once]].max(initial=-np.inf))
                if first.sharpness < SHARPEST and len(first.rows):
                    self.left.open(first.sharpened(self.goal, below, self.splits.known))
                elif len(first.rows):
                    self._solve(first, below)
                    most -= 1
            except SearchStopped:
                self.left.open(first)  # so that their bound counts
                raise
            self.between()

    @property
    def _gives_up(self) -> bool:
        """Say whether to leave points open: nothing better was found for long, and solving them makes no gap smaller.

        That is the case where the gap is as small as wanted, or where solved points keep it open.
        """
        if not self._order.is_idle:
            return False
        return min([self._limit(1) * (1 - self.goal.effort.gap), *self._least.values()]) <= self.left.least

    def between(self) -> None:
        """Let the watching caller stop the search."""
        go_on(self._watch, self._progress)

    def _progress(self) -> SearchProgress:
        best, total = self._best.value, self.legal.num_legal
        done = max(0, total - sum(len(points.rows) for points in self.left.groups))
        return SearchProgress(num_done=done, num_points=total, best=best, bound=min(best, self.bound))

    def _limit(self, count: int) -> float:
        """Return the value of the layout at place ``count``; a point above it does not matter."""
        return np.inf if self.goal.effort.exhaustive else self._best.limit(count)

    def keep(self, solution: Solution) -> None:
        """Keep a solution that was found for another purpose, if it is faster than all, and time is the objective."""
        if self.goal.objective == "time" and solution.value < self._best.value:
            self._best.add(solution)

    def _solve(self, points: Points, limit: float) -> None:
        filling = points.solved(self.goal, limit, self.splits)
        values, before = self.goal.value(filling), self._best.limit(self._count)
        fits = np.isfinite(values)
        # What does not fit under the limit, or not at all, is no less than the limit.
        self._records.solve(points, fits, np.where(fits, filling.bound, np.maximum(filling.bound, limit)))
        for layout, bound in zip(points.layouts.tolist(), filling.bound.tolist(), strict=True):
            row = points.variant.terms, layout
            self._least[row] = min(bound, self._least.get(row, np.inf))
        self._best.keep(points, filling, values)
        self._order.learn(points, values, is_better=self._best.limit(self._count) < before * (1 - _TIE))
        # The other points are not better than this limit, but the limit may rise.
        is_open = ~fits & np.isfinite(filling.bound)
        self.left.passed.append(replace(points, bound=np.maximum(filling.bound, limit)).only(is_open))

    def _price_kind(self, terms: Terms, layouts: Ints) -> None:
        """Find the cuttings of all layouts of one kind of mesh, and price these."""
        try:
            arguments = replace(terms, pins=self._pins), self.goal.effort.gap
            cuttings = self.pricer.cuttings(layouts, *arguments)
            self._cuttings += [(terms, cutting, served) for cutting, served in cuttings]
            self._price(terms, cuttings)
        except InputError as fault:
            if not self._pins:
                raise
            self._refused.append(fault)

    def _refine(self, row: Row, used: Cutting) -> None:
        """Find a layout's own cutting; if it differs from the cutting used, price the layout again."""
        self.between()
        terms, layout = row
        cutting = solved_cutting(
            self.pricer.question, self.legal.space.candidate(layout, 0), replace(terms, pins=self._pins)
        )
        atoms = {atom for atom, column in self.pricer.atoms.items() if column[layout] > 1}
        self._own[row] = used
        if cutting.only(atoms) == used.only(atoms):
            return
        self._own[row] = cutting
        self._best.forget(row)
        self._least.pop(row, None)
        self._records.forget_layout(layout, self._variants[terms])
        self.left.plain = [self.in_use(plain) for plain in self.left.plain]
        self._cuttings.append((terms, cutting, np.array([layout])))
        self._price(terms, [(cutting, np.array([layout]))])
        self.left.open_again()

    def in_use(self, points: Priced) -> Priced:
        """Leave out layouts whose own cutting differs from the cutting of these points."""
        cuttings = {layout: cutting for (terms, layout), cutting in self._own.items() if terms == points.terms}
        gone = [layout for layout, cutting in cuttings.items() if cutting != points.priced.cutting]
        return points.only(~np.isin(points.layouts, gone)) if gone else points

    def _price(self, terms: Terms, cuttings: Sequence[tuple[Cutting, Ints]]) -> None:
        """Price the blocks of layouts as their cuttings have them, without recompute."""
        variants = self._variants[terms]
        base = replace(self.legal.space.base, cp_kind=terms.cp_kind)
        space = replace(self.legal.space, base=base, sp=variants[0].space.sp)
        orders: list[CpOrder] = sorted({variant.space.base.cp_order for variant in variants})
        parts: list[PricedLayouts] = []
        for cutting, layouts in cuttings:
            groups: dict[CpOrder, Ints] = {
                order: np.intersect1d(layouts, self._layouts(terms, order)) for order in orders
            }
            parts += self.pricer.priced(space, cutting, groups, apart=bool(self._pins))
        self.left.plain += PlainPoints.of(parts, self.pricer.joined(parts), variants, self.goal)

    def _layouts(self, terms: Terms, order: CpOrder | None = None) -> Ints:
        """Return the layouts of the variants with these terms, or of those with one order of the sequence over cp."""
        parts = [run.layouts for run in self._variants[terms] if order in (None, run.space.base.cp_order)]
        return np.unique(np.concatenate(parts))
