"""The folder of a run: who writes to it, what was started in it before, and under which plan."""

import itertools
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from autoshard.errors import InputError, RunFailed, file_faults
from autoshard.files import append_line, naming, takes_lock
from autoshard.plan.plan import Plan
from autoshard.run.folder import ATTEMPTS, CHECKPOINTS, LOCK, LOGS, PLAN, TRAINING, precedes_plan
from autoshard.spec.files import json_line
from autoshard.units import counted

_MOST_WORDS = 600  # characters of a failure that are kept; the logs have all
_FOLDER = "folder"  # of a start, in its record
_FREED_S = 10.0  # in which the ranks of a start that was killed end, and leave its folder to the next


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder and keep others from running in it; the lock goes with this process, however it ends."""
    if folder.exists() and not folder.is_dir():
        raise InputError.of(f"--out {folder}", "is a file. Name a folder")
    with file_faults(f"--out {folder}", "made"):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    with file:
        end_s = time.monotonic() + _FREED_S
        while not (is_mine := takes_lock(file)) and time.monotonic() < end_s:
            time.sleep(0.1)
        if not is_mine:
            file.seek(0)
            who = file.read().strip() or "another process"
            raise InputError.of(f"--out {folder}", f"{who} is running in it. Wait for it, or name another")
        with naming(folder / LOCK):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield


def holds_files(folder: Path) -> bool:
    """Say whether there is anything in a folder beside what a start leaves that was killed, or a file in its place."""
    if not folder.is_dir():
        return folder.exists()
    return not all(map(precedes_plan, folder.iterdir()))


def free_sibling(folder: Path) -> Path:
    """Return the name of a sibling folder that does not exist yet."""
    names = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(name for name in names if not name.exists())


def refuse_other_run(folder: Path, before: Plan | None, plan: Plan) -> None:
    """Refuse a folder with a run of another model, or with other files."""
    if not any((folder / name).exists() for name in (PLAN, TRAINING, ATTEMPTS, CHECKPOINTS)):
        raise InputError.of(f"--out {folder}", f"holds files, and none is the {PLAN} of a run. Name another folder")
    if before is None:
        return
    names = [entry.name for entry in fields(plan.model) if entry.name not in ("name", "source")]
    changed = [name for name in names if getattr(before.model, name) != getattr(plan.model, name)]
    if changed:
        pairs = ", ".join(f"{name} {getattr(before.model, name)}, now {getattr(plan.model, name)}" for name in changed)
        raise InputError.of(f"--out {folder}", f"holds a run of another model ({pairs}). Name another folder")


def count_attempt(folder: Path, step: int, most: int) -> None:
    """Record that a run starts from a step; refuse after ``most`` starts from this step that took no step."""
    path = folder / ATTEMPTS
    records = list(_records(path))
    fruitless = 0
    for record in reversed(records):
        if "stepped" in record or record.get("from", step) != step or "allowed" in record or "ended" in record:
            break
        fruitless += "from" in record
    if fruitless >= most:
        message = f"{counted(fruitless, 'start')} after step {step} came to no step. See {folder / LOGS}"
        raise RunFailed(f"{message}; then type --resume {step} to allow as many again")
    _append(path, {"from": step, _FOLDER: str(folder.absolute())})


def folder_before(folder: Path) -> Path:
    """Return where this folder lay at the last start in it, as far as it says so."""
    starts = [start for record in _records(folder / ATTEMPTS) if isinstance(start := record.get(_FOLDER), str)]
    return Path(starts[-1]) if starts else folder.absolute()


def original_of(folder: Path) -> Path | None:
    """Return the folder of which this one is a copy: that of the last start, if it is there and is not this one."""
    original = folder_before(folder)
    return original if (original / TRAINING).is_file() and not original.samefile(folder) else None


def note_stepped(folder: Path, step: int) -> None:
    """Note the first step that a start has taken."""
    _append(folder / ATTEMPTS, {"stepped": step})


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file of JSON objects, without those that a kill has cut off."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        record = json_line(line)
        if isinstance(record, dict):
            yield cast(dict[str, Any], record)


def allow_attempts(folder: Path) -> None:
    """Forget the starts before, because the user says so."""
    _append(folder / ATTEMPTS, {"allowed": True})


def note_end(folder: Path, by: str) -> None:
    """Note that a run ended as it should, and by which signal, if it was one; the starts before are forgotten."""
    _append(folder / ATTEMPTS, {"ended": by})


@contextmanager
def noting_failure(folder: Path) -> Iterator[None]:
    """Note how a start fails, for those who watch the folder from elsewhere."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):  # of a full disk: the failure itself is worth more
            _append(folder / ATTEMPTS, {"failed": str(error)[:_MOST_WORDS] or type(error).__name__})
        raise


def _append(path: Path, what: dict[str, Any]) -> None:
    append_line(path, json.dumps({**what, "at": time.time()}))
