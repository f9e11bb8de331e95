"""The answers to a question side by side: how much slower each is, how sure that is, and what was measured nearby."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoshard.cost.doubt import compared, ratio_of
from autoshard.plan.candidate import Candidate
from autoshard.plan.explanation import Answer, Certificate, NearestRun, Ratio
from autoshard.plan.found import FoundPlan
from autoshard.plan.plan import Plan
from autoshard.report.sheet import Bar, Cell, Column, Node, Sheet, Table, Words, sheet_rows
from autoshard.report.words import (
    TIME_WORDS,
    axes_words,
    prediction_of,
    ratio_words,
    recompute_words,
    signed_words,
    time_bar,
)
from autoshard.spec.record import decode, encode
from autoshard.units import counted, format_change, format_seconds

_LEAST_SHARE = 0.005  # of a step: smaller differences are not listed
_TITLE = "slower than {}, with its 80% interval; sure: the chance that it is slower"


def runners_up_of(best: Plan, next_best: Mapping[str, Plan]) -> list[Answer]:
    """Return the next best plans as answers of these names, which are compared with the best."""
    best_s, answers = prediction_of(best).step_time_s, list[Answer]()
    for name, plan in next_best.items():
        slower = prediction_of(plan).step_time_s / best_s - 1
        answers.append(Answer(name=name, plan=plan, why="", slower=slower, ratio=ratio_of(plan, best)))
    return answers


def answers_sheet(plan: Plan, answers: Sequence[Answer]) -> Sheet:
    """Return the answers to a question beside the plan, what was measured near them, and what to measure."""
    best = FoundPlan.of(Answer(name="", plan=plan, why="", slower=0.0), Certificate())
    records = Node(encode([best, *(FoundPlan.of(answer, Certificate()) for answer in answers)]))
    plan_record, *figures = records
    fastest = plan_record if figures[0]["ratio"] else figures[0]
    notes = list(answers_notes(figures))
    for answer in answers:
        runs = filter(None, (answer.nearest_run, answer.unsettled_run))
        notes += [Words(f"{answer.name}: {_run_words(run)}", "soft") for run in runs]
    notes += _rivals_of(plan, answers)
    letters = [answer.name for answer in answers if len(answer.name) == 1 and answer.name.isalpha()]
    if letters:
        notes.append(
            f"{', '.join(letters)}: not among the layouts that this plan was chosen from; plan --at writes one"
        )
    tables, vendor = [answers_table(figures, fastest, str(plan.candidate))], against_vendor(plan, answers)
    tables += [_vendor_table(Node(vendor))] if vendor else []
    return Sheet(tables=tables, notes=notes)


def _rivals_of(plan: Plan, answers: Sequence[Answer]) -> Iterator[Words]:
    """Yield which answers are faster by the doubt of both, and which may be by the interval of the prediction."""
    high_s, faster, near = prediction_of(plan).high_s, list[str](), list[str]()
    for answer in answers:
        if answer.plan.candidate != plan.candidate and not answer.against:
            may_be = near if prediction_of(answer.plan).step_time_s <= high_s else []
            names = faster if ratio_of(answer.plan, plan).high < 1 - _LEAST_SHARE else may_be
            names.append(answer.name)
    are = "is" if len(faster) == 1 else "are"
    said = [f"{', '.join(faster)} {are} predicted to be faster than this plan"] if faster else []
    if near:
        said.append(f"{', '.join(near)} may be as fast as this plan, by the interval of its prediction")
    if said:
        yield Words(f"{'; '.join(said)}: measure before you rent for long", "warning")


def answers_table(answers: Sequence[Node], fastest: Node, candidate: str) -> Table:
    """Return the answers that a search has noted, with what each loses against the fastest and its layout to paste.

    The plan that is shown, ``candidate``, has its layout elsewhere.
    """
    longest_s = max(answer["step_time_s"].value for answer in answers)
    columns: dict[str, Column] = {
        "name": "name",
        ">step": "step_time_s",
        ">slower": slower_words,
        ">sure": lambda answer: answer["ratio"]["faster"].figure(lambda it: f"{1 - it:.0%}") if answer["ratio"] else "",
        ">memory": "peak_bytes",
        "where its time goes": lambda answer: Bar(1, 0, time_bar(answer["time_parts"].value, longest_s)),
        "plan": lambda answer: plan_words(Candidate.parse(answer["candidate"].value)),
        "why": lambda answer: _loses(answer, fastest),
        "layout": lambda answer: "" if (text := answer["candidate"].value) == candidate else Words(text, "code"),
    }
    alone = all(answer["ratio"] for answer in answers)  # are compared with the plan that is shown
    title = f"{'Runners-up' if alone else 'Answers'}; {_TITLE.format('this plan' if alone else 'the fastest')}"
    rows = sheet_rows(answers, columns)
    return Table(title, [*columns], rows, whole=("name",), drop=("why",), below="layout")


def plan_words(layout: Candidate) -> str:
    """Say how a plan cuts the model, in which order it computes, and what it computes again."""
    return f"{axes_words(layout)}; {layout.schedule}; {recompute_words(layout)}"


def answers_notes(answers: Sequence[Node]) -> Iterator[Cell]:
    """Yield why answers may not run, and where a vendor's layout is documented."""
    for answer in answers:
        name = answer["name"].value
        yield from (Words(f"{name}: {reason}", "bad") for reason in answer["against"].value)
        if answer["source"].value:
            yield Words(f"{name}: {answer['source'].value}", "soft")


def slower_words(answer: Node) -> Cell:
    """Return how much slower than the fastest an answer is, with its 80% interval; nothing for the fastest itself."""
    slower, ratio = answer["slower"].figure(format_change), answer["ratio"]
    if not ratio:
        return slower if answer["slower"].value else ""
    low, high = (ratio[end].figure(lambda end: signed_words(end - 1)) for end in ("low", "high"))
    return slower, " (", low, " to ", high, ")"


def _loses(answer: Node, fastest: Node) -> str:
    """Say what is promised of an answer with a name; of another one, by which part of the time it loses most."""
    if answer["against"].value:
        return "may not run"
    if answer["why"].value and not answer["name"].value.isdecimal():
        return answer["why"].value
    parts, bests = answer["time_parts"].value, fastest["time_parts"].value
    sign = 1 if answer["step_time_s"].value >= fastest["step_time_s"].value else -1
    more = {name: sign * (parts.get(name, 0.0) - bests.get(name, 0.0)) for name in sorted({*parts, *bests})}
    part = max(more, key=more.__getitem__)  # by which it loses most, or gains
    return f"{format_seconds(more[part])} {'more' if sign > 0 else 'less'} {TIME_WORDS.get(part, part)}"


def against_vendor(plan: Plan, answers: Sequence[Answer]) -> dict[str, Any] | None:
    """Return the ratio of a plan's step to that of the layout that the vendor documents, if it is another, in parts."""
    vendor = next((answer.plan for answer in answers if answer.name == "vendor"), plan)
    if vendor.candidate == plan.candidate:
        return None
    difference = compared(vendor, plan)
    parts = [{"name": part.name, "vendor": part.a, "this": part.b} for part in difference.time.parts]
    return {**encode(difference.ratio), "parts": parts, "evidence": dict(difference.evidence)}


def _vendor_table(figures: Node) -> Table:
    """Return how a plan compares with the layout that the vendor documents, part by part; small parts are left out."""
    whole_s = sum(part["vendor"].value for part in figures["parts"])
    rows: list[tuple[Cell, ...]] = []
    for part in figures["parts"]:
        name, more_s = str(part["name"].value), part["this"].value - part["vendor"].value
        if abs(more_s) >= _LEAST_SHARE * whole_s:
            more = f"{'+' if more_s > 0 else ''}{format_seconds(more_s)}"
            seconds = (part[side].figure(format_seconds) for side in ("vendor", "this"))
            rows.append((TIME_WORDS.get(name, name), *seconds, more, figures["evidence"].value.get(name, "")))
    ratio = decode(Ratio, {key: figures[key].value for key in ("value", "low", "high", "faster")})
    columns = ("part", ">vendor", ">this", ">difference", "rests on")
    return Table(f"against the vendor's layout: {ratio_words(ratio)}", columns, rows, drop=("rests on",))


def _run_words(run: NearestRun) -> str:
    """Say what published runs took, how far that can be trusted, and what the cost model says of them."""
    measured = f"{counted(run.num_runs, 'run')}, {format_seconds(run.low_s)} to {format_seconds(run.high_s)}"
    doubt = f" ({run.unsettled})" if run.unsettled else ""
    label = "seen, not settled" if run.unsettled else "measured nearby"
    predicted = f"this model says {format_seconds(run.predicted_s)}"
    return f"{label}: {run.run}: {measured}{doubt}; {predicted} ({run.source})"
