"""The folder of a run: who writes to it, what was started in it before, and under which plan."""

import fcntl
import itertools
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from autoshard.engine.folder import ATTEMPTS, LOCK, PLAN, TRAINING
from autoshard.errors import InputError, RunFailed, file_faults
from autoshard.plan.diff import leaves
from autoshard.plan.plan import Plan
from autoshard.spec import record
from autoshard.spec.training import Training

_MOST_WORDS = 600  # characters of a failure that are kept; the logs have all


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder and keep others from running in it; the lock goes with this process, however it ends."""
    if folder.exists() and not folder.is_dir():
        raise InputError.of(f"--out {folder}", "is a file. Name a folder")
    with file_faults(f"--out {folder}", "made"):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            who = file.read().strip() or "another process"
            raise InputError.of(f"--out {folder}", f"{who} is running in it. Wait for it, or name another") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def holds_files(folder: Path) -> bool:
    """Say whether there is anything in a folder beside its lock, or a file in its place."""
    return folder.exists() and (not folder.is_dir() or any(one.name != LOCK for one in folder.iterdir()))


def refuse_other_run(folder: Path, plan: Plan) -> None:
    """Refuse a folder with a run of another model, or with other files."""
    from autoshard.plan.codec import load

    path = folder / PLAN
    if not path.is_file():
        raise InputError.of(f"--out {folder}", f"holds files, and none is the {PLAN} of a run. Name another folder")
    before = load(path)
    names = [entry.name for entry in fields(plan.model) if entry.name not in ("name", "source")]
    changed = [name for name in names if getattr(before.model, name) != getattr(plan.model, name)]
    if changed:
        pairs = ", ".join(f"{name} {getattr(before.model, name)}, now {getattr(plan.model, name)}" for name in changed)
        raise InputError.of(f"--out {folder}", f"holds a run of another model ({pairs}). Name another folder")


def changes_since(folder: Path, training: Training) -> list[str]:
    """Return how this start differs from the last one in the folder, and write down what this one does."""
    path, now = folder / TRAINING, record.encode(training)
    before: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else now
    path.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
    one, other = leaves(before), leaves(now)
    return [f"{name} was {one.get(name)}, now {value}" for name, value in other.items() if one.get(name) != value]


def count_attempt(folder: Path, step: int, most: int) -> None:
    """Note that a run starts from a step; refuse when as many starts before got no further and failed."""
    path = folder / ATTEMPTS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found = [one for line in lines if line.endswith("}") and "failed" not in (one := json.loads(line))]
    alike = len(list(itertools.takewhile(lambda one: one.get("from") == step, reversed(found))))
    if alike >= most:
        message = f"{alike} starts after step {step} came to no checkpoint beyond it. See {folder / 'logs'}"
        raise RunFailed(f"{message}; then type --resume {step} to allow as many again")
    _append(path, {"from": step})


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
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**what, "at": time.time()}) + "\n")
