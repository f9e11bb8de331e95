"""Best-first search: solve outer points in the order of their bounds, until no open bound is better.

The block solver finds the cuts of all layouts of a kind at once. A cutting names atoms, not sizes, so that one serves
many layouts; the best layouts get cuttings of their own. It minimises time alone; the outer search saves memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoshard.blocks.cutting import Terms, solved_cutting
from autoshard.layout.layout import Cutting
from autoshard.layout.pin import Pin
from autoshard.plan.explanation import Certificate
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.bound.legal_space import LegalSpace, RunVariant
from autoshard.search.bound.mesh_kinds import MeshKinds
from autoshard.search.bound.points import AT_ONCE, SHARPEST, Points, Solution, likeliest, likely_s
from autoshard.search.bound.priced_layouts import LayoutPricer, Row
from autoshard.search.bound.records import BestSolutions, OwnCuttings, PointRecords, SolvingOrder
from autoshard.search.bound.rough import rough_seconds
from autoshard.search.bound.tightening import SolvedPoints, Tightening
from autoshard.search.bound.unsolved import PlainPoints, UnsolvedPoints
from autoshard.search.bound.watch import SearchProgress, SearchStopped, Watch, go_on, never_stop
from autoshard.search.fill.split_bounds import SplitSearch
from autoshard.search.fill.stage_filling import Goal

_ALWAYS = 3  # layouts get their own cutting, even if fewer are shown, so that the best layout does not depend on it
_QUICK = ("1f1b", "interleaved")  # schedules of which even stages are seldom far from the best
_FIRST = 4  # groups of points that are solved before points of the next variant are opened
_LIKELY = 8  # layouts that are timed before all others, at each look
_EARLY_LOOKS = (4, 16, 64, 256)  # after so many priced kinds of mesh likely layouts are looked at again
_LOOKS = 8  # times that points are opened to find the one that misses memory by least
_RUNNER_UP = 3  # groups of points that are solved for each runner-up
_SURVEYED = 300  # groups of points of which even stages are timed at last
_NEAR, _MOST_NEAR = 3, 16  # sizes in which layouts differ from the best, and groups of these that are solved
_TIE = 1e-8  # relative: times that differ by less count as equal


class Pool:
    """The points of a space: waiting, open or solved, and the best solution of each layout."""

    def __init__(
        self, pricer: LayoutPricer, legal: LegalSpace, goal: Goal, pins: tuple[Pin, ...] = (),
        watch: Watch = never_stop, rival_values: Sequence[float] = (),
    ) -> None:  # fmt: skip
        """``rival_values`` are those of the best layouts of other spaces, with which these compete."""
        self.pricer, self.legal, self.goal, self._pins, self._watch = pricer, legal, goal, pins, watch
        pricer.between = self.between
        self._kinds = MeshKinds(pricer, legal, goal, pins)
        self._records = PointRecords(legal)
        self.points: list[Points] = []  # all that are priced and may fit
        self.left, self._count = UnsolvedPoints(), _ALWAYS
        self._place = 1  # of the layout that others must be better than: the best, or the last that is wanted
        self._order = SolvingOrder(goal.effort.most_idle)
        self.splits = SplitSearch(seconds_left=goal.effort.split_s, most_flows=0)
        self._best, self._solved = BestSolutions(rival_values), SolvedPoints()
        self._tightening = Tightening(self._solved, self.splits, goal.effort)
        self.own_cuttings = OwnCuttings()
        self._rough_s: dict[int, Floats] = {}
        self._looked_at = np.inf  # the value of the best solution when open points were looked at last
        self._kinds.queue_all(self.rough_s(legal.space.base.zero))

    def settle(self, count: int) -> None:
        """Solve points until no layout can be better than the best by more than the gap, and ``count`` are known.

        The best ``count`` of those that are known get a cutting of their own. The watching caller may stop this between
        any two steps; then the solutions known so far count.
        """
        self._count, looked = max(count, _ALWAYS), False
        self._price_all()
        while True:
            # The first points of a variant give a limit that excludes most points of the next variant.
            while not self._gives_up and self._open_next():
                self._explore(most=np.inf if self._order.is_idle else _FIRST)
            self._explore()
            leading = self.solutions[: self._count]
            solution = next((best for best in leading if best.row not in self.own_cuttings), None)
            even = next((best for best in leading if not self._records.solved(best.point)[0]), None)
            if solution:
                self._refine(solution.row, solution.cutting)
            elif even:
                self._solve(even.point, even.value)
            elif self.left.least < self._limit and not (self._gives_up and not self._look_further()):
                pass
            elif not looked:
                self._look_for_runners_up()
                looked = True
            elif not self._tighten() and (self._gives_up or self.left.least >= self._limit):
                break

    def _price_all(self) -> None:
        num_kinds = len(self._kinds.unpriced)
        while self._kinds.unpriced:
            self.left.plain += self._kinds.price_next(self._limit, self._records)
            first_or_last = not np.isfinite(self._limit) or not self._kinds.unpriced
            if first_or_last or num_kinds - len(self._kinds.unpriced) in _EARLY_LOOKS:
                self._look_first(early=not first_or_last)
        if self._kinds.refused and not self._kinds.cuttings:
            raise self._kinds.refused[0]

    def _tighten(self) -> bool:
        """Raise the bounds of solved points that keep the gap open; say whether a solution is better."""
        best = self._best.value
        self._tightening.run(self._best.limit(self._place), self.left.least, self._solve_again)
        return self._best.value < best

    def _solve_again(self, point: Points) -> None:
        self._solve(point, self._limit)
        self.between()

    def _look_first(self, *, early: bool) -> None:
        """Time even stages of likely layouts: an answer if the search is stopped, and some limits for other points."""
        quick = [run for run in self.legal.variants if run.space.base.schedule in _QUICK] or self.legal.variants
        most = _LIKELY
        while self._look_at_likely(most, quick, early=early) and not np.isfinite(self._limit):
            most *= 2

    def _look_at_likely(self, most: int, quick: Sequence[RunVariant], *, early: bool) -> bool:
        """Time even stages of so many layouts that look fastest; return whether there were some.

        Of each kind of schedule the likeliest points give a limit, unless this is an ``early`` look.
        """
        limit, before = self._limit, len(self.points)
        groups = [plain for plain in self.left.plain if any(run in quick for run in plain.variants)]
        near = np.concatenate([np.zeros(0, int), *(plain.layouts[plain.bounds < limit] for plain in groups)])
        rough_s = self.rough_s(self.legal.space.base.zero)[near]
        chosen = near[np.argsort(rough_s, kind="stable")][:most]
        self._add_recompute(groups, quick, lambda plain: np.isin(plain.layouts, chosen))
        new = (points.only(np.isin(points.layouts, chosen)) for points in self.points[before:])
        for group, is_first in likeliest(new):
            if group.bound.min() < self._limit:
                first = group.only(np.argsort(group.bound, kind="stable")[: 2 * AT_ONCE])
                self._time_even_stages(first, early=early or not is_first)
        return len(self.points) > before

    def _look_for_runners_up(self) -> None:
        """Solve a few more groups of points that may be among the layouts that are wanted beside the best."""
        self._place = self._count
        try:
            self.left.open_again()
            for _ in range(_RUNNER_UP * (self._count - 1)):
                if self.left.least >= self._limit:
                    break
                if self.left.least < self.left.least_opened:
                    self._open_next()
                self._explore(most=1)
        finally:
            self._place = 1

    def _look_further(self) -> bool:
        """Look at points that are left open, once for each best solution; say whether one of them is better."""
        value = self._best.value
        if value < self._looked_at:
            self._looked_at, best = value, self.solutions[0]
            for group in self._likeliest(self.points)[:_SURVEYED]:
                self._time_even_stages(group)
            self._look_near(best)
        return self._best.value < value

    def _look_near(self, best: Solution) -> None:
        """Solve some points near the best solution, those that look fastest.

        Points of its schedule are near if few sizes differ (a factor has moved between axes, or mbs has changed);
        points of other schedules, if they are of its layout.
        """
        rows, sizes = self.legal.space.rows, ("tp", "pp", "cp", "ep", "dp", "mbs")
        num_changed = sum(rows[key] != rows[key][best.layout] for key in sizes)
        same = [run for run in self.legal.variants if run.space.base.schedule == best.candidate.schedule]
        elsewhere = [run for run in self.legal.variants if run not in same]
        self._solve_some(same, np.flatnonzero(num_changed <= _NEAR), best.value)
        self._solve_some(elsewhere, np.flatnonzero(num_changed == 0), best.value)

    def _solve_some(self, runs: Sequence[RunVariant], layouts: Ints, limit: float) -> None:
        """Solve points of some variants and layouts that look fastest, if they may take less than a limit."""
        self._add_recompute(
            self.left.plain, runs, lambda plain: np.isin(plain.layouts, layouts) & (plain.bounds < limit)
        )
        among = [points for points in self.points if points.variant in runs]
        for group in self._likeliest(among, layouts)[:_MOST_NEAR]:
            self.between()
            self._solve(group.only(np.argsort(group.bound, kind="stable")[:AT_ONCE]), limit)

    def _time_even_stages(self, points: Points, *, early: bool = False) -> None:
        self.between()
        filling = points.evenly_solved(self.goal)
        self._best.keep(points, filling, self.goal.value(filling), early=early)

    def _likeliest(self, among: Sequence[Points], layouts: Ints | None = None) -> list[Points]:
        """Return the unsolved points that may be better than all solutions, by schedule, the likeliest first."""
        groups: list[Points] = []
        for points in among:
            is_open = ~self._records.solved(points) & (self._records.least(points) < self._best.value)
            is_open &= np.isin(points.layouts, layouts) if layouts is not None else True
            groups += [*self.own_cuttings.in_use(points.only(is_open)).by_schedule()] if is_open.any() else []
        return sorted(groups, key=likely_s)

    def settled(self, solution: Solution) -> bool:
        """Say whether the layout of a solution has its own cutting; if not, give it that and settle all again."""
        row, used = solution.row, solution.cutting
        if row not in self.own_cuttings:
            self._refine(row, used)
        if self.own_cuttings[row] != used:
            self.settle(self._count)  # the fastest may be this layout with its own cutting
        return self.own_cuttings[row] == used

    def below(self, limit: float, schedules: frozenset[str] | None = None) -> Iterator[Points]:
        """Yield the points of some schedules, or of all, whose bound is below a limit; a group shares its schedule."""
        runs = [run for run in self.legal.variants if schedules is None or run.space.base.schedule in schedules]
        self.left.sharpen(limit, self.goal, self.pricer.least_with_recompute)
        self._add_recompute([plain for plain in self.left.plain if plain.least < limit], runs)
        for points in [group for group in self.points if group.variant in runs]:
            near = self.own_cuttings.in_use(points.only(self._records.least(points) < limit))
            if len(near.rows):
                yield from near.by_schedule()

    def smallest(self) -> Solution | None:
        """Return the smallest solution that a short search finds in the part of the space that needs least memory."""
        goal = Goal(objective="memory", capacity=np.inf)
        pool = Pool(self.pricer, self.legal.of_least_memory(), goal, self._pins, lambda _: self._watch(SearchProgress))
        pool._count = 1
        pool.left.plain += pool._kinds.priced_as(self._kinds)
        while pool._kinds.unpriced and not self._kinds.cuttings:
            pool.left.plain += pool._kinds.price_next(np.inf, pool._records)
        pool._kinds.unpriced = []
        for _ in range(_LOOKS):
            if not pool._open_next():
                break
            pool._explore(most=_FIRST)
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
        if self._kinds.unpriced:
            return 0.0
        return min(self.left.least, self._kinds.least_left, self._solved.least)

    def certificate(self, legal: Certificate) -> Certificate:
        """Add to a certificate how many points were solved, left out by their bounds, and too large."""
        value = self._best.value
        unpriced = ((layouts, run) for terms, layouts in self._kinds.unpriced for run in self._kinds.variants[terms])
        counts = {**self._records.counts(self.left, value, unpriced), "num_tables": len(self._kinds.cuttings)}
        return replace(legal, **counts, value=float(value), bound=float(min(value, self.bound)))

    def _open_next(self) -> bool:
        """Open the points below the limit of the variant with the least bound; return whether there was one."""
        limit = self._limit
        while True:
            least, points = min(self.left.waiting, key=lambda entry: entry[0], default=(np.inf, None))
            plain = min(self.left.plain, key=lambda group: group.least, default=None)
            if plain is None or plain.least >= limit or plain.least > least:
                break
            if plain.sharp:
                same_runs = [group for group in self.left.plain if group.sharp and group.variants == plain.variants]
                self._add_recompute(same_runs, plain.variants)
            else:
                self.left.sharpen(limit, self.goal, self.pricer.least_with_recompute)
        if points is None or least >= limit:
            return False
        self.left.waiting.remove((least, points))
        points = self.own_cuttings.in_use(points)
        for group in points.only(points.bound < limit).by_schedule():
            self.left.open(group)
        self.left.wait(points.only(points.bound >= limit))
        return True

    def _add_recompute(
        self, groups: Iterable[PlainPoints], runs: Sequence[RunVariant],
        near: Callable[[PlainPoints], NDArray[np.bool_]] | None = None,
    ) -> None:  # fmt: skip
        """Price some layouts under every recompute, and let their points of some variants wait.

        Layouts that are not ``near``, or not below the limit, stay as they are. Layouts of the same variants wait
        together, however their blocks are cut: to bound and solve many at once takes little longer than one.
        """
        limit = self._limit
        by_variants = self.left.take(groups, runs, near or (lambda plain: plain.bounds < limit))
        self.pricer.with_recompute([plain.priced for chosen in by_variants.values() for plain in chosen])  # all at once
        for variants, chosen in by_variants.items():
            priced = self.pricer.with_recompute([plain.priced for plain in chosen])
            joined = self.pricer.joined([part.only(plain.rows) for part, plain in zip(priced, chosen, strict=True)])
            for variant in variants:
                points = Points.of(joined, variant, self.goal, limit)
                self._records.bound(points)
                self.points.append(points)
                self.left.wait(points)

    def _explore(self, most: float = np.inf) -> None:
        """Solve the open points below the limit, at most ``most`` groups of them."""
        while np.isfinite(self.left.least_opened) and most > 0:
            limit = self._limit
            held_down = self._order.is_idle and self.left.least < self.left.least_opened  # by points not open yet
            if self.left.least_opened >= limit or held_down or self._gives_up:
                return
            points = self.own_cuttings.in_use(self.left.pop(self._order.times))
            whole, beyond = self.goal.effort.exhaustive, np.full(len(points.rows), np.inf)
            limits = beyond if whole else self._best.limits(points, limit)  # only the best point of each layout
            order = np.argsort(points.bound, kind="stable")
            near = points.bound[order] < limits[order]
            self.left.passed.append(points.only(order[~near]))
            order = order[near]
            at_once = points.num_at_once(self.goal)
            self.left.open(points.only(order[at_once:]))
            first = points.only(order[:at_once])
            try:
                below = float(limits[order[:at_once]].max(initial=-np.inf))
                if first.sharpness < SHARPEST and len(first.rows):
                    sharper = first.sharpened(self.goal, below, self.splits.known)
                    self._records.bound(sharper)
                    self.left.open(sharper)
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
        if not self._order.is_idle or self._place > 1:
            return False
        return min(self._limit, self._solved.least) <= self.left.least

    def between(self) -> None:
        """Let the watching caller stop the search."""
        go_on(self._watch, self._progress)

    def _progress(self) -> SearchProgress:
        best, total = self._best.value, self.legal.num_legal
        done = max(0, total - sum(len(points.rows) for points in self.left.groups))
        return SearchProgress(num_done=done, num_points=total, best=best, bound=min(best, self.bound))

    @property
    def _limit(self) -> float:
        """The value above which a point does not matter: that of the best layout, less the gap that may be left.

        There is none before as many layouts are known as are wanted.
        """
        if self.goal.effort.exhaustive or not np.isfinite(self._best.limit(self._count)):
            return np.inf
        return self._best.limit(self._place) * (1 - (self.goal.effort.gap if self._place == 1 else 0.0))

    def cutting_of(self, terms: Terms, layout: int) -> Cutting | None:
        """Return how a layout was cut at first under some terms, if it was."""
        return next((cutting for of, cutting, served in self._kinds.cuttings if of == terms and layout in served), None)

    def keep(self, solution: Solution) -> None:
        """Keep a solution that was found for another purpose, if it is faster than all, and time is the objective."""
        if self.goal.objective == "time" and solution.value < self._best.value:
            self._best.add(solution)

    def _solve(self, points: Points, limit: float) -> None:
        filling = points.solved(self.goal, limit, self.splits)
        values, before = self.goal.value(filling), self._best.limit(1)
        fits = np.isfinite(values)
        # What does not fit under the limit, or not at all, is no less than the limit.
        self._records.solve(points, fits, np.where(fits, filling.bound, np.maximum(filling.bound, limit)))
        self._solved.add(points, filling.bound)
        self._best.keep(points, filling, values)
        self._order.learn(points, values, is_better=self._best.limit(1) < before * (1 - _TIE))
        # The other points are not better than this limit, but the limit may rise.
        is_open = ~fits & np.isfinite(filling.bound)
        self.left.passed.append(replace(points, bound=np.maximum(filling.bound, limit)).only(is_open))

    def _refine(self, row: Row, used: Cutting) -> None:
        """Find a layout's own cutting; if it differs from the cutting used, price the layout again."""
        self.between()
        terms, layout = row
        cutting = solved_cutting(self.pricer.question, self.legal.space.candidate(layout, 0), self._kinds.pinned(terms))
        atoms = {atom for atom, column in self.pricer.meshes.atoms.items() if column[layout] > 1}
        self.own_cuttings[row] = used
        if cutting.only(atoms) == used.only(atoms):
            return
        self.own_cuttings[row] = cutting
        self._best.forget(row)
        self._solved.forget(row)
        self._records.forget_layout(layout, self._kinds.variants[terms])
        self.left.plain = [self.own_cuttings.in_use(plain) for plain in self.left.plain]
        self.left.plain += self._kinds.priced(terms, [(cutting, np.array([layout]))])
        self.left.open_again()
