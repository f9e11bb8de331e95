"""Loading a checkpoint: each rank reads the boxes that overlap with its pieces."""

import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from autoshard.engine.placement import StatePiece
from autoshard.runtime.checkpoint.agreed import from_all_ranks
from autoshard.runtime.checkpoint.files import TYPES, overlap
from autoshard.runtime.checkpoint.index import StoredBox
from autoshard.runtime.checkpoint.shelf import Checkpoint, Shelf
from autoshard.runtime.checkpoint.storage import Storage, StorageError, persistent

_Targets = list[tuple[torch.Tensor, tuple[slice, ...]]]  # memory, and which part of a box goes there


def load(shelf: Shelf, checkpoint: Checkpoint, pieces: Sequence[StatePiece], group: Any) -> None:
    """Fill pieces from a checkpoint; every rank calls this, and it fails on all of them or on none."""
    from_all_ranks(lambda: _fill_pieces(shelf.place, checkpoint, pieces), group)


def _fill_pieces(place: Storage, checkpoint: Checkpoint, pieces: Sequence[StatePiece]) -> None:
    """Read file by file, in the order of the file, each box once."""
    files: dict[str, dict[tuple[str, StoredBox], _Targets]] = defaultdict(lambda: defaultdict(list))
    tensors = checkpoint.index.tensors
    for piece in pieces:
        for box in tensors[piece.name].boxes if piece.reads else ():
            if both := overlap((box.offsets, box.lengths), (piece.offsets, tuple(piece.memory.shape))):
                files[box.file][piece.name, box].append((piece.memory[both[1]], both[0]))
    for file, wanted in files.items():
        path, boxes = f"{checkpoint.folder}/{file}", sorted(wanted.items(), key=lambda item: item[0][1].start)

        def read(path: str = path, boxes: Sequence[tuple[tuple[str, StoredBox], _Targets]] = boxes) -> None:
            with place.reading(path) as opened:
                for (name, box), targets in boxes:
                    _fill(opened, f"{place.path(path)}", name, box, TYPES[tensors[name].dtype], targets)

        persistent(read)


def _fill(file: Any, path: str, name: str, box: StoredBox, dtype: torch.dtype, targets: _Targets) -> None:
    """Read a box, all of it because its checksum is over all of it: straight into memory that is just like it."""
    first = targets[0][0]
    alike = len(targets) == 1 and tuple(first.shape) == box.lengths and first.dtype == dtype
    straight = alike and first.is_contiguous() and first.device.type == "cpu"
    numbers = first if straight else torch.empty(box.lengths, dtype=dtype)
    raw = numbers.reshape(-1).view(torch.uint8).numpy().data
    file.seek(box.start)
    found = file.readinto(raw)
    if found != box.num_bytes or raw.nbytes != box.num_bytes:
        raise StorageError(f"{path}: ends too early, at {box.start + found} bytes")
    if zlib.crc32(raw) != box.crc32:
        raise StorageError(f"{path}: the checksum of {name} is another than when it was saved")
    if not straight:
        for memory, part in targets:
            memory.copy_(numbers[part])
