"""Where a run is shown beside its own folder: trackers, each fed by a thread of its own, so that no step waits."""

import json
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Protocol

from autoshard.errors import Fault, InputError
from autoshard.runtime.metrics.log import scalars
from autoshard.spec.training import Tracking

_IDS = "trackers.json"
_ID_BYTES = 4


class Tracker(Protocol):
    """One place where a run is shown; one thread calls it all, and what it raises ends the tracker, not the run."""

    name: str

    def start(self, config: Mapping[str, Any]) -> Sequence[str]:
        """Begin, or continue what an earlier start began; return what the user should know, a sentence each."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step."""
        ...

    def finish(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """End, with what is to be said of the whole run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerNote:
    """Something for the user from a tracker."""

    kind: Literal["note", "warning"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoggedStep:
    """A step for a tracker."""

    number: int
    record: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finish:
    """The last thing that a tracker hears."""

    summary: Mapping[str, Any]
    failed: bool


@dataclass(slots=True)
class _Feed:
    """A tracker with the thread that calls it."""

    tracker: Tracker
    said: "SimpleQueue[TrackerNote]"
    items: "SimpleQueue[_LoggedStep | _Finish]" = field(default_factory=SimpleQueue)
    thread: threading.Thread | None = None
    dropped: bool = False

    def start(self, config: Mapping[str, Any]) -> None:
        self.thread = threading.Thread(target=self._work, args=(config,), name=self.tracker.name, daemon=True)
        self.thread.start()

    def _work(self, config: Mapping[str, Any]) -> None:
        try:
            for text in self.tracker.start(config):
                self.said.put(TrackerNote(kind="note", text=text))
            for item in iter(self.items.get, None):
                if isinstance(item, _Finish):
                    self.tracker.finish(item.summary, failed=item.failed)
                    return
                self.tracker.log(item.number, dict(scalars(item.record)))
        except Exception as error:
            self.dropped = True
            cause = f"{type(error).__name__}: {error}"
            text = f"{self.tracker.name} failed, and gets nothing more of this run, which goes on: {cause}"
            self.said.put(TrackerNote(kind="warning", text=text))


class Trackers:
    """All trackers of a run. Their threads start at its first step, because ranks are forked before that."""

    def __init__(self, trackers: Sequence[Tracker], config: Mapping[str, Any]) -> None:
        self._said: SimpleQueue[TrackerNote] = SimpleQueue()
        self._feeds = [_Feed(tracker, self._said) for tracker in trackers]
        self._config = config
        self._started = False

    def log(self, step: int, record: dict[str, Any]) -> None:
        """Hand the fields of a step on; what trackers take of them is found in their threads."""
        if not self._started:
            self._started = True
            for feed in self._feeds:
                feed.start(self._config)
        for feed in self._feeds:
            if not feed.dropped:
                feed.items.put(_LoggedStep(number=step, record=record))

    def finish(self, summary: Mapping[str, Any], *, failed: bool, within_s: float) -> None:
        """Tell all that the run has ended, and wait so long for each to write what it has."""
        feeds = [feed for feed in self._feeds if feed.thread]
        for feed in feeds:
            feed.items.put(_Finish(summary=summary, failed=failed))
        for feed in feeds:
            assert feed.thread
            feed.thread.join(within_s)
            if feed.thread.is_alive():
                text = f"{feed.tracker.name} was not done {within_s:g} s after the run, and is left alone"
                self._said.put(TrackerNote(kind="warning", text=text))
        self._feeds = []

    def said(self) -> Iterator[TrackerNote]:
        """Take what the trackers have to say since the last time."""
        while not self._said.empty():  # nobody else takes
            yield self._said.get()


def proposed_ids(folder: Path) -> dict[str, str]:
    """Return under which ids trackers know the run of a folder, or would know a new one."""
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
    asked = {"wandb": track.wandb is not None, "tensorboard": track.tensorboard}
    faults = [
        Fault(where=f"track.{name}", message=f"{name} is not installed here. Type: pip install 'autoshard[{name}]'")
        for name, wanted in asked.items()
        if wanted and find_spec(name) is None
    ]
    if faults:
        raise InputError(faults)


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
