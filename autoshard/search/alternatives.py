"""What stands beside a plan: what memory costs it, whether the search knows a faster one, and the runners-up."""

from dataclasses import replace

from autoshard.cost.calibration import Calibration
from autoshard.plan.explanation import Alternatives
from autoshard.plan.plan import Plan
from autoshard.search.contest import best_time_s, outer_pins, pinned, request_of_plan
from autoshard.search.planner import search

_SHOWN = 4


def alternatives(plan: Plan, calibration: Calibration) -> Alternatives:
    """Search a plan's own question again, and its own outer point without a limit of memory."""
    request = request_of_plan(plan, calibration)
    found = search(request, _SHOWN)
    others = tuple(one for one in found.plans if one.candidate != plan.candidate)
    own = pinned(replace(request, memory_bytes=float("inf")), outer_pins(plan.candidate, {}))
    return Alternatives(others=others[: _SHOWN - 1], unlimited_s=best_time_s(own))
