"""The configurations of a file, by name, as values under dotted paths: YAML, JSON, TOML, Python, shell."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from autoshard.errors import InputError, file_faults, nearest, no_such_file, require
from autoshard.imports.forms.flat import flat, resolved_keys
from autoshard.imports.forms.python import configurations
from autoshard.imports.forms.shell import shell_arguments
from autoshard.spec.files import YAML_SUFFIXES, read_data

_MOST_BYTES = 4 * 2**20
_ARGUMENTS = "MODEL_ARGS"  # in files of Megatron-LM's tests: arguments as keys
_FIRST_LINES = 3
_LISTED = 12  # functions that a refusal names


def split_name(typed: str) -> tuple[Path, str | None]:
    """Split FILE.py:FUNCTION.

    >>> split_name("recipes/llama3.py:llama3_70b"), split_name("a.yaml")
    ((PosixPath('recipes/llama3.py'), 'llama3_70b'), (PosixPath('a.yaml'), None))
    """
    file, colon, name = typed.rpartition(":")
    return (Path(file), name) if colon and name.isidentifier() else (Path(typed), None)


def parsed_documents(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return the configurations of a file; only Python files hold more than one."""
    with file_faults(str(path), "read"):
        remedy = "Type the configuration or the logs of a run of yours"
        require((path.is_file(), str(path), "is not a file" if path.exists() else no_such_file(path, remedy)))
        require((path.stat().st_size <= _MOST_BYTES, str(path), "is far too large for a configuration"))
    suffix = path.suffix.lower()
    if suffix in YAML_SUFFIXES or suffix == ".json":
        return {"": _of_data(read_data(path), path)}
    text = _text(path)
    if suffix == ".toml":
        try:
            return {"": flat(tomllib.loads(text))}
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InputError.of(str(path), f"is not TOML: {error}") from None
    if suffix == ".py":
        return {name: flat(values) for name, values in configurations(text, str(path)).items()}
    if text.lstrip()[:1] == "{":
        return {"": _of_data(read_data(path), path)}
    return {"": shell_arguments(text, str(path), lambda name: _beside(path, name))}


def _beside(path: Path, name: str) -> str | None:
    file = path.parent / name
    return _text(file) if file.is_file() and file.stat().st_size <= _MOST_BYTES else None


def _of_data(data: object, path: Path) -> Mapping[str, Any]:
    """Return the values of parsed data; a list of words is a list of arguments."""
    if isinstance(data, list) and all(isinstance(item, str | int | float) for item in cast(list[object], data)):
        return shell_arguments(" ".join(map(str, cast(list[object], data))), str(path))
    items = cast(dict[Any, Any], data) if isinstance(data, dict) else {}
    require((bool(items), str(path), "must hold keys with values"))
    values = flat({str(key): value for key, value in items.items()})
    if any(name.startswith(f"{_ARGUMENTS}.") for name in values):
        named = {name.removeprefix(f"{_ARGUMENTS}."): value for name, value in values.items()}
        return {name.lstrip("-").replace("-", "_"): value for name, value in named.items() if name.startswith("--")}
    return resolved_keys(values)


def comment_of(path: Path) -> str:
    """Return the comment in the first lines of a TOML or YAML file, where people say what it is for."""
    if path.suffix.lower() not in (".toml", *YAML_SUFFIXES):
        return ""
    lines = _text(path).splitlines()[:_FIRST_LINES]
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))


def _text(path: Path) -> str:
    with file_faults(str(path), "read"):
        try:
            return path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise InputError.of(str(path), "is not text in UTF-8") from None


def chosen(found: Mapping[str, Mapping[str, Any]], path: Path, name: str | None) -> tuple[str, Mapping[str, Any]]:
    """Return the configuration of a name, or the only one."""
    require((bool(found), str(path), "holds no function that returns a configuration"))
    if name is not None:
        require((name in found, f"{path}:{name}", f"there is no such function. {nearest(name, list(found))}"))
        return name, found[name]
    names = [*found]
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    several = f"holds {len(names)} configurations: {', '.join(names[:_LISTED])}{more}. Type {path}:{names[0]}"
    require((len(names) == 1, str(path), several))
    return names[0], found[names[0]]
