"""Tensors in files that are mapped into memory, and their boxes of ours: the source of a conversion or of a run."""

import json
import math
import mmap
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autoshard.engine.patches import Patch, whole
from autoshard.errors import Fault, InputError
from autoshard.layout.shards import Box
from autoshard.runtime.checkpoint.files import TYPES, StoredBox, box_name, overlap

_LENGTH_BYTES = 8  # cited: huggingface/safetensors README, Format: a little-endian length, the header, the data
DAMAGED = "its checksum is another than when it was saved. The file is damaged"
Shapes = Mapping[str, tuple[int, ...]]


class Once:
    """A check that is made when it is first asked for; threads that ask meanwhile wait."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check, self._lock, self._done = check, threading.Lock(), False

    def __call__(self) -> None:
        """Make the check, unless it was made."""
        with self._lock:
            if not self._done:
                self._check()
                self._done = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """A tensor in a file; ``read`` returns it as a view of the file, ``check`` refuses it if it is damaged."""

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    check: Once | None = None
    odd: str = ""  # its format, where that holds no fractions
    patches: tuple[Patch, ...] = ()


class WeightSource:
    """All stored weights of a model: every number of ours once, however many files repeat it."""

    def __init__(self, stored: Iterable[Stored], wanted: Shapes, where: str, state: Any = None) -> None:
        """Refuse a source in which numbers of tensors of these shapes are missing."""
        self.wanted, self.state = wanted, state  # ``state`` is that of a run, where a checkpoint is read
        self._boxes: dict[str, dict[Box, tuple[Stored, Patch]]] = {name: {} for name in wanted}
        for one in stored:
            for patch in one.patches:
                self._boxes[patch.tensor].setdefault(patch.box, (one, patch))
        faults: list[Fault] = []
        for name, shape in wanted.items():
            missing = math.prod(shape) - sum(math.prod(lengths) for _, lengths in self._boxes[name])
            if missing:
                message = f"{name}: {missing} of {math.prod(shape)} numbers are missing"
                faults.append(Fault(where=where, message=message))
        if faults:
            raise InputError(faults)
        self.dtypes = {name: next(iter(boxes.values()))[0].dtype for name, boxes in self._boxes.items()}
        self.stored = list({id(one): one for boxes in self._boxes.values() for one, _ in boxes.values()}.values())

    def fill(self, memory: torch.Tensor, tensor: str, offsets: Sequence[int]) -> None:
        """Copy a box of one of our tensors into memory of its shape, in the format of the memory."""
        for theirs, mine in self._parts(tensor, (tuple(offsets), tuple(memory.shape))):
            memory[mine].copy_(theirs)

    def straight(self, wanted: Patch, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return a file's own memory, if that is the wanted part of a stored tensor of this shape."""
        view, _ = next(self._parts(wanted.tensor, wanted.box), (None, ()))
        if view is None or view.numel() != math.prod(shape) or view.dtype != dtype or not view.is_contiguous():
            return None
        alike = wanted.view(torch.empty(shape, device="meta")).is_contiguous()
        return view.view(shape) if alike else None

    def _parts(self, tensor: str, wanted: Box) -> Iterator[tuple[torch.Tensor, tuple[slice, ...]]]:
        """Yield the stored parts of a box of ours, each with its index in the box."""
        for box, (stored, patch) in self._boxes[tensor].items():
            if both := overlap(box, wanted):
                if stored.check:
                    stored.check()
                yield patch.view(stored.read())[both[0]], both[1]


def shape_faults(found: Mapping[str, Stored], wanted: Shapes, needless: Collection[str], where: str) -> Iterator[Fault]:
    """Yield the tensors that are missing, of another shape, without fractions, or not of the model."""
    for name, shape in wanted.items():
        one = found.get(name)
        if one is None:
            yield Fault(where=f"{where}: {name}", message="missing")
        elif one.shape != shape:
            message = f"has shape {one.shape}, the model asks for {shape}"
            yield Fault(where=f"{one.file}: {name}", message=message)
        elif one.odd:
            message = f"holds {one.odd}, and only F64, F32, F16, BF16 can be read"
            yield Fault(where=f"{one.file}: {name}", message=message)
    for name in found.keys() - wanted.keys():
        if not name.endswith(tuple(needless)):
            yield Fault(where=f"{found[name].file}: {name}", message="is no tensor of this model")


def read_header(file: Path, advice: str) -> dict[str, Stored]:
    """Return the tensors of a safetensors file, or say what is wrong with it, and what to do."""
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
    if cut := [name for name, end in ends.items() if end > size]:
        message = f"has {size} bytes of the {max(ends.values())} in its header: {cut[0]} is cut off"
        raise InputError.of(str(file), f"{message}{f', {len(cut) - 1} more are' if cut[1:] else ''}. {advice}")
    found: dict[str, Stored] = {}
    mapped = _Mapped(file)
    for name, (shape, label) in shapes.items():
        dtype = TYPES.get(label, torch.uint8)
        read = partial(mapped.tensor, dtype, shape, ends[name] - math.prod(shape) * dtype.itemsize)
        odd = "" if label in TYPES else label
        found[name] = Stored(name=name, file=str(file), dtype=dtype, shape=shape, read=read, odd=odd)
    return found


def box_in(folder: Path, tensor: str, dtype: str, box: StoredBox, ours: str) -> Stored:
    """Return a box of a checkpoint, with its checksum and the name of our tensor."""
    file, name = folder / box.file, box_name(tensor, box.offsets)
    read = partial(_Mapped(file).tensor, TYPES[dtype], box.lengths, box.start)

    def check() -> None:
        if zlib.crc32(read().view(torch.uint8).reshape(-1).numpy().data) != box.crc32:
            raise InputError.of(f"{file}: {name}", DAMAGED)

    return Stored(
        name=name, file=str(file), dtype=TYPES[dtype], shape=box.lengths, read=read, check=Once(check),
        patches=(whole(ours, box.offsets, box.lengths),),
    )  # fmt: skip


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
