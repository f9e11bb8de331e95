"""The plan that is written where nobody says which: the simplest of those that are as good as the fastest."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.search.ask.choice.doubt import DOUBT, LEAST_DOUBT, Within, doubt_of, known_schedules, short_percent
from autoshard.search.ask.choice.looking import FSDP, PlanKind, best_of_kind, fastest_among, kinds_to_add
from autoshard.search.ask.choice.searched import EngineResult, order_of
from autoshard.search.ask.choice.simple import Simple, simplest, simplest_near
from autoshard.search.bound.points import Solution
from autoshard.search.bound.pool import Pool

_TIE = 1e-9  # relative: times that differ by less count as equal
_ROUNDS = 3  # in which the fastest plan may turn out to be another, with another interval
_AT_ONCE = 8  # points of a group that are solved together, those with the best bounds
_USUAL, _NUM_TIERS = 0, 2  # of known_schedules
_MOST_GROUPS = 64  # that are solved where no simple plan has a usual schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan that is written if nobody names one, why, and by which share of the fastest it may be slower."""

    plan: Plan | None = None  # None: the fastest
    why: str = ""
    within: float = 0.0


def fastest_of(results: Sequence[EngineResult]) -> tuple[EngineResult, Solution] | None:
    """Return the fastest solution of all engines; None where nothing fits."""
    pairs = ((result, solution) for result in results for solution in result.solutions[:1])
    return min(pairs, key=order_of, default=None)


def choose(results: Sequence[EngineResult], within: Within) -> Choice:
    """Return the simplest plan of all engines that takes at most a given share more than the fastest.

    Where the doubt says how much, schedules that nobody has measured come last: they are chosen if they gain more than
    the doubt over all others.
    """
    if within != DOUBT:
        return _of_all(results, within)
    choice = Choice()
    for _ in range(_ROUNDS):
        fastest = fastest_of(results)
        choice = _of_known(results, _doubt(results))
        if fastest_of(results) == fastest:
            break
    return choice


def choose_known(results: Sequence[EngineResult], ended: str) -> Choice:
    """Return the best solution of a stopped search under usual schedules, if the fastest has another schedule."""
    within = _doubt(results)
    usual = [
        (result, solution) for result in results for solution in result.solutions if _is_known(result, solution, _USUAL)
    ]
    best = min(usual, key=order_of, default=None)
    fastest = fastest_of(results)
    if best is None or fastest is None or _is_known(*fastest, _USUAL) or best[1].value > _limit(results, within):
        return Choice(within=within)
    plan = best[0].plan(best[0].exactly_evened(best[1]))
    why = f"the fastest that is known under {plan.schedule.builder}: {ended}"
    return Choice(plan=plan, why=why, within=within)


def _of_known(results: Sequence[EngineResult], within: float) -> Choice:
    """Return the simplest plan under usual schedules, or else the fastest of these.

    Where all of them are too slow, the schedules that are measured elsewhere are taken in the same way, and then all.
    """
    words, fastest = short_percent(within), fastest_of(results)
    for tier in range(_NUM_TIERS):
        plan = _simplest(results, within, tier, LEAST_DOUBT)
        if plan:
            return Choice(plan=plan, why=f"the simplest within {words} of the fastest", within=within)
        if fastest is None or _is_known(*fastest, tier):
            return Choice(within=within)
        plan = _fastest_known(results, within, tier)
        if plan:
            why = f"the fastest under {plan.schedule.builder}: nothing simple is within {words} of the fastest"
            return Choice(plan=plan, why=why, within=within)
    return _of_all(results, within, LEAST_DOUBT)


def _of_all(results: Sequence[EngineResult], within: float, near: float = np.inf) -> Choice:
    """Return the simplest plan, whatever its schedule."""
    why = f"the simplest within {short_percent(within)} of the fastest"
    return Choice(plan=_simplest(results, within, None, near), why=why, within=within)


def _is_known(result: EngineResult, solution: Solution, tier: int) -> bool:
    schedules = _schedules(result, tier)
    return schedules is None or solution.point.variant.space.base.schedule in schedules


def _doubt(results: Sequence[EngineResult]) -> float:
    fastest = fastest_of(results)
    if fastest is None:
        return 0.0
    result, solution = fastest
    plan = result.request.plan(solution.candidate, result.engine, solution.cutting, tables=False)
    assert plan.prediction, "a found plan has its prediction"
    return doubt_of(plan.prediction)


def _limit(results: Sequence[EngineResult], within: float) -> float:
    fastest = fastest_of(results)
    return (fastest[1].value if fastest else np.inf) * (1 + within) * (1 + _TIE)


def _schedules(result: EngineResult, tier: int | None) -> frozenset[str] | None:
    """Return the schedules of a tier of ``known_schedules``; None for all that there are."""
    return None if tier is None else known_schedules(result.request.constants)[tier]


def _simplest(results: Sequence[EngineResult], within: float, tier: int | None, near: float) -> Plan | None:
    """Return the simplest plan of all engines that takes at most this share more than the fastest."""
    limit = _limit(results, within)
    pairs = [
        (result, simple)
        for result in results
        if result.pool and (simple := simplest_below(result.pool, limit, _schedules(result, tier), near))
    ]
    near_fastest = {simple: result for result, simple in pairs if simple.solution.value <= _limit(results, within)}
    if not near_fastest:
        return None
    best = simplest_near(list(near_fastest), near)
    return near_fastest[best].plan(near_fastest[best].exactly_evened(best.solution))


def simplest_below(pool: Pool, limit: float, schedules: frozenset[str] | None, near: float) -> Simple | None:
    """Return the simplest solution below a limit, of some schedules or of all, with its own cutting."""
    while True:
        plan = simplest(pool.below(limit, schedules), pool.goal, limit, pool.between, near)
        if plan:
            pool.keep(plan.solution)
        if not plan or pool.settled(plan.solution):
            return plan


def of_another_kind(
    results: Sequence[EngineResult], shown: Sequence[Candidate], fsdp: Candidate | None
) -> tuple[Plan, str] | None:
    """Return the fastest plan of the kinds that no shown plan has, and its kind; not the plan ``fsdp``."""
    plan, words = _fastest_of_kinds(results, kinds_to_add(shown, has_fsdp=fsdp is not None))
    return None if plan is None or plan.candidate == fsdp else (plan, words)


def fastest_with_fsdp(results: Sequence[EngineResult]) -> tuple[Plan, str] | None:
    """Return the fastest plan with FSDP that is known after a short look, if one fits."""
    plan, words = _fastest_of_kinds(results, [FSDP])
    return plan and (plan, words)


def _fastest_of_kinds(results: Sequence[EngineResult], kinds: Sequence[PlanKind]) -> tuple[Plan | None, str]:
    """Return the fastest plan of some kinds that fits, and its kind."""
    entries = [
        (result, solution, kind)
        for kind in kinds
        for result in results
        if result.pool and (solution := best_of_kind(result.pool, kind))
    ]
    best = min(entries, key=lambda entry: order_of(entry[:2]), default=None)
    if best is None:
        return None, ""
    result, best_solution, kind = best
    solution = result.exactly_evened(best_solution)
    plan = result.request.plan(solution.candidate, result.engine)
    fits = plan.prediction and plan.prediction.peak_bytes <= plan.prediction.capacity_bytes
    return (plan, f"the fastest found {kind.words}") if fits else (None, "")


def _fastest_known(results: Sequence[EngineResult], within: float, tier: int) -> Plan | None:
    """Return the fastest plan under the schedules of a tier that takes at most this share more than the fastest."""
    limit = _limit(results, within)
    pairs: list[tuple[EngineResult, Solution]] = []
    for result in results:
        while result.pool:
            solution = fastest_below(result.pool, limit, _schedules(result, tier))
            if solution is None or result.pool.settled(solution):
                pairs += [(result, solution)] if solution else []
                break
    near_fastest = [pair for pair in pairs if pair[1].value <= _limit(results, within)]
    best = min(near_fastest, key=order_of, default=None)
    return best and best[0].plan(best[0].exactly_evened(best[1]))


def fastest_below(pool: Pool, limit: float, schedules: frozenset[str] | None) -> Solution | None:
    """Return the fastest solution below a limit among the points of some schedules that look best."""
    best: Solution | None = None
    groups = sorted(pool.below(limit, schedules), key=lambda group: float(group.bound.min()))
    for group in groups[:_MOST_GROUPS]:
        pool.between()
        below = best.value if best else limit
        order = np.argsort(group.bound, kind="stable")[:_AT_ONCE]
        order = order[group.bound[order] < below]
        solutions = fastest_among(pool, group.only(order), below) if len(order) else []
        best = min(
            (solution for solution in (best, *solutions) if solution), key=lambda solution: solution.order, default=None
        )
    if best:
        pool.keep(best)
    return best
