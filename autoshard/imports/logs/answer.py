"""Logs of one configuration, each as a measured row beside its prediction, or with the reason why it is none."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from autoshard.calibration.rows import MeasuredRow
from autoshard.calibration.suspects import too_fast
from autoshard.calibration.validate import PredictedRow, predicted_row, predicted_run
from autoshard.errors import InputError, file_faults
from autoshard.imports.imported import ImportedRun
from autoshard.imports.logs.log import TrainingLog
from autoshard.imports.logs.question import log_question
from autoshard.imports.logs.row import LoggedRun, logged_run
from autoshard.imports.question import ImportOptions
from autoshard.spec import record
from autoshard.spec.cluster_catalogue import cluster_names, load_node_type
from autoshard.spec.files import json_line


@dataclass(frozen=True, slots=True, kw_only=True)
class LogAnswer:
    """One log: its row and what is predicted for it, or why there is no row."""

    file: str
    logged: LoggedRun | None = None
    predicted: PredictedRow | None = None
    refused: InputError | None = None

    @property
    def row(self) -> MeasuredRow | None:
        """The row, if there is one."""
        return self.logged and self.logged.row


def log_answers(
    files: Sequence[Path],
    config: ImportedRun | None,
    options: ImportOptions,
    nodes: int | None,
    read: Callable[[Path], TrainingLog],
) -> tuple[LogAnswer, ...]:
    """Measure and predict logs of one configuration; one that is refused leaves the others."""
    return tuple(_answer(file, config, options, nodes, read) for file in files)


def _answer(
    file: Path,
    config: ImportedRun | None,
    options: ImportOptions,
    nodes: int | None,
    read: Callable[[Path], TrainingLog],
) -> LogAnswer:
    try:
        log = read(file)
        question = log_question(log, config, options, nodes)
        name = question.request.cluster.name
        node_type = None if name in cluster_names() or options.cluster is None else load_node_type(options.cluster)
        logged = logged_run(log, question, node_type, options.release)
        run = logged.run
        constants = (question.request.calibration or run.constants).running(run.framework, run.release)
        predicted = predicted_row(logged.row.id, run, predicted_run(run, constants))
        remarks = *log.remarks, *_doubts(logged)
    except InputError as error:
        return LogAnswer(file=str(file), refused=error)
    return LogAnswer(file=str(file), logged=replace(logged, log=replace(log, remarks=remarks)), predicted=predicted)


def _doubts(logged: LoggedRun) -> Iterator[str]:
    """Say that a log can hardly be of the question that was made of its configuration."""
    if fault := too_fast(logged.run, logged.row.step_time_s or math.inf):
        yield f"a step {fault}: these are hardly the model, the batch and the chips of this log"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLines:
    """The new content of a file of rows, how many of them are new, and how many say a time, by cluster."""

    text: str
    added: int
    replaced: int
    timed: Mapping[str, int]


def with_rows(path: Path, rows: Sequence[MeasuredRow]) -> RowLines:
    """Return a file with rows added; a row takes the place of the one with the same id, other lines stay."""
    with file_faults(str(path), "read"):
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    news = {row.id: json.dumps(_stated(row)) for row in rows}
    places = {str(_row_of(line).get("id", "")): place for place, line in enumerate(lines)}
    replaced = news.keys() & places.keys()
    for name in replaced:
        lines[places[name]] = news[name]
    lines += [text for name, text in news.items() if name not in replaced]
    return RowLines(
        text="".join(f"{line}\n" for line in lines if line.strip()),
        added=len(news) - len(replaced),
        replaced=len(replaced),
        timed=Counter(str(row.get("platform")) for row in map(_row_of, lines) if row.get("step_time_s")),
    )


def _row_of(line: str) -> Mapping[str, Any]:
    value = json_line(line)
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _stated(row: MeasuredRow) -> Mapping[str, Any]:
    return {name: value for name, value in record.encode(row).items() if value is not None}
