"""Finds model cards by name, and reads any Hugging Face ``config.json`` by path."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from autoshard.errors import Fault, InputError, nearest
from autoshard.spec.config_reader import shown
from autoshard.spec.files import shipped
from autoshard.spec.hf_config import spec_from_config
from autoshard.spec.model import ModelSpec

# The key under which a card says what it is and where its numbers are from; the rest is plain Hugging Face.
HEADER = "autoshard"
_MAX_CONFIG_BYTES = 16 * 2**20


def model_names() -> tuple[str, ...]:
    """Return the names of all cards, without reading them.

    >>> "llama3-70b" in model_names()
    True
    """
    return tuple(sorted(path.stem for path in shipped("models").glob("*.json")))


def load_model(name_or_path: str | Path) -> ModelSpec:
    """Return the model of a card's name, or of the path of a ``config.json`` or of a folder that holds one.

    >>> load_model("llama3-8b").num_parameters
    8030261248
    """
    names = model_names()
    text = str(name_or_path)
    if text in names and isinstance(name_or_path, str):
        return _load(shipped("models") / f"{text}.json", text)
    if not _is_path(name_or_path):
        hint = f"{nearest(text, names)} Or give the path of a config.json."
        raise InputError.of("model", f"{text!r} is not a known model. {hint}")
    path = Path(name_or_path)
    try:
        path = path / "config.json" if path.is_dir() else path
        name = path.stem if path.name != "config.json" else path.resolve().parent.name
    except (OSError, ValueError) as error:
        raise InputError.of(text, f"cannot be opened: {error}") from error
    return _load(path, name or "model")


def load_config(name_or_path: str | Path) -> Mapping[str, object]:
    """Return what ``load_model`` reads as transformers reads it: without the header of a card."""
    path = Path(name_or_path)
    if str(name_or_path) in model_names() and isinstance(name_or_path, str):
        path = shipped("models") / f"{name_or_path}.json"
    config = read_config(path / "config.json" if path.is_dir() else path)
    return {key: value for key, value in config.items() if key != HEADER}


def _is_path(name_or_path: str | Path) -> bool:
    text = str(name_or_path)
    looks_like_one = isinstance(name_or_path, Path) or text.endswith(".json") or "/" in text or os.sep in text
    return looks_like_one or (text != "" and os.path.lexists(text))


def _load(path: Path, name: str) -> ModelSpec:
    config = read_config(path)
    header = config.get(HEADER)
    stated = cast(Mapping[str, object], header).get("source") if isinstance(header, Mapping) else None
    source = stated if isinstance(stated, str) else f"the user's {path.name}"
    try:
        return spec_from_config(config, name=name, source=source)
    except InputError as error:
        # The path in front says which file; the dots after it lead to the field.
        faults = [Fault(where=f"{path}: {fault.where}", message=fault.message) for fault in error.faults]
        raise InputError(faults) from error


def read_config(path: Path) -> Mapping[str, object]:
    """Return the data of a config.json, or say why there is none."""
    try:
        content = _content(path)
    except (OSError, ValueError) as error:
        raise InputError.of(str(path), f"cannot be read: {error}") from error
    try:
        data: object = json.loads(content)
    except json.JSONDecodeError as error:
        message = f"is not JSON: {error.msg} in line {error.lineno}, column {error.colno}"
        raise InputError.of(str(path), message) from error
    except (ValueError, RecursionError) as error:
        raise InputError.of(str(path), f"is not usable JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError.of(str(path), f"must be a JSON object, as a Hugging Face config.json is, not {shown(data)}")
    return cast(dict[str, object], data)


def _content(path: Path) -> bytes:
    if not path.exists():
        known = "Give a config.json, a folder that holds one, or a name that `autoshard list models` shows."
        raise InputError.of(str(path), f"there is no such file. {known}")
    if not path.is_file():
        raise InputError.of(str(path), "is not a regular file")
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise InputError.of(str(path), "is far too large for a config.json; is it a file of weights?")
    content = path.read_bytes()
    if not content.strip():
        raise InputError.of(str(path), "is empty")
    return content
