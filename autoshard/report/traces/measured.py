"""What a run measured, for the trace of its plan: its median step, and the passes of the steps that it recorded."""

import gzip
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.errors import InputError
from autoshard.plan.plan import Plan
from autoshard.report.page.runs import run_data
from autoshard.report.rank_row import PASSES
from autoshard.report.traces.ticks import slice_times, ticks
from autoshard.run.folder import PROFILES, profile_path
from autoshard.spec.files import parsed_json

_ACTION = re.compile(r"[FBIW]\d+\.\d+")
_FILE = re.compile(r"step-(\d+)-rank-(\d+)\.json\.gz")
_US = 1e6
_FIRST_PROCESS = 100_000  # behind those of pipeline ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPass:
    """A pass as a rank ran it; times are from the first pass that its host recorded of the step."""

    name: str
    start_s: float
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """What a run measured: figures of its steps, and by pipeline rank and step the passes of one of its ranks."""

    folder: str
    same_machine: bool
    figures: Mapping[str, Any]
    num_steps: int
    passes: Mapping[tuple[int, int], tuple[MeasuredPass, ...]]
    ranks: tuple[int, ...]  # of each pipeline rank, the one whose passes these are


def measured_steps(folder: Path, plan: Plan) -> MeasuredSteps:
    """Read what a run of a plan measured."""
    run = run_data(folder, plan)
    ranks = tuple(min(plan.mesh.ranks_of({"pp": number})) for number in range(plan.mesh.size("pp")))
    steps = {int(found[1]) for path in (folder / PROFILES).glob("*") if (found := _FILE.fullmatch(path.name))}
    passes: dict[tuple[int, int], tuple[MeasuredPass, ...]] = {}
    for step in sorted(steps):
        recorded = dict(_recorded(folder, step, ranks))
        first: dict[str, float] = {}
        for host, actions in recorded.values():
            starts = [action.start_s for action in actions]
            first[host] = min([first.get(host, float("inf")), *starts])
        for number, (host, actions) in recorded.items():
            passes[number, step] = tuple(
                MeasuredPass(name=action.name, start_s=action.start_s - first[host], time_s=action.time_s)
                for action in actions
            )
    return MeasuredSteps(
        folder=str(folder),
        same_machine=run["same_machine"],
        figures=run["measured"],
        num_steps=len(run["steps"]),
        passes=passes,
        ranks=ranks,
    )


def measured_events(measured: MeasuredSteps) -> Iterator[dict[str, Any]]:
    """Yield the events of what was measured: a process for the median step, and one for each pipeline rank."""
    figures, place = measured.figures, "" if measured.same_machine else ", on another machine than is predicted"
    name = f"measured: {measured.folder}{place}"
    yield from _named(_FIRST_PROCESS, name, {1: f"a step, the median of {measured.num_steps}"})
    median = MeasuredPass(name="step", start_s=0.0, time_s=figures["step_time_s"])
    yield _slice(_FIRST_PROCESS, 1, median, "measured step", {"time_s": median.time_s, "losses": figures["losses"]})
    for number, rank in enumerate(measured.ranks):
        process = _FIRST_PROCESS + 1 + number
        steps = [step for place, step in measured.passes if place == number]
        if steps:
            yield from _named(process, f"measured: pipeline rank {number} (rank {rank})", {
                step: f"step {step}" for step in steps})  # fmt: skip
        for step in steps:
            for action in measured.passes[number, step]:
                kind, args = PASSES[action.name[0]], {"step": step, "time_s": action.time_s}
                yield _slice(process, step, action, f"measured {kind}", args)


def _named(process: int, name: str, lanes: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    meta = {"ph": "M", "pid": process, "ts": 0}
    first = min(lanes)
    yield {**meta, "tid": first, "name": "process_name", "args": {"name": name}}
    yield {**meta, "tid": first, "name": "process_sort_index", "args": {"sort_index": process}}
    for lane, text in lanes.items():
        yield {**meta, "tid": lane, "name": "thread_name", "args": {"name": text}}


def _slice(process: int, lane: int, action: MeasuredPass, category: str, args: dict[str, Any]) -> dict[str, Any]:
    times = slice_times(ticks(action.start_s), ticks(action.start_s + action.time_s))
    return {"ph": "X", "pid": process, "tid": lane, **times, "cat": category, "name": action.name, "args": args}


def _recorded(folder: Path, step: int, ranks: tuple[int, ...]) -> Iterator[tuple[int, tuple[str, list[MeasuredPass]]]]:
    """Yield what torch's profiler recorded of a step: by pipeline rank its host, and its passes in order."""
    for number, rank in enumerate(ranks):
        path = profile_path(folder, step, rank)
        if not path.is_file():
            continue
        try:
            data: Any = parsed_json(gzip.decompress(path.read_bytes()).decode(), str(path))
            host, events = str(data.get("host_name", "")), data["traceEvents"]
            actions = [
                MeasuredPass(name=event["name"], start_s=event["ts"] / _US, time_s=event["dur"] / _US)
                for event in events
                if event.get("ph") == "X" and _ACTION.fullmatch(event["name"])
            ]
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"is no trace of torch's profiler ({error}). Remove it, or record the step again"
            raise InputError.of(str(path), message) from error
        yield number, (host, sorted(actions, key=lambda action: action.start_s))
