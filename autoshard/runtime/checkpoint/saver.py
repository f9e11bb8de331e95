"""Saving: a thread copies the state while the next step computes, and the next update waits for it."""

import shutil
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoshard.run.folder import INDEX
from autoshard.run.placement import StatePiece
from autoshard.run.reports import SavedStep
from autoshard.runtime.checkpoint.agreed import from_all_ranks, from_first_rank
from autoshard.runtime.checkpoint.files import (
    DTYPES,
    CheckpointIndex,
    RunState,
    StoredBox,
    StoredTensor,
    box_name,
    cut_piece,
    dump_index,
    fills_once,
    header_of,
    is_finite,
)
from autoshard.runtime.checkpoint.shelf import Shelf
from autoshard.runtime.checkpoint.storage import Storage, StorageError, persistent
from autoshard.spec.training import Checkpointing

_PATIENCE_S = 10.0  # without a byte written, after which a step gives the checkpoint up
_SLICE_BYTES = 2**22  # that are checked, summed up and written at a time


@dataclass(slots=True)
class SaveProgress:
    """How far a save is, for the step that waits for it: in the end the state is copied, or the save is given up."""

    settled: threading.Event = field(default_factory=threading.Event)  # the state may change
    abandoned: threading.Event = field(default_factory=threading.Event)  # what is read of it from now on is useless
    last_s: float = field(default_factory=time.monotonic)  # when something was written last
    _deciding: threading.Lock = field(default_factory=threading.Lock)

    def end_copy(self, what: str) -> None:
        """Let the state change, unless it may have changed already."""
        with self._deciding:
            self.go_on(what)
            self.settled.set()

    def go_on(self, what: str) -> None:
        """Stop a save that was given up."""
        if self.abandoned.is_set():
            raise StorageError(f"{what}: given up, so that training goes on")

    def abandon(self) -> None:
        """Let the state change even if it was not copied."""
        with self._deciding:
            if not self.settled.is_set():
                self.abandoned.set()
                self.settled.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """The file that a rank has written, with its own boxes of each tensor."""

    file: str
    num_bytes: int
    finite: bool
    tensors: Mapping[str, StoredTensor]


def write_boxes(storage: Storage, path: str, pieces: Sequence[StatePiece], progress: SaveProgress) -> RankFile:
    """Write pieces into a safetensors file, one after the other, with no more than one of them in memory."""
    file_name, whole, finite = path.rpartition("/")[2], storage.path(path), True
    header, (*starts, num_bytes) = header_of(
        (box_name(piece.name, piece.offsets), piece.memory.dtype, piece.memory.shape) for piece in pieces
    )
    tensors: dict[str, StoredTensor] = {}
    with storage.writing(path) as file:
        file.write(header)
        for piece, start in zip(pieces, starts, strict=True):
            numbers, crc32 = piece.memory.detach().to("cpu").contiguous(), 0
            for part in numbers.reshape(-1).split(_SLICE_BYTES // numbers.itemsize):
                progress.go_on(whole)
                finite = finite and is_finite(part)
                raw = part.view(torch.uint8).numpy().data
                crc32 = zlib.crc32(raw, crc32)
                file.write(raw)
                progress.last_s = time.monotonic()
            box = StoredBox(piece.offsets, tuple(numbers.shape), file_name, start, numbers.nbytes, crc32)
            before = tensors.setdefault(piece.name, StoredTensor(DTYPES[numbers.dtype], tuple(piece.whole), ()))
            tensors[piece.name] = replace(before, boxes=(*before.boxes, box))
        progress.end_copy(whole)  # only the disk is behind now
    return RankFile(file=file_name, num_bytes=num_bytes, finite=finite, tensors=tensors)


def joined_tensors(files: Iterable[RankFile]) -> dict[str, StoredTensor]:
    """Join the boxes of all ranks; refuse boxes that do not fill a tensor."""
    boxes, tensors = defaultdict[str, list[StoredBox]](list), dict[str, StoredTensor]()
    for file in files:
        tensors |= file.tensors
        for name, tensor in file.tensors.items():
            boxes[name] += tensor.boxes
    joined = {name: replace(tensor, boxes=tuple(boxes[name])) for name, tensor in tensors.items()}
    for name, tensor in joined.items():
        if not fills_once(tensor):
            raise StorageError(f"{name}: the boxes of all ranks do not fill it exactly once")
    return joined


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLabel:
    """What every checkpoint of a run says of it, and the files of the run of which each holds a copy."""

    model: str
    candidate: str
    texts: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)


@contextmanager
def _beside_steps(device: Any, updated: Any) -> Iterator[None]:
    """Copy from a GPU as soon as the state is ``updated``, not after what the next step has begun there.

    A kernel of that step may take long, or hang; the state before it can be saved all the same.
    """
    stream = torch.cuda.Stream(device)
    if updated is not None:
        stream.wait_event(updated)
    with torch.cuda.stream(stream):
        yield


class Saver:
    """Saves a run's state, one checkpoint at a time; every rank of the group calls the same.

    Args:
        shelf: Where checkpoints lie.
        spool: A local folder for files on their way to a store: updates wait for the disk, not for the network.
        known: The steps that are on the shelf when the run begins.
        keeping: Which checkpoints are kept.
        group: The ranks.
        label: What every index says of the run.
    """

    def __init__(
        self, shelf: Shelf, spool: Path, steps: Iterable[int], *, keeping: Checkpointing, group: Any,
        label: CheckpointLabel,
    ) -> None:  # fmt: skip
        self._shelf, self._spool, self._steps = shelf, Storage.of(str(spool)), set(steps)
        self._keeping, self._group, self._label = keeping, group, label
        self._thread: threading.Thread | None = None
        self._progress, self._blocked_s = SaveProgress(), 0.0
        self._ended: tuple[SavedStep, str] | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is under way on this rank, or its end has not been asked for yet."""
        return self._thread is not None

    @property
    def done(self) -> bool:
        """Whether this rank's thread has ended."""
        return self._thread is not None and not self._thread.is_alive()

    def begin(self, state: RunState, pieces: Sequence[StatePiece], *, prunes: bool = True, alone: bool = False) -> None:
        """Start to save; the pieces must not change before ``wait_copied`` has returned.

        Afterwards later checkpoints are removed, behind which the run went back, and if it ``prunes`` older ones that
        need not be kept: not if this one is not to be relied on. A save that is ``alone`` waits for nothing that was
        begun on a device: that may hang.
        """
        assert self._thread is None, "one checkpoint at a time"
        self._progress, self._blocked_s = SaveProgress(), 0.0
        device = pieces[0].memory.device if pieces else None
        is_gpu = device is not None and device.type == "cuda"
        updated = torch.cuda.current_stream(device).record_event() if is_gpu and not alone else None

        def save() -> None:
            with _beside_steps(device, updated) if is_gpu else nullcontext():
                self._save(state, tuple(pieces), prunes)

        self._thread = threading.Thread(target=save, daemon=True)
        self._thread.start()

    def wait(self, patience_s: float) -> None:
        """Wait for the end of the save for a while."""
        if self._thread is not None:
            self._thread.join(patience_s)

    def wait_copied(self) -> None:
        """Wait until the state may change; give the save up if its disk does not write any more."""
        if self._thread is None:
            return
        start_s = time.monotonic()
        while not self._progress.settled.wait(0.05):
            if time.monotonic() - max(self._progress.last_s, start_s) > _PATIENCE_S:
                self._progress.abandon()
        self._blocked_s += time.monotonic() - start_s

    def ended(self) -> tuple[SavedStep, str]:
        """Wait for the end of the save, after which another may begin; return it, and why it failed if it did."""
        assert self._thread is not None, "nothing was begun"
        self._thread.join()
        self._thread = None
        assert self._ended is not None, "the thread says how it ended"
        saved, failure = self._ended
        return replace(saved, blocked_s=self._blocked_s), failure

    def _save(self, state: RunState, pieces: Sequence[StatePiece], prunes: bool) -> None:
        start_s, failure, remark, progress = time.monotonic(), "", "", self._progress
        try:
            self._write(state, pieces, progress)
            try:
                from_first_rank(
                    lambda: self._shelf.prune(self._keeping, state.step, state.best_step, earlier=prunes), self._group
                )
            except StorageError as error:
                remark = f"older checkpoints are still there: {error}"
        except StorageError as error:
            failure = str(error)
        except Exception as error:  # a step must not wait for a thread that is gone; the run hears of it
            failure = f"{type(error).__name__}: {error}"
        finally:
            progress.settled.set()
            self._ended = SavedStep(step=state.step, time_s=time.monotonic() - start_s, remark=remark), failure

    def _write(self, state: RunState, pieces: Sequence[StatePiece], progress: SaveProgress) -> None:
        """Write the checkpoint of a step; either all ranks fail, or none does."""
        shelf, storage, spool, folder = self._shelf, self._shelf.storage, self._spool, self._shelf.folder(state.step)
        file_name = f"rank-{dist.get_rank():05}.safetensors"
        boxes = [part for piece in pieces if piece.saves for part in cut_piece(piece)]

        def make_ready() -> None:
            shelf.make_ready(state.step, self._steps)
            self._steps.add(state.step)

        def copy() -> RankFile | None:
            """Write the file of this rank; try a disk that fails again, as long as the state is what it was."""
            if not boxes:
                return progress.end_copy(file_name)
            where = (storage, f"{folder}/{file_name}") if storage.is_local else (spool, file_name)
            return persistent(lambda: write_boxes(*where, boxes, progress), progress.settled)

        def upload() -> None:
            with spool.reading(file_name) as source, storage.writing(f"{folder}/{file_name}") as file:
                shutil.copyfileobj(source, file, _SLICE_BYTES)

        def conclude() -> None:
            """Write the index, which makes the checkpoint complete."""
            files, label = [file for file in written if file], self._label
            for name, text in label.texts.items():
                persistent(partial(storage.write, f"{folder}/{name}", text.encode()))
            data = dump_index(
                CheckpointIndex(
                    state=state,
                    model=label.model,
                    candidate=label.candidate,
                    finite=all(file.finite for file in files),
                    files={file.file: file.num_bytes for file in files},
                    tensors=joined_tensors(files),
                )
            )
            persistent(lambda: storage.write(f"{folder}/{INDEX}", data))
            shelf.publish(folder)

        if storage.is_local:
            from_first_rank(lambda: persistent(make_ready, progress.settled), self._group)
        with self._without_remains(folder):
            written = from_all_ranks(copy, self._group)
            if not storage.is_local:  # no update waits for a store
                from_first_rank(lambda: persistent(make_ready), self._group)
                from_all_ranks(lambda: boxes and persistent(upload), self._group)
                if boxes:
                    spool.remove(file_name)
            from_first_rank(conclude, self._group)

    @contextmanager
    def _without_remains(self, folder: str) -> Iterator[None]:
        """Give a disk back what a save that fails on all ranks has written: it may be full, and others write to it."""
        try:
            yield
        except StorageError:
            if self._shelf.storage.is_local and dist.get_rank() == 0:
                with suppress(StorageError):
                    self._shelf.storage.remove(folder)
            raise
