"""Saving through torch.distributed.checkpoint: its plans, and files of our own that carry checksums.

Each rank writes one safetensors file, box after box, and never holds more than one box beside the state itself.
"""

import shutil
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter
from torch.futures import Future

from autoshard.engine.placement import StatePiece
from autoshard.runtime.checkpoint.files import DTYPES, box_name, cut_piece, header_of, is_finite
from autoshard.runtime.checkpoint.index import FILE, CheckpointIndex, StoredBox, StoredTensor, dump_index
from autoshard.runtime.checkpoint.storage import Storage, StorageError, persistent

_SLICE_BYTES = 2**22  # that are looked at, summed up and written at a time


@dataclass(slots=True)
class SaveProgress:
    """How far a save is, for those who wait for it: in the end the state is copied, or the save is given up."""

    settled: Event = field(default_factory=Event)  # the state may change
    abandoned: Event = field(default_factory=Event)  # what is read of it from now on is of no use
    last_s: float = field(default_factory=time.monotonic)  # when something was written last
    _deciding: Lock = field(default_factory=Lock)

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


@dataclass(slots=True)
class AgreedPlan:
    """What a save tells the next one: pieces do not change while a run goes on, so their plan is agreed on once."""

    plan: SavePlan | None = None  # of this rank
    metadata: Metadata | None = None  # of all ranks, on the first one


class PieceSavePlanner(DefaultSavePlanner):
    """Plans the boxes of an engine's pieces; DCP's own planner checks that they fill every tensor without overlap."""

    def __init__(self, pieces: Sequence[StatePiece], known: AgreedPlan) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        cut = [part for piece in pieces if piece.saves for part in cut_piece(piece)]
        self._pieces = {MetadataIndex(piece.name, piece.offsets): piece for piece in cut}
        self._known = known

    def create_local_plan(self) -> SavePlan:
        """List what this rank saves; a list that is known already is not sent."""
        self.plan = SavePlan([_write_item(index, piece) for index, piece in self._pieces.items()])
        return SavePlan([], usable=False) if self.plan == self._known.plan else self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check the plans of all ranks; each of them knows its own."""
        if any(plan.usable for plan in all_plans):
            assert all(plan.usable for plan in all_plans), "all ranks know a plan or none does"
            _, self._known.metadata = super().create_global_plan(all_plans)
        assert self._known.metadata is not None, "plans that are known were checked"
        return [SavePlan([], usable=False)] * len(all_plans), self._known.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Know that all is well with this rank's plan."""
        self._known.plan = self.plan
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the memory of a box."""
        return self._pieces[index].memory


def _write_item(index: MetadataIndex, piece: StatePiece) -> WriteItem:
    chunk = ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=piece.memory.shape)
    properties = TensorProperties(dtype=piece.memory.dtype)
    data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(piece.whole))
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


_Box = tuple[str, tuple[int, ...], tuple[int, ...], int, int, int]  # the tensor, and a StoredBox without its file


@dataclass(frozen=True, slots=True)
class _RankFile:
    """A rank's file, as the coordinator is told."""

    file: str
    num_bytes: int
    finite: bool
    boxes: list[_Box]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a checkpoint is written.

    What goes to a store is copied to a local disk first: updates wait for the disk and not for the network.
    """

    place: Storage
    folder: str
    spool: Storage  # for files on their way to a store
    make_ready: Callable[[], None]  # what the first rank does before anything is written there

    @property
    def spools(self) -> bool:
        """Whether files are written elsewhere first."""
        return not self.place.is_local


class PieceWriter(StorageWriter):
    """Writes a rank's boxes into one file, and as the coordinator the index of all."""

    def __init__(
        self, target: Target, progress: SaveProgress, planner: PieceSavePlanner, index: Callable[..., CheckpointIndex]
    ) -> None:
        self._target, self._progress = target, progress
        self._planner, self._index = planner, index
        self._written: list[_RankFile] = []

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from save to save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, rank: int = 0, **kwargs: Any) -> None:
        """Name the file of this rank."""
        self._name = f"rank-{rank:05}.safetensors"

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Write the file of this rank before others know of it: updates wait for that, and not for many ranks' plans.

        A disk that fails is tried again, as long as the state is what it was.
        """
        items = self._planner.plan.items
        if items:
            self._written = [persistent(lambda: self._write(items), self._progress.settled)]
        else:
            self._progress.end_copy(self._name)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Take the plans as they are; a store is made ready only now, when no update waits for it."""
        if self._target.spools:
            persistent(self._target.make_ready)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Bring the file to the store, trying again while that fails; tell what was written."""
        if self._target.spools and self._written:
            persistent(self._upload)
            self._target.spool.remove(self._name)
        future: Future[Any] = Future()
        future.set_result(self._written)
        return future

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the index: with it the checkpoint is complete."""
        written: list[_RankFile] = [one for listed in results for one in listed]
        boxes: dict[str, list[StoredBox]] = defaultdict(list)
        for one in written:
            for name, offsets, lengths, *where in one.boxes:
                boxes[name].append(StoredBox(offsets, lengths, one.file, *where))
        tensors: dict[str, StoredTensor] = {}
        for name, found in metadata.state_dict_metadata.items():
            assert isinstance(found, TensorStorageMetadata), f"{name} is no tensor"
            assert len(found.chunks) == len(boxes[name]), f"{name} was planned otherwise"
            tensors[name] = StoredTensor(DTYPES[found.properties.dtype], tuple(found.size), tuple(boxes[name]))
        files = {one.file: one.num_bytes for one in written}
        data = dump_index(self._index(finite=all(one.finite for one in written), files=files, tensors=tensors))

        def write() -> None:
            with self._target.place.writing(f"{self._target.folder}/{FILE}") as file:
                file.write(data)

        persistent(write)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Refuse to be chosen by the form of a path."""
        return False

    def _write(self, items: Sequence[WriteItem]) -> _RankFile:
        target = self._target
        place, path = (target.spool, self._name) if target.spools else (target.place, f"{target.folder}/{self._name}")
        whole = place.path(path)
        header, (*starts, num_bytes) = _header(items)
        finite, boxes = True, list[_Box]()
        with place.writing(path) as file:
            file.write(header)
            for item, start in zip(items, starts, strict=True):
                data = item.tensor_data
                assert data is not None, "only tensors are saved"
                numbers = _on_host(self._planner.resolve_data(item))
                crc32, is_good = self._put(numbers, file, whole)
                finite = finite and is_good
                lengths = tuple(data.chunk.sizes)
                boxes.append((item.index.fqn, tuple(data.chunk.offsets), lengths, start, numbers.nbytes, crc32))
            self._progress.end_copy(whole)  # what is left is to bring the file to the disk
        return _RankFile(self._name, num_bytes, finite, boxes)

    def _upload(self) -> None:
        target = self._target
        with target.spool.reading(self._name) as source, target.place.writing(f"{target.folder}/{self._name}") as file:
            shutil.copyfileobj(source, file, _SLICE_BYTES)

    def _put(self, numbers: torch.Tensor, file: Any, path: str) -> tuple[int, bool]:
        """Write a box; return its checksum, and whether it is finite."""
        crc32, finite = 0, True
        for part in numbers.reshape(-1).split(_SLICE_BYTES // numbers.itemsize):
            self._progress.go_on(path)
            finite = finite and is_finite(part)
            raw = part.view(torch.uint8).numpy().data
            crc32 = zlib.crc32(raw, crc32)
            file.write(raw)
            self._progress.last_s = time.monotonic()
        return crc32, finite


def _header(items: Sequence[WriteItem]) -> tuple[bytes, list[int]]:
    """Return the header of a rank's file, where in the file each box starts, and where the last one ends."""
    tensors: list[tuple[str, torch.dtype, Sequence[int]]] = []
    for item in items:
        data = item.tensor_data
        assert data is not None and item.index.offset is not None, "only boxes of tensors are saved"
        tensors.append((box_name(item.index.fqn, item.index.offset), data.properties.dtype, data.chunk.sizes))
    return header_of(tensors)


def _on_host(tensor: Any) -> torch.Tensor:
    """Return a box without gaps on the host: the state's own memory where it is so already."""
    return tensor.detach().to("cpu").contiguous()
