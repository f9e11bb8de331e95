"""What the folder of a run holds at a moment, read without changing anything in it, from any machine that sees it."""

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast, get_args

from autoshard.errors import InputError, inside
from autoshard.plan.codec import load
from autoshard.plan.plan import Plan
from autoshard.run.activity import RankStatus, is_alive, read_status, why_still
from autoshard.run.folder import (
    ATTEMPTS,
    CHECKPOINTS,
    EVALUATIONS,
    HANG_REPORTS,
    INDEX,
    LOCK,
    METRICS,
    PARTIAL,
    PLAN,
    POSITIONS,
    TRAINING,
    checkpoint_step,
    precedes_plan,
    run_meant,
)
from autoshard.run.reports import Phase, RouterReport, TimedStep
from autoshard.spec.files import json_line, parsed_json
from autoshard.spec.record import decode
from autoshard.spec.training import Training

_WHOLE_BYTES = 2**20  # steps up to here are read whole; of more, the end and a sample, in the same time for any run
_END_BYTES, _SAMPLE_BYTES, _NUM_SAMPLES = 2**18, 2**13, 240  # a line is about 400 bytes, with neuron-monitor 4000
_LOCKS = Path("/proc/locks")
_MOST = 2**53  # of numbers in lines: up to here floats know whole numbers
_PHASES: Mapping[str, Phase] = {phase: phase for phase in get_args(Phase)}
_OF_ROUTERS = frozenset(figure.name for figure in fields(RouterReport))
_NOTED = {"from": int, "at": int | float, "failed": str, "ended": str}  # in a line of attempts.jsonl


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """A line of ``metrics.jsonl``."""

    step: TimedStep
    at: float  # when it ended, by the clock of the machine that ran it
    compared: bool  # whether the plan's prediction is about the machine that ran it


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvaluation:
    """A line of ``evaluations.jsonl``."""

    step: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLock:
    """Who runs in the folder, or did last."""

    process: int
    host: str
    at: float  # when it started
    held: bool | None  # whether it still runs; None on another machine, which cannot tell


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRank:
    """The record of a rank, and what the machine that watches knows of its process."""

    rank: int
    host: str
    status: RankStatus
    still: str  # why its process cannot move; empty where nothing speaks against it, or on another machine
    still_s: float | None  # since it last moved; None on another machine, whose clock is another


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCheckpoint:
    """The newest checkpoint that has an index."""

    step: int
    at: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """What the folder of a run holds; what is missing there, or cannot be read, is None or empty."""

    path: Path
    plan: Plan | None
    training: Training | None
    faults: tuple[str, ...]  # why one of these two could not be read
    steps: tuple[LoggedStep, ...]  # all, or of a long run an even sample and the last ones
    steps_at: float | None  # when the file of steps last changed
    evaluation: LoggedEvaluation | None  # the last one
    starts: tuple[Mapping[str, Any], ...]  # the lines of attempts.jsonl
    lock: RunLock | None
    ranks: tuple[SeenRank, ...]  # inside a step
    checkpoint: SeenCheckpoint | None
    saving: int | None  # the step of a checkpoint that is being written
    checkpoints_elsewhere: str  # where they lie, if that is not looked at
    hang_reports: tuple[str, ...]  # that ranks of the last start have left


def read_run(folder: Path) -> RunFolder:
    """Read the folder of a run; refuse a folder that holds something else."""
    _refuse_no_run(folder)
    faults: list[str] = []
    plan = training = None
    try:
        plan = load(folder / PLAN) if (folder / PLAN).is_file() else None
    except InputError as error:
        faults.append(str(error.faults[0]))
    try:
        text = _text(folder / TRAINING)
        with inside(folder / TRAINING):
            training = decode(Training, parsed_json(text, "")) if text else None
    except InputError as error:
        faults.append(str(error.faults[0]))
    steps, steps_at = _steps(folder / METRICS)
    lock = _lock(folder / LOCK)
    started_at = lock.at if lock else 0.0
    to = training.checkpoint.to if training else None
    place = folder / CHECKPOINTS if to in (None, "none") else Path(to)
    here = place.is_dir()
    checkpoint, saving = _checkpoints(place) if here else (None, None)
    return RunFolder(
        path=folder, plan=plan, training=training, faults=tuple(faults), steps=steps, steps_at=steps_at,
        evaluation=_last_evaluation(folder / EVALUATIONS),
        starts=tuple(filter(_is_note, _objects(_text(folder / ATTEMPTS).encode()))), lock=lock,
        ranks=tuple(_ranks(folder / POSITIONS, started_at)), checkpoint=checkpoint, saving=saving,
        checkpoints_elsewhere="" if here or to in (None, "none") else to,
        hang_reports=tuple(_text(path) for path in sorted(folder.glob(HANG_REPORTS))
                           if path.stat().st_mtime > started_at),
    )  # fmt: skip


def _refuse_no_run(folder: Path) -> None:
    """Refuse what holds no run; an empty folder may be that of a run that has not begun."""
    if folder.is_file():
        raise InputError.of(str(folder), f"is a file. Name the folder of a run, which holds {PLAN} and {METRICS}")
    if not folder.is_dir():
        raise InputError.of(str(folder), f"there is no such folder. {run_meant(folder)}")
    paths = list(folder.iterdir())
    names = {path.name for path in paths}
    if PLAN in names and not names & {TRAINING, METRICS, ATTEMPTS} and not any(map(precedes_plan, paths)):
        remedy = f"To run it, type: autoshard run {folder / PLAN}"
        raise InputError.of(str(folder), f"holds a plan and no run. {remedy}")
    if not all(map(precedes_plan, paths)) and not {path.name for path in paths} & {PLAN, TRAINING, METRICS, ATTEMPTS}:
        runs = sorted(str(path.parent) for path in folder.glob(f"*/{METRICS}"))
        remedy = f"It holds the runs {', '.join(runs[:5])}" if runs else "Name the --out of autoshard run"
        raise InputError.of(str(folder), f"holds no run: none of its files is {PLAN} or {METRICS}. {remedy}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # missing, or just being replaced
        return ""


def _objects(data: bytes) -> Iterator[Mapping[str, Any]]:
    """Yield the whole lines that are objects; a kill leaves half a line, and a sample begins and ends with one."""
    for line in data.split(b"\n")[:-1]:
        if isinstance(record := json_line(line), dict):
            yield cast(Mapping[str, Any], record)


def _is_note(line: Mapping[str, Any]) -> bool:
    """Say whether an object is a note about a start of the run."""
    typed = all(isinstance(line[name], kind) for name, kind in _NOTED.items() if name in line)
    return typed and all(abs(line[name]) < _MOST for name in ("from", "at") if name in line)


def _steps(path: Path) -> tuple[tuple[LoggedStep, ...], float | None]:
    """Read a file of steps, and when it changed."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size <= _WHOLE_BYTES:
                parts = [file.read()]
            else:
                starts = [status.st_size * number // _NUM_SAMPLES for number in range(_NUM_SAMPLES)]
                parts = [os.pread(file.fileno(), _SAMPLE_BYTES, start) for start in starts]
                parts.append(os.pread(file.fileno(), _END_BYTES, status.st_size - _END_BYTES))
    except OSError:
        return (), None
    records = (record for part in parts[:-1] for record in list(_objects(part))[:1])
    by_number = {
        logged.step.number: logged for record in (*records, *_objects(parts[-1])) if (logged := _logged(record))
    }
    return tuple(by_number[number] for number in sorted(by_number)), status.st_mtime


def _logged(record: Mapping[str, Any]) -> LoggedStep | None:
    """Return the step of a line; None if it is another line."""
    try:
        numbers: dict[str, Any] = {
            **record,
            **{name: float(text) for name, text in record.get("nonfinite", {}).items()},
        }
        rate, memory_bytes, loss = numbers.get("learning_rate"), numbers.get("memory_bytes"), numbers["loss"]
        step = TimedStep(
            number=_count(numbers["step"]), loss=loss if loss is None else float(loss), norm=float(numbers["norm"]),
            time_s=max(1e-9, _bounded(numbers["time_s"])), num_tokens=_count(numbers["tokens"]),
            learning_rate=None if rate is None else _bounded(rate), waited_s=_bounded(numbers.get("waited_s") or 0.0),
            updated=bool(numbers.get("updated", True)), phase=_PHASES[numbers.get("phase", "steady")],
            memory_bytes=None if memory_bytes is None else _count(memory_bytes), router=_router(numbers.get("router")),
        )  # fmt: skip
        return LoggedStep(step=step, at=_bounded(numbers["at"]), compared=numbers.get("mfu") is not None)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _last_evaluation(path: Path) -> LoggedEvaluation | None:
    """Return the last evaluation of a file that can be read."""
    try:
        with path.open("rb") as file:
            data = os.pread(file.fileno(), _SAMPLE_BYTES, max(0, os.fstat(file.fileno()).st_size - _SAMPLE_BYTES))
    except OSError:
        return None
    newest = None
    for record in _objects(data):
        with suppress(KeyError, TypeError, ValueError):
            newest = LoggedEvaluation(step=_count(record["step"]), time_s=_bounded(record["time_s"]))
    return newest


def _router(figures: Mapping[str, Any] | None) -> RouterReport | None:
    """Return what a line says of routers; None where it says nothing, or not all that a step has."""
    numbers = {name: _bounded(value) for name, value in (figures or {}).items() if name in _OF_ROUTERS}
    return RouterReport(**numbers) if {"busiest", "entropy", "dropped"} <= numbers.keys() else None


def _bounded(value: Any) -> float:
    """Return a number that can be computed with; anything else is a ValueError or a TypeError."""
    if abs(value) < _MOST:
        return float(value)
    raise ValueError


def _count(value: Any) -> int:
    if type(value) is int and 0 <= value < _MOST:
        return value
    raise ValueError


def _lock(path: Path) -> RunLock | None:
    match = re.fullmatch(r"process (\d+) on (.+)", _text(path).strip())
    if not match:
        return None
    process, host, status = int(match[1]), match[2], path.stat()
    held = None
    if host == socket.gethostname():
        locks = _text(_LOCKS)  # of this machine, by the numbers of files; a process' number may be another's by now
        held = f":{status.st_ino} " in locks if _LOCKS.is_file() else is_alive(process)
    return RunLock(process=process, host=host, at=status.st_mtime, held=held)


def _ranks(positions: Path, started_at: float) -> Iterator[SeenRank]:
    """Yield the ranks that are inside a step; records of earlier starts are left out."""
    me, now_s = socket.gethostname(), time.monotonic()
    for path in sorted(positions.glob("*/*"), key=lambda path: (path.parent.name, path.name.zfill(9))):
        status = read_status(path) if path.name.isdecimal() else None
        if status is None or not status.step:
            continue
        here, still = path.parent.name == me, ""
        if here:
            still = why_still(status.process) if is_alive(status.process) else "gone"
        if path.stat().st_mtime >= started_at - 1.0:  # the clock of files has coarse steps
            still_s = max(0.0, now_s - status.since_s) if here else None
            yield SeenRank(rank=int(path.name), host=path.parent.name, status=status, still=still, still_s=still_s)


def _checkpoints(place: Path) -> tuple[SeenCheckpoint | None, int | None]:
    """Return the newest checkpoint that is complete, and the step of one that is being written."""
    try:
        names = [path.name for path in place.iterdir()]
    except OSError:
        return None, None
    saving = max(
        (step for name in names if (step := checkpoint_step(name.removesuffix(PARTIAL))) and PARTIAL in name),
        default=None,
    )
    for step, name in sorted(
        ((step, name) for name in names if (step := checkpoint_step(name)) is not None), reverse=True
    ):
        try:
            at = (place / name / INDEX).stat().st_mtime
            num_bytes = sum(file.stat().st_size for file in os.scandir(place / name))
        except OSError:  # without an index, or pruned while we look
            continue
        return SeenCheckpoint(step=step, at=at, num_bytes=num_bytes), saving
    return None, saving
