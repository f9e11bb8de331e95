"""Plans and reasons as JSON data, for programs."""

from collections.abc import Sequence
from typing import Any

from autoshard.plan.certificate import Certificate
from autoshard.plan.plan import Plan
from autoshard.plan.rules.rule import Rejection
from autoshard.spec.record import encode


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as its file has it, with its candidate in text first."""
    return {"candidate": str(plan.candidate), **encode(plan)}


def found_json(plans: Sequence[Plan], certificate: Certificate) -> dict[str, Any]:
    """Return the best plan whole, the runners-up by candidate and prediction, and what was looked at."""
    best, *others = plans
    rows = [{"candidate": str(other.candidate), "prediction": encode(other.prediction)} for other in others]
    return {"plan": plan_json(best), "runners_up": rows, "certificate": encode(certificate)}


def rejection_json(rejection: Rejection) -> dict[str, str]:
    """Return a reason with its Rule and source."""
    return {"rule": rejection.rule_id, "message": rejection.message, "source": rejection.source}
