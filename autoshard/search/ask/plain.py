"""A plain plan at once, by rules of thumb: the answer if a search is stopped before it has found any."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoshard.errors import InputError
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.columns import Engine
from autoshard.search.bound.legal_space import legal_space
from autoshard.search.bound.request import Request
from autoshard.search.bound.rough import rough_seconds

_MOST = 8  # plans that are priced
Needs = tuple[int, float]  # over how many ranks weights are spread, and the tokens of a micro-batch on a rank
_PLAIN = {
    "schedule": "1f1b",
    "vp": 1,
    "cp_kind": "ring",
    "cp_order": "contiguous",
    "recompute": (Recompute(kind="full"),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """The first plan that fits among few that look fastest; without one, the smallest of those that were tried."""

    plan: Plan | None = None
    miss: Plan | None = None


def plain_plan(request: Request) -> Plain:
    """Try few plans that look fastest, with 1F1B and full recompute where nothing is said, until one fits.

    Where a plan does not fit, no other is tried whose weights are spread over no more ranks, with as many tokens.
    Tensors that are pinned may be refused in any layout, so that with them there is no plain plan.
    """
    too_large = list[tuple[Needs, float, Plan]]()
    for candidate, engine in () if request.layouts else _likely(request):
        spread, tokens = _needs(candidate)
        if any(spread <= more and tokens >= fewer for (more, fewer), _, _ in too_large):
            continue
        plan = request.plan(candidate, engine, tables=False)
        assert plan.prediction, "a plan of a candidate has its prediction"
        excess = plan.prediction.peak_bytes - request.capacity_bytes(plan.kernels)
        if excess <= 0:
            return Plain(plan=request.plan(candidate, engine))
        too_large.append(((spread, tokens), excess, plan))
        if len(too_large) == _MOST:
            break
    return Plain(miss=min(too_large, key=lambda tried: tried[1])[2] if too_large else None)


def _needs(candidate: Candidate) -> Needs:
    """Return what decides most of a rank's memory."""
    spread = candidate.tp * candidate.pp * candidate.ep
    spread *= candidate.dp * candidate.cp if candidate.zero == 3 else 1
    return spread, candidate.mbs / (candidate.tp * candidate.cp)


def _likely(request: Request) -> Iterator[tuple[Candidate, Engine]]:
    """Yield plain candidates that no Rule refuses, in the order of their rough seconds, by engine."""
    plain = replace(request, pins={**_PLAIN, **request.pins})
    for engine in request.engines:
        try:
            variants = [run for run in legal_space(plain, engine).variants if not run.space.base.zero_group]
        except InputError:  # the engine cannot keep the pins
            continue
        timed: list[tuple[float, int, int]] = []
        for number, run in enumerate(variants):
            rough_s = rough_seconds(plain.question(run.space.base), run.space.rows, run.space.base.zero)
            timed += [(seconds, number, row) for row, seconds in enumerate(rough_s.tolist())]
        for _, number, row in sorted(timed):
            yield variants[number].space.candidate(row, 0), engine
