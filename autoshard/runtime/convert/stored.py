"""Tensors in files that are mapped into memory, and their boxes of ours: the source of a conversion or of a run.

Files of ``torch.save`` are read without running code in them, and written tensor by tensor.
"""

import io
import math
import pickle
import struct
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch._utils import _rebuild_tensor_v2  # pyright: ignore[reportPrivateUsage]

from autoshard.engine.patches import Index, Patch, whole
from autoshard.errors import Fault, InputError, require
from autoshard.layout.shards import Box
from autoshard.runtime.checkpoint.files import DTYPES, TYPES, StoredBox, is_finite, overlap

_ELSEWHERE = "Copy it again, or take another checkpoint"
_SQUARED = 2**16  # numbers at a time: 7 GB/s on a core, and 0.6 GB/s all at once (an EPYC of 2 cores, 2026-11-24)
_COMPUTED = 2**20  # numbers at a time, where they are computed from blocks with scales
DAMAGED = "its checksum is another than when it was saved. The file is damaged"
Shapes = Mapping[str, tuple[int, ...]]


class Once:
    """A check that runs once, at its first call; threads that call it meanwhile wait."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check, self._lock, self._done = check, threading.Lock(), False

    def __call__(self) -> None:
        """Run the check, unless it has run."""
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
    remedy: str = ""  # where a copy of its numbers differs
    # Returns the numbers at these places along each axis, where they are computed from other tensors of files.
    compute: Callable[[Sequence[np.ndarray]], torch.Tensor] | None = None
    sources: tuple["Stored", ...] = ()  # these other tensors

    @property
    def files(self) -> set[str]:
        """The files in which its numbers are."""
        return {self.file, *(source.file for source in self.sources)}

    def parts(self, patch: Patch, both: tuple[Index, Index]) -> Iterator[tuple[torch.Tensor, Index]]:
        """Yield the numbers of a part of a patch, and where they belong; little is computed at a time."""
        if self.compute is None:
            yield patch.view(self.read())[both[0]], both[1]
            return
        for there, here in _pieces(both):
            yield patch.arranged(self.compute(patch.places(there)), there), here


def _pieces(both: tuple[Index, Index]) -> Iterator[tuple[Index, Index]]:
    """Cut an index of a box and of memory along their first axes, so that each piece has few numbers."""
    lengths = [side.stop - side.start for side in both[0]]
    axis = next((number for number, length in enumerate(lengths) if length > 1), None)
    if axis is None or math.prod(lengths) <= _COMPUTED:
        yield both
        return
    step = max(1, _COMPUTED * lengths[axis] // math.prod(lengths))
    for low in range(0, lengths[axis], step):
        there, here = (_narrowed(index, axis, low, min(step, lengths[axis] - low)) for index in both)
        yield from _pieces((there, here))


def _narrowed(index: Index, axis: int, low: int, count: int) -> Index:
    start = index[axis].start + low
    return (*index[:axis], slice(start, start + count), *index[axis + 1 :])


class WeightSource:
    """All stored weights of a model: every number of ours once, however many files repeat it."""

    def __init__(
        self,
        stored: Iterable[Stored],
        shapes: Shapes,
        where: str,
        state: Any = None,
        squares: Callable[[int], Mapping[str, float]] | None = None,
        remark: str = "",
    ) -> None:
        """Refuse a source in which numbers of tensors of these shapes are missing."""
        self.shapes, self.state = shapes, state  # ``state`` is that of a run, where a checkpoint is read
        self.squares = squares  # of every tensor, told without patches; by so many threads
        self.remark = remark  # on how it was read, for the user
        holders: dict[str, dict[Box, list[tuple[Stored, Patch]]]] = {name: {} for name in shapes}
        for tensor in stored:
            for patch in tensor.patches:
                holders[patch.tensor].setdefault(patch.box, []).append((tensor, patch))
        faults: list[Fault] = []
        for name, shape in shapes.items():
            missing = math.prod(shape) - sum(math.prod(lengths) for _, lengths in holders[name])
            if missing:
                message = f"{name}: {missing} of {math.prod(shape)} numbers are missing"
                faults.append(Fault(where=where, message=message))
        if faults:
            raise InputError(faults)
        self._boxes = {name: {box: _Held(both) for box, both in boxes.items()} for name, boxes in holders.items()}
        self.dtypes = {name: next(iter(boxes.values())).stored.dtype for name, boxes in self._boxes.items()}
        all_stored = (stored for boxes in holders.values() for both in boxes.values() for stored, _ in both)
        self.stored = list({id(stored): stored for stored in all_stored}.values())

    def fill(self, memory: torch.Tensor, tensor: str, offsets: Sequence[int]) -> None:
        """Copy a box of one of our tensors into memory of its shape, in the format of the memory.

        Refuse copies in the files that differ, and numbers that are not finite, or not in that format.
        """
        for box, held in self._boxes[tensor].items():
            if both := overlap(box, (tuple(offsets), tuple(memory.shape))):
                held.check()
                for numbers, place in held.stored.parts(held.patch, both):
                    _copy(numbers, memory[place], f"{held.stored.file}: {held.stored.name}")


def _copy(numbers: torch.Tensor, target: torch.Tensor, where: str) -> None:
    target.copy_(numbers)
    if not is_finite(target):
        if is_finite(numbers):
            label = DTYPES[target.dtype].lower()
            raise InputError.of(where, f"holds numbers that are too large for {label}. Take bf16 or fp32")
        raise InputError.of(where, f"holds numbers that are not finite. {_ELSEWHERE}")


class _Held:
    """A box of one of our tensors in files: the copy that is read, and a check that all copies are equal."""

    def __init__(self, holders: Sequence[tuple[Stored, Patch]]) -> None:
        self.stored, self.patch = holders[0]
        self.check = Once(lambda: self._check(holders))

    def _check(self, holders: Sequence[tuple[Stored, Patch]]) -> None:
        if self.stored.check:
            self.stored.check()
        for stored, patch in holders[1:]:  # without their checksums, which are over whole files
            numbers = self.patch.view(self.stored.read())
            if not same_bits(numbers, patch.view(stored.read())):
                if stored.check:
                    stored.check()
                first = f"{self.stored.file}: {self.stored.name}"
                message = f"holds the same numbers of {patch.tensor} as {first}, and they differ"
                remedy = stored.remedy or _ELSEWHERE
                raise InputError.of(f"{stored.file}: {stored.name}", f"{message}. {remedy}")


def same_bits(numbers: torch.Tensor, second: torch.Tensor) -> bool:
    """Say whether two tensors hold the same bits, those of nan too."""
    if numbers.dtype != second.dtype:
        return False
    if torch.equal(numbers, second):
        return True
    raw, raw_second = (tensor.contiguous().view(torch.uint8) for tensor in (numbers, second))
    return torch.equal(raw, raw_second)


def square(numbers: torch.Tensor) -> float:
    """Return the sum of the squares of numbers, in double precision; a cache holds what is converted at a time."""
    if numbers.numel() <= _SQUARED:
        return float(torch.linalg.vector_norm(numbers, dtype=torch.float64)) ** 2
    rows = _SQUARED * len(numbers) // numbers.numel()
    return sum(square(part) for part in (numbers.split(rows) if rows else numbers))


def shape_faults(
    tensors: Mapping[str, Stored], shapes: Shapes, needless: Collection[str], where: str
) -> Iterator[Fault]:
    """Yield the tensors that are missing, of another shape, without fractions, or not of the model."""
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            yield Fault(where=f"{where}: {name}", message="missing")
        elif tensor.shape != shape:
            message = f"has shape {tensor.shape}, the model asks for {shape}"
            yield Fault(where=f"{tensor.file}: {name}", message=message)
        elif tensor.odd:
            message = f"holds {tensor.odd}, and only F64, F32, F16, BF16 can be read"
            yield Fault(where=f"{tensor.file}: {name}", message=message)
    for name in tensors.keys() - shapes.keys():
        if not name.endswith(tuple(needless)):
            yield Fault(where=f"{tensors[name].file}: {name}", message="is no tensor of this model")


def read_tensors(file: Path, advice: str) -> dict[str, Stored]:
    """Return the tensors of a safetensors file, or say what is wrong with it, and what to do."""
    try:
        opened: Any = safe_open(file, "pt")  # maps it into memory
    except (SafetensorError, OSError) as error:
        raise InputError.of(str(file), f"is no whole file of tensors ({error}). {advice}") from None
    tensors: dict[str, Stored] = {}
    for name in opened.keys():  # noqa: SIM118 (it is no mapping)
        label, shape = opened.get_slice(name).get_dtype(), tuple(opened.get_slice(name).get_shape())
        tensors[name] = Stored(
            name=name, file=str(file), dtype=TYPES.get(label, torch.uint8), shape=shape,
            read=partial(opened.get_tensor, name), odd="" if label in TYPES else label,
        )  # fmt: skip
    return tensors


def with_checksum(stored: Stored, box: StoredBox, ours: str) -> Stored:
    """Return a tensor of a checkpoint's file as a box of ours, with its checksum."""

    def check() -> None:
        if zlib.crc32(stored.read().reshape(-1).view(torch.uint8).numpy().data) != box.crc32:
            raise InputError.of(f"{stored.file}: {stored.name}", DAMAGED)

    return replace(stored, check=Once(check), patches=(whole(ours, box.offsets, box.lengths),))


_TENSORS = ".tensors"  # the folder beside a file of torch_xla's own serialisation, which holds references only
_ALIGNED_BYTES = 64  # as torch aligns what it writes
_HEADER_BYTES = 30  # cited: PKWARE APPNOTE.TXT 4.3.7: of a file in an archive, before its name and extra field
_STORAGES = {
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
}
_INSIDE = ("model", "state_dict", "module")  # under which a state dict may stand in another


class Reference:
    """Stands for a tensor in a file of its own; torch_xla calls it TensorReference."""

    tid: int


def read_state(file: Path) -> dict[str, Stored]:
    """Return the tensors of a state dict; of torch_xla's own serialisation, those in its folder."""
    with torch.serialization.safe_globals([(Reference, "torch_xla.utils.serialization.TensorReference")]):  # pyright: ignore
        state = _inner(_loaded(file), file)
    tensors: dict[str, Stored] = {}
    check = Once(lambda: _check(file))
    for name, value in state.items():
        if isinstance(value, Reference):
            require((isinstance(value.tid, int), f"{file}: {name}", f"names a file that is no number: {value.tid}"))
            own_file = Path(f"{file}{_TENSORS}") / f"tensor_{value.tid}.pt"
            value, where, its = _loaded(own_file), own_file, Once(lambda own_file=own_file: _check(own_file))
        else:
            where, its = file, check
        if isinstance(value, torch.Tensor):
            tensors[name] = Stored(
                name=name, file=str(where), dtype=value.dtype, shape=tuple(value.shape), check=its,
                odd="" if value.dtype in DTYPES else str(value.dtype).removeprefix("torch."),
                read=lambda value=value: value.detach(),
            )  # fmt: skip
    return tensors


def _inner(state: Any, file: Path) -> Mapping[str, Any]:
    """Return the state dict that a file holds, alone or as one entry beside others that are no weights."""
    while isinstance(state, Mapping) and (inside := [name for name in _INSIDE if _is_dict(state.get(name))]):
        beside = sorted(name for name, value in state.items() if name in inside[1:] or _is_weight(value))
        message = f"holds weights beside {inside[0]}: {', '.join(map(str, beside[:3]))}. Save one state_dict() alone"
        require((not beside, str(file), message))
        state = state[inside[0]]
    if not _is_dict(state):
        raise InputError.of(str(file), "holds no state dict: names, each with a tensor")
    return state


def _is_weight(value: Any) -> bool:
    """Whether a value is more than a number or the state of a generator."""
    return isinstance(value, torch.Tensor) and value.dtype in DTYPES and value.dim() > 0


def _is_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _loaded(file: Path) -> Any:
    if not file.exists():
        raise InputError.of(str(file), "there is no such file, though another names it")
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        what = str(error).partition("\n")[0]
        message = "holds more than tensors, and what could run code is not unpickled. Save its state_dict() alone"
        raise InputError.of(str(file), f"{message} ({what})") from None
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        if file.suffix in (".json", ".yaml", ".yml", ".txt", ".py"):
            advice = "holds no weights; type a folder of weights, a checkpoint or a .pt file"
            raise InputError.of(str(file), advice) from None
        raise InputError.of(str(file), f"is no whole file of torch.save ({reason}). Copy it again") from None


def _check(file: Path) -> None:
    """Compare the checksums of the archive that the file is."""
    with zipfile.ZipFile(file) as archive:
        if bad := archive.testzip():
            raise InputError.of(f"{file}: {bad}", DAMAGED)


class StateFile:
    """A state dict on its way into a file, tensor after tensor; checksums are those of the archive."""

    def __init__(self, stream: IO[bytes], tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> None:
        self._archive, pickled = zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED), io.BytesIO()
        state = {name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape in tensors}
        _Pickler(pickled, protocol=2).dump(state)
        for name, data in (("data.pkl", pickled.getvalue()), ("byteorder", b"little"), ("version", b"3\n")):
            with self._record(name, len(data)) as record:
                record.write(data)

    def _record(self, name: str, num_bytes: int) -> IO[bytes]:
        """Begin a record whose bytes are aligned."""
        entry = zipfile.ZipInfo(f"archive/{name}")
        large = num_bytes >= zipfile.ZIP64_LIMIT
        begin = self._archive.start_dir + _HEADER_BYTES + len(entry.filename) + 4 + (20 if large else 0)
        padding = -begin % _ALIGNED_BYTES
        entry.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        entry.file_size = num_bytes
        return self._archive.open(entry, "w", force_zip64=large)

    def write(self, number: int, num_bytes: int, chunks: Iterable[Any]) -> None:
        """Write the numbers of a tensor."""
        with self._record(f"data/{number}", num_bytes) as record:
            for chunk in chunks:
                record.write(chunk)

    def __enter__(self) -> "StateFile":
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        """Write the end of the archive, unless it will never be whole."""
        if failed:
            self._archive.fp = None
        self._archive.close()


class _Pickler(pickle.Pickler):
    """Pickles tensors as torch.save does, each with a storage of its own; they need no memory."""

    num_storages = 0

    def persistent_id(self, obj: Any) -> Any:
        return obj if isinstance(obj, tuple) and obj[:1] == ("storage",) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        storage = "storage", _STORAGES[obj.dtype], str(self.num_storages), "cpu", obj.numel()
        self.num_storages += 1
        return _rebuild_tensor_v2, (storage, 0, tuple(obj.shape), obj.stride(), False, OrderedDict())
