"""The files of a checkpoint: safetensors of boxes, and an index of which box of which tensor lies where.

A checkpoint is a folder of safetensors files, one of each rank that saved something, and ``index.json``, which is
written last. It can be read without autoshard.
"""

import json
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autoshard.errors import InputError, require
from autoshard.layout.shards import Box
from autoshard.run.placement import StatePiece
from autoshard.spec import record

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The progress of a run: all of its state beside tensors."""

    step: int = 0  # the last step that was taken, counted from 1
    num_updates: int = 0  # steps whose update was not skipped
    next_sample: int = 0  # the number of the first sample that no step has seen
    num_tokens: int = 0  # that all steps have seen
    seed: int = 0  # of the order of the data
    trackers: tuple[tuple[str, str], ...] = ()  # the name of each tracker, and the run's id there
    best_step: int | None = None  # whose evaluation had the lowest loss
    best_loss: float | None = None
    judged_by: str = ""  # the sets of that evaluation
    unjudged: bool = False  # an evaluation after this step was broken off
    set_sizes: tuple[tuple[str, int], ...] = ()  # of each set of the data, in tokens or samples
    set_checksums: tuple[tuple[str, int], ...] = ()  # of some tokens of each


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor in a file: raw numbers in storage order."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    file: str
    start: int  # in the file
    num_bytes: int
    crc32: int

    @property
    def place(self) -> Box:
        """The offsets of the box in its tensor, and its lengths along each axis."""
        return self.offsets, self.lengths


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor, in boxes that do not overlap."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """The contents of a checkpoint."""

    state: RunState
    model: str  # the name of the model
    candidate: str  # the layout that saved it
    finite: bool  # whether every number of the state is finite
    files: Mapping[str, int] = field(hash=False)  # with their bytes
    tensors: Mapping[str, StoredTensor] = field(hash=False)


def dump_index(index: CheckpointIndex) -> bytes:
    """Write an index, with a checksum over all of it."""
    tensors = {
        name: {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "boxes": [
                [box.offsets, box.lengths, box.file, box.start, box.num_bytes, box.crc32] for box in tensor.boxes
            ],
        }
        for name, tensor in sorted(index.tensors.items())
    }
    plain = {name: getattr(index, name) for name in ("model", "candidate", "finite")}
    body = {
        "format": FORMAT,
        "state": record.encode(index.state),
        **plain,
        "files": {**index.files},
        "tensors": tensors,
    }
    text = json.dumps(body, separators=(",", ":"))
    return f'{{"crc32":{zlib.crc32(text.encode())},"index":{text}}}'.encode()


def load_index(data: bytes, where: str) -> CheckpointIndex:
    """Read an index; refuse a damaged one."""
    try:
        whole: Any = json.loads(data.decode())
        body, crc32 = whole["index"], whole["crc32"]
        text = json.dumps(body, separators=(",", ":"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError.of(where, f"is damaged: {error}") from None
    if zlib.crc32(text.encode()) != crc32:
        raise InputError.of(where, "is damaged: its checksum has changed")
    if body.get("format") != FORMAT:
        raise InputError.of(where, f"is of format {body.get('format')}, and this version reads {FORMAT}")
    tensors = {
        name: StoredTensor(
            tensor["dtype"],
            tuple(tensor["shape"]),
            tuple(StoredBox(tuple(offsets), tuple(lengths), *rest) for offsets, lengths, *rest in tensor["boxes"]),
        )
        for name, tensor in body["tensors"].items()
    }
    for name, tensor in tensors.items():
        held, size = sum(math.prod(box.lengths) for box in tensor.boxes), math.prod(tensor.shape)
        require((held == size, where, f"is damaged: it places {held:,} of the {size:,} numbers of {name}"))
    plain = {name: body[name] for name in ("model", "candidate", "finite", "files")}
    named = {*plain["files"], *(box.file for tensor in tensors.values() for box in tensor.boxes)}
    strange = sorted(name for name in named if name not in plain["files"] or "/" in name or name in (".", ".."))
    if strange:
        raise InputError.of(where, f"is damaged: it names {strange[0]}, which is no file of this checkpoint")
    return CheckpointIndex(state=record.decode(RunState, body["state"], where), tensors=tensors, **plain)


DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
TYPES = {name: dtype for dtype, name in DTYPES.items()}
_MOST_BYTES = 2**26  # of a box in a file; larger pieces are cut, so that little is copied at a time


def cut_piece(piece: StatePiece, dim: int = 0) -> list[StatePiece]:
    """Cut a piece along its first dims into boxes of limited size, each of them contiguous in memory."""
    lengths, num_bytes = piece.memory.shape, piece.memory.nbytes
    if num_bytes <= _MOST_BYTES or dim == len(lengths):
        return [piece]
    rows = max(1, lengths[dim] * _MOST_BYTES // num_bytes)
    parts: list[StatePiece] = []
    for start in range(0, lengths[dim], rows):
        offsets = list(piece.offsets)
        offsets[dim] += start
        memory = piece.memory.narrow(dim, start, min(rows, lengths[dim] - start))
        parts += cut_piece(replace(piece, offsets=tuple(offsets), memory=memory), dim + 1)
    return parts


def box_name(tensor: str, offsets: Sequence[int]) -> str:
    """Name a box in the header of a file."""
    return f"{tensor}@{','.join(map(str, offsets))}"


def overlap(first: Box, second: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where two boxes of a tensor overlap, as an index of each; None if they do not.

    >>> overlap(((0, 4), (2, 4)), ((1, 2), (9, 4)))
    ((slice(1, 2, None), slice(0, 2, None)), (slice(0, 1, None), slice(2, 4, None)))
    """
    axes = [(max(a, b), min(a + n, b + m), a, b) for a, n, b, m in zip(*first, *second, strict=True)]
    if any(low >= high for low, high, _, _ in axes):
        return None
    in_first = tuple(slice(low - a, high - a) for low, high, a, _ in axes)
    return in_first, tuple(slice(low - b, high - b) for low, high, _, b in axes)


def fills_once(tensor: StoredTensor) -> bool:
    """Say whether the boxes of a tensor fill it without overlap, by a sweep along the axis that they cut most often."""
    shape, boxes = tensor.shape, tensor.boxes
    inside = all(0 <= low <= low + n <= size for b in boxes for low, n, size in zip(*b.place, shape, strict=True))
    if not inside or sum(math.prod(box.lengths) for box in boxes) != math.prod(shape):
        return False
    axis = max(range(len(shape)), key=lambda axis: len({box.offsets[axis] for box in boxes}), default=0)
    open_boxes = list[StoredBox]()
    for box in sorted(boxes, key=lambda box: box.offsets[axis:]):
        open_boxes = [
            earlier
            for earlier in open_boxes
            if not shape or earlier.offsets[axis] + earlier.lengths[axis] > box.offsets[axis]
        ]
        if any(overlap(box.place, earlier.place) for earlier in open_boxes):
            return False
        open_boxes.append(box)
    return True


def header_of(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[int]]:
    """Return the header of a safetensors file, where in the file each tensor starts, and where the last one ends."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    ends = [0]
    for name, dtype, shape in tensors:
        ends.append(ends[-1] + math.prod(shape) * dtype.itemsize)
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": ends[-2:]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return head, [len(head) + end for end in ends]


def is_finite(numbers: torch.Tensor) -> bool:
    """Say whether all numbers are finite; their sum answers at once unless it overflows."""
    total = float(numbers.sum())
    return math.isfinite(total) or bool(torch.isfinite(numbers).all())
