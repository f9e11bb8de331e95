"""The half of ``autoshard import`` that reads logs of runs into measured rows."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from autoshard.calibration.calibrate import timed_rows
from autoshard.calibration.next_layout import FEWEST
from autoshard.commands.output import print_answer, write_text
from autoshard.commands.progress import byte_progress
from autoshard.commands.writing.places import place_checks
from autoshard.commands.writing.target import Target
from autoshard.errors import require
from autoshard.imports.imported import imported_run
from autoshard.imports.logs.answer import log_answers, with_rows
from autoshard.imports.logs.log import TrainingLog
from autoshard.imports.logs.reading import read_log
from autoshard.imports.question import ImportOptions
from autoshard.imports.to_try import NextAnswer, next_answer
from autoshard.report.interchange import log_sheets, logs_json
from autoshard.report.sheet import Node
from autoshard.search.ask.planner import SearchResult
from autoshard.search.bound.request import Request
from autoshard.units import counted

_LARGE_BYTES = 1 << 26  # from which on a log shows how far it is read


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSources:
    """The logs of one configuration, and what is typed beside them."""

    files: Sequence[Path]
    config: str | None
    options: ImportOptions
    nodes: int | None
    rows: Path | None  # the file to which rows are added


def import_logs(
    sources: LogSources, search: Callable[[Request], SearchResult] | None, target: Target, *, keeps: bool
) -> int:
    """Read logs, print their rows beside predictions, add them to a file, and name the layout to try next.

    ``keeps`` says whether its plan is written.
    """
    rows, json = sources.rows, target.json
    require(*place_checks(rows) if rows else ())
    run = imported_run(sources.config) if sources.config else None

    def read(file: Path) -> TrainingLog:
        quiet = json or not file.is_file() or file.stat().st_size < _LARGE_BYTES
        with byte_progress(f"reading {file.name}", quiet=quiet) as report:
            return read_log(file, report)

    answers = log_answers(sources.files, run, sources.options, sources.nodes, read)
    measured = [answer.row for answer in answers if answer.row is not None]
    wrote, use = "", ""
    if rows and measured:
        content = with_rows(rows, measured)
        write_text(content.text, rows, "--rows")
        wrote = f"{rows}: {counted(content.added, 'row')} added, {content.replaced} replaced"
        use = _use_line(rows, content.timed, [row.platform for row in measured], sources.options.cluster)
    logged = [answer.logged for answer in answers if answer.logged is not None]
    answer = None
    if search and logged:
        cluster = sources.options.cluster or logged[-1].run.cluster.name
        answer = next_answer(logged, timed_rows(rows, cluster) if rows else None, search)
    written = target.write(answer.plan) if keeps and answer and answer.plan else None
    figures = logs_json(answers, answer)
    next_step = _next_step(sources, str(target.out) if written else "", answer) if measured else ""
    next_step = use if use and answer is None else next_step
    print_answer(figures if json else log_sheets(answers, Node(figures), answer, (wrote, next_step)))
    for refused in (answer for answer in answers if answer.refused):
        for fault in refused.refused.faults if refused.refused else ():
            where = fault.where if fault.where.startswith(refused.file) else f"{refused.file}: {fault.where}"
            print(f"refused {' '.join(f'{where}: {fault.message}'.split())}", file=sys.stderr)
    if answer and answer.plan and written:
        target.end(answer.plan, written)
    return 1 if any(answer.refused for answer in answers) else 0


def _next_step(sources: LogSources, plan: str, answer: NextAnswer | None) -> str:
    """Return what to type next: an export of the layout to try, or the same line with files for rows and plan."""
    if plan and answer:
        program = "megatron" if answer.program.name == "bridge" else answer.program.name
        return shlex.join(["autoshard", "export", plan, "--to", program])
    out = "next.json" if answer and answer.plan else None
    return same_line(sources, {"rows": sources.rows or "rows.jsonl", "out": out})


def same_line(sources: LogSources, more: Mapping[str, object]) -> str:
    """Return the line of ``autoshard import`` that asks the same, with ``more`` options; None is none."""
    values = {
        "config": sources.config,
        "nodes": sources.nodes,
        **{entry.name: getattr(sources.options, entry.name) for entry in fields(sources.options)},
        **more,
    }
    typed = [(f"--{name.replace('_', '-')}", str(value)) for name, value in values.items() if value is not None]
    words = [word for pair in typed for word in pair]
    return shlex.join(["autoshard", "import", *map(str, sources.files), *words])


def _use_line(rows: Path, timed: Mapping[str, int], clusters: Sequence[str], typed: str | None) -> str:
    """Return what the rows are for: a fit to a cluster that has enough of them, or else a look at the errors."""
    cluster = next((name for name in clusters if timed.get(name, 0) >= FEWEST), None)
    if cluster is None:
        return shlex.join(["autoshard", "validate", str(rows)])
    words = ["--cluster", typed or cluster, "--out", "fitted.json"]
    return shlex.join(["autoshard", "calibrate", str(rows), *words])
