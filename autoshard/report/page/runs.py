"""A run beside the prediction of its plan: step by step, and part by part."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoshard.errors import inside, require
from autoshard.plan.plan import Plan
from autoshard.report.page.charts import step_charts
from autoshard.report.page.elements import Markup, sheet_section
from autoshard.report.run import run_sheet
from autoshard.report.sheet import Node
from autoshard.report.watch.content import read_run
from autoshard.report.words import prediction_of
from autoshard.run.folder import PLAN, REPORT
from autoshard.run.other_programs import BusyProcessors
from autoshard.run.reports import losses_of, with_nulls
from autoshard.spec.files import read_data
from autoshard.spec.record import decode
from autoshard.units import counted

_MOST_STEPS = 400  # that are drawn; of more, every second, third, ...


def run_data(folder: Path, plan: Plan) -> dict[str, Any]:
    """Return the steps of a run of a plan, and the comparison that the run wrote when it ended."""
    with inside("--run"):
        run = read_run(folder)
    same = run.plan is None or _question(run.plan) == _question(plan)
    require(
        (bool(run.steps), f"--run {folder}", "has taken no step yet"),
        (same, f"--run {folder}", f"is a run of another plan, {folder / PLAN}. Report that one"),
    )
    steps = [
        with_nulls({"step": step.number, "loss": step.loss, "time_s": step.time_s, "tokens_per_s": step.tokens_per_s,
                    "phase": step.phase})
        for step in (logged.step for logged in run.steps)
    ]  # fmt: skip
    compared = any(logged.compared for logged in run.steps)
    with inside("--run"):
        ended = _ended(folder / REPORT)
    data = {"folder": str(folder), "same_machine": compared, "steps": steps, **ended}
    return {**data, **figures_of(plan, data)}


def figures_of(plan: Plan, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run measured of a step so far, and what was predicted of it: of a run that has ended, before it."""
    predicted, steps = prediction_of(plan), run["steps"]
    steady = [step["time_s"] for step in steps if step["phase"] == "steady"] or [step["time_s"] for step in steps]
    ended, losses = run["step_time_s"], losses_of(steps) or [None]
    step_s = ended["measured"] if ended else statistics.median(steady)
    before = ended or {"predicted": predicted.step_time_s, "low": predicted.low_s, "high": predicted.high_s}
    speed, then = predicted.step_time_s / step_s, predicted.step_time_s / before["predicted"]
    return {
        "measured": {
            "step_time_s": step_s,
            "tokens_per_s": predicted.tokens_per_s * speed,
            "mfu": predicted.mfu * speed,
            "losses": dict(zip(("first", "last"), (losses[0], losses[-1]), strict=True)),
        },
        "predicted": {
            "step_time_s": before["predicted"],
            "low_s": before["low"],
            "high_s": before["high"],
            "tokens_per_s": predicted.tokens_per_s * then,
            "mfu": predicted.mfu * then,
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepTimes:
    predicted: float
    low: float
    high: float
    measured: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _BothBytes:
    predicted: float | None
    measured: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankBytes:
    ranks: tuple[int, ...]
    memory_bytes: Mapping[str, _BothBytes]
    sent_bytes: Mapping[str, _BothBytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """The form of what a page shows of the comparison that a run writes at its end."""

    step_time_s: _StepTimes | None = None
    ranks: tuple[_RankBytes, ...] = ()
    other_programs: BusyProcessors | None = None


def _ended(path: Path) -> dict[str, object]:
    """Read the comparison of a run; one that has not ended has none. A file of another form is refused."""
    data = decode(dict[str, object], read_data(path), path) if path.is_file() else {}
    comparison = {"step_time_s": data.get("step_time_s"), "ranks": data.get("ranks", []),
                  "other_programs": data.get("other_programs")}  # fmt: skip
    decode(_Ended, comparison, path)
    return comparison


def _question(plan: Plan) -> tuple[object, ...]:
    """Return what two plans share if the prediction of one is about runs of the other."""
    return plan.model, plan.workload, plan.cluster.name, plan.cluster.num_nodes, str(plan.candidate)


def run_section(plan: Plan, run: Node) -> Markup:
    """Return the steps of a run against the predicted step, its losses, and its memory and traffic by part."""
    prediction, steps = prediction_of(plan), run["steps"].value
    drawn = steps[:: max(1, -(-len(steps) // _MOST_STEPS))]
    steady = [step for step in drawn if step["phase"] == "steady"] or drawn
    losses = [(step["step"], step["loss"]) for step in drawn]
    times = [(step["step"], step["time_s"]) for step in steady]
    charts = step_charts(losses, times, (prediction.step_time_s, prediction.low_s, prediction.high_s))
    return sheet_section(replace(run_sheet(plan, run, comparable=run["same_machine"].value), about=_about(run)), charts)


def _about(run: Node) -> str:
    steps = run["steps"].value
    words = f"{counted(len(steps), 'step')} of {run['folder'].value}. A run times steps, not their parts."
    if (early := sum(step["phase"] != "steady" for step in steps)) and early < len(steps):
        words += f" The times of {early} that warmed up or compiled are left out."
    elsewhere = " It ran on another machine than the prediction is about, so that only bytes can be compared."
    return words + ("" if run["same_machine"].value else elsewhere)
