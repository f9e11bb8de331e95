"""Best first: outer points by their bounds, each solved in full, until none that is left can be better.

A cutting names atoms, not sizes, so that one serves many layouts. The solver is asked about a layout of every kind of
mesh, then about those that come out best, until it has been asked about all that stay there; the others are priced with
the best of its answers. Tables are solved for time alone: memory is saved by the outer search.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from autoshard.cost.setting import Question
from autoshard.errors import InputError
from autoshard.layout.pin import Pin
from autoshard.plan.candidate import Candidate
from autoshard.plan.lowering import ATOMS
from autoshard.plan.stages import even_stages
from autoshard.search.bounds import Ideal
from autoshard.search.chosen import Chosen
from autoshard.search.columns import atom_columns
from autoshard.search.cutting import Cutter, Terms
from autoshard.search.exact_ranges import Effort
from autoshard.search.families import Asked, families
from autoshard.search.goals import Goal
from autoshard.search.judging import Ruled
from autoshard.search.points import Bound, Group, Legal, groups
from autoshard.search.space import SIZES
from autoshard.spec.workload import DTYPE_BYTES

Column = Any
TIE_DIGITS = 9  # times that agree in so many digits count as equal
_ALWAYS = 3  # of the best layouts are solved for, however few are shown, so that the best one does not depend on that
_FIRST = 4  # groups of points that are solved before the next variant is bounded
_AT_ONCE = 8  # points of a group that are solved together, those with the best bounds
_TIE = 1e-8  # by how much such times differ at most


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """An outer point with the best filling of its stages, and what that takes."""

    layout: int
    group: Group  # of this point alone
    chosen: Chosen
    value: float  # of what is minimised

    @property
    def order(self) -> tuple[float, ...]:
        """Where it stands: by time, then by memory, then by its sizes and choices."""
        space, row = self.group.legal.variant.space, int(self.group.places[0])
        sizes = [float(space.rows[key][row]) for key in (*SIZES, "vp")]
        base = space.base
        choices = [
            float(space.sp is False),
            float(base.zero != 1),
            float(base.zero),
            float(base.cp_order != "contiguous"),
        ]
        numbers = (self.value, float(self.chosen.time_s[0]))
        times = [float(f"{number:.{TIE_DIGITS}g}") for number in numbers]
        return (*times, float(self.chosen.peak_bytes[0]), *sizes, *choices)

    @property
    def candidate(self) -> Candidate:
        """The point with its stages, in text."""
        candidate = self.group.legal.variant.space.at(int(self.group.places[0]), 0)
        stages, kinds = self.chosen.stages(0), self.group.family.kinds
        uneven = stages != even_stages(sum(stages), len(stages))
        recompute = self.chosen.recompute(0, kinds)
        return replace(candidate, stages=stages if uneven else None, recompute=recompute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search has come."""

    num_done: int  # points that need no more work
    num_points: int
    best: float
    bound: float


Watch = Callable[[Progress], str]  # asked between any two steps: why to stop, or nothing
_Kind = tuple[bool, str]  # whether the sequence is cut over tp between products, and its order over cp


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Waiting:
    """A family with the number of a variant whose points have no more than their cheapest bound yet.

    Those that promise most come first: what they come to leaves out most points of the others.
    """

    ideal: Ideal
    number: int
    order: tuple[bool, float]


class Pool:
    """The points of a space, and what is known of them so far."""

    def __init__(
        self, question: Question, ruled: Ruled, goal: Goal, effort: Effort, pins: tuple[Pin, ...] = ()
    ) -> None:
        space, legal = ruled.space, ruled.legal
        self._question, self._space, self._legal, self._pins = question, space, legal, pins
        self._goal, self._effort, self._capacity = goal, effort, question.cluster.rank_memory_bytes
        self._cutter = Cutter(question)
        self._exact = frozenset(ATOMS if pins else ("ep", "cp") if question.model.num_experts else ())
        self._asked: dict[bool, list[Asked]] = {}
        self._own: dict[tuple[int, bool], Asked] = {}
        self._refused: set[tuple[int, bool]] = set()  # layouts that cannot keep to what is pinned
        self._faults: list[InputError] = []
        self._ideals: list[Ideal] = []
        self._waiting: list[_Waiting] = []
        self._open: list[tuple[float, int, Group]] = []
        self._bounded = [np.zeros(len(one.variant.layouts), dtype=bool) for one in legal]  # by a family, fitting or not
        self._best: dict[int, Solution] = {}
        self._least: list[float] = []  # what points that need no more work may come to at least
        self._number = self._num_open = 0
        sizes = atom_columns(question.model, space)
        cut = zip(*((column > 1).tolist() for column in sizes.values()), strict=True)
        self._cut = [frozenset(atom for atom, cuts in zip(sizes, row, strict=True) if cuts) for row in cut]
        self.num_solved = 0
        self.num_fitting = 0

    def settled(self, count: int, watch: Watch) -> str:
        """Solve points until so many of the best layouts are known, each with its own cutting; say why it ended."""
        wanted = max(count, _ALWAYS)
        for cuts in dict.fromkeys(_cuts(one) for one in self._legal):
            for layouts in self._kinds(cuts):
                self._ask_first(layouts, cuts)
        if self._faults and not self._ideals:
            raise self._faults[0]
        while True:
            # A few points of a variant give a limit that leaves out most of the next.
            while self._waiting:
                self._bound(self._waiting.pop(0), self._below(wanted))
                ended = self._explore(wanted, watch, most=_FIRST)
                if ended:
                    return self._stopped(ended)
            ended = self._explore(wanted, watch)
            left = [one for one in self.solutions[:wanted] if self._place(one) not in self._own]
            if ended or not left:
                return ended
            self._ask_first([left[0].layout], _cuts(left[0].group.legal))

    def _stopped(self, ended: str) -> str:
        """Bound what was not looked at yet, so that what is left open is known."""
        for waiting in self._waiting:
            self._bound(waiting, np.inf)
        self._waiting.clear()
        return ended

    @property
    def solutions(self) -> list[Solution]:
        """The best of every layout so far, best first."""
        return sorted(self._best.values(), key=lambda one: one.order)

    @property
    def bound(self) -> float:
        """What any point takes at least, those solved and those left open."""
        return min([*self._least, self._open[0][0] if self._open else np.inf])

    @property
    def num_tables(self) -> int:
        """How many answers of the solver differ."""
        return sum(len(own) for own in self._asked.values())

    @property
    def num_too_large(self) -> int:
        """Points that no filling fits, by their bound."""
        return sum(int((~known).sum()) for known in self._bounded)

    def _explore(self, count: int, watch: Watch, most: float = np.inf) -> str:
        """Solve what may be among so many best layouts, group by group, or at most so many groups of it."""
        while self._open and most > 0:
            most -= 1
            below = self._below(count)
            if self._open[0][0] >= below * (1 + _TIE):
                return ""
            _, _, group = heapq.heappop(self._open)
            self._num_open -= len(group.rows)
            below_each = np.array([self._below_of(layout, below) for layout in group.layouts.tolist()])
            near = np.argsort(group.bound, kind="stable")
            near = near[group.bound[near] < below_each[near] * (1 + _TIE)]
            count_now = _AT_ONCE if np.isfinite(below) or self._effort.exhaustive else 1
            if len(near) > count_now:
                self._push(group.only(near[count_now:]))
            if len(near):
                self._solve(group.only(near[:count_now]), float(below_each[near[:count_now]].max()))
            ended = watch(self._progress())
            if ended:
                return ended
        return ""

    def _progress(self) -> Progress:
        best = min((one.value for one in self._best.values()), default=np.inf)
        points = sum(len(known) for known in self._bounded)
        return Progress(
            num_done=max(0, points - self._num_open), num_points=points, best=best, bound=min(best, self.bound)
        )

    def _below(self, count: int) -> float:
        """Return what a point must stay below to matter."""
        if self._effort.exhaustive or len(self._best) < count:
            return np.inf
        return sorted(one.value for one in self._best.values())[count - 1]

    def _below_of(self, layout: int, below: float) -> float:
        """Return what a point of a layout must stay below: only the best of each layout is wanted."""
        known = self._best.get(layout)
        return min(below, known.value) if known and not self._effort.exhaustive else below

    def _solve(self, group: Group, below: float) -> None:
        cuts = _cuts(group.legal)
        mine = [
            number
            for number, layout in enumerate(group.layouts.tolist())
            if (layout, cuts) not in self._refused
            and self._own.get((layout, cuts), group.family.asked) is group.family.asked
        ]
        if not mine:
            return
        group = group.only(np.array(mine))
        found = self._goal.solved(group, below * (1 + _TIE), self._effort)
        self.num_solved += len(mine)
        values = self._goal.value(found)
        self.num_fitting += int(np.isfinite(values).sum())
        self._least.append(float(found.bound_s.min()))
        for number, layout in enumerate(group.layouts.tolist()):
            if np.isfinite(values[number]):
                only = np.array([number])
                chosen, value = found.only(only), float(values[number])
                self._keep(Solution(layout=layout, group=group.only(only), chosen=chosen, value=value))

    def _keep(self, one: Solution) -> None:
        known = self._best.get(one.layout)
        if known is None or one.order < known.order:
            self._best[one.layout] = one

    def _place(self, one: Solution) -> tuple[int, bool]:
        return one.layout, _cuts(one.group.legal)

    def _kinds(self, cuts: bool) -> Iterator[list[int]]:
        """Yield the layouts of each kind that no cutting of another kind serves, those with the largest tp first.

        Of these first one that may well come out best, because that one is asked about anyway: with as few stages as
        leave room for other things than weights and gradients, and small micro-batches.
        """
        layouts = self._layouts(cuts)
        rows, precision = self._space.keep(layouts).rows, self._question.workload.precision
        per_weight = DTYPE_BYTES[precision.weights] + DTYPE_BYTES[precision.gradients]
        held = self._question.model.num_parameters * per_weight / (rows["tp"] * rows["pp"])
        order = np.lexsort((rows["mbs"], rows["cp"], rows["pp"], held > self._capacity / 2, -rows["tp"]))
        found: dict[tuple[str, ...], list[int]] = {}
        ordered: list[int] = layouts[order].tolist()
        for layout in ordered:
            found.setdefault(tuple(sorted(self._cut[layout] & self._exact)), []).append(layout)
        yield from found.values()

    def _layouts(self, cuts: bool, order: str | None = None) -> Column:
        """Return the layouts of the variants of a kind."""
        some = [
            one.variant.layouts
            for one in self._legal
            if _cuts(one) == cuts and order in (None, one.variant.space.base.cp_order)
        ]
        return np.unique(np.concatenate(some)) if some else np.zeros(0, dtype=np.int64)

    def _ask_first(self, layouts: Sequence[int], cuts: bool) -> None:
        """Ask about the first of some layouts that can keep to what is pinned; the others before it are no answer."""
        for layout in layouts:
            try:
                self._ask(layout, cuts)
                return
            except InputError as fault:
                if not self._pins:
                    raise
                self._faults.append(fault)
                self._refused.add((layout, cuts))

    def _ask(self, layout: int, cuts: bool) -> None:
        """Solve for a layout; if the answer is new, its families are priced with it. The layout keeps to its own."""
        atoms = self._cut[layout]
        terms = Terms(engine=self._space.engine, sequence_parallel=cuts, pins=self._pins)
        cutting = self._cutter.solved(self._space.at(layout, 0), terms)
        known = self._asked.setdefault(cuts, [])
        same = [
            one for one in known if one.serves(atoms, self._exact) and one.cutting.only(atoms) == cutting.only(atoms)
        ]
        asked = same[0] if same else Asked(cutting=cutting, atoms=atoms)
        self._own[layout, cuts] = asked
        self._forget(layout, cuts, asked)
        if same:
            return
        known.append(asked)
        orders = dict.fromkeys(one.variant.space.base.cp_order for one in self._legal if _cuts(one) == cuts)
        for order in orders:
            self._price(asked, cuts, order)

    def _forget(self, layout: int, cuts: bool, asked: Asked) -> None:
        """Drop what a layout came to with another cutting than its own, and look again at what was left out for it."""
        known = self._best.get(layout)
        if known is None or self._place(known) != (layout, cuts) or known.group.family.asked is asked:
            return
        del self._best[layout]
        self._least.clear()
        self._open.clear()
        self._num_open = 0
        pairs = product(self._ideals, range(len(self._legal)))
        self._waiting.clear()
        for ideal, number in pairs:
            if self._serves(ideal, number):
                self._wait(ideal, number)
        self._waiting.sort(key=lambda waiting: waiting.order)

    def _serves(self, ideal: Ideal, number: int) -> bool:
        """Say whether a variant is run with a family's blocks and ZeRO."""
        space, base = ideal.family.space, self._legal[number].variant.space.base
        same = (space.sp is not False, space.base.cp_order, ideal.zero)
        return same == (*_kind(self._legal[number]), base.zero)

    def _price(self, asked: Asked, cuts: bool, order: str) -> None:
        """Price the blocks of all layouts that a cutting serves, and bound their points."""
        mine = [one for one in enumerate(self._legal) if _kind(one[1]) == (cuts, order)]
        layouts = [
            layout
            for layout in map(int, self._layouts(cuts, order))
            if asked.serves(self._cut[layout], self._exact) and self._own.get((layout, cuts), asked) is asked
        ]
        if not layouts:
            return
        sp = mine[0][1].variant.space.sp
        space = replace(self._space, base=replace(self._space.base, cp_order=order), sp=sp)
        for family in families(self._question, space, asked, np.array(layouts), apart=bool(self._pins)):
            zeros = dict.fromkeys(legal.variant.space.base.zero for _, legal in mine)
            for zero in zeros:
                ideal = Ideal.of(family, zero, self._goal.capacity)
                self._ideals.append(ideal)
                for number, legal in mine:
                    if legal.variant.space.base.zero == zero:
                        self._wait(ideal, number)
        self._waiting.sort(key=lambda waiting: waiting.order)

    def _wait(self, ideal: Ideal, number: int) -> None:
        """Let a family wait with a variant, if any of its points may fit."""
        legal = self._legal[number]
        _, places, least = groups(ideal, legal, self._bound_of, -np.inf)
        if len(places):
            self._bounded[number][places] = True
            self._waiting.append(_Waiting(ideal=ideal, number=number, order=(_keeps_most(legal), least)))

    @property
    def _bound_of(self) -> Bound:
        return _no_bound if self._effort.exhaustive else self._goal.bound

    def _bound(self, waiting: _Waiting, below: float) -> None:
        """Bound the points of a family and a variant as well as can be, and open those that may matter."""
        legal = self._legal[waiting.number]
        found, _, left_s = groups(waiting.ideal, legal, self._bound_of, below * (1 + _TIE))
        self._least.append(left_s)
        for group in found:
            self._push(group)

    def _push(self, group: Group) -> None:
        self._number += 1
        self._num_open += len(group.rows)
        heapq.heappush(self._open, (float(group.bound.min()), self._number, group))


def _cuts(legal: Legal) -> bool:
    """Say whether a variant cuts the sequence over tp between products; with tp 1 it makes no difference."""
    return legal.variant.space.sp is not False


def _no_bound(ideal: Ideal, builder: str, rows: Column, chunks: Column, allowed: Column, below: float) -> Column:
    """Leave out nothing."""
    return np.zeros(len(rows))


def _keeps_most(legal: Legal) -> bool:
    """Say whether a variant's bound promises much that seldom fits, so that others come before it."""
    return legal.variant.space.base.schedule == "gpipe"


def _kind(legal: Legal) -> _Kind:
    return _cuts(legal), legal.variant.space.base.cp_order
