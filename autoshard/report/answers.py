"""The answers to a question side by side: how much slower each is, what of that is sure, what was measured of them."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from autoshard.cost.doubt import compared, ratio_of
from autoshard.plan.explanation import Answer, NearestRun
from autoshard.plan.plan import Plan
from autoshard.report.tables import Cell, FittingTable, Labelled, prose, unbroken
from autoshard.report.words import (
    TIME_WORDS,
    axes_words,
    counted,
    prediction_of,
    ratio_words,
    recompute_words,
    slower_words,
)
from autoshard.units import format_seconds

_LEAST_SHARE = 0.005  # of the vendor's step: smaller differences of a part are not listed


def runners_up_of(plan: Plan, others: Sequence[Plan]) -> list[Answer]:
    """Return the next best plans with the part of the time by which each loses most."""
    best, found = prediction_of(plan), list[Answer]()
    for number, other in enumerate(others, 2):
        its = prediction_of(other)
        sign = 1 if its.step_time_s >= best.step_time_s else -1
        more = {
            part: sign * (its.time_parts.get(part, 0.0) - best.time_parts.get(part, 0.0))
            for part in sorted(best.time_parts.keys() | its.time_parts.keys())
        }
        part = max(more, key=more.__getitem__)  # by which it loses most, or gains
        why = f"{'more' if sign > 0 else 'less'} {TIME_WORDS.get(part, part)}"
        slower = its.step_time_s / best.step_time_s - 1
        found.append(Answer(name=str(number), plan=other, why=why, slower=slower, ratio=ratio_of(other, plan)))
    return found


def answers_parts(plan: Plan, answers: Sequence[Answer]) -> list[RenderableType]:
    """Return the answers to a question side by side, a line with the candidate of each, and what to measure."""
    rows: list[list[Cell]] = []
    for answer in answers:
        its = prediction_of(answer.plan)
        share = its.peak_bytes / its.capacity_bytes
        words = f"{axes_words(answer.plan)}; {answer.plan.schedule.builder}; {recompute_words(answer.plan)}"
        certain = f"{1 - answer.ratio.faster:.0%}" if answer.ratio else ""
        figures = format_seconds(its.step_time_s), slower_words(answer), certain, f"{share:.0%}"
        rows.append([answer.name, *figures, words, answer.why])
    columns = ("name", ">step", ">slower", ">sure", ">memory", "plan", "why")
    title = "Answers" if any(not answer.name.isdigit() for answer in answers) else "Runners-up"
    title += "; slower: what holds 80% of it, and how sure it is that the answer is slower"
    parts: list[RenderableType] = [FittingTable(title, columns, rows, whole=("name",), drop=("why",)), ""]
    named = max(8, *(len(answer.name) for answer in answers)) + 1
    for answer in answers:
        if answer.plan.candidate != plan.candidate:
            parts.append(unbroken(Text.assemble(answer.name.ljust(named), (str(answer.plan.candidate), "green"))))
        parts += [Labelled("", Text(reason, "red"), indent=named) for reason in answer.against]
        if answer.source:
            parts.append(Labelled("", Text(answer.source, "dim"), indent=named))
        for run in filter(None, (answer.nearest_run, answer.unsettled_run)):
            parts.append(Labelled("", Text(_run_words(run), "dim"), indent=named))
    parts += _against_vendor(plan, answers)
    best = prediction_of(plan)
    near = [one.name for one in answers if one.plan.candidate != plan.candidate and not one.against
            and best.low_s <= prediction_of(one.plan).step_time_s <= best.high_s]  # fmt: skip
    if near:
        lie = "lies" if len(near) == 1 else "lie"
        words = f"{len(near)} of these ({', '.join(near)}) {lie} within the interval of this prediction"
        parts.append(prose(f"{words}, so measure before you rent for long", "yellow"))
    return parts


def _against_vendor(plan: Plan, answers: Sequence[Answer]) -> list[RenderableType]:
    """Return how a plan compares with the layout that the vendor documents, part by part, if it is another."""
    others = [one.plan for one in answers if one.name == "vendor" and one.plan.candidate != plan.candidate]
    if not others:
        return []
    found = compared(others[0], plan)
    rows: list[list[Cell]] = []
    for part in found.time.parts:
        if abs(part.difference) >= _LEAST_SHARE * found.time.total.a:
            more = f"{'+' if part.difference > 0 else ''}{format_seconds(part.difference)}"
            seconds = [format_seconds(part.a), format_seconds(part.b), more]
            rows.append([TIME_WORDS.get(part.name, part.name), *seconds, found.evidence.get(part.name, "")])
    ratio = f": {ratio_words(found.ratio)}" if found.ratio else ""
    columns = ("part", ">vendor", ">this", ">difference", "rests on")
    title = f"against the vendor's layout{ratio}"
    return [FittingTable(title, columns, rows, drop=("rests on",)) if rows else prose(title), ""]


def _run_words(run: NearestRun) -> str:
    """Say what published runs took, how far that can be trusted, and what the cost model says of them."""
    measured = f"{counted(run.num_runs, 'run')}, {format_seconds(run.low_s)} to {format_seconds(run.high_s)}"
    doubt = f" ({run.unsettled})" if run.unsettled else ""
    label = "seen, not settled" if run.unsettled else "measured nearby"
    said = f"this model says {format_seconds(run.predicted_s)}"
    return f"{label}: {run.run}: {measured}{doubt}; {said} ({run.source})"
