"""Safetensors files, whose tensors are views of the mapped file."""

import json
import math
import mmap
import zlib
from functools import partial
from pathlib import Path

import torch

from autoshard.errors import InputError
from autoshard.runtime.checkpoint.files import DTYPES
from autoshard.runtime.convert.stored import Once, Stored

_TYPES = {name: dtype for dtype, name in DTYPES.items()}
_LENGTH_BYTES = 8  # cited: huggingface/safetensors README, Format: a little-endian length, the header, the data


def read_header(file: Path, advice: str) -> dict[str, Stored]:
    """Return the tensors of a file, or say what is wrong with it, and what to do."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        try:
            entries = json.loads(stream.read(length if length < size else 0))
            entries.pop("__metadata__", None)
            ends = {name: _LENGTH_BYTES + length + one["data_offsets"][1] for name, one in entries.items()}
            shapes = {name: (tuple(one["shape"]), str(one["dtype"])) for name, one in entries.items()}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError.of(str(file), f"is no whole file of tensors ({error}). {advice}") from None
    if size < max(ends.values(), default=0):
        cut = [name for name, end in ends.items() if end > size]
        message = f"has {size} bytes of the {max(ends.values())} that its header tells of: {cut[0]} is cut off"
        raise InputError.of(str(file), f"{message}{f', {len(cut) - 1} more are' if cut[1:] else ''}. {advice}")
    found: dict[str, Stored] = {}
    view = _Mapped(file)
    for name, (shape, label) in shapes.items():
        dtype = _TYPES.get(label, torch.uint8)
        read = partial(view.tensor, dtype, shape, ends[name] - math.prod(shape) * dtype.itemsize)
        odd = "" if label in _TYPES else label
        found[name] = Stored(name=name, file=str(file), dtype=dtype, shape=shape, read=read, odd=odd)
    return found


def box_in(file: Path, name: str, dtype: str, shape: tuple[int, ...], start: int, crc32: int) -> Stored:
    """Return a tensor of a file by its place, with its checksum."""
    read = partial(_Mapped(file).tensor, _TYPES[dtype], shape, start)

    def check() -> None:
        if zlib.crc32(read().view(torch.uint8).reshape(-1).numpy().data) != crc32:
            raise InputError.of(
                f"{file}: {name}", "its checksum is another than when it was saved. The file is damaged"
            )

    return Stored(name=name, file=str(file), dtype=_TYPES[dtype], shape=shape, read=read, check=Once(check))


class _Mapped:
    """A file that is mapped into memory when it is first read."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._map: mmap.mmap | None = None

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> torch.Tensor:
        """Return a tensor that lies there."""
        if self._map is None:
            with self._file.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants what it could write
        return torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape), offset=start).reshape(shape)
