"""``autoshard advise``: which short runs would change the choice of a plan most, with a sweep that runs them."""

import json as json_text
import shlex
from pathlib import Path

from autoshard.calibration.advice import Advice, advised
from autoshard.calibration.calibrate import TimedRows, timed_rows
from autoshard.calibration.proposals import proposed_runs
from autoshard.commands.output import print_answer, print_left_out
from autoshard.commands.plan import SearchOptions, searched
from autoshard.commands.writing.places import folder_checks
from autoshard.commands.writing.target import token_total
from autoshard.errors import NoPlan, file_faults, require
from autoshard.extensions import EXTENSIONS
from autoshard.files import replace_text
from autoshard.plan.codec import dump
from autoshard.report.advice import STEPS, advice_json, advice_sheets
from autoshard.spec.cluster import LOCAL
from autoshard.spec.recipe import DEFAULT_CLUSTER, QuestionOptions
from autoshard.spec.record import encode
from autoshard.units import counted

_OPTIONS = 16  # plans that can be chosen: of more, the last are far slower than any error of the first
_SWEEP, _RUNS, _GIVEN = "sweep.yaml", "runs", "given.jsonl"


def advise(
    rows: Path,
    question: QuestionOptions,
    nodes: int = 1,
    budget: int = 5,
    run_nodes: int = 1,
    tokens: str | None = None,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Say which few short runs would change the choice of a plan most, and what today's choice may cost.

    What can be chosen are the best plans of the question. How long each takes is uncertain, as far as the rows leave
    constants open, and by the error of the cost model. Regret is how much longer the choice takes than the best plan.

    Args:
        rows: Measured runs of the cluster: a file with a row per line of JSON, or a folder of such files or of runs.
        question: The question.
        nodes: How many nodes the cluster has.
        budget: How many runs to propose, at most.
        run_nodes: How many nodes a run may have, at most.
        tokens: How many tokens the whole training reads, e.g. 2T or 300B; regret is then in dollars for all of it.
        out: A folder to write: plans of the runs, a sweep that runs them, and the rows that are known.
        json: Print one JSON object instead of tables.
    """
    require(
        (budget >= 1, "--budget", f"must be at least 1, not {budget}"),
        (run_nodes >= 1, "--run-nodes", f"must be at least 1, not {run_nodes}"),
        *(folder_checks(out) if out else ()),
    )
    total = token_total(tokens) if tokens else None
    options = SearchOptions()
    (request,) = options.requests(question, (nodes,))
    timed = timed_rows(rows, question.cluster or DEFAULT_CLUSTER)
    first = f"holds no row of {request.cluster.name} with a step_time_s. Measure one run first: autoshard run plan.json"
    require((bool(timed.runs), str(rows), first))
    print_left_out(timed.rows.left_out_lines)
    plans = searched(request, _OPTIONS, options).plans
    runs = proposed_runs(request, plans, run_nodes) if len(plans) > 1 else []
    if len(plans) > 1 and not runs:
        why = f"none of the {len(plans)} best plans may be made so small that it runs on {counted(run_nodes, 'node')}"
        raise NoPlan(f"no run: {why}. Allow more with --run-nodes")
    advice = advised(plans, runs, timed.samples, request.constants, budget)
    print_answer(advice_json(advice, total) if json else advice_sheets(advice, total))
    if out and advice.proposals:
        _write(advice, timed, rows, out)
        if not json:
            print(_next(advice, question, nodes, out))
    return 0


def _write(advice: Advice, timed: TimedRows, rows: Path, out: Path) -> None:
    """Write the plans, the sweep and the rows that are known, unless these lie there already."""
    with file_faults(f"--out {out}"):
        (out / _RUNS).mkdir(parents=True, exist_ok=True)
        points: list[dict[str, str]] = []
        for number, proposal in enumerate(advice.proposals, 1):
            path = out / f"advised-{number}.json"
            replace_text(path, dump(proposal.plan))
            points.append({"plan": path.name})
        sweep = {"mode": "run", "base": {"steps": STEPS}, "list": points}
        replace_text(out / _SWEEP, json_text.dumps(sweep, indent=2) + "\n")  # which is YAML
        if rows.resolve() != (out / _RUNS).resolve():
            lines = (json_text.dumps(encode(row)) for row, _ in timed.runs)
            replace_text(out / _RUNS / _GIVEN, "\n".join(lines) + "\n")


def _next(advice: Advice, question: QuestionOptions, nodes: int, out: Path) -> str:
    """Return what to type next."""
    cluster, constants = question.cluster or DEFAULT_CLUSTER, str(out / "calibration.json")
    again = {**question.given, "cluster": cluster, "calibration": constants}
    named = [
        word for key, value in again.items() if key != "pins" for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    named += [word for name, value in question.pins.items() for word in ("--pin", f"{name}={value}")]
    named += [] if cluster == LOCAL else ["--nodes", str(nodes)]
    lines = [
        *_start(advice, out),
        ["autoshard", "calibrate", str(out / _RUNS), "--cluster", cluster, "--out", constants],
        ["autoshard", "advise", str(out / _RUNS), *named],
    ]
    extensions = EXTENSIONS.options()
    typed = "\n".join(shlex.join([*line, *extensions]) for line in lines)
    return f"wrote {out / _SWEEP} and the plans of its runs; next:\n{typed}"


def _start(advice: Advice, out: Path) -> list[list[str]]:
    """Return the commands that run the plans: one sweep on one node, a job for each on several."""
    if all(proposal.plan.cluster.num_nodes == 1 for proposal in advice.proposals):
        return [["autoshard", "sweep", str(out / _SWEEP), "--out", str(out)]]
    jobs: list[list[str]] = []
    for number in range(1, len(advice.proposals) + 1):
        name = f"advised-{number}"
        folders = ["--out", str(out / name), "--run-folder", str(out / _RUNS / name)]
        jobs.append(["autoshard", "launch", str(out / f"{name}.json"), *folders, "--steps", str(STEPS)])
    return jobs
