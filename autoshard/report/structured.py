"""Plans and reasons as JSON data, for programs."""

from collections.abc import Sequence
from typing import Any

from autoshard.plan.certificate import Certificate
from autoshard.plan.diff import Breakdown, Diff, Term, diff
from autoshard.plan.explanation import Alternatives, Explanation, WhyNot
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
            "dollars": encode(other.dollars),
        }
        for other in others
    ]
    dollars = encode(best.dollars)
    return {"plan": plan_json(best), "dollars": dollars, "runners_up": rows, "certificate": encode(certificate)}


def frontier_json(plans: Sequence[Plan], gap: float, ended: str) -> dict[str, Any]:
    """Return plans that trade time, memory and cost against each other."""
    rows = [
        {
            "nodes": plan.cluster.num_nodes,
            "candidate": str(plan.candidate),
            "prediction": encode(plan.prediction),
            "dollars": encode(plan.dollars),
        }
        for plan in plans
    ]
    return {"plans": rows, "gap": gap, "ended": ended}


def made_json(made: Plan | None, refused: Sequence[Rejection]) -> dict[str, Any]:
    """Return the plan of exactly one candidate, if it has a shape, after the reasons against it."""
    reasons = [rejection_json(reason) for reason in refused]
    return {"rejections": reasons, "plan": made and plan_json(made), "dollars": encode(made and made.dollars)}


def explanation_json(plan: Plan, explanation: Explanation, alternatives: Alternatives) -> dict[str, Any]:
    """Return the annotated blocks of a plan, what it predicts, what its step costs, and what comes next to it."""
    others = [{"candidate": str(one.candidate), "prediction": encode(one.prediction)} for one in alternatives.others]
    return {
        **encode(explanation),
        "prediction": encode(plan.prediction),
        "unlimited_s": alternatives.unlimited_s,
        "runners_up": others,
        "dollars": encode(plan.dollars),
    }


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


def why_not_json(plan: Plan, found: WhyNot) -> dict[str, Any]:
    """Return why a plan is not another."""
    other = found.other
    return {
        "asked": found.asked,
        "other": other and {"candidate": str(other.candidate), "prediction": encode(other.prediction)},
        "fits": found.fits,
        "against": list(found.against),
        "difference": other and comparison_json(diff(plan, other), ()),
        "flips": [{**encode(flip), "factor": flip.factor} for flip in found.flips],
        "unmoved": list(found.unmoved),
    }


def rejection_json(rejection: Rejection) -> dict[str, str]:
    """Return a reason with its Rule and source."""
    return {"rule": rejection.rule_id, "message": rejection.message, "source": rejection.source}


def _breakdown_json(whole: Breakdown) -> dict[str, Any]:
    parts = [{**_term_json(part), "share": whole.share(part)} for part in whole.parts]
    return {"total": _term_json(whole.total), "parts": parts}


def _term_json(term: Term) -> dict[str, Any]:
    return {"name": term.name, "a": term.a, "b": term.b, "difference": term.difference}
