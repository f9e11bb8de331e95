"""Files of options, such as recipes: their entries by option."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from autoshard.command_line.options import Option
from autoshard.command_line.suggesting import key_suggestion
from autoshard.errors import Fault, Faults, InputError, nearest
from autoshard.spec.file_kinds import RECIPE_FILE, refuse_other_kinds
from autoshard.spec.files import read_data
from autoshard.spec.recipe import RECIPE_KEYS, TRAINING_KEYS, entries_seen_from
from autoshard.spec.record import decode
from autoshard.spec.training import Training

Entries = dict[str, tuple[str, Any]]  # option -> how faults name the place where it is stated, and what stands there


def entries_of(where: str, path: str, options: Mapping[str, Option], faults: list[Fault]) -> Entries:
    """Return the entries of a file by option; keys of a recipe that belong to other commands are checked too."""
    try:
        data = read_data(Path(path))
        refuse_other_kinds(Path(path), data, RECIPE_FILE)
    except InputError as error:
        raise InputError(Fault(where=where, message=fault.message) for fault in error.faults) from None
    if not isinstance(data, dict):
        raise InputError.of(where, "must hold options, one `name: value` per line")
    entries: Entries = {}
    elsewhere: dict[str, object] = {}
    flat = dict(_flattened(cast(dict[Any, Any], data), options, ""))
    for name, value in entries_seen_from(flat, Path(path).parent).items():
        section, _, key = name.rpartition(".")
        inside = _keys(options, f"{name}.")
        if name == "extend":
            entries[name] = (path, value or ())
        elif name in options or (inside and value is None):
            entries |= {} if value is None else {name: (f"{where}: {name}", value)}
        elif inside:
            message = f"must hold keys, each on a line of its own: {', '.join(inside)}"
            faults.append(Fault(where=f"{where}: {name}", message=message))
        elif name in RECIPE_KEYS:
            elsewhere[name] = value
        else:
            names = _keys(options, f"{section}.") if section else [*_keys(options, ""), *RECIPE_KEYS]
            keys = list(dict.fromkeys(names))
            message = f"unknown key. {nearest(key, keys) if section else key_suggestion(key, keys)}"
            faults.append(Fault(where=f"{where}: {name}", message=message))
    of_training = Faults()
    with of_training.of():
        decode(Training, {key: elsewhere[key] for key in TRAINING_KEYS if elsewhere.get(key) is not None})
    faults += (Fault(where=f"{where}: {fault.where}", message=fault.message) for fault in of_training)
    return entries


def _flattened(section: Mapping[Any, Any], options: Mapping[str, Option], before: str) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a file with the names of options: those of sections have dots."""
    for key, value in section.items():
        name = before + str(key).replace("-", "_")
        if isinstance(value, dict) and _keys(options, f"{name}."):
            yield from _flattened(cast(dict[Any, Any], value), options, f"{name}.")
        else:
            yield name, value


def _keys(options: Mapping[str, Option], before: str) -> list[str]:
    """Return the keys of a section, such as ``schedule.``."""
    inside = (name.removeprefix(before).partition(".")[0] for name in options if name.startswith(before))
    return list(dict.fromkeys(inside))
