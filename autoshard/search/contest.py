"""Questions about a plan's own outer point, or another: what its stages would be in circumstances that differ."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoshard.cost.calibration import Calibration
from autoshard.errors import InputError
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.search.planner import Request, search
from autoshard.search.space import default_kernels

_OUTER = ("tp", "pp", "cp", "ep", "dp", "mbs", "vp", "zero", "schedule", "cp_kind", "cp_order")


def request_of_plan(plan: Plan, calibration: Calibration) -> Request:
    """Ask what a plan answers, for its own engine and kernels, with nothing else fixed."""
    own = default_kernels(plan.cluster, plan.engine)
    return Request(
        model=plan.model,
        cluster=plan.cluster,
        workload=plan.workload,
        engines=(plan.engine,),
        pins={} if plan.kernels == own else {"kernels": plan.kernels},
        calibration=calibration,
    )


def outer_pins(candidate: Candidate, also: Mapping[str, Any]) -> dict[str, Any]:
    """Pin everything of a candidate but its stages, and keep what is pinned besides."""
    pins = {key: getattr(candidate, key) for key in _OUTER}
    return {**pins, "sp": candidate.sequence_parallel, **also}


def best_time_s(request: Request) -> float:
    """Return the time of the best plan; infinite where there is none, whatever the reason."""
    try:
        plans = search(request).plans
    except InputError:
        return float("inf")
    return plans[0].prediction.step_time_s if plans and plans[0].prediction else float("inf")


def pinned(request: Request, pins: Mapping[str, Any]) -> Request:
    """Ask the same about fixed keys."""
    return replace(request, pins={**request.pins, **pins})
