"""Plans and reasons as JSON data, for programs."""

from collections.abc import Sequence
from typing import Any

from autoshard.blocks.explain import Explanation
from autoshard.cost.doubt import compared
from autoshard.cost.timeline import RankTime
from autoshard.plan.diff import Breakdown, Diff, Term
from autoshard.plan.explanation import Alternatives, Answer, Certificate, WhyNot
from autoshard.plan.plan import Plan
from autoshard.plan.rules.rule import Rejection
from autoshard.report.answers import against_vendor, runners_up_of
from autoshard.report.comparison import misfits, sentences
from autoshard.report.words import prediction_of
from autoshard.spec.record import encode


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the content of a plan file, with the candidate as text first."""
    return {"candidate": str(plan.candidate), **encode(plan)}


def _brief_json(plan: Plan) -> dict[str, Any]:
    prediction, dollars = encode(plan.prediction), encode(plan.dollars)
    return {"candidate": str(plan.candidate), "prediction": prediction, "dollars": dollars}


def answers_json(
    written: Answer,
    answers: Sequence[Answer],
    certificate: Certificate,
    no_vendor: str = "",
    remarks: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the written plan whole, every answer by candidate and prediction, and what was searched."""
    rows = [_answer_json(answer, certificate) for answer in answers]
    return {
        "plan": plan_json(written.plan),
        "written": written.name,
        "dollars": encode(written.plan.dollars),
        "answers": rows,
        "no_vendor": no_vendor,
        "against_vendor": against_vendor(written.plan, answers),
        "remarks": list(remarks),
        "runners_up": [row for row in rows if row["name"].isdecimal()],
        "certificate": encode(certificate),
    }


def _answer_json(answer: Answer, certificate: Certificate) -> dict[str, Any]:
    run, unsettled = answer.nearest_run, answer.unsettled_run
    return {
        "name": answer.name,
        **_brief_json(answer.plan),
        "slower": answer.slower,
        "ratio": answer.ratio and encode(answer.ratio),
        "gap": certificate.about(answer.plan).gap,
        "why": answer.why,
        "against": list(answer.against),
        "source": answer.source,
        "nearest_run": run and encode(run),
        "unsettled_run": unsettled and encode(unsettled),
    }


def frontier_json(plans: Sequence[Plan], gap: float, ended: str) -> dict[str, Any]:
    """Return the plans of a Pareto frontier."""
    rows = [{"nodes": plan.cluster.num_nodes, **_brief_json(plan)} for plan in plans]
    return {"plans": rows, "gap": gap, "ended": ended}


def candidate_json(
    plan: Plan | None, refused: Sequence[Rejection], total_tokens: float | None = None
) -> dict[str, Any]:
    """Return why a candidate is refused, then its plan, if its shapes exist."""
    reasons, total = [rejection_json(reason) for reason in refused], plan and total_json(plan, total_tokens)
    content, dollars = plan and plan_json(plan), encode(plan and plan.dollars)
    return {"rejections": reasons, "plan": content, "dollars": dollars, "total": total}


def total_json(plan: Plan, total_tokens: float | None) -> dict[str, Any] | None:
    """Return what all tokens take; None where nobody says how many they are."""
    if not total_tokens:
        return None
    time_s, dollars = total_tokens / prediction_of(plan).tokens_per_s, plan.dollars
    usd = dollars and dollars.usd_per_billion_tokens * total_tokens / 1e9
    return {"tokens": total_tokens, "time_s": time_s, "usd": usd}


def rejection_json(rejection: Rejection) -> dict[str, str]:
    """Return a reason with its Rule and source."""
    return {"rule": rejection.rule_id, "message": rejection.message, "source": rejection.source}


def explanation_json(
    plan: Plan,
    explanation: Explanation,
    alternatives: Alternatives,
    times: Sequence[RankTime] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the explained blocks of a plan, its prediction and cost, and the next best plans."""
    certificate = alternatives.certificate
    return {
        **encode(explanation),
        **_brief_json(plan),
        "pipeline_ranks": encode(list(times)),
        "unlimited_s": alternatives.unlimited_s,
        "gap": certificate and certificate.about(plan).gap,
        "certificate": encode(certificate),
        "runners_up": [
            {"name": rival.name, **_brief_json(rival.plan), "slower": rival.slower, "ratio": encode(rival.ratio)}
            for rival in runners_up_of(plan, alternatives.rivals)
        ],
        "notes": list(notes),
    }


def comparison_json(diff: Diff, remarks: Sequence[str]) -> dict[str, Any]:
    """Return the comparison of two plans: its sentences, then the numbers behind them."""

    def whole(both: Breakdown) -> dict[str, Any]:
        parts = [{**term(part), "share": both.share(part)} for part in both.parts]
        return {"total": term(both.total), "parts": parts}

    def term(part: Term) -> dict[str, Any]:
        return {"name": part.name, "a": part.a, "b": part.b, "difference": part.difference}

    return {
        "summary": [*sentences(diff), *misfits(diff)],
        "slower_by": diff.slower_by,
        "within_intervals": diff.is_within_intervals,
        **encode(diff),
        "seconds_of": "a step" if diff.same_tokens else "a million tokens",
        "time": whole(diff.time),
        "memory": whole(diff.memory),
        "sent": list(map(term, diff.sent)),
        "remarks": list(remarks),
    }


def why_not_json(plan: Plan, answer: WhyNot, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the answer to --why-not."""
    figures = {name: value for name, value in encode(answer).items() if name != "rival"}
    return {
        **figures,
        "other": answer.rival and _brief_json(answer.rival),
        "difference": answer.rival and comparison_json(compared(plan, answer.rival), ()),
        "flips": [{**encode(flip), "factor": flip.factor} for flip in answer.flips],
        "notes": list(notes),
    }
