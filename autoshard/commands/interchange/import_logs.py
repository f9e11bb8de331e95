"""The half of ``autoshard import`` that reads logs of runs into measured rows."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from autoshard.commands.output import print_answer, write_text
from autoshard.commands.progress import byte_progress
from autoshard.commands.writing.places import place_checks
from autoshard.errors import require
from autoshard.imports.imported import imported_run
from autoshard.imports.logs.answer import log_answers, with_rows
from autoshard.imports.logs.log import TrainingLog
from autoshard.imports.logs.reading import read_log
from autoshard.imports.question import ImportOptions
from autoshard.report.interchange import log_sheets, logs_json
from autoshard.report.sheet import Node

_LARGE_BYTES = 1 << 26  # from which on a log shows how far it is read
_ENOUGH = 3  # rows that a fit may rest on


def import_logs(
    files: Sequence[Path],
    config: str | None,
    options: ImportOptions,
    nodes: int | None,
    rows: Path | None,
    *,
    json: bool,
) -> int:
    """Read logs of one configuration, print their rows beside predictions, and add them to a file."""
    require(*place_checks(rows) if rows else ())
    run = imported_run(config) if config else None

    def read(file: Path) -> TrainingLog:
        quiet = json or not file.is_file() or file.stat().st_size < _LARGE_BYTES
        with byte_progress(f"reading {file.name}", quiet=quiet) as report:
            return read_log(file, report)

    answers = log_answers(files, run, options, nodes, read)
    measured = [answer.row for answer in answers if answer.row is not None]
    wrote, next_step = "", _with_rows_line(files, config, options, nodes) if measured else ""
    if rows and measured:
        content = with_rows(rows, measured)
        write_text(content.text, rows, "--rows")
        wrote = f"{rows}: {content.added} rows added, {content.replaced} replaced"
        next_step = _use_line(rows, content.timed, [row.platform for row in measured], options.cluster)
    figures = logs_json(answers)
    print_answer(figures if json else log_sheets(answers, Node(figures), wrote, next_step))
    for answer in answers:
        for fault in answer.refused.faults if answer.refused else ():
            where = fault.where if fault.where.startswith(answer.file) else f"{answer.file}: {fault.where}"
            print(f"refused {' '.join(f'{where}: {fault.message}'.split())}", file=sys.stderr)
    return 1 if any(answer.refused for answer in answers) else 0


def _with_rows_line(files: Sequence[Path], config: str | None, options: ImportOptions, nodes: int | None) -> str:
    """Return the same line with a file for the rows."""
    values = {
        "config": config,
        "nodes": nodes,
        **{entry.name: getattr(options, entry.name) for entry in fields(options)},
    }
    typed = [(f"--{name.replace('_', '-')}", str(value)) for name, value in values.items() if value is not None]
    words = [word for pair in typed for word in pair]
    return shlex.join(["autoshard", "import", *map(str, files), *words, "--rows", "rows.jsonl"])


def _use_line(rows: Path, timed: Mapping[str, int], clusters: Sequence[str], typed: str | None) -> str:
    """Return what the rows are for: a fit to a cluster that has enough of them, or else a look at the errors."""
    cluster = next((name for name in clusters if timed.get(name, 0) >= _ENOUGH), None)
    if cluster is None:
        return shlex.join(["autoshard", "validate", str(rows)])
    words = ["--cluster", typed or cluster, "--out", "fitted.json"]
    return shlex.join(["autoshard", "calibrate", str(rows), *words])
