"""Plans that no other betters in step time, peak memory and cost at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.plan.plan import Plan
from autoshard.search.planner import never_stop, search
from autoshard.search.pool import Watch
from autoshard.search.request import Request

_MOST = 16  # plans of one cluster
_STEP = 0.1  # of memory: of plans that differ by less only the faster is wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Plans that no other betters, fastest first; by how much each may be slower than the fastest of its memory."""

    plans: tuple[Plan, ...]
    gap: float
    ended: str


def frontier(requests: Sequence[Request], watch: Watch = never_stop) -> Frontier:
    """Return the frontier over several sizes of a cluster.

    For each size, search for the fastest plan, then for the fastest with a tenth less memory, until nothing fits.
    """
    found: list[Plan] = []
    gap, stopped = 0.0, ""
    for request in requests:
        limit = request.memory_bytes
        for _ in range(0 if stopped else _MOST):
            answer = search(replace(request, objective="time", memory_bytes=limit), 1, watch)
            found += answer.plans
            stopped = answer.certificate.stopped
            if stopped or not answer.plans:
                break
            gap = max(gap, answer.certificate.gap)
            limit = coordinates(found[-1])[1] * (1 - _STEP)
    return Frontier(plans=undominated(found), gap=gap, ended=stopped or "complete")


def undominated(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Return the plans that no other equals or betters in everything, fastest first."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=coordinates):
        own = coordinates(plan)
        if not any(all(one <= two for one, two in zip(coordinates(other), own, strict=True)) for other in kept):
            kept.append(plan)
    return tuple(kept)


def coordinates(plan: Plan) -> tuple[float, float, float]:
    """Return step time, peak memory, and dollars of a plan; node seconds where no price is known."""
    assert plan.prediction, "a found plan has its prediction"
    dollars, step_s = plan.dollars, plan.prediction.step_time_s
    return step_s, plan.prediction.peak_bytes, dollars.usd_per_step if dollars else plan.cluster.num_nodes * step_s
