"""The sheets of ``import`` and ``export``: others' configurations and logs, beside predictions, and what is lost."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from autoshard.calibration.next_layout import FEWEST
from autoshard.exports.price import ExportAnswer
from autoshard.imports.answer import ImportAnswer
from autoshard.imports.logs.answer import LogAnswer
from autoshard.imports.logs.row import LoggedRun
from autoshard.imports.to_try import NextAnswer
from autoshard.plan.plan import Plan
from autoshard.report.plan_sheets import plan_figures, plan_headline
from autoshard.report.sheet import Cell, Fact, Node, Sheet, Table, Words
from autoshard.report.structured import rejection_json
from autoshard.report.words import layout_words, prediction_of, ratio_words, software_of
from autoshard.spec.record import encode
from autoshard.units import counted, format_seconds

_MOST_NAMED = 12  # keys that were not read; --json has them all
_LOG_COLUMNS = ("log", "program", "steps", ">step", ">middle half", ">predicted", ">ratio", ">memory", ">predicted GiB")
_LESS_NEEDED = (">middle half", "program", ">predicted GiB", ">memory")


def import_json(answer: ImportAnswer) -> dict[str, Any]:
    """Return everything that is said of a configuration."""
    question = answer.question
    run, request = question.run, question.request
    return {
        "program": run.program.title,
        "file": run.file,
        "configuration": run.name,
        "model": request.model.name,
        "model_from": question.model_from,
        "cluster": request.cluster.name,
        "nodes": request.cluster.num_nodes,
        "ranks": request.cluster.num_ranks,
        "seq_len": request.workload.seq_len,
        "global_batch": request.workload.global_batch,
        "precision": request.workload.precision.name,
        "candidate": str(question.candidate),
        "keys_read": run.stated,
        "not_read": list(run.unread),
        "no_effect": list(run.harmless),
        "remarks": list(run.remarks),
        "assumed": [{"what": guess.what, "why": guess.why, "option": guess.option} for guess in question.assumed],
        "rejections": [rejection_json(reason) for reason in answer.refused],
        "no_estimate": answer.shapeless,
        "imported": answer.plan and plan_figures(answer.plan),
        "best": answer.best and plan_figures(answer.best),
        "ratio": answer.ratio and encode(answer.ratio),
        "no_best": answer.why_no_best,
    }


def import_sheets(answer: ImportAnswer, figures: Node, next_step: str) -> Iterator[Sheet]:
    """Yield one screen: the configuration and its prediction, what cannot run, the best plan, what was not read."""
    run, plan = answer.question.run, answer.plan
    name = f"{run.file}{f':{run.name}' if run.name else ''}"
    yield Sheet(title=(Words(name, "strong"), f": {run.program.title}, {counted(run.stated, 'key')} read"))
    request = answer.question.request
    if plan is not None:
        headline = plan_headline(plan, figures["imported"])
        yield Sheet(title=headline.title, about=headline.about, facts=[*headline.facts, *_verdict(answer)])
    else:
        question = f"{request.model.name} on {request.cluster.num_nodes} x {request.cluster.name}"
        layout = Fact("layout", Words(str(answer.question.candidate), "code"))
        yield Sheet(title=question, facts=[layout, *_verdict(answer)])
    best = [Fact("" if number else "best", cell) for number, cell in enumerate(_best_words(answer, figures))]
    model = Fact("model", request.model.name, f": {answer.question.model_from}")
    notes = [*_reading_notes(run.unread, len(run.harmless)), *(Words(remark, "warning") for remark in run.remarks)]
    notes = [*notes, *(Words(f"assumed {guess}", "soft") for guess in answer.question.assumed)]
    more = [Fact("next", Words(next_step, "code"))] if next_step else []
    yield Sheet(facts=[*best, model, *more], notes=notes)


def _verdict(answer: ImportAnswer) -> Iterator[Fact]:
    """Yield the layout in text, and every reason why it cannot run."""
    if answer.plan is not None:
        yield Fact("layout", Words(str(answer.plan.candidate), "code"))
    for name, reasons in groupby(answer.refused, lambda reason: reason.rule_id):
        first, *likewise = reasons
        if name == "memory":
            text = first.message.partition(": ")[2]
            more = f" Likewise on {len(likewise)} more." if likewise else ""
            yield Fact(Words("cannot run", "bad"), f"{text}.{more}")
            continue
        yield from (Fact(Words("cannot run", "bad"), str(reason)) for reason in (first, *likewise))
    if answer.runs:
        yield Fact(Words("runs", "good"), "no Rule speaks against it, and it fits in memory")


def _best_words(answer: ImportAnswer, figures: Node) -> Iterator[Cell]:
    """Yield the best plan and how it compares, or why there is none."""
    best, program = answer.best, answer.question.run.program.title
    if best is None:
        if answer.why_no_best:
            yield f"none: {answer.why_no_best}"
        return
    step = figures["best"]["prediction"]["step_time_s"].figure()
    if answer.plan is not None and best.candidate == answer.plan.candidate:
        yield f"no other layout that {program} can run is chosen before this one"
        return
    yield (Words(layout_words(best), "strong"), ", ", step, " a step")
    if answer.ratio:
        yield f"{ratio_words(answer.ratio)} (80% interval of the ratio)"
    yield Words(str(best.candidate), "code")


def _reading_notes(unread: Sequence[str], num_harmless: int) -> Iterator[Cell]:
    """Yield which keys were not read, and how many have no effect."""
    shown = list(unread[:_MOST_NAMED])
    more = [f"and {len(unread) - _MOST_NAMED} more, which --json names"] if len(unread) > _MOST_NAMED else []
    if shown:
        yield Words(f"not read: {'; '.join([*shown, *more])}", "warning")
    if num_harmless:
        yield Words(f"{counted(num_harmless, 'key')} of the file without effect on time or memory of a step", "soft")


def export_json(answer: ExportAnswer, out: str, remark: str) -> dict[str, Any]:
    """Return everything that is said of an export, with the text of the file, and what became of the plan's numbers."""
    return {
        "program": answer.program.title,
        "file": out,
        "text": answer.text,
        "candidate": str(answer.expressed.candidate),
        "differences": [encode(difference) for difference in answer.expressed.differences],
        "not_in_the_file": dict(answer.program.limits.unsaid),
        "planned": answer.planned and _priced(answer.planned),
        "as_run": answer.as_run and _priced(answer.as_run),
        "no_price": answer.unpriced,
        "ratio": answer.ratio and encode(answer.ratio),
        "rejections": [rejection_json(reason) for reason in answer.refused],
        "notes": [remark] if remark else [],
    }


def _priced(plan: Plan) -> Mapping[str, Any]:
    return {"candidate": str(plan.candidate), "step_time_s": prediction_of(plan).step_time_s}


def export_sheets(answer: ExportAnswer, figures: Node) -> Iterator[Sheet]:
    """Yield what a program cannot express of a plan, what it will do instead, and the price of that."""
    program, differences = answer.program.title, answer.expressed.differences
    lost = [Fact(Words("cannot say", "warning"), loss.what, f"; instead: {loss.instead}") for loss in differences]
    lost = lost or [Fact(Words("says all", "good"), f"{program} can express every choice of this layout")]
    missing = answer.program.limits.unsaid.items()
    unsaid = [Fact("not in it", what.rpartition(".")[2], f": {where}") for what, where in missing]
    price: list[Fact] = []
    if answer.planned and answer.as_run:
        planned, run = (figures[key]["step_time_s"].figure() for key in ("planned", "as_run"))
        price = [Fact("step", run, (f" of {software_of(answer.as_run)} as {program} will run it"))]
        if differences:
            price = [Fact("as planned", planned, f" of {software_of(answer.planned)}"), Fact("as it runs", run)]
        price += [Fact("price", f"{ratio_words(answer.ratio)} (80% interval)")] if answer.ratio else []
    elif answer.unpriced:
        price = [Fact("price", f"not known: {answer.unpriced}")]
    refused = [Fact(Words("cannot run", "bad"), str(reason)) for reason in answer.refused]
    layout = Fact("layout", Words(str(answer.expressed.candidate), "code"))
    yield Sheet(title=f"for {program}", facts=[layout, *lost, *unsaid, *price, *refused])


def logs_json(answers: Sequence[LogAnswer], following: NextAnswer | None) -> dict[str, Any]:
    """Return everything that is said of logs, and of the layout to try after them."""
    logs = {"logs": [_log_figures(answer) for answer in answers]}
    return logs if following is None else {**logs, "next_layout": _next_figures(following)}


def _next_figures(following: NextAnswer) -> Mapping[str, Any]:
    known, best, to_try = following.known, following.best, following.to_try
    return {
        "rows": len(known.samples),
        "constants": known.constants.name,
        "fitted": known.is_fitted,
        "fastest_candidate": str(best.run.candidate),
        "fastest_step_time_s": best.step_s,
        "candidate": to_try and str(to_try.run.candidate),
        "step_time_s": to_try and to_try.step_s,
        "low_s": to_try and to_try.low_s,
        "high_s": to_try and to_try.high_s,
        "chance": to_try and to_try.chance,
        "regret": to_try and to_try.regret,
        "regret_after": to_try and to_try.regret_after,
        "why_none": following.why_none,
    }


def _log_figures(answer: LogAnswer) -> Mapping[str, Any]:
    if answer.logged is None or answer.predicted is None:
        faults = answer.refused.faults if answer.refused else ()
        return {"file": answer.file, "refused": [str(fault) for fault in faults]}
    logged, predicted = answer.logged, answer.predicted
    step, row = logged.step, logged.row
    return {
        "file": answer.file,
        "program": logged.log.program,
        "steps": step.steps,
        "reports": step.reports,
        "step_time_s": step.time_s,
        "low_s": step.low_s,
        "high_s": step.high_s,
        "predicted_step_time_s": predicted.predicted_step_time_s,
        "ratio": predicted.predicted_step_time_s / step.time_s,
        "inside": predicted.low_s <= step.time_s <= predicted.high_s,
        "peak_memory_gib": row.peak_memory_gib,
        "predicted_peak_memory_gib": predicted.predicted_peak_memory_gib,
        "basis": step.basis,
        "checks": list(step.checks),
        "remarks": list(logged.log.remarks),
        "row": {name: value for name, value in encode(row).items() if value is not None},
    }


def log_sheets(
    answers: Sequence[LogAnswer], figures: Node, following: NextAnswer | None, ends: tuple[str, str]
) -> Iterator[Sheet]:
    """Yield a table of the logs that became rows, what their seconds rest on, and the layout to try next.

    ``ends`` say which rows were written, and what to type next.
    """
    nodes = {answer.file: node for answer, node in zip(answers, figures["logs"], strict=True)}
    read = [answer.logged for answer in answers if answer.logged is not None]
    rows = [_log_cells(logged, nodes[logged.log.file]) for logged in read]
    if rows:
        yield Sheet(tables=[Table("", _LOG_COLUMNS, rows, whole=("steps",), drop=_LESS_NEEDED)])
        yield Sheet(notes=[Words(note, "soft") for logged in read for note in _log_notes(logged)])
    layouts = dict.fromkeys(_layout(logged) for logged in read)
    facts = [Fact("layout", Words(layout, "code")) for layout in layouts]
    refused = len(answers) - len(read)
    facts += [Fact(Words("refused", "bad"), f"{counted(refused, 'log')} of {len(answers)}")] if refused else []
    facts += [*_next_facts(following, figures["next_layout"])] if following else []
    wrote, next_step = ends
    facts += [Fact("wrote", wrote)] if wrote else []
    facts += [Fact("next", Words(next_step, "code"))] if next_step else []
    yield Sheet(facts=facts)


def _next_facts(following: NextAnswer, node: Node) -> Iterator[Fact]:
    """Yield the fastest layout of the rows, the one to try next, and what its measurement would show."""
    known, best, to_try = following.known, following.best, following.to_try
    rows = counted(len(known.samples), "row")
    known_before = f"known without them: {known.constants.name} (a fit needs {FEWEST} rows of two layouts)"
    yield Fact("constants", f"fitted to {rows}, from {known.constants.name}" if known.is_fitted else known_before)
    yield Fact("fastest", node["fastest_step_time_s"].figure(), " of the rows of this question")
    yield Fact("", Words(str(best.run.candidate), "code"))
    if to_try is None:
        yield Fact("try next", f"nothing: {following.why_none}")
        return
    between = f" ({format_seconds(to_try.low_s)} to {format_seconds(to_try.high_s)}), faster than that with "
    yield Fact("try next", (node["step_time_s"].figure(), between, node["chance"].figure(_chance_words)))
    yield Fact("", Words(str(to_try.run.candidate), "code"))
    costs = f"{to_try.regret:.1%} of a step today, {to_try.regret_after:.1%} once it is measured"
    yield Fact("shows", f"choosing among the best layouts costs {costs}, on average over what is unknown")


def _chance_words(chance: float) -> str:
    """Return a chance in percent; nothing that is believed is certain.

    >>> _chance_words(0.999), _chance_words(0.714)
    ('over 99%', '71%')
    """
    return "over 99%" if chance > 0.99 else f"{chance:.0%}"


def _layout(logged: LoggedRun) -> str:
    return str(logged.question.candidate)


def _log_cells(logged: LoggedRun, node: Node) -> list[Cell]:
    step = logged.step
    spread = f"{format_seconds(step.low_s)} to {format_seconds(step.high_s)}"
    return [
        Path(logged.log.file).name,
        logged.row.framework or logged.log.program,
        logged.step.steps,
        node["step_time_s"].figure(),
        spread,
        node["predicted_step_time_s"].figure(),
        node["ratio"].figure(lambda ratio: f"{ratio:.2f}"),
        node["peak_memory_gib"].figure(lambda gib: f"{gib:.1f} GiB"),
        node["predicted_peak_memory_gib"].figure(lambda gib: f"{gib:.1f}"),
    ]


def _log_notes(logged: LoggedRun) -> Iterator[str]:
    """Yield what the figures of a log rest on, and what is to be said of it."""
    name = Path(logged.log.file).name
    checks = f"; {'; '.join(logged.step.checks)}" if logged.step.checks else ""
    yield f"{name}: step by {logged.step.basis}{checks}"
    if logged.peak.says:
        yield f"{name}: memory: {logged.peak.says}"
    yield from (f"{name}: {remark}" for remark in logged.log.remarks)
    yield from (f"{name}: assumed {entry}" for entry in logged.question.assumed)
