"""Files of ``torch.save``: read without running code in them, written tensor by tensor."""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch._utils import _rebuild_tensor_v2  # pyright: ignore[reportPrivateUsage]

from autoshard.errors import InputError
from autoshard.runtime.checkpoint.files import DTYPES
from autoshard.runtime.convert.stored import DAMAGED, Once, Stored

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
