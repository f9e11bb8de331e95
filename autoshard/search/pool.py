"""Best first: outer points by their bounds, each solved in full, until none that is left can be better.

The solver is asked about a layout of every kind of mesh, then about those that come out best, until it has been asked
about all that stay there; the others are priced with the best of its answers. Tables are solved for time alone: memory
is saved by the outer search.
"""

import heapq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.blocks.cutting import Terms
from autoshard.cost.setting import Question
from autoshard.layout.pin import Pin
from autoshard.plan.candidate import Zero
from autoshard.search.answers import Answers
from autoshard.search.bounds import Ideal
from autoshard.search.exact_ranges import Effort
from autoshard.search.families import Asked, Prices, families
from autoshard.search.goals import Goal
from autoshard.search.judging import Ruled
from autoshard.search.points import Bound, Group, Legal, groups
from autoshard.search.progress import Progress, Watch
from autoshard.search.solutions import Solution

Column = Any
_ALWAYS = 3  # of the best layouts are solved for, however few are shown, so that the best one does not depend on that
_FIRST = 4  # groups of points that are solved before the next variant is bounded
_AT_ONCE = 8  # points of a group that are solved together, those with the best bounds
_SHARPENED = 256  # points of a group whose bounds are made sharper together
_TIE = 1e-8  # by how much times that count as equal differ at most


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Waiting:
    """A family with a variant, of whose points some are not open yet: those with a bound of ``above`` or more.

    Those that promise most come first: what they come to leaves out most points of the others.
    """

    ideal: Ideal
    legal: Legal
    least: float  # what these points come to at least
    above: float = -np.inf

    @property
    def order(self) -> tuple[bool, float]:
        """Where it stands; GPipe promises much that seldom fits."""
        return self.legal.builder == "gpipe", self.least


class Pool:
    """The points of a space, and what is known of them so far."""

    def __init__(
        self, question: Question, ruled: Ruled, goal: Goal, effort: Effort, pins: tuple[Pin, ...] = ()
    ) -> None:
        self._space, self._legal, self._pins = ruled.space, ruled.legal, pins
        self._goal, self._effort = goal, effort
        self._prices = Prices(question)
        self._answers = Answers(question, ruled.space, ruled.legal, pins)
        self._waiting: list[_Waiting] = []
        self._open: list[tuple[float, int, Group]] = []
        self._passed: list[Group] = []  # no better than what is known: opened again if that is forgotten
        self._best: dict[int, Solution] = {}
        self._least: dict[tuple[Terms, Asked, int], float] = {}  # what a layout's solved points come to at least
        self._number = self._num_open = 0
        self._bounded, self._solved, self._fits = ({one: _none_of(one) for one in ruled.legal} for _ in range(3))

    def settled(self, count: int, watch: Watch) -> str:
        """Solve points until so many of the best layouts are known, each with its own cutting; say why it ended."""
        wanted = max(count, _ALWAYS)
        for terms in dict.fromkeys(one.terms for one in self._legal):
            for layouts in self._answers.kinds(terms):
                self._learn(layouts, terms)
        if self._answers.faults and not self._waiting:
            raise self._answers.faults[0]
        while True:
            # A few points of a variant give a limit that leaves out most of the next.
            while waiting := self._next_waiting(self._limit(wanted)):
                self._bound(waiting, self._limit(wanted))
                ended = self._explore(wanted, watch, most=_FIRST)
                if ended:
                    return self._stopped(ended)
            ended = self._explore(wanted, watch)
            own = self._answers.has_own
            left = [one for one in self.solutions[:wanted] if not own(one.layout, one.group.legal.terms)]
            if ended or not left:
                return ended
            self._learn([left[0].layout], left[0].group.legal.terms)

    @property
    def solutions(self) -> list[Solution]:
        """The best of every layout so far, best first."""
        return sorted(self._best.values(), key=lambda one: one.order)

    @property
    def bound(self) -> float:
        """What any point takes at least, those solved and those left open."""
        waiting = (one.least for one in self._waiting)
        return min([*self._least.values(), *waiting, self._open[0][0] if self._open else np.inf], default=np.inf)

    @property
    def num_tables(self) -> int:
        """How many answers of the solver differ."""
        return self._answers.num_tables

    @property
    def num_too_large(self) -> int:
        """Points that no filling fits, by their bound."""
        return _count(self._bounded, False)

    @property
    def num_solved(self) -> int:
        """Points that were solved."""
        return _count(self._solved, True)

    @property
    def num_fitting(self) -> int:
        """Solved points of which a filling fits."""
        return _count(self._fits, True)

    def _next_waiting(self, limit: float) -> _Waiting | None:
        """Take the first that may have points below a limit."""
        found = min((one for one in self._waiting if one.least < limit), key=lambda one: one.order, default=None)
        if found:
            self._waiting.remove(found)
        return found

    def _stopped(self, ended: str) -> str:
        """Bound what was not looked at yet, so that what is left open is known."""
        while self._waiting:
            self._bound(self._waiting.pop(), np.inf)
        return ended

    def _explore(self, count: int, watch: Watch, most: float = np.inf) -> str:
        """Solve what may be among so many best layouts, group by group, or at most so many groups of it."""
        while self._open and most > 0:
            limit = self._limit(count)
            if self._open[0][0] >= limit:
                return ""
            _, _, group = heapq.heappop(self._open)
            self._num_open -= len(group.rows)
            group, limits = self._near(group, limit)
            if not np.isfinite(limit) or group.sharp or len(group.rows) <= 1:
                most -= 1
                at_once = _AT_ONCE if np.isfinite(limit) or self._effort.exhaustive else 1
                self._push(group.only(slice(at_once, None)))
                self._solve(group.only(slice(at_once)), float(limits[:at_once].max(initial=-np.inf)))
            else:
                self._push(group.only(slice(_SHARPENED, None)))
                some = group.only(slice(_SHARPENED))
                self._push(replace(some, bound=self._goal.sharpened(some), sharp=True))
            ended = watch(self._progress())
            if ended:
                return ended
        return ""

    def _near(self, group: Group, limit: float) -> tuple[Group, Column]:
        """Return the points that may be better than what is known of their layouts, best first, and these limits."""
        limits = np.array([self._limit_of(layout, limit) for layout in group.layouts.tolist()])
        order = np.argsort(group.bound, kind="stable")
        near = group.bound[order] < limits[order]
        self._pass(group.only(order[~near]))
        return group.only(order[near]), limits[order[near]]

    def _progress(self) -> Progress:
        best = min((one.value for one in self._best.values()), default=np.inf)
        points = sum(len(known) for known in self._bounded.values())
        return Progress(
            num_done=max(0, points - self._num_open), num_points=points, best=best, bound=min(best, self.bound)
        )

    def _limit(self, count: int) -> float:
        """Return what a point must stay below to matter."""
        if self._effort.exhaustive or len(self._best) < count:
            return np.inf
        return sorted(one.value for one in self._best.values())[count - 1] * (1 + _TIE)

    def _limit_of(self, layout: int, limit: float) -> float:
        """Return what a point of a layout must stay below: only the best of each layout is wanted."""
        known = self._best.get(layout)
        return min(limit, known.value * (1 + _TIE)) if known and not self._effort.exhaustive else limit

    def _solve(self, group: Group, limit: float) -> None:
        terms, asked = group.legal.terms, group.family.asked
        group = group.only(self._answers.allows(group.layouts.tolist(), terms, asked))
        if not len(group.rows):
            return
        found = self._goal.solved(group, limit, self._effort)
        values = self._goal.value(found)
        fits = np.isfinite(values)
        self._solved[group.legal][group.places] = True
        self._fits[group.legal][group.places] |= fits
        for number, (layout, bound) in enumerate(zip(group.layouts.tolist(), found.bound_s.tolist(), strict=True)):
            place = (terms, asked, layout)
            self._least[place] = min(bound, self._least.get(place, np.inf))
            if fits[number]:
                only = np.array([number])
                chosen, value = found.only(only), float(values[number])
                self._keep(Solution(layout=layout, group=group.only(only), chosen=chosen, value=value))
        # What is left is no better than the limit, but may be once that has risen.
        self._pass(replace(group, bound=np.maximum(found.bound_s, limit)).only(~fits & np.isfinite(found.bound_s)))

    def _keep(self, one: Solution) -> None:
        """Keep the best of a layout; one with another cutting may become that, if this one is forgotten."""
        known = self._best.get(one.layout)
        first, second = (one, known) if known is None or one.order < known.order else (known, one)
        self._best[one.layout] = first
        if second and second.told != first.told:
            self._pass(replace(second.group, bound=np.array([second.value])))

    def _pass(self, group: Group) -> None:
        if len(group.rows):
            self._passed.append(group)

    def _learn(self, layouts: list[int], terms: Terms) -> None:
        """Ask about the first of some layouts; if the answer is new, its families are priced with it."""
        answer = self._answers.ask_first(layouts, terms)
        if answer:
            layout, asked, new = answer
            self._forget(layout, terms, asked)
            if new:
                self._price(asked, terms)

    def _forget(self, layout: int, terms: Terms, asked: Asked) -> None:
        """Drop what a layout came to with another cutting than its own, and open again what was passed over for it."""
        for other in self._answers.known(terms):
            if other is not asked:
                self._least.pop((terms, other, layout), None)
        known = self._best.get(layout)
        if known and known.group.legal.terms == terms and known.group.family.asked is not asked:
            del self._best[layout]
            for group in self._passed:
                self._push(group)
            self._passed.clear()

    def _price(self, asked: Asked, terms: Terms) -> None:
        """Price the blocks of all layouts that a cutting serves, and let their points wait."""
        layouts = self._answers.served(asked, terms)
        if not layouts:
            return
        mine = [one for one in self._legal if one.terms == terms]
        base = replace(self._space.base, cp_kind=terms.cp_kind)
        space = replace(self._space, base=base, sp=mine[0].variant.space.sp)
        for family in families(self._prices, space, asked, layouts, apart=bool(self._pins)):
            alike = [legal for legal in mine if legal.cp_order == family.cp_order]
            zeros: list[Zero] = list(dict.fromkeys(legal.zero for legal in alike))
            for zero in zeros:
                ideal = Ideal.of(family, zero, self._goal.capacity)
                for legal in alike:
                    if legal.zero == zero:
                        self._wait(ideal, legal)

    def _wait(self, ideal: Ideal, legal: Legal) -> None:
        """Let a family wait with a variant, if any of its points may fit."""
        _, places, least = groups(ideal, legal, self._bound_of, -np.inf)
        if len(places):
            self._bounded[legal][places] = True
            self._waiting.append(_Waiting(ideal=ideal, legal=legal, least=least))

    @property
    def _bound_of(self) -> Bound:
        return _no_bound if self._effort.exhaustive else self._goal.bound

    def _bound(self, waiting: _Waiting, limit: float) -> None:
        """Bound the points of a family and a variant as well as can be, and open those that may matter."""
        found, _, left = groups(waiting.ideal, waiting.legal, self._bound_of, limit)
        for group in found:
            self._push(group.only(group.bound >= waiting.above))
        if np.isfinite(left):
            self._waiting.append(replace(waiting, least=left, above=limit))

    def _push(self, group: Group) -> None:
        if len(group.rows):
            self._number += 1
            self._num_open += len(group.rows)
            heapq.heappush(self._open, (float(group.bound.min()), self._number, group))


def _none_of(legal: Legal) -> Column:
    return np.zeros(len(legal.variant.layouts), dtype=bool)


def _count(known: dict[Legal, Column], value: bool) -> int:
    return sum(int((column == value).sum()) for column in known.values())


def _no_bound(ideal: Ideal, builder: str, rows: Column, chunks: Column, allowed: Column, below: float) -> Column:
    """Leave out nothing."""
    return np.zeros(len(rows))
