"""Plans and reasons as JSON data, for programs."""

from collections.abc import Sequence
from typing import Any

from autoshard.plan.certificate import Certificate
from autoshard.plan.diff import Breakdown, Diff, Term
from autoshard.plan.dollars import dollars_of
from autoshard.plan.explanation import Explanation
from autoshard.plan.plan import Plan
from autoshard.plan.rules.rule import Rejection
from autoshard.report.comparison import misfits, sentences
from autoshard.spec.record import encode


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as its file has it, with its candidate in text first."""
    return {"candidate": str(plan.candidate), **encode(plan)}


def found_json(plans: Sequence[Plan], certificate: Certificate) -> dict[str, Any]:
    """Return the best plan whole, the runners-up by candidate and prediction, and what was looked at."""
    best, *others = plans
    rows = [
        {
            "candidate": str(other.candidate),
            "prediction": encode(other.prediction),
            "dollars": encode(dollars_of(other)),
        }
        for other in others
    ]
    dollars = encode(dollars_of(best))
    return {"plan": plan_json(best), "dollars": dollars, "runners_up": rows, "certificate": encode(certificate)}


def made_json(made: Plan | None, refused: Sequence[Rejection]) -> dict[str, Any]:
    """Return the plan of exactly one candidate, if it has a shape, after the reasons against it."""
    reasons = [rejection_json(reason) for reason in refused]
    return {"rejections": reasons, "plan": made and plan_json(made), "dollars": encode(made and dollars_of(made))}


def explanation_json(plan: Plan, explanation: Explanation) -> dict[str, Any]:
    """Return the annotated blocks of a plan, and what its step costs."""
    return {**encode(explanation), "dollars": encode(dollars_of(plan))}


def comparison_json(diff: Diff, remarks: Sequence[str]) -> dict[str, Any]:
    """Return two plans compared: the sentences that people read, then what they rest on."""
    return {
        "summary": [*sentences(diff), *misfits(diff)],
        "slower_by": diff.slower_by,
        "within_intervals": diff.is_within_intervals,
        **encode(diff),
        "seconds_of": "a step" if diff.same_tokens else "a million tokens",
        "time": _breakdown_json(diff.time),
        "memory": _breakdown_json(diff.memory),
        "sent": [_term_json(term) for term in diff.sent],
        "remarks": list(remarks),
    }


def _breakdown_json(whole: Breakdown) -> dict[str, Any]:
    parts = [{**_term_json(part), "share": whole.share(part)} for part in whole.parts]
    return {"total": _term_json(whole.total), "parts": parts}


def _term_json(term: Term) -> dict[str, Any]:
    return {"name": term.name, "a": term.a, "b": term.b, "difference": term.difference}


def rejection_json(rejection: Rejection) -> dict[str, str]:
    """Return a reason with its Rule and source."""
    return {"rule": rejection.rule_id, "message": rejection.message, "source": rejection.source}
