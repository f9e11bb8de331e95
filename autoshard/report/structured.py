"""Plans and reasons as JSON data, for programs."""

from collections.abc import Sequence
from typing import Any

from autoshard.plan.diff import Breakdown, Diff, Term, diff
from autoshard.plan.explanation import Alternatives, Certificate, Explanation, WhyNot
from autoshard.plan.plan import Plan
from autoshard.plan.rules.rule import Rejection
from autoshard.report.comparison import misfits, sentences
from autoshard.spec.record import encode


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as its file has it, with its candidate in text first."""
    return {"candidate": str(plan.candidate), **encode(plan)}


def _brief_json(plan: Plan) -> dict[str, Any]:
    prediction, dollars = encode(plan.prediction), encode(plan.dollars)
    return {"candidate": str(plan.candidate), "prediction": prediction, "dollars": dollars}


def found_json(plans: Sequence[Plan], certificate: Certificate) -> dict[str, Any]:
    """Return the best plan whole, the runners-up by candidate and prediction, and what was looked at."""
    best, *others = plans
    rows = [_brief_json(other) for other in others]
    return {
        "plan": plan_json(best),
        "dollars": encode(best.dollars),
        "runners_up": rows,
        "certificate": encode(certificate),
    }


def frontier_json(plans: Sequence[Plan], gap: float, ended: str) -> dict[str, Any]:
    """Return plans that trade time, memory and cost against each other."""
    rows = [{"nodes": plan.cluster.num_nodes, **_brief_json(plan)} for plan in plans]
    return {"plans": rows, "gap": gap, "ended": ended}


def made_json(made: Plan | None, refused: Sequence[Rejection]) -> dict[str, Any]:
    """Return the plan of exactly one candidate, if it has a shape, after the reasons against it."""
    reasons = [rejection_json(reason) for reason in refused]
    return {"rejections": reasons, "plan": made and plan_json(made), "dollars": encode(made and made.dollars)}


def rejection_json(rejection: Rejection) -> dict[str, str]:
    """Return a reason with its Rule and source."""
    return {"rule": rejection.rule_id, "message": rejection.message, "source": rejection.source}


def explanation_json(plan: Plan, explanation: Explanation, alternatives: Alternatives) -> dict[str, Any]:
    """Return the annotated blocks of a plan, what it predicts, what its step costs, and what comes next to it."""
    return {
        **encode(explanation),
        **_brief_json(plan),
        "unlimited_s": alternatives.unlimited_s,
        "runners_up": [_brief_json(other) for other in alternatives.others],
    }


def comparison_json(diff: Diff, remarks: Sequence[str]) -> dict[str, Any]:
    """Return two plans compared: the sentences that people read, then what they rest on."""

    def whole(both: Breakdown) -> dict[str, Any]:
        parts = [{**term(part), "share": both.share(part)} for part in both.parts]
        return {"total": term(both.total), "parts": parts}

    def term(one: Term) -> dict[str, Any]:
        return {"name": one.name, "a": one.a, "b": one.b, "difference": one.difference}

    return {
        "summary": [*sentences(diff), *misfits(diff)],
        "slower_by": diff.slower_by,
        "within_intervals": diff.is_within_intervals,
        **encode(diff),
        "seconds_of": "a step" if diff.same_tokens else "a million tokens",
        "time": whole(diff.time),
        "memory": whole(diff.memory),
        "sent": [term(one) for one in diff.sent],
        "remarks": list(remarks),
    }


def why_not_json(plan: Plan, found: WhyNot) -> dict[str, Any]:
    """Return why a plan is not another."""
    return {
        **encode(found),
        "other": found.other and _brief_json(found.other),
        "difference": found.other and comparison_json(diff(plan, found.other), ()),
        "flips": [{**encode(flip), "factor": flip.factor} for flip in found.flips],
    }
