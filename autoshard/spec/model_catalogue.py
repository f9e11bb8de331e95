"""Find model cards by name, and read any Hugging Face ``config.json`` by path."""

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from autoshard.errors import InputError, file_faults, inside, nearest, require
from autoshard.spec.file_kinds import CONFIG_FILE, refuse_other_kinds
from autoshard.spec.files import read_data, shipped
from autoshard.spec.hf.config import spec_from_config
from autoshard.spec.model import ModelSpec
from autoshard.spec.record import show_value

# The key of a card for its description and the source of its numbers; all other keys are plain Hugging Face.
HEADER = "autoshard"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)  # of a user or an organisation
_MAX_CONFIG_BYTES = 16 * 2**20
_CITATIONS = ("https://", "arXiv:", "Designed for this project")


def model_names() -> tuple[str, ...]:
    """Return the names of all model cards.

    >>> "llama3-70b" in model_names()
    True
    """
    return _names_in(shipped("models"))


def load_model(name_or_path: str | Path) -> ModelSpec:
    """Return a model by the name of its card or its name on the hub, or by the path of a ``config.json`` or its folder.

    >>> load_model("llama3-8b").num_parameters
    8030261248
    """
    names = model_names()
    text = str(name_or_path)
    if text.count("/") == 1 and isinstance(name_or_path, str) and not os.path.lexists(text):
        name_or_path = text = _hub_names().get(text.lower(), text)
    if text in names and isinstance(name_or_path, str):
        return _card(shipped("models") / f"{text}.json")
    looks_like_a_path = isinstance(name_or_path, Path) or text.endswith(".json") or "/" in text or os.sep in text
    if not looks_like_a_path and not (text and os.path.lexists(text)):
        hint = f"{nearest(text, names, 'models')} Or give the path of a config.json."
        raise InputError.of("model", f"{text!r} is not a known model. {hint}")
    path = Path(name_or_path)
    on_hub = isinstance(name_or_path, str) and _HUB_NAME.fullmatch(text) is not None and path.suffix != ".json"
    if on_hub and not os.path.lexists(text):
        download = f"hf download {text} config.json --local-dir {path.name}"
        reason = (
            f"no card has this name on the hub, and there is no such folder. Type: {download}, and name that folder"
        )
        raise InputError.of(text, reason)
    with file_faults(text, "opened"):
        path = path / "config.json" if path.is_dir() else path
        name = path.stem if path.name != "config.json" else path.resolve().parent.name
    return _load(path, name or "model")


@functools.cache
def _names_in(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.json")))


@functools.cache
def _card(path: Path) -> ModelSpec:
    """Read a card that ships with autoshard; a question about vendors' layouts compares dozens of them."""
    return _load(path, path.stem, is_card=True)


def _hub_names() -> Mapping[str, str]:
    """Return the names of cards by the names that their models have on the Hugging Face hub, in small letters."""
    names: dict[str, str] = {}
    for name in model_names():
        header = cast(Mapping[str, Any], read_config(shipped("models") / f"{name}.json")[HEADER])
        names |= {hub_name.lower(): name for hub_name in header.get("hub", ())}
    return names


def load_config(name_or_path: str | Path) -> Mapping[str, object]:
    """Return the config of a model as transformers reads it: without the header of a card."""
    path = Path(name_or_path)
    if str(name_or_path) in model_names() and isinstance(name_or_path, str):
        path = shipped("models") / f"{name_or_path}.json"
    config = read_config(path / "config.json" if path.is_dir() else path)
    return {key: value for key, value in config.items() if key != HEADER}


def read_config(path: Path) -> Mapping[str, object]:
    """Return the data of a config.json."""
    with file_faults(str(path), "read"):
        advice = "Give a config.json, a folder that holds one, or a name that `autoshard list models` shows."
        require((path.exists(), str(path), f"there is no such file. {advice}"))
        require((path.is_file(), str(path), "is not a regular file"))
        too_large = "is far too large for a config.json; is it a file of weights?"
        require((path.stat().st_size <= _MAX_CONFIG_BYTES, str(path), too_large))
    data = read_data(path)
    refuse_other_kinds(path, data, CONFIG_FILE)
    not_object = f"must be a JSON object, as a Hugging Face config.json is, not {show_value(data)}"
    require((isinstance(data, dict), str(path), not_object))
    return cast(dict[str, object], data)


def _load(path: Path, name: str, *, is_card: bool = False) -> ModelSpec:
    config = read_config(path)
    header = config.get(HEADER)
    stated = cast(Mapping[str, object], header).get("source") if isinstance(header, Mapping) else None
    source = stated if isinstance(stated, str) else f"the user's {path.name}"
    cited = not is_card or any(mark in source for mark in _CITATIONS)
    advice = f"must say where the numbers are from, with one of: {', '.join(_CITATIONS)}"
    with inside(path):
        require((cited, f"{HEADER}.source", advice))
        return spec_from_config(config, name=name, source=source)
