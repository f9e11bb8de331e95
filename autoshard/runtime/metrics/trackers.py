"""Where a run is shown beside its own folder: trackers, each fed by a thread of its own, so that no step waits."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from ssl import SSLError
from typing import Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from autoshard.errors import require
from autoshard.runtime.metrics.log import scalars
from autoshard.runtime.metrics.shown import ShownSteps
from autoshard.spec.training import Tracking

_FINISH_S = 60.0  # for uploads when a run ends
_ANSWER_S = 10.0  # for a server to say that it is there
_FLUSH, _FLUSH_S = "x_transaction_log_flush_interval", 1.0  # what a kill may take; 15 s by default


class Tracker(Protocol):
    """One place where a run is shown; one thread calls all of it, and an exception ends the tracker, not the run."""

    name: str

    @property
    def key(self) -> str:
        """The key of a tracker and of the place where it shows the run; no second tracker has it."""
        ...

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
    """All trackers of a run. Their threads start at its first step, because ranks are forked before that.

    What was shown of earlier starts, as ``shown`` knows, is completed first.
    """

    def __init__(self, trackers: Sequence[Tracker], config: Mapping[str, Any], shown: ShownSteps | None = None) -> None:
        self._trackers, self._config, self._shown = trackers, config, shown
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
                calls.put(partial(self._hand, tracker, step, record))

    def finish(self, summary: Mapping[str, Any], *, failed: bool, within_s: float) -> None:
        """Let all trackers end, and wait so long for each to write what it has."""
        for tracker, _, calls in self._feeds:
            calls.put(partial(self._end, tracker, summary, failed=failed))
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
            for step, record in self._shown.missing(tracker.key) if self._shown else ():
                self._hand(tracker, step, record)
            for call in iter(calls.get, None):
                call()
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            text = f"{tracker.name} failed, and gets nothing more of this run, which goes on: {cause}"
            self._notes.put(("warning", text))

    def _hand(self, tracker: Tracker, step: int, record: dict[str, Any]) -> None:
        tracker.log(step, dict(scalars(record)))
        if self._shown:
            self._shown.hand(tracker.key, step)

    def _end(self, tracker: Tracker, summary: Mapping[str, Any], *, failed: bool) -> None:
        tracker.finish(summary, failed=failed)
        if self._shown:
            self._shown.end(tracker.key)


def refuse_without_packages(track: Tracking) -> None:
    """Refuse trackers that are not installed, before anything of a run starts."""
    trackers = {"wandb": track.wandb is not None, "tensorboard": track.tensorboard}
    message = "is not installed here. Type: pip install"
    require(
        *(
            (not is_used or find_spec(name) is not None, f"track.{name}", f"{name} {message} 'autoshard[{name}]'")
            for name, is_used in trackers.items()
        )
    )


def trackers_of(
    track: Tracking, folder: Path, *, shown: ShownSteps, run_id: str | None, files: Mapping[str, Path]
) -> list[Tracker]:
    """Return the trackers of a run in this folder, of which some steps were shown before; files go where they can."""
    refuse_without_packages(track)
    trackers: list[Tracker] = []
    if track.wandb is not None:
        labels = {"project": track.wandb, "name": track.name or folder.resolve().name}
        trackers.append(OnWandb(labels=labels, run_id=run_id, folder=folder, files=files))
    if track.tensorboard:
        trackers.append(OnTensorBoard(folder=folder, num_done=shown.until(OnTensorBoard.key)))
    return trackers


class OnTensorBoard:
    """A run for TensorBoard: scalars of every step, and the configuration and the summary as text.

    Every start writes a new event file into the folder of the run; readers drop the steps of earlier files after
    ``num_done``, which this one has again.
    """

    name, key = "TensorBoard", "tensorboard"

    def __init__(self, *, folder: Path, num_done: int) -> None:
        self._folder, self._last = folder / "tensorboard", num_done
        self._writer: Any = None

    def start(self, config: Mapping[str, Any]) -> Sequence[str]:
        """Open a file."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=self._last + 1)
        self._write_text("configuration", config)
        return [f"TensorBoard: tensorboard --logdir {self._folder}"]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        self._last = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """Write the summary, and close."""
        if summary:
            self._write_text("summary", {"failed": failed, **summary})
        self._writer.close()

    def _write_text(self, tag: str, value: Mapping[str, Any]) -> None:
        lines = json.dumps(value, indent=2).splitlines()
        self._writer.add_text(tag, "\n".join(f"    {line}" for line in lines), self._last)  # code, to Markdown


class OnWandb:
    """One W&B run, however often its training is continued.

    Without a key, or where the server cannot be reached, it is kept in files that can be sent later.
    """

    name = "Weights & Biases"

    def __init__(
        self, *, labels: Mapping[str, str], run_id: str | None, folder: Path, files: Mapping[str, Path]
    ) -> None:
        self._labels, self._run_id = labels, run_id  # project, name, group; without an id an agent has given one
        self._folder, self._files = folder.resolve(), files
        self._run: Any = None
        self.next_step = 0

    def start(self, config: Mapping[str, Any]) -> Sequence[str]:
        """Begin or continue the run, and attach its files."""
        import wandb
        from wandb.errors import AuthenticationError, Error
        from wandb.sdk.lib.wbauth import authenticate_session

        self._folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.setup(wandb.Settings(silent=True)).settings
        mode, fault = settings.mode, ""
        try:
            if mode == "online":  # without a key it would ask for one
                host = settings.base_url
                has_key = authenticate_session(host=host, source="autoshard", prompt=False, update_session=False)
                fault = _unreachable(host) if has_key else "there is no key here. To get one, type: wandb login"
        except AuthenticationError as error:
            fault = _first_line(error)
        mode = "offline" if fault else mode
        try:
            self._begin(wandb, config, mode)
        except Error as error:
            if mode == "offline":
                raise
            fault = _first_line(error)
            wandb.teardown()  # otherwise its service holds that the run is under way
            self._begin(wandb, config, "offline")
        for name, path in self._files.items():
            artifact = wandb.Artifact(f"{name}-{self._run.id}", type=name)
            artifact.add_file(str(path), policy="immutable")
            self._run.log_artifact(artifact)
        if not self._run.offline:
            return [f"Weights & Biases: {self._run.url}"]
        advice = f"kept offline. To send it, type: wandb sync {Path(self._run.settings.sync_dir)}"
        return [f"Weights & Biases: {text}" for text in (fault, advice) if text]

    @property
    def key(self) -> str:
        """W&B, and the run there."""
        return f"wandb {self._run_id}"

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration of the run, with the choices of a controller."""
        return dict(self._run.config)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Hand on a step; W&B takes no step back, so that a repeated one is not sent again."""
        if step >= self.next_step:
            self._run.log(dict(values), step=step, commit=True)
            self.next_step = step + 1

    def finish(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """Write the summary, and wait a minute for uploads."""
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=int(failed))

    def _begin(self, wandb: Any, config: Mapping[str, Any], mode: str) -> None:
        settings: dict[str, Any] = {"console": "off", "silent": True, "finish_timeout": _FINISH_S}
        if _FLUSH in wandb.Settings.model_fields:  # a name with an x may go
            settings[_FLUSH] = _FLUSH_S
        settings = {"mode": mode, "dir": str(self._folder), "settings": wandb.Settings(**settings)}
        self._run = wandb.init(id=self._run_id, resume="allow", config=dict(config), **settings, **self._labels)
        self.next_step = self._run.starting_step


@cache  # a sweep begins many runs
def _unreachable(url: str) -> str:
    """Say why nobody answers at the address of a server; W&B finds out after a minute and a half, and we wait for it.

    An answer that is an error, or a certificate that Python does not know, is for W&B to judge.
    """
    try:
        with urlopen(Request(url, method="HEAD"), timeout=_ANSWER_S):
            return ""
    except (HTTPError, HTTPException):
        return ""
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        return "" if isinstance(reason, SSLError) else f"{url} cannot be reached: {reason}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
