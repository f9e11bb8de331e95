"""The index of a checkpoint: which box of which tensor lies where in which file, and how far the run was.

A checkpoint is a folder of safetensors files, one of each rank that saved something, and ``index.json``, which is
written last. It can be read without autoshard.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoshard.errors import InputError
from autoshard.spec import record

FILE = "index.json"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """How far a run is: all of its state beside tensors."""

    step: int  # the last step that was taken, counted from 1
    num_updates: int  # steps whose update was not skipped
    next_sample: int  # the number of the first sample that no step has seen
    num_tokens: int = 0  # that all steps have seen
    seed: int = 0  # of the order of the data
    trackers: tuple[tuple[str, str], ...] = ()  # the name of each tracker, and the run's id there


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor in a file: raw numbers in storage order."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    file: str
    start: int  # in the file
    num_bytes: int
    crc32: int


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
                [one.offsets, one.lengths, one.file, one.start, one.num_bytes, one.crc32] for one in tensor.boxes
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
    except (ValueError, KeyError, TypeError) as error:
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
    plain = {name: body[name] for name in ("model", "candidate", "finite", "files")}
    return CheckpointIndex(state=record.decode(RunState, body["state"], where), tensors=tensors, **plain)
