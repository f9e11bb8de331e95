"""``autoshard import``: what other programs' configurations will take, what cannot run of them, and what is better."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from autoshard.command_line.options import Configuration, Paths
from autoshard.commands.interchange.import_logs import LogSources, import_logs, same_line
from autoshard.commands.output import print_answer
from autoshard.commands.progress import watching
from autoshard.commands.writing.places import place_checks
from autoshard.commands.writing.target import Target, Written
from autoshard.errors import require
from autoshard.imports.answer import answered, fitting_question
from autoshard.imports.imported import imported_run
from autoshard.imports.logs.reading import holds_log, logs_in
from autoshard.imports.question import ImportOptions
from autoshard.imports.to_try import OPTIONS
from autoshard.report.interchange import import_json, import_sheets
from autoshard.report.sheet import Node
from autoshard.search.ask.choice.doubt import DOUBT
from autoshard.search.ask.planner import SearchResult, search
from autoshard.search.bound.request import Request
from autoshard.units import format_seconds

_LONGEST_S = 10**6


def import_(
    file: Paths,
    question: ImportOptions,
    config: Configuration | None = None,
    rows: Path | None = None,
    nodes: int | None = None,
    no_search: bool = False,
    time_limit: int | None = None,
    out: Path | None = None,
    force: bool = False,
    json: bool = False,
) -> int:
    """Predict a configuration of NxD Training, Megatron, NeMo, torchtitan, Accelerate or DeepSpeed; name a better plan.

    Logs of runs of these programs become measured rows, beside their predictions; the answer is the layout to try next.

    Args:
        file: The configuration: YAML, JSON, TOML, a shell script, or FILE.py:FUNCTION. It is read, and never run. Or
            logs of one configuration, or folders with them: text, also packed with gzip, event files of TensorBoard,
            offline runs of W&B.
        question: What the file leaves open, or is to be changed.
        config: The configuration of the runs whose logs are read. Default: what each log prints of it.
        rows: The file to which the measured rows of logs are added, one a line; the row of a log that it has already
            is replaced.
        nodes: How many nodes the cluster has. Default: what the file says, or as few as its layout needs.
        no_search: Only predict; look for no better plan, and for no layout to try after the runs of logs.
        time_limit: Stop the search after so many seconds, with the best plan until then.
        out: Keep the configuration as a plan file, if it can run; of logs, the layout to try next.
        force: Replace the plan file even if somebody has edited it, or if it holds something else.
        json: Print one JSON object instead of tables.
    """
    require(
        (time_limit is None or 1 <= time_limit <= _LONGEST_S, "--time-limit", f"must be 1 to {_LONGEST_S}"),
        (nodes is None or nodes >= 1, "--nodes", f"must be at least 1, not {nodes}"),
        *(place_checks(out) if out else ()),
    )
    files = [log for path in file for log in logs_in(path)]
    first, *more = files
    target = Target(out=out or Path("plan.json"), force=force, json=json)

    def best(request: Request, count: int = 1) -> SearchResult:
        request = replace(request, effort=replace(request.effort, at_once=time_limit is not None))
        with watching(time_limit, format_seconds) as watch:
            return search(request, count, watch, simple_within=DOUBT)

    sources = LogSources(files=files, config=config, options=question, nodes=nodes, rows=rows)
    if config or rows or more or holds_log(first):
        several = None if no_search else partial(best, count=OPTIONS)
        return import_logs(sources, several, target, keeps=out is not None)
    name = str(first)
    configured = fitting_question(imported_run(name), question, nodes)
    answer = answered(configured, None if no_search else best)
    written = target.write(answer.plan) if out and answer.plan and answer.runs else Written()
    figures = import_json(answer)
    next_step = target.next_step if out else same_line(sources, {"out": "imported.json"})
    next_step = next_step if answer.runs else ""
    print_answer(figures if json else import_sheets(answer, Node(figures), next_step))
    if not answer.runs:
        return 1
    return target.end(answer.plan, written) if out and answer.plan else 0
