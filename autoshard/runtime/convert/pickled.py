"""Files of ``torch.save``: read without running anything that they say, written tensor by tensor."""

import io
import math
import mmap
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch._utils import _rebuild_tensor_v2  # pyright: ignore[reportPrivateUsage]

from autoshard.errors import InputError
from autoshard.runtime.checkpoint.files import DTYPES
from autoshard.runtime.convert.stored import Once, Stored

_TENSORS = ".tensors"  # the folder beside a file of torch_xla's own serialisation, which holds references only
_ALIGNED_BYTES = 64  # as torch aligns what it writes
# cited: PKWARE APPNOTE.TXT 4.3.7: the header of a file in an archive; in it the lengths of name and extra field.
_HEADER_BYTES, _LENGTHS_AT = 30, 26
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
        state = _loaded(file)
    while isinstance(state, Mapping) and (inside := [state[name] for name in _INSIDE if _is_dict(state.get(name))]):
        state = inside[0]
    if not _is_dict(state):
        raise InputError.of(str(file), "holds no state dict: names, each with a tensor")
    found: dict[str, Stored] = {}
    check = Once(lambda: _check(file))
    for name, value in state.items():
        if isinstance(value, Reference):
            one = Path(f"{file}{_TENSORS}") / f"tensor_{value.tid}.pt"
            value, where, its = _loaded(one), one, Once(lambda one=one: _check(one))
        else:
            where, its = file, check
        if isinstance(value, torch.Tensor):
            found[name] = Stored(
                name=name, file=str(where), dtype=value.dtype, shape=tuple(value.shape), check=its,
                odd="" if value.dtype in DTYPES else str(value.dtype).removeprefix("torch."),
                read=lambda value=value: value.detach(),
            )  # fmt: skip
    return found


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
        raise InputError.of(str(file), f"is no whole file of torch.save ({reason}). Copy it again") from None


def _check(file: Path) -> None:
    """Compare the checksums of the archive that the file is."""
    bad = ""
    with file.open("rb") as stream, zipfile.ZipFile(stream) as archive:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        for one in archive.infolist():
            lengths = struct.unpack_from("<HH", mapped, one.header_offset + _LENGTHS_AT)
            start = one.header_offset + _HEADER_BYTES + sum(lengths)
            with memoryview(mapped) as view, view[start : start + one.file_size] as data:
                bad = bad or ("" if zlib.crc32(data) == one.CRC else one.filename)
        mapped.close()
    if bad:
        raise InputError.of(f"{file}: {bad}", "its checksum is another than when it was saved. The file is damaged")


class StateFile:
    """A state dict on its way into a file, tensor after tensor; checksums are those of the archive."""

    def __init__(self, stream: IO[bytes], tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> None:
        self._archive = zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED)
        for name, data in (("data.pkl", _pickled(tensors)), ("byteorder", b"little"), ("version", b"3\n")):
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


class _PickledStorage:
    def __init__(self, key: int, dtype: torch.dtype, size: int) -> None:
        self.told = ("storage", _STORAGES[dtype], str(key), "cpu", size)


class _PickledTensor:
    """Is pickled as a tensor is."""

    def __init__(self, storage: _PickledStorage, shape: tuple[int, ...]) -> None:
        self._storage, self._shape = storage, shape

    def __reduce__(self) -> Any:
        strides = tuple(_strides(self._shape))
        return _rebuild_tensor_v2, (self._storage, 0, self._shape, strides, False, OrderedDict())


def _strides(shape: tuple[int, ...]) -> Iterator[int]:
    return (math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.told if isinstance(obj, _PickledStorage) else None


def _pickled(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    state = {
        name: _PickledTensor(_PickledStorage(key, dtype, math.prod(shape)), shape)
        for key, (name, dtype, shape) in enumerate(tensors)
    }
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(state)
    return buffer.getvalue()
