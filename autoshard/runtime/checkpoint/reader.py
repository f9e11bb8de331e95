"""Loading through torch.distributed.checkpoint: each rank reads the boxes that overlap with its pieces."""

import zlib
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from autoshard.engine.placement import StatePiece
from autoshard.runtime.checkpoint.files import DTYPES
from autoshard.runtime.checkpoint.index import CheckpointIndex, StoredBox
from autoshard.runtime.checkpoint.storage import Storage, StorageError, persistent

_TYPES = {name: dtype for dtype, name in DTYPES.items()}


class PieceLoadPlanner(LoadPlanner):
    """Plans which stored boxes fill the pieces that this rank reads."""

    def __init__(self, pieces: Sequence[StatePiece]) -> None:
        self._pieces = {MetadataIndex(piece.name, piece.offsets): piece for piece in pieces if piece.reads}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Learn what there is."""
        assert metadata is not None, "a checkpoint has an index"
        self._there = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """List what this rank reads."""
        chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        for piece in self._pieces.values():
            chunks[piece.name].append(ChunkStorageMetadata(torch.Size(piece.offsets), piece.memory.shape))
        items: list[ReadItem] = []
        for name, wanted in chunks.items():
            stored = self._there[name]
            assert isinstance(stored, TensorStorageMetadata), f"{name} is no tensor"
            items += create_read_items_for_chunk_list(name, stored, wanted)
        # DCP numbers a rank's chunks; here they are found by their offsets.
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing is shared."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Take the plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Refuse what is no tensor."""
        raise AssertionError("only tensors are saved")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the part of a piece that an item fills."""
        assert read_item.dest_index.offset is not None, "pieces have offsets"
        memory: torch.Tensor = self._pieces[MetadataIndex(read_item.dest_index.fqn, read_item.dest_index.offset)].memory
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            memory = memory.narrow(dim, start, length)
        return memory

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The tensor is a view of the piece already."""


class PieceReader(StorageReader):
    """Reads boxes of a checkpoint, each of them whole, since its checksum is over all of it."""

    def __init__(self, place: Storage, folder: str, index: CheckpointIndex) -> None:
        self._place, self._folder, self._index = place, folder, index

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from load to load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what there is as DCP knows it."""
        known: dict[str, Any] = {}
        for name, tensor in self._index.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths)) for box in tensor.boxes]
            properties = TensorProperties(dtype=_TYPES[tensor.dtype])
            known[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return Metadata(known)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Files are opened when they are read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Take the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Take the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read file by file, in the order of the file, each box once."""
        wanted: dict[StoredBox, list[ReadItem]] = defaultdict(list)
        tensors = self._index.tensors
        stored = {MetadataIndex(name, box.offsets): box for name, one in tensors.items() for box in one.boxes}
        for item in plan.items:
            assert item.storage_index.offset is not None, "boxes have offsets"
            wanted[stored[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]].append(item)
        files: dict[str, list[StoredBox]] = defaultdict(list)
        for box in sorted(wanted, key=lambda box: (box.file, box.start)):
            files[box.file].append(box)

        def read(name: str) -> None:
            with self._place.reading(f"{self._folder}/{name}") as file:
                for box in files[name]:
                    self._fill(file, box, wanted[box], planner)

        for name in files:
            persistent(partial(read, name))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Refuse to be chosen by the form of a path."""
        return False

    def _fill(self, file: Any, box: StoredBox, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        dtype = _TYPES[self._index.tensors[items[0].storage_index.fqn].dtype]
        targets = [planner.resolve_tensor(item) for item in items]
        whole = len(items) == 1 and tuple(items[0].lengths) == box.lengths
        there = targets[0]
        straight = whole and there.is_contiguous() and there.dtype == dtype and there.device.type == "cpu"
        numbers = there if straight else torch.empty(box.lengths, dtype=dtype)
        raw = numbers.reshape(-1).view(torch.uint8).numpy().data
        file.seek(box.start)
        found = _read_into(file, raw)
        path = self._place.path(f"{self._folder}/{box.file}")
        if found != box.num_bytes or raw.nbytes != box.num_bytes:
            raise StorageError(f"{path}: ends too early, at {box.start + found} bytes")
        if zlib.crc32(raw) != box.crc32:
            name = items[0].storage_index.fqn
            raise StorageError(f"{path}: the checksum of {name} is another than when it was saved")
        if not straight:
            for item, target in zip(items, targets, strict=True):
                part = numbers
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, start, length)
                target.copy_(part)


def _read_into(file: Any, memory: memoryview) -> int:
    """Fill memory from a file; return how many bytes there were."""
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done:])
        if not count:
            break
        done += count
    return done
