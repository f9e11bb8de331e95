"""Saves beside training: a thread reads the state while the next step computes, and the next update waits for it."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from autoshard.engine.placement import StatePiece
from autoshard.engine.results import SavedStep
from autoshard.runtime.checkpoint.index import CheckpointIndex, RunState, StoredTensor
from autoshard.runtime.checkpoint.reader import PieceLoadPlanner, PieceReader
from autoshard.runtime.checkpoint.shelf import Checkpoint, Shelf
from autoshard.runtime.checkpoint.storage import Storage, StorageError, persistent
from autoshard.runtime.checkpoint.writer import AgreedPlan, PieceSavePlanner, PieceWriter, SaveProgress, Target
from autoshard.spec.training import Checkpointing

Value = TypeVar("Value")

_PATIENCE_S = 10.0  # without a byte written, after which a step gives the checkpoint up


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a save ended."""

    saved: SavedStep
    failure: str = ""  # why there is no checkpoint


class Saver:
    """Saves a run's state, one checkpoint at a time; every rank of the group calls the same.

    Args:
        shelf: Where checkpoints lie.
        spool: A local folder for copies of what goes to a store.
        known: The steps that are on the shelf when the run begins.
        keeping: Which checkpoints are kept.
        group: The ranks.
        label: What every index says of the run.
    """

    def __init__(
        self,
        shelf: Shelf,
        spool: Path,
        known: Iterable[int],
        *,
        keeping: Checkpointing,
        group: Any,
        label: Mapping[str, str],
    ) -> None:
        self._shelf, self._spool, self._steps = shelf, spool, set(known)
        self._keeping, self._group, self._label = keeping, group, label
        self._thread: threading.Thread | None = None
        self._progress, self._known = SaveProgress(), AgreedPlan()
        self._blocked_s = 0.0
        self._ended: Ended | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is under way on this rank, or its end has not been asked for yet."""
        return self._thread is not None

    @property
    def done(self) -> bool:
        """Whether this rank's thread has ended."""
        return self._thread is not None and not self._thread.is_alive()

    def begin(self, state: RunState, pieces: Sequence[StatePiece], *, prunes: bool = True) -> None:
        """Start to save; the pieces must not change before ``wait_copied`` has returned.

        Older checkpoints that need not be kept are removed afterwards, unless this one is not to be relied on.
        """
        assert self._thread is None, "one checkpoint at a time"
        self._progress, self._blocked_s = SaveProgress(), 0.0
        self._thread = threading.Thread(target=self._save, args=(state, tuple(pieces), prunes), daemon=True)
        self._thread.start()

    def wait_copied(self) -> None:
        """Wait until the state may change; a disk that writes nothing any more is not waited for."""
        if self._thread is None:
            return
        start_s = time.monotonic()
        while not self._progress.settled.wait(0.05):
            if time.monotonic() - max(self._progress.last_s, start_s) > _PATIENCE_S:
                self._progress.abandon()
        self._blocked_s += time.monotonic() - start_s

    def ended(self) -> Ended:
        """Wait for the end of the save, and say how it went; then another one may begin."""
        assert self._thread is not None, "nothing was begun"
        self._thread.join()
        self._thread = None
        assert self._ended is not None, "the thread says how it ended"
        return replace(self._ended, saved=replace(self._ended.saved, blocked_s=self._blocked_s))

    def _save(self, state: RunState, pieces: Sequence[StatePiece], prunes: bool) -> None:
        start_s, failure, remark, progress = time.monotonic(), "", "", self._progress
        try:
            self._write(state, pieces, progress)
            remark = self._pruned(state.step) if prunes else ""
        except (CheckpointException, StorageError) as error:
            failure = _reason(error)
        except Exception as error:  # a step must not wait for a thread that is gone; the run is told
            failure = f"{type(error).__name__}: {error}"
        finally:
            progress.settled.set()
            time_s = time.monotonic() - start_s
            self._ended = Ended(saved=SavedStep(step=state.step, time_s=time_s, remark=remark), failure=failure)

    def _write(self, state: RunState, pieces: Sequence[StatePiece], progress: SaveProgress) -> None:
        """Save; on all ranks this fails or on none."""
        folder = self._shelf.folder(state.step)

        def make_ready() -> None:
            self._shelf.make_ready(state.step, self._steps)
            self._steps.add(state.step)

        spool = Storage.of(str(self._spool))
        target = Target(place=self._shelf.place, folder=folder, spool=spool, make_ready=make_ready)
        if not target.spools:
            self._led(lambda: persistent(make_ready, progress.settled))

        def index(*, finite: bool, files: Mapping[str, int], tensors: Mapping[str, StoredTensor]) -> CheckpointIndex:
            return CheckpointIndex(state=state, finite=finite, files=files, tensors=tensors, **self._label)

        planner = PieceSavePlanner(pieces, self._known)
        writer = PieceWriter(target, progress, planner, index)
        dcp_save({}, storage_writer=writer, planner=planner, process_group=self._group)
        self._led(lambda: self._shelf.publish(folder))

    def _pruned(self, step: int) -> str:
        """Remove what need not be kept; return what the user should know of it."""
        try:
            self._led(lambda: self._shelf.prune(self._keeping, step))
        except StorageError as error:
            return f"older checkpoints are still there: {error}"
        return ""

    def _led(self, operation: Callable[[], Value]) -> Value:
        """Let the first rank do something, and all know what came of it."""
        told: list[Any] = [None, ""]
        if dist.get_rank() == 0:
            try:
                told[0] = operation()
            except StorageError as error:
                told[1] = str(error)
        dist.broadcast_object_list(told, 0, group=self._group)
        if told[1]:
            raise StorageError(told[1])
        return told[0]


def load(shelf: Shelf, checkpoint: Checkpoint, pieces: Sequence[StatePiece], group: Any) -> None:
    """Fill pieces from a checkpoint; every rank calls this, and on all of them it fails or on none."""
    reader = PieceReader(shelf.place, checkpoint.folder, checkpoint.index)
    try:
        dcp_load({}, storage_reader=reader, planner=PieceLoadPlanner(pieces), process_group=group)
    except CheckpointException as error:
        raise StorageError(_reason(error)) from None


def _reason(error: BaseException) -> str:
    """Return what the first rank that failed says, without tracebacks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    rank, (cause, _) = min(error.failures.items())
    told = str(cause) if isinstance(cause, StorageError) else f"{type(cause).__name__}: {cause}"
    return f"rank {rank}: {told}"
