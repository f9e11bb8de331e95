"""The index of a checkpoint: which box of which tensor lies where in which file, and how far the run was.

A checkpoint is a folder of safetensors files, one of each rank that saved something, and ``index.json``, which is
written last. It needs no code of autoshard to be read.
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
    """How far a run is: all of its state that is no tensor."""

    step: int  # the last step that was taken, counted from 1
    num_updates: int  # steps whose update was not skipped
    next_sample: int  # the number of the first sample that no step has seen
    num_tokens: int = 0  # that all steps have seen
    seed: int = 0  # of the order of the data
    trackers: tuple[tuple[str, str], ...] = ()  # by which trackers know the run: theirs, and the id


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
    """All that a checkpoint holds."""

    state: RunState
    model: str  # the name of the model
    candidate: str  # the layout that saved it
    finite: bool  # whether every number of the state is finite
    files: Mapping[str, int] = field(hash=False)  # with their bytes
    tensors: Mapping[str, StoredTensor] = field(hash=False)

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(self.files.values())


def dump_index(index: CheckpointIndex) -> bytes:
    """Write an index, with a checksum over all of it."""
    body = {
        "format": FORMAT,
        "state": record.encode(index.state),
        "model": index.model,
        "candidate": index.candidate,
        "finite": index.finite,
        "files": dict(index.files),
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "boxes": [
                    [box.offsets, box.lengths, box.file, box.start, box.num_bytes, box.crc32] for box in tensor.boxes
                ],
            }
            for name, tensor in sorted(index.tensors.items())
        },
    }
    text = json.dumps(body, separators=(",", ":"))
    return f'{{"crc32":{zlib.crc32(text.encode())},"index":{text}}}'.encode()


def load_index(data: bytes, where: str) -> CheckpointIndex:
    """Read an index; one that is damaged is refused as such."""
    try:
        text = data.decode()
        whole: Any = json.loads(text)
        body = whole["index"]
        told = json.dumps(body, separators=(",", ":"))
        kept = whole["crc32"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError.of(where, f"is damaged: {error}") from None
    if zlib.crc32(told.encode()) != kept:
        raise InputError.of(where, "is damaged: its checksum is another")
    if body.get("format") != FORMAT:
        raise InputError.of(where, f"is of format {body.get('format')}, and this version reads {FORMAT}")
    return CheckpointIndex(
        state=record.decode(RunState, body["state"], where),
        model=body["model"],
        candidate=body["candidate"],
        finite=body["finite"],
        files=body["files"],
        tensors={
            name: StoredTensor(
                tensor["dtype"],
                tuple(tensor["shape"]),
                tuple(StoredBox(tuple(box[0]), tuple(box[1]), *box[2:]) for box in tensor["boxes"]),
            )
            for name, tensor in body["tensors"].items()
        },
    )
