"""Files of tensors: boxes under names, the header of safetensors, and where boxes overlap."""

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoshard.engine.placement import StatePiece
from autoshard.layout.shards import Box

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


def overlap(box: Box, other: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where two boxes of a tensor overlap, as an index of each; None if they do not.

    >>> overlap(((0, 4), (2, 4)), ((1, 2), (9, 4)))
    ((slice(1, 2, None), slice(0, 2, None)), (slice(0, 1, None), slice(2, 4, None)))
    """
    found = [(max(one, two), min(one + n, two + m), one, two) for one, n, two, m in zip(*box, *other, strict=True)]
    if any(low >= high for low, high, _, _ in found):
        return None
    first = tuple(slice(low - one, high - one) for low, high, one, _ in found)
    return first, tuple(slice(low - two, high - two) for low, high, _, two in found)


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
    """Say whether all numbers are finite; their sum answers at once unless it overflows.

    >>> is_finite(torch.tensor([1.0, 3e38, 3e38])), is_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    """
    total = float(numbers.sum())
    return math.isfinite(total) or bool(torch.isfinite(numbers).all())
