"""Weights from a Hugging Face folder: every rank reads just its slices of the files, which are mapped into memory."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from autoshard.engine.hf_weights import HfNames, Row, slices
from autoshard.engine.pieces import Piece
from autoshard.errors import Fault, InputError
from autoshard.plan.plan import Plan
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model, read_config

CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_ONE = "model.safetensors"
_DTYPES = ("F64", "F32", "F16", "BF16")  # as the header of a file names them
_LENGTH_BYTES = 8  # cited: huggingface/safetensors README, Format: a little-endian length, the header, the data


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where a tensor lies, and what the header of its file says of it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_weights(path: Path, plan: Plan, pieces: Sequence[Piece]) -> None:
    """Fill the weights among the pieces of a rank with those of a Hugging Face folder, in the formats of the pieces.

    Every rank looks at all headers, so that all of them find the same faults.
    """
    names, stored = _checked(path, plan.model)
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in names.rows:
        rows[row.ours.tensor].append(row)
    with ExitStack() as stack:
        files = {file: stack.enter_context(_opened(file)) for file in {one.file for one in stored.values()}}
        for piece in (one for one in pieces if one.part == "weight" and one.reads):
            for row in rows[piece.weight]:
                assert row.ours.axes.shape(names.sizes) == piece.whole, f"{piece.weight} has shape {piece.whole}"
                for part in slices(row, names.sizes, piece.offsets, tuple(piece.memory.shape)):
                    read = files[stored[part.tensor].file].get_slice(part.tensor)[part.index]
                    piece.memory[part.place].copy_(part.laid(read))


def _checked(path: Path, model: ModelSpec) -> tuple[HfNames, Mapping[str, Stored]]:
    """Return where each of the model's tensors lies, or say all that is wrong."""
    _refuse_other_model(path / CONFIG, load_model(path / CONFIG), model)
    stored = _stored(path)
    names = HfNames.fitting(str(read_config(path / CONFIG)["model_type"]), model, stored.keys())
    faults = [
        Fault(
            where=f"{stored[fault.where].file if fault.where in stored else path}: {fault.where}", message=fault.message
        )
        for fault in names.faults({name: one.shape for name, one in stored.items()})
    ]
    for name in names.shapes.keys() & stored.keys():
        if stored[name].dtype not in _DTYPES:
            message = f"holds {stored[name].dtype}, and only {', '.join(_DTYPES)} can be read"
            faults.append(Fault(where=f"{stored[name].file}: {name}", message=message))
    if faults:
        raise InputError(sorted(faults, key=lambda fault: fault.where))
    return names, stored


def _refuse_other_model(config: Path, found: ModelSpec, wanted: ModelSpec) -> None:
    """Name the fields in which a model is not the plan's; how many positions rotary ones were trained on is free."""
    free = {"name", "source", *(("max_positions",) if wanted.positions == "rotary" else ())}
    pairs = {one.name: (getattr(found, one.name), getattr(wanted, one.name)) for one in fields(ModelSpec)}
    faults = [
        Fault(where=f"{config}: {name}", message=f"is {there} there and {here} in the plan's {wanted.name}")
        for name, (there, here) in pairs.items()
        if there != here and name not in free
    ]
    if faults:
        hint = f"To train the model of this folder, plan for it: --model {config.parent}"
        raise InputError([*faults[:-1], Fault(where=faults[-1].where, message=f"{faults[-1].message}. {hint}")])


def _stored(path: Path) -> Mapping[str, Stored]:
    """Return every tensor of a folder; where there is an index, those that it names."""
    index = path / _INDEX
    listed = _listed(index) if index.exists() else None
    if listed is not None:
        files = sorted({path / file for file in listed.values()})
    else:
        files = [path / _ONE] if (path / _ONE).exists() else sorted(path.glob("*.safetensors"))
    if not files:
        raise InputError.of(str(path), "holds no *.safetensors. Write them with transformers: model.save_pretrained")
    found = {name: stored for file in files for name, stored in _header(file).items()}
    lacking = [name for name, file in (listed or {}).items() if name not in found or found[name].file.name != file]
    if lacking and listed:
        where = f"{path / listed[lacking[0]]}: {lacking[0]}"
        raise InputError.of(where, f"is not there, though {_INDEX} says so ({len(lacking)} such tensors)")
    return found


def _listed(index: Path) -> Mapping[str, str]:
    """Read which file each tensor is in."""
    names = read_config(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise InputError.of(f"{index}: weight_map", "must say for each tensor the file that it is in")
    return {str(name): str(file) for name, file in names.items()}


def _header(file: Path) -> Mapping[str, Stored]:
    with _opened(file) as handle:
        parts = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        return {
            name: Stored(file=file, shape=tuple(part.get_shape()), dtype=part.get_dtype())
            for name, part in parts.items()
        }


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a file of tensors, or say what is wrong with it."""
    from safetensors import SafetensorError, safe_open

    if not file.exists():
        raise InputError.of(str(file), f"there is no such file, though {_INDEX} names it. Download it again")
    try:
        handle = safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InputError.of(str(file), _broken(file, str(error))) from error
    with handle as opened:
        yield opened


def _broken(file: Path, error: str) -> str:
    """Say by how much a file is too short, if its header can be read."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        try:
            header = json.loads(stream.read(length if length < file.stat().st_size else 0))
            ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
        except (ValueError, LookupError, TypeError, AttributeError):
            return f"is no whole file of tensors ({error}). Download it again"
    expected = _LENGTH_BYTES + length + max(ends, default=0)
    return f"has {file.stat().st_size} bytes of the {expected} that its header tells of. Download it again"
