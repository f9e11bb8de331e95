"""An independent look around the best plans: changes of their keys, each priced as ``--at`` prices it.

It knows no bounds. What it finds says how much of the gap of a certificate may be real; a better plan takes the place
of the best.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.blocks.cutting import Terms
from autoshard.layout.layout import Cutting
from autoshard.plan.candidate import CpOrder
from autoshard.plan.recompute import Recompute
from autoshard.schedule.waves import Ints
from autoshard.search.ask.choice.changes import improved
from autoshard.search.ask.choice.searched import EngineResult
from autoshard.search.bound.legal_space import VARIANT_KEYS, RunVariant
from autoshard.search.bound.points import Points, Solution
from autoshard.search.bound.pool import Pool

_RIVALS, _CLOSE = 6, 1.03  # layouts that are changed as well, and how many times as slow as the best they may be
_SIZES = 8  # other sizes of the best layout that are priced, the nearest first
_KEYS = tuple(key for key in VARIANT_KEYS if key not in ("sp", "vp", "stages"))
_AXES = ("tp", "pp", "cp", "dp")
_TIE = 1e-8  # relative: times that differ by less count as equal
_Part = tuple[RunVariant, Ints]  # a variant, and which of its rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunt:
    """What came of changes of the best plans: by which share of its time they gained, and how many were priced."""

    gained: float
    num_changes: int


def hunted(result: EngineResult, best: Solution) -> Hunt:
    """Change the layers and the recompute of a solution and of those close to it, and its other keys one at a time.

    The pool keeps the best solution that they lead to, and gives its layout a cutting of its own.
    """
    pool, effort = result.pool, result.request.effort
    assert pool, "a solution is of a pool"
    solution, num_changes = improved(best, pool.goal, effort.most_changes, effort.changes_s)
    for rival in _rivals(pool, best) if effort.most_changes else ():
        pool.between()
        changed, count = improved(rival, pool.goal, effort.most_changes, effort.changes_s)
        solution, num_changes = min(solution, changed, key=_value), num_changes + count
    for points in _near(result, best) if effort.most_changes else ():
        pool.between()
        filling = points.evenly_solved(pool.goal)
        num_changes += len(points.rows)
        number = int(filling.time_s.argmin())
        if filling.time_s[number] < solution.value * (1 - _TIE):
            column = np.array([number])
            solution = Solution(
                layout=int(points.layouts[number]),
                point=points.only(column),
                filling=filling.only(column),
                value=float(filling.time_s[number]),
            )
    if solution is not best:
        pool.keep(solution)
        pool.settled(solution)
    return Hunt(gained=1 - pool.solutions[0].value / best.value, num_changes=num_changes)


def _value(solution: Solution) -> float:
    return solution.value


def _rivals(pool: Pool, best: Solution) -> list[Solution]:
    """Return the next solutions that are close to the best and have stages, so that other splits may make them faster.

    Where layers differ, or stages are many, a search tries splits that are nearly even.
    """
    close = [solution for solution in pool.solutions if solution.value <= _CLOSE * best.value]
    several = [solution for solution in close if solution.point.blocks.schedule.num_stages > 1]
    return [solution for solution in several if solution.layout != best.layout][:_RIVALS]


def _near(result: EngineResult, best: Solution) -> Iterator[Points]:
    """Yield points that differ from a solution in one key, or in two sizes whose product stays.

    They are cut as the solution is, or under other terms as the search has cut its layout.
    """
    pool, shared = result.pool, best.point.variant
    assert pool, "a solution is of a pool"
    sizes, vp = _near_layouts(best, pool.legal.space.rows), shared.space.rows["vp"][best.point.variant_rows[0]]
    by_terms: dict[Terms, list[_Part]] = {}
    for run in pool.legal.variants:
        changed = sum(getattr(run.space.base, key) != getattr(shared.space.base, key) for key in _KEYS)
        changed += run.space.sp != shared.space.sp
        if changed > 1:
            continue
        other_chunks = np.abs(run.space.rows["vp"] - vp)
        same_layout = run.layouts == best.layout
        rows = same_layout & (other_chunks == 1) | np.isin(run.layouts, sizes) & (other_chunks == 0)
        if changed:
            least = other_chunks[same_layout].min(initial=1 << 30)
            rows = same_layout & (other_chunks == least)
        if rows.any():
            by_terms.setdefault(run.terms, []).append((run, np.flatnonzero(rows)))
    for terms, parts in by_terms.items():
        cutting = best.cutting if terms == shared.terms else pool.cutting_of(terms, best.layout)
        yield from _priced(result, parts, cutting, best) if cutting else ()


def _near_layouts(best: Solution, rows: Mapping[str, Ints]) -> Ints:
    """Return the layouts nearest to that of a solution: a factor moved between two axes, or mbs or ep is another."""
    ratios = {key: np.abs(np.log2(rows[key] / rows[key][best.layout])) for key in (*_AXES, "ep", "mbs")}
    moved = np.sum([ratios[key] > 0 for key in _AXES], axis=0)
    changes = 1 * (moved > 0) + 1 * (ratios["ep"] > 0) + 1 * (ratios["mbs"] > 0)
    near = np.flatnonzero((changes == 1) & (moved <= 2))
    distance = np.sum([ratios[key][near] for key in ratios], axis=0)
    return near[np.argsort(distance, kind="stable")[:_SIZES]]


def _priced(result: EngineResult, parts: Sequence[_Part], cutting: Cutting, best: Solution) -> Iterator[Points]:
    """Yield the points of parts of variants with one cutting, under the recompute of a solution, none and full."""
    pool, runs = result.pool, [run.only(rows) for run, rows in parts]
    assert pool, "a solution is of a pool"
    legal, pricer, goal = pool.legal, pool.pricer, pool.goal
    rows: list[int] = best.filling.kind[:, 0].tolist()
    used = {Recompute(), Recompute(kind="full"), *(best.point.priced.kinds[row] for row in rows)}
    recomputes = tuple(kinds for kinds in legal.space.recomputes if used.issuperset(kinds) or len(kinds) > 1)
    base = replace(legal.space.base, cp_kind=runs[0].space.base.cp_kind)
    space = replace(legal.space, base=base, sp=runs[0].space.sp, recomputes=recomputes or legal.space.recomputes)
    orders: list[CpOrder] = sorted({run.space.base.cp_order for run in runs})
    layouts: dict[CpOrder, Ints] = {
        order: np.unique(np.concatenate([run.layouts for run in runs if run.space.base.cp_order == order]))
        for order in orders
    }
    priced = pricer.priced(space, [(cutting, layouts)], apart=bool(result.request.layouts))
    joined = pricer.joined(pricer.with_recompute(priced))
    for (run, run_rows), of_part in zip(parts, runs, strict=True):
        points = Points.of(joined, of_part, goal)
        # The pool knows its points by the whole variant.
        yield from replace(points, variant=run, variant_rows=run_rows[points.variant_rows]).by_schedule()
