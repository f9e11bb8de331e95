"""Short looks at points of one kind that a search had no reason to solve: they cost little, and prove nothing."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.plan.candidate import Candidate
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.bound.legal_space import RunVariant
from autoshard.search.bound.points import Points, Solution
from autoshard.search.bound.pool import Pool
from autoshard.search.bound.space import KEYS
from autoshard.search.bound.unsolved import PlainPoints
from autoshard.search.fill.stage_options import ALL_RANGES

_FEW = 4  # points of a kind that are looked at first, those that look fastest
_MOST = 256  # while none fits in memory, or some that were not looked at may be faster
_ROUGH = 1.06  # by which factor the rough seconds of a point may exceed what it takes
Sizes = Mapping[str, Any]  # by key: numbers, or columns of numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKind:
    """A kind of plan that people ask for by its name."""

    name: str
    words: str  # after "the fastest"
    holds: Callable[[Candidate, Sizes], Any]  # given what is shared, and the sizes

    def has(self, candidate: Candidate) -> bool:
        """Say whether a candidate is of this kind."""
        return bool(self.holds(candidate, {key: getattr(candidate, key) for key in KEYS}))

    def rows(self, variant: RunVariant) -> Ints:
        """Return the rows of a variant that are of this kind."""
        return np.flatnonzero(np.broadcast_to(self.holds(variant.space.base, variant.space.rows), len(variant.layouts)))


FSDP = PlanKind(
    name="FSDP",
    words="with FSDP (ZeRO-3, no tp, no pipeline)",
    holds=lambda shared, sizes: (shared.zero == 3) & (sizes["tp"] == 1) & (sizes["pp"] == 1),
)
NO_PIPELINE = PlanKind(name="no pipeline", words="without a pipeline", holds=lambda _, sizes: sizes["pp"] == 1)
PLAIN_PIPELINE = PlanKind(
    name="1f1b",
    words="under 1f1b, without chunks",
    holds=lambda shared, sizes: (shared.schedule == "1f1b") & (sizes["pp"] > 1),
)


def with_experts(*, apart: bool) -> PlanKind:
    """Return the plans of usual schedules that share experts out over ranks, or those that do not."""
    return PlanKind(
        name="ep" if apart else "no ep",
        words=f"{'with' if apart else 'without'} expert parallelism",
        holds=lambda shared, sizes: ((sizes["ep"] > 1) == apart) & (shared.schedule in ALL_RANGES),
    )


def kinds_to_add(shown: Sequence[Candidate], *, has_fsdp: bool) -> list[PlanKind]:
    """Return the kinds that are worth a look beside plans that are shown: those that none of these is of.

    Beside pipelines that is a plan without one; where these are divided further than 1F1B, also 1F1B. Where there is a
    plan without a pipeline, it is FSDP, unless that is an answer of its own.
    """
    if any(NO_PIPELINE.has(candidate) for candidate in shown):
        return [] if has_fsdp or any(FSDP.has(candidate) for candidate in shown) else [FSDP]
    return [NO_PIPELINE, *([] if any(PLAIN_PIPELINE.has(candidate) for candidate in shown) else [PLAIN_PIPELINE])]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Priced:
    """Points of a kind that are priced under every recompute, with their bounds."""

    points: Points

    @property
    def seconds(self) -> Floats:
        """By which points are chosen."""
        return self.points.bound


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Unpriced:
    """Points of a kind that a variant runs in layouts that are priced without recompute."""

    seconds: Floats  # by which points are chosen: rough ones; infinite where points do not fit
    plain: PlainPoints
    variant: RunVariant
    rows: Ints  # of the variant
    places: Ints  # of their layouts among the plain ones


def _seen(pool: Pool, kind: PlanKind, *, priced: bool = False) -> Iterator[_Priced | _Unpriced]:
    """Yield the points of a kind, or only those that are priced under every recompute, whose bounds are then known."""
    rows = {variant: kind.rows(variant) for variant in pool.legal.variants}
    for points in pool.points:
        selected = points.only(np.isin(points.variant_rows, rows[points.variant]))
        yield _Priced(points=pool.own_cuttings.in_use(selected))
    for plain in [] if priced else pool.left.plain:
        place = np.full(pool.legal.space.num_layouts, -1)
        place[plain.layouts] = np.arange(len(plain.bounds))
        for variant in plain.variants:
            places = place[variant.layouts[rows[variant]]]
            kind_rows, places = rows[variant][places >= 0], places[places >= 0]
            if len(places):
                seconds = _rough_s(pool, variant, kind_rows, plain.bounds[places])
                yield _Unpriced(seconds=seconds, plain=plain, variant=variant, rows=kind_rows, places=places)


def _rough_s(pool: Pool, variant: RunVariant, rows: Ints, bounds: Floats) -> Floats:
    """Return rough seconds of some rows of a variant; infinite where bounds say that they do not fit."""
    return np.maximum(bounds, pool.rough_s(variant.space.base.zero)[variant.layouts[rows]])


def best_of_kind(pool: Pool, kind: PlanKind) -> Solution | None:
    """Return the best known solution of a kind, those of few points that look fastest included."""
    solutions = [solution for solution in pool.solutions if kind.has(solution.candidate)][:1]
    seen = [group for group in _seen(pool, kind) if len(group.seconds)]
    before, few, count = -np.inf, _FEW, sum(int(np.isfinite(group.seconds).sum()) for group in seen)
    while not solutions or few == _FEW or before < _ROUGH * min(solution.value for solution in solutions):
        limit = _limit(seen, few)
        solutions += _solved(pool, seen, (before, limit))
        if few >= min(count, _MOST):
            break
        before, few = limit, 4 * few
    return min(solutions, key=lambda solution: solution.order, default=None)


def rivals_of_kind(pool: Pool, kind: PlanKind, most: int) -> list[Solution]:
    """Return what is known of a kind, and the solutions of so many points that are priced, those of best bounds."""
    solutions = [solution for solution in pool.solutions if kind.has(solution.candidate)]
    seen = [group for group in _seen(pool, kind, priced=True) if len(group.seconds)]
    return [*solutions[:most], *_solved(pool, seen, (-np.inf, _limit(seen, most)))]


def _limit(seen: Sequence[_Priced | _Unpriced], count: int) -> float:
    """Return the seconds of the point at this place of all."""
    seconds = np.concatenate([np.zeros(0), *(group.seconds for group in seen)])
    return float(np.sort(seconds[np.isfinite(seconds)])[:count].max(initial=-np.inf))


def _solved(pool: Pool, seen: Sequence[_Priced | _Unpriced], between: tuple[float, float]) -> list[Solution]:
    """Return the best solution of each group of points whose seconds lie above one value and not above another."""
    solutions: list[Solution] = []
    numbers = [np.flatnonzero((group.seconds > between[0]) & (group.seconds <= between[1])) for group in seen]
    near = [(group, chosen) for group, chosen in zip(seen, numbers, strict=True) if len(chosen)]
    for points in _priced(pool, near):
        pool.between()
        for group in points.by_schedule():
            solutions += fastest_among(pool, group, np.inf)
    return solutions


def _priced(pool: Pool, near: Sequence[tuple[_Priced | _Unpriced, Ints]]) -> Iterator[Points]:
    """Yield some points of groups under every recompute; a layout is priced once for all variants that run it."""
    by_plain: dict[PlainPoints, list[tuple[_Unpriced, Ints]]] = defaultdict(list)
    for group, numbers in near:
        if isinstance(group, _Priced):
            yield group.points.only(numbers)
        else:
            by_plain[group.plain].append((group, numbers))
    chosen = [
        (plain.priced, plain.rows[np.unique(np.concatenate([group.places[numbers] for group, numbers in unpriced]))])
        for plain, unpriced in by_plain.items()
    ]
    for priced, unpriced in zip(pool.pricer.some_with_recompute(chosen), by_plain.values(), strict=True):
        for group, numbers in unpriced:
            points = Points.of(priced, group.variant, pool.goal)
            yield points.only(np.isin(points.variant_rows, group.rows[numbers]))


def fastest_among(pool: Pool, group: Points, below: float) -> list[Solution]:
    """Return the best solution of some points that share a schedule, if there is one below a limit."""
    filling = group.solved(pool.goal, below, pool.splits)
    values = pool.goal.value(filling)
    number = np.array([int(values.argmin())])
    layout, value = int(group.layouts[number[0]]), float(values[number[0]])
    solution = Solution(layout=layout, point=group.only(number), filling=filling.only(number), value=value)
    return [solution] if value < below else []
