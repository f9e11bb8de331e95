"""Plans that no other betters in step time, peak memory and cost at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.plan.plan import Plan
from autoshard.search.planner import Request, on, search
from autoshard.search.progress import Watch

_MOST = 16  # plans of one cluster
_STEP = 0.1  # of memory: of plans that differ by less only the faster is wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Plans that no other betters, fastest first; by how much each may be slower than the fastest of its memory."""

    plans: tuple[Plan, ...]
    gap: float
    ended: str


def frontier(requests: Sequence[Request], watch: Watch = on) -> Frontier:
    """Find the frontier over several sizes of a cluster.

    For each size: the fastest plan, then the fastest with a tenth less memory than that, until nothing fits.
    """
    found: list[Plan] = []
    gap, ended = 0.0, ""
    for request in requests:
        limit = request.memory_bytes
        for _ in range(_MOST):
            answer = search(replace(request, objective="time", memory_bytes=limit), 1, watch)
            if not answer.plans:
                break
            plan = answer.plans[0]
            found.append(plan)
            gap = max(gap, answer.certificate.gap)
            ended = answer.certificate.ended if answer.certificate.ended != "complete" else ended
            if ended:
                return Frontier(plans=undominated(found), gap=gap, ended=ended)
            limit = _peak(plan) * (1 - _STEP)
    return Frontier(plans=undominated(found), gap=gap, ended=ended or "complete")


def undominated(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Return the plans that no other equals or betters in everything, fastest first."""
    ordered = sorted(plans, key=coordinates)
    kept: list[Plan] = []
    for plan in ordered:
        own = coordinates(plan)
        if not any(all(one <= two for one, two in zip(coordinates(other), own, strict=True)) for other in kept):
            kept.append(plan)
    return tuple(kept)


def coordinates(plan: Plan) -> tuple[float, float, float]:
    """Return what is compared: step time, peak memory, and dollars; node seconds where no price is known."""
    assert plan.prediction, "a found plan has its prediction"
    dollars = plan.dollars
    cost = dollars.usd_per_step if dollars else plan.cluster.num_nodes * plan.prediction.step_time_s
    return plan.prediction.step_time_s, float(_peak(plan)), cost


def _peak(plan: Plan) -> int:
    assert plan.prediction, "a found plan has its prediction"
    return plan.prediction.peak_bytes
