"""The sheets of ``import`` for logs: what runs took, beside what is predicted for them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoshard.imports.logs.answer import LogAnswer
from autoshard.imports.logs.row import LoggedRun
from autoshard.report.sheet import Cell, Fact, Node, Sheet, Table, Words
from autoshard.report.words import counted
from autoshard.spec.record import encode
from autoshard.units import format_seconds

_COLUMNS = ("log", "program", "steps", ">step", ">middle half", ">predicted", ">ratio", ">memory", ">predicted GiB")
_LESS_NEEDED = (">middle half", "program", ">predicted GiB", ">memory")


def logs_json(answers: Sequence[LogAnswer]) -> dict[str, Any]:
    """Return everything that is said of logs."""
    return {"logs": [_figures(answer) for answer in answers]}


def _figures(answer: LogAnswer) -> Mapping[str, Any]:
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


def log_sheets(answers: Sequence[LogAnswer], figures: Node, wrote: str, next_step: str) -> Iterator[Sheet]:
    """Yield a table of the logs that became rows, what their seconds rest on, and what to type next."""
    nodes = {answer.file: node for answer, node in zip(answers, figures["logs"], strict=True)}
    read = [answer.logged for answer in answers if answer.logged is not None]
    rows = [_cells(logged, nodes[logged.log.file]) for logged in read]
    if rows:
        yield Sheet(tables=[Table("", _COLUMNS, rows, whole=("steps",), drop=_LESS_NEEDED)])
        yield Sheet(notes=[Words(note, "soft") for logged in read for note in _notes(logged)])
    layouts = dict.fromkeys(_layout(logged) for logged in read)
    facts = [Fact("layout", Words(layout, "code")) for layout in layouts]
    refused = len(answers) - len(read)
    facts += [Fact(Words("refused", "bad"), f"{counted(refused, 'log')} of {len(answers)}")] if refused else []
    facts += [Fact("wrote", wrote)] if wrote else []
    facts += [Fact("next", Words(next_step, "code"))] if next_step else []
    yield Sheet(facts=facts)


def _layout(logged: LoggedRun) -> str:
    return str(logged.question.candidate)


def _cells(logged: LoggedRun, node: Node) -> list[Cell]:
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


def _notes(logged: LoggedRun) -> Iterator[str]:
    """Yield what the figures of a log rest on, and what is to be said of it."""
    name = Path(logged.log.file).name
    checks = f"; {'; '.join(logged.step.checks)}" if logged.step.checks else ""
    yield f"{name}: step by {logged.step.basis}{checks}"
    if logged.peak.says:
        yield f"{name}: memory: {logged.peak.says}"
    yield from (f"{name}: {remark}" for remark in logged.log.remarks)
    yield from (f"{name}: assumed {entry}" for entry in logged.question.assumed)
