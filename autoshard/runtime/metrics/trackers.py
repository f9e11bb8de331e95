"""Where a run is shown beside its own folder: trackers, each fed by a thread of its own, so that no step waits."""

import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from autoshard.errors import InputError, require
from autoshard.runtime.metrics.log import scalars
from autoshard.spec.training import Tracking

_IDS = "trackers.json"
_ID_BYTES = 4


class Tracker(Protocol):
    """One place where a run is shown; one thread calls all of it, and an exception ends the tracker, not the run."""

    name: str

    def start(self, config: Mapping[str, Any]) -> Sequence[str]:
        """Begin, or continue an earlier start; return notes for the user, a sentence each."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step."""
        ...

    def finish(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """End, with the summary of the whole run."""
        ...


class Trackers:
    """All trackers of a run. Their threads start at its first step, because ranks are forked before that."""

    def __init__(self, trackers: Sequence[Tracker], config: Mapping[str, Any]) -> None:
        self._trackers, self._config = trackers, config
        self._notes: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self._feeds: list[tuple[Tracker, threading.Thread, SimpleQueue[Callable[[], None] | None]]] = []

    def log(self, step: int, record: dict[str, Any]) -> None:
        """Hand the fields of a step on; the threads of trackers pick the numbers."""
        if not self._feeds:
            for tracker in self._trackers:
                calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
                thread = threading.Thread(target=self._work, args=(tracker, calls), name=tracker.name, daemon=True)
                thread.start()
                self._feeds.append((tracker, thread, calls))
        for tracker, thread, calls in self._feeds:
            if thread.is_alive():  # else it has failed
                calls.put(lambda tracker=tracker: tracker.log(step, dict(scalars(record))))

    def finish(self, summary: Mapping[str, Any], *, failed: bool, within_s: float) -> None:
        """Let all trackers end, and wait so long for each to write what it has."""
        for tracker, _, calls in self._feeds:
            calls.put(partial(tracker.finish, summary, failed=failed))
            calls.put(None)
        for tracker, thread, _ in self._feeds:
            thread.join(within_s)
            if thread.is_alive():
                text = f"{tracker.name} was not done {within_s:g} s after the run, and is left alone"
                self._notes.put(("warning", text))
        self._trackers, self._feeds = (), []

    def notes(self) -> Iterator[tuple[str, str]]:
        """Take the notes and warnings of trackers since the last time, each with its kind."""
        while not self._notes.empty():  # nobody else takes
            yield self._notes.get()

    def _work(self, tracker: Tracker, calls: "SimpleQueue[Callable[[], None] | None]") -> None:
        try:
            for text in tracker.start(self._config):
                self._notes.put(("note", text))
            for call in iter(calls.get, None):
                call()
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            text = f"{tracker.name} failed, and gets nothing more of this run, which goes on: {cause}"
            self._notes.put(("warning", text))


def proposed_ids(folder: Path) -> dict[str, str]:
    """Return the ids by which trackers know the run of a folder, or would know a new one."""
    path = folder / _IDS
    try:
        kept: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        kept = {}
    except ValueError:
        raise InputError.of(str(path), "is not JSON. Remove it, and trackers show a new run") from None
    return {"wandb": secrets.token_hex(_ID_BYTES), **kept}


def tracker_ids(folder: Path, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the ids of a run, those of its checkpoint first, and keep them in ``trackers.json``."""
    path = folder / _IDS
    ids = {**proposed_ids(folder), **(given or {})}
    aside = path.with_name(f"{_IDS}.part")
    aside.write_text(json.dumps(ids) + "\n", encoding="utf-8")
    aside.replace(path)
    return ids


def refuse_without_packages(track: Tracking) -> None:
    """Refuse trackers that are not installed, before anything of a run starts."""
    wanted = {"wandb": track.wandb is not None, "tensorboard": track.tensorboard}
    message = "is not installed here. Type: pip install"
    require(
        *(
            (not asked or find_spec(name) is not None, f"track.{name}", f"{name} {message} 'autoshard[{name}]'")
            for name, asked in wanted.items()
        )
    )


def trackers_of(
    track: Tracking, folder: Path, *, num_done: int, run_id: str, files: Mapping[str, Path]
) -> list[Tracker]:
    """Return the trackers of a run in this folder, of which so many steps were done before; files go where they can."""
    from autoshard.runtime.metrics.on_tensorboard import OnTensorBoard
    from autoshard.runtime.metrics.on_wandb import OnWandb

    refuse_without_packages(track)
    found: list[Tracker] = []
    if track.wandb is not None:
        labels = {"project": track.wandb, "name": track.name or folder.resolve().name}
        found.append(OnWandb(labels=labels, run_id=run_id, folder=folder, files=files))
    if track.tensorboard:
        found.append(OnTensorBoard(folder=folder, num_done=num_done))
    return found
