"""The answers to a question side by side: how much slower each is, what of that is sure, what was measured of them."""

from collections.abc import Iterator, Sequence

from autoshard.cost.doubt import compared, ratio_of
from autoshard.plan.candidate import Candidate
from autoshard.plan.explanation import Answer, Certificate, NearestRun
from autoshard.plan.found import FoundPlan
from autoshard.plan.plan import Plan
from autoshard.report.sheet import Bar, Cell, Column, Node, Sheet, Table, Words, rows_of
from autoshard.report.words import (
    TIME_WORDS,
    axes_words,
    counted,
    prediction_of,
    ratio_words,
    recompute_words,
    signed_words,
    time_bar,
)
from autoshard.spec.record import encode
from autoshard.units import format_seconds

_LEAST_SHARE = 0.005  # of the vendor's step: smaller differences of a part are not listed
_TITLE = "slower: what holds 80% of it, and how sure it is that the answer is slower"


def runners_up_of(plan: Plan, others: Sequence[Plan]) -> list[Answer]:
    """Return the next best plans as answers, which are compared with the best."""
    best_s, runners_up = prediction_of(plan).step_time_s, list[Answer]()
    for number, other in enumerate(others, 2):
        slower = prediction_of(other).step_time_s / best_s - 1
        runners_up.append(Answer(name=str(number), plan=other, why="", slower=slower, ratio=ratio_of(other, plan)))
    return runners_up


def answers_sheet(plan: Plan, answers: Sequence[Answer]) -> Sheet:
    """Return the answers to a question beside the plan, what was measured near them, and what to measure."""
    best = FoundPlan.of(Answer(name="", plan=plan, why="", slower=0.0), Certificate())
    records = Node(encode([best, *(FoundPlan.of(answer, Certificate()) for answer in answers)]))
    first, *others = records
    fastest = first if others[0]["name"].value.isdecimal() else others[0]
    notes = list(answers_notes(others))
    for answer in answers:
        runs = filter(None, (answer.nearest_run, answer.unsettled_run))
        notes += [Words(f"{answer.name}: {_run_words(run)}", "soft") for run in runs]
    predicted = prediction_of(plan)
    near = [answer.name for answer in answers if answer.plan.candidate != plan.candidate and not answer.against
            and predicted.low_s <= prediction_of(answer.plan).step_time_s <= predicted.high_s]  # fmt: skip
    if near:
        lie = "lies" if len(near) == 1 else "lie"
        words = f"{len(near)} of these ({', '.join(near)}) {lie} within the interval of this prediction"
        notes.append(Words(f"{words}, so measure before you rent for long", "warning"))
    tables = [answers_table(others, fastest, str(plan.candidate)), *_against_vendor(plan, answers)]
    return Sheet(tables=tables, notes=notes)


def answers_table(answers: Sequence[Node], fastest: Node, candidate: str) -> Table:
    """Return the answers of a search's record: with what each loses against the fastest, and its layout to paste.

    The layout of the plan that is shown, ``candidate``, stands elsewhere.
    """
    longest_s = max(answer["step_time_s"].value for answer in answers)
    columns: dict[str, Column] = {
        "name": "name",
        ">step": "step_time_s",
        ">slower": _slower,
        ">sure": lambda answer: answer["ratio"]["faster"].figure(lambda it: f"{1 - it:.0%}") if answer["ratio"] else "",
        ">memory": "peak_bytes",
        "where its time goes": lambda answer: Bar(1, 0, time_bar(answer["time_parts"].value, longest_s)),
        "plan": _plan_words,
        "why": lambda answer: _loses(answer, fastest),
        "layout": lambda answer: "" if (text := answer["candidate"].value) == candidate else Words(text, "code"),
    }
    names = "Runners-up" if all(answer["name"].value.isdecimal() for answer in answers) else "Answers"
    rows = rows_of(answers, columns)
    return Table(f"{names}; {_TITLE}", [*columns], rows, whole=("name",), drop=("why",), below="layout")


def _plan_words(answer: Node) -> str:
    layout = Candidate.parse(answer["candidate"].value)
    return f"{axes_words(layout)}; {layout.schedule}; {recompute_words(layout)}"


def answers_notes(answers: Sequence[Node]) -> Iterator[Cell]:
    """Yield why answers may not run, and where a vendor's layout is documented."""
    for answer in answers:
        name = answer["name"].value
        yield from (Words(f"{name}: {reason}", "bad") for reason in answer["against"].value)
        if answer["source"].value:
            yield Words(f"{name}: {answer['source'].value}", "soft")


def _slower(answer: Node) -> Cell:
    """Return how much slower than the fastest an answer is with what holds 80% of that; the fastest is not slower."""
    slower, ratio = answer["slower"].figure("{:+.1%}".format), answer["ratio"]
    if not ratio:
        return slower if answer["slower"].value else ""
    low, high = (ratio[end].figure(lambda end: signed_words(end - 1)) for end in ("low", "high"))
    return slower, " (", low, " to ", high, ")"


def _loses(answer: Node, fastest: Node) -> str:
    """Say what is promised of an answer with a name; of another one, by which part of the time it loses most."""
    if answer["against"].value:
        return "may not run"
    if not answer["name"].value.isdecimal():
        return answer["why"].value
    parts, bests = answer["time_parts"].value, fastest["time_parts"].value
    sign = 1 if answer["step_time_s"].value >= fastest["step_time_s"].value else -1
    more = {name: sign * (parts.get(name, 0.0) - bests.get(name, 0.0)) for name in sorted({*parts, *bests})}
    part = max(more, key=more.__getitem__)  # by which it loses most, or gains
    return f"{format_seconds(more[part])} {'more' if sign > 0 else 'less'} {TIME_WORDS.get(part, part)}"


def _against_vendor(plan: Plan, answers: Sequence[Answer]) -> Iterator[Table]:
    """Yield how a plan compares with the layout that the vendor documents, part by part, if it is another."""
    for vendor in answers:
        if vendor.name != "vendor" or vendor.plan.candidate == plan.candidate:
            continue
        difference = compared(vendor.plan, plan)
        rows: list[list[Cell]] = []
        for part in difference.time.parts:
            if abs(part.difference) >= _LEAST_SHARE * difference.time.total.a:
                more = f"{'+' if part.difference > 0 else ''}{format_seconds(part.difference)}"
                seconds = [format_seconds(part.a), format_seconds(part.b), more]
                rows.append([TIME_WORDS.get(part.name, part.name), *seconds, difference.evidence.get(part.name, "")])
        ratio = f": {ratio_words(difference.ratio)}" if difference.ratio else ""
        columns = ("part", ">vendor", ">this", ">difference", "rests on")
        yield Table(f"against the vendor's layout{ratio}", columns, rows, drop=("rests on",))


def _run_words(run: NearestRun) -> str:
    """Say what published runs took, how far that can be trusted, and what the cost model says of them."""
    measured = f"{counted(run.num_runs, 'run')}, {format_seconds(run.low_s)} to {format_seconds(run.high_s)}"
    doubt = f" ({run.unsettled})" if run.unsettled else ""
    label = "seen, not settled" if run.unsettled else "measured nearby"
    predicted = f"this model says {format_seconds(run.predicted_s)}"
    return f"{label}: {run.run}: {measured}{doubt}; {predicted} ({run.source})"
