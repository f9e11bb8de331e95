"""The simplest plan that is nearly as fast as the fastest: one that people can explain, debug, and write by hand.

Layers of simple plans recompute in one or two kinds. Two such plans are compared by these criteria, in this order:

1. stages: an even split of the layers before others
2. recompute: one kind everywhere; ``full:K`` on all stages; two kinds, one per stage; ``full:K`` on some stages; then
   one kind or two of which any uses host memory
3. schedule: 1f1b before all others
4. chunks: fewer stages on a rank
5. axes: fewer of tp, pp, cp, ep and dp above 1
6. other keys: fewer of sp, zero, zero_group, weight_group, cp_kind and cp_order that are not at their default

and where all of these are equal, by their time. If wanted, axes and other keys are compared only among those plans that
are nearly as fast as the fastest which agrees with them in the first four. What the user pinned is kept, and does not
count as complexity.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, combinations_with_replacement, groupby

import numpy as np

from autoshard.plan.candidate import even_stages
from autoshard.plan.recompute import Recompute
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.bound.points import Points, Solution
from autoshard.search.fill.stage_filling import SURE, Goal, fill_stages
from autoshard.search.fill.stage_options import ALL_RANGES, NEVER, ChunkLayers, RankOptions, StageChoices, StageFilling

_AXES = ("tp", "pp", "cp", "ep", "dp")
_EVEN, _UNEVEN = range(5), (5, 6)  # places in the order of stages and recompute; uneven: one kind, two kinds
_COARSE = 3  # places of simplicity before axes and other keys: stages and recompute, schedule, chunks
_AT_ONCE = 64  # plans that are timed together
_SETS_AT_ONCE = 8  # sets of kinds of recompute with which uneven stages are filled together
_TIE = 1e-9  # relative: times that differ by less count as equal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simple:
    """A solution and its place in the order of simplicity: recompute, schedule, chunks, axes, other keys."""

    simplicity: tuple[int, ...]
    solution: Solution


def simplest(
    groups: Iterable[Points],
    goal: Goal,
    limit: float,
    between: Callable[[], None] = lambda: None,
    near: float = np.inf,
) -> Simple | None:
    """Return the simplest plan of some points that is faster than a limit; None if there is none.

    The points of a group share a schedule. ``between`` is called between groups, and may stop the search. Of plans that
    are as simple but for axes and other keys, only those within ``near`` of the fastest count: a share of its time.
    """
    ordered: dict[tuple[int, ...], list[tuple[Points, Ints]]] = defaultdict(list)
    for points in groups:
        keys = _simplicity(points)
        for key in dict.fromkeys(keys):
            ordered[key].append((points, np.flatnonzero([key == point_key for point_key in keys])))
    looked_at = _LookedAt(goal=goal, limit=limit)
    for recompute in (*_EVEN, *_UNEVEN):
        for _, key_group in groupby(sorted(ordered), key=lambda key: key[:2]):  # schedule and chunks
            plans, below = list[Simple](), limit
            for key in key_group:
                best = _fastest_of_key(ordered[key], (recompute, below), looked_at, between)
                if best:
                    plans.append(Simple(simplicity=(recompute, *key), solution=best))
                    if not np.isfinite(near):
                        break
                    below = min(below, best.value * (1 + near))
            if plans:
                return simplest_near(plans, near)
    return None


def simplest_near(plans: Sequence[Simple], near: float) -> Simple:
    """Return the simplest of some plans; axes and other keys count only near the fastest of the otherwise simplest."""
    least = min(plan.simplicity[:_COARSE] for plan in plans)
    equals = [plan for plan in plans if plan.simplicity[:_COARSE] == least]
    limit = min(plan.solution.value for plan in equals) * (1 + near) * (1 + _TIE)
    fast = (plan for plan in equals if plan.solution.value <= limit)
    return min(fast, key=lambda plan: (plan.simplicity, plan.solution.order[:3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _LookedAt:
    """What is known of points with even stages and with uneven ones, by the identity of points, which live as long."""

    goal: Goal
    limit: float
    even: "dict[int, EvenStages]" = field(default_factory=dict[int, "EvenStages"])
    least_uneven: dict[int, Floats] = field(default_factory=dict[int, Floats])

    def even_of(self, points: Points) -> "EvenStages":
        """Return every recompute of even stages."""
        if id(points) not in self.even:
            self.even[id(points)] = EvenStages.of(points, self.goal)
        return self.even[id(points)]

    def least_uneven_of(self, points: Points) -> Floats:
        """Return what points take at least with uneven stages, if each may have any kind of recompute on the device."""
        if id(points) not in self.least_uneven:
            choices = points.choices
            if choices.stages or choices.recompute or points.variant.space.base.schedule not in ALL_RANGES:
                self.least_uneven[id(points)] = np.full(len(points.rows), np.inf)
            else:
                allowed = choices.allowed & np.array([not kind.offload for kind in choices.kinds])[:, None]
                bounded = replace(self.goal, effort=replace(self.goal.effort, gap=1.0))
                choices = replace(choices, allowed=allowed, partly=False)
                filling = fill_stages(points.blocks, choices, bounded, (0.0, self.limit), points.rest_s)
                self.least_uneven[id(points)] = filling.bound
        return self.least_uneven[id(points)]


def _fastest_of_key(
    groups: Sequence[tuple[Points, Ints]],
    sought: tuple[int, float],
    looked_at: _LookedAt,
    between: Callable[[], None],
) -> Solution | None:
    """Return the fastest plan of some points with recompute from one place in the order, below a limit.

    Uneven stages in the order of another schedule than 1F1B or GPipe are not simple.
    """
    (recompute, limit), best = sought, None
    for points, indices in groups:
        between()
        below = best.value * (1 + _TIE) if best else limit
        numbers = indices[points.bound[indices] < below]
        if recompute in _UNEVEN and len(numbers):
            numbers = numbers[looked_at.least_uneven_of(points)[numbers] < below]
        if not len(numbers):
            continue
        if recompute in _UNEVEN:
            solution = _uneven(points.only(numbers), looked_at.goal, below, recompute - len(_EVEN) + 1)
        else:
            solution = looked_at.even_of(points).fastest(recompute, numbers, below)
        best = min((entry for entry in (best, solution) if entry), key=lambda entry: entry.order, default=None)
    return best


def _simplicity(points: Points) -> list[tuple[int, ...]]:
    """Return the place of each point in the order of simplicity, recompute left out."""
    space, rows = points.variant.space, points.variant_rows
    base, sizes = space.base, {key: column[rows] for key, column in space.rows.items()}
    axes = np.sum([sizes[axis] > 1 for axis in _AXES], axis=0)
    is_sp_other = (space.sp != (sizes["tp"] > 1)) & (space.sp is not None)
    groups = (base.zero_group is not None, base.weight_group is not None)
    shared = sum((base.zero != 1, *groups, base.cp_kind != "ring", base.cp_order != "contiguous"))
    is_other = np.full(len(rows), base.schedule != "1f1b")
    places: list[list[int]] = np.stack([is_other, sizes["vp"], axes, shared + is_sp_other], axis=1).tolist()
    return [tuple(row) for row in places]


def _uneven(points: Points, goal: Goal, limit: float, num_kinds: int) -> Solution | None:
    """Return the fastest plan of some points below a limit whose stages each have one of a few kinds of recompute."""
    schedule, choices, count = points.schedule, points.choices, len(points.rows)
    assert schedule, "its points share a schedule"
    if choices.stages or choices.recompute or schedule.num_ranks == 1:
        return None
    on_device = [number for number, kind in enumerate(choices.kinds) if not kind.offload]
    sets = [list(kinds) for kinds in combinations(on_device, num_kinds)]
    if not sets:  # of one kind there are no two
        return None
    among = np.zeros((len(choices.kinds), len(sets)), dtype=bool)
    for number, kinds in enumerate(sets):
        among[kinds, number] = True
    repeated = points.only(np.repeat(np.arange(count), len(sets)))  # each point with each set of kinds
    allowed, best = repeated.choices.allowed & np.tile(among, count), None
    for start in range(0, len(repeated.rows), _SETS_AT_ONCE):
        numbers = np.arange(start, min(start + _SETS_AT_ONCE, len(repeated.rows)))
        batch, below = repeated.only(numbers), best.value * (1 + _TIE) if best else limit
        choices = replace(batch.choices, allowed=allowed[:, numbers], partly=False)
        fillings = fill_stages(batch.blocks, choices, goal, (0.0, below), batch.rest_s)
        fastest = _fastest(batch, fillings, np.arange(len(numbers))) if fillings.time_s.min() < below else None
        best = min((entry for entry in (best, fastest) if entry), key=lambda entry: entry.order, default=None)
    return best


def _fastest(points: Points, timed: StageFilling, numbers: Ints) -> Solution:
    """Return the fastest filling of points; among equals, that of least memory."""
    equal = np.flatnonzero(timed.time_s <= timed.time_s.min() * (1 + _TIE))
    column = equal[timed.peak_bytes[equal].argmin()][None]
    point = points.only(numbers[column])
    return Solution(
        layout=int(point.layouts[0]), point=point, filling=timed.only(column), value=float(timed.time_s[column[0]])
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvenStages:
    """Points that share a schedule, with even or pinned splits of layers, priced under every allowed recompute."""

    points: Points
    choices: StageChoices
    options: RankOptions

    @classmethod
    def of(cls, points: Points, goal: Goal) -> "EvenStages":
        """Price every recompute of an even share of the layers."""
        blocks, choices = points.blocks, points.choices
        split = choices.stages or even_stages(choices.num_layers, blocks.schedule.num_stages)
        layers = ChunkLayers.of_splits(blocks, [split])
        return cls(points=points, choices=choices, options=RankOptions.of(blocks, choices, layers, goal.capacity))

    def fastest(self, recompute: int, numbers: Ints, limit: float) -> Solution | None:
        """Return the fastest of some points below a limit, with recompute from one place in the order of simplicity.

        A rank that may do two things does the faster one if it fits.
        """
        first, second = self._pairs(recompute)
        both_s = self.options.both_s[:, :, numbers]
        least_s = np.minimum(both_s[:, first], both_s[:, second])  # [rank, pair, point]
        bound = np.where(least_s.max(axis=0) < NEVER, self._bound(least_s, numbers), np.inf)
        pair, number = np.nonzero(bound < limit)
        order = np.argsort(bound[pair, number], kind="stable")
        best: Solution | None = None
        for start in range(0, len(order), _AT_ONCE):
            places = order[start : start + _AT_ONCE]
            places = places[bound[pair[places], number[places]] < limit]
            if not len(places):
                break
            first_option, second_option, column = first[pair[places]], second[pair[places]], number[places]
            option = np.where(
                both_s[:, first_option, column] <= both_s[:, second_option, column], first_option, second_option
            )
            solution = _fastest(self.points, self.options.timed(option, numbers[column]), numbers[column])
            if solution.value < limit:
                best, limit = solution, solution.value
        return best

    def _pairs(self, recompute: int) -> tuple[Ints, Ints]:
        """Return the pairs of options that a place in the order of recompute allows; equal options are one option."""
        options, choices = self.options.options, self.choices
        partly = tuple(bool(is_partial) for is_partial in np.any(options.plain > 0, axis=(0, 2)))
        kinds: list[int] = options.kind[0, :, 0].tolist()
        return _pairs_of(recompute, partly, tuple(choices.kinds[row] for row in kinds), bool(choices.recompute))

    def _bound(self, least_s: Floats, numbers: Ints) -> Floats:
        """Return a lower bound of the step, given the time of a micro-batch on its ranks: [pair, point]."""
        blocks = self.options.blocks
        before_s = np.cumsum(least_s, axis=0) - least_s if blocks.schedule.builder in ALL_RANGES else 0.0
        passes_s = (before_s + blocks.schedule.num_micro_batches * least_s).max(axis=0)
        return (passes_s + self.points.rest_s[numbers] + blocks.fixed_s[numbers]) * (1 - SURE)


@cache
def _pairs_of(
    recompute: int, partly: tuple[bool, ...], kinds: tuple[Recompute, ...], is_pinned: bool
) -> tuple[Ints, Ints]:
    """Return pairs of options, given which recompute part of the layers only, the kind of each, and if it is pinned."""
    numbers = range(len(partly))
    whole = [number for number in numbers if not partly[number] and not kinds[number].offload]
    if is_pinned:
        pairs = [(number, number) for number in numbers if recompute == 0]
    elif recompute < 2:
        pairs = [(number, number) for number in (numbers if recompute else whole) if partly[number] == recompute]
    elif recompute == 2:
        pairs = list(combinations(whole, 2))
    elif recompute == 3:
        ends = (Recompute(), Recompute(kind="full"))
        two = [number for number in numbers if partly[number] or kinds[number] in ends]
        pairs = [(first, second) for first, second in combinations(two, 2) if partly[first] or partly[second]]
    else:
        alike = [number for number in numbers if not partly[number]]
        pairs = [
            pair for pair in combinations_with_replacement(alike, 2) if any(kinds[number].offload for number in pair)
        ]
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
