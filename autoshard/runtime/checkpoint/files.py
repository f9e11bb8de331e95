"""What files of checkpoints are made of: boxes under names, the header of safetensors, folders of steps."""

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import torch

from autoshard.engine.placement import StatePiece

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
_MOST_BYTES = 2**26  # of a box in a file; larger pieces are cut, so that little is copied at a time


def cut_piece(piece: StatePiece, dim: int = 0) -> list[StatePiece]:
    """Cut a piece along its first dims into parts that are not too large, each of them in one run of memory."""
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
    """Say whether all numbers are finite; a sum says so at once unless it overflows.

    >>> is_finite(torch.tensor([1.0, 3e38, 3e38])), is_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    """
    total = float(numbers.sum())
    return math.isfinite(total) or bool(torch.isfinite(numbers).all())


def folder_of(step: int) -> str:
    """Name the checkpoint of a step, so that names sort as steps do.

    >>> folder_of(120)
    'step-00000120'
    """
    return f"step-{step:08}"


def step_of(folder: str) -> int | None:
    """Return the step of a checkpoint's name; None if it is none."""
    name = PurePath(folder).name
    number = name.removeprefix("step-")
    return int(number) if name.startswith("step-") and number.isdecimal() else None
