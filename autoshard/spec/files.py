"""Read files of users, JSON or YAML by suffix, into plain Python data."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from autoshard.errors import InputError, close_names, file_faults, nearest

YAML_SUFFIXES = (".yaml", ".yml")
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")


def shipped(name: str) -> Path:
    """Return a data folder of autoshard: inside the package if that was installed, beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_data" / name
    return installed if installed.is_dir() else package.parent / name


def shipped_files(folder: str) -> Mapping[str, Path]:
    """Return the YAML files of a data folder that come with autoshard, by the names by which they may be called."""
    return {path.stem: path for path in sorted(shipped(folder).glob("*.yaml"))}


def named_file(typed: Path, folder: str) -> Path:
    """Return a file of the user's, or the one of a data folder that comes with autoshard under this name.

    >>> named_file(Path("tiny-text"), "recipes").name
    'tiny-text.yaml'
    """
    if typed.is_file():
        return typed
    files, is_yaml = shipped_files(folder), typed.suffix.lower() in YAML_SUFFIXES
    if str(typed) in files:
        return files[str(typed)]
    if not typed.exists() and is_yaml and typed.stem in files:
        remedy = f"To use the one that comes with autoshard, type {typed.stem}"
        raise InputError.of(str(typed), f"there is no such file. {remedy}")
    if not typed.exists() and (is_yaml or (typed.name == str(typed) and not typed.suffix)):
        near = close_names(typed.stem, list(files))  # of a path of the user's, none may be ours
        meant = f". {nearest(typed.stem, list(files), Path(folder).name)}" if near or not is_yaml else ""
        raise InputError.of(str(typed), f"there is no such file{meant}")
    return typed


def read_data(path: Path) -> object:
    """Parse a JSON file, or a YAML file if its suffix says so; every fault is an InputError."""
    try:
        text = _bytes(path).decode("utf-8-sig")  # editors of Windows write a mark first
    except UnicodeDecodeError as error:
        raise InputError.of(str(path), "is not text in UTF-8") from error
    try:
        return _parsed_yaml(text, path) if path.suffix.lower() in YAML_SUFFIXES else parsed_json(text, str(path))
    except RecursionError as error:
        raise InputError.of(str(path), "is nested too deeply") from error


def json_lines(path: Path) -> Mapping[str, object]:
    """Parse a file with one JSON value per line, and return each value under its place, as in ``runs.jsonl line 3``.

    A line that is not JSON has an InputError as its value; the other lines are still read.
    """
    values: dict[str, object] = {}
    for number, line in enumerate(_bytes(path).split(b"\n"), 1):
        if line.strip():
            try:
                value = parsed_line(line, "")
            except InputError as error:
                value = error
            values[f"{path} line {number}"] = value
    return values


def parsed_line(line: bytes, where: str) -> object:
    """Parse a line of JSON; what is wrong with it is an InputError."""
    try:
        return parsed_json(line.decode("utf-8-sig"), where)
    except UnicodeDecodeError:
        raise InputError.of(where, "is not text in UTF-8") from None


def json_line(line: str | bytes) -> object:
    """Return the JSON value of a line; None if it cannot be read, since anybody may have changed the file.

    A kill or a full disk leaves half a line, and lines can be nested more deeply than Python reads.

    >>> json_line('{"step": 3}'), json_line('{"st'), json_line("[" * 5000)
    ({'step': 3}, None, None)
    """
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _bytes(path: Path) -> bytes:
    with file_faults(str(path), "read"):
        return path.read_bytes()


def parsed_json(text: str, where: str) -> object:
    """Parse JSON text; a key may appear only once in an object, and numbers must be finite."""
    if not text.strip():
        raise InputError.of(where, "is empty")
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""  # where there is one, its number is that of the file
        what = error.msg.removesuffix(" at")
        raise InputError.of(where, f"is not JSON: {what} in {line}column {error.colno}") from error
    except InputError as error:
        raise InputError.of(where, str(error)) from error
    except ValueError as error:  # a whole number of thousands of digits
        raise InputError.of(where, f"is not usable JSON: {error}") from error
    except RecursionError as error:
        raise InputError.of(where, "is nested too deeply") from error


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_repeats([key for key, _ in pairs], "")
    return dict(pairs)


def _refuse_repeats(keys: list[Any], where: str) -> None:
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise InputError.of(where, f"the key {twice!r} appears twice in one object")


def yaml_of(data: object, *, width: int = 1000, flow: bool | None = False) -> str:
    """Write YAML in the order that data has, without aliases; text that readers take for a number is quoted.

    >>> yaml_of(["1e5", 1e-05]).splitlines()
    ["- '1e5'", '- 1.0e-05']
    """
    import yaml

    class YamlDumper(yaml.SafeDumper):
        """Knows 3e11 as a number, as ``parsed`` files and YAML 1.2 do."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    cast(Any, YamlDumper).add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("+-0123456789"))
    return yaml.dump(data, Dumper=YamlDumper, sort_keys=False, default_flow_style=flow, width=width)


def _parsed_yaml(text: str, path: Path) -> object:
    import yaml  # here, because planning from JSON must not pay for it

    class YamlLoader(yaml.SafeLoader):
        """Reads 3e11 as a number, which is text in YAML 1.1, and dates as text, which are none in JSON.

        Equal keys are refused, of which YAML keeps the last.
        """

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _refuse_repeats([key.value for key, _ in node.value], str(path))
            return super().construct_mapping(node, deep)

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            # Deep, so that what holds itself (&a {b: *a}) is refused.
            return cast(Any, super()).construct_object(node, deep=True)

    cast(Any, YamlLoader).add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("+-0123456789"))
    as_text = cast(Any, yaml.SafeLoader).construct_yaml_str
    cast(Any, YamlLoader).add_constructor("tag:yaml.org,2002:timestamp", as_text)
    try:
        return cast(object, yaml.load(text, Loader=YamlLoader))
    except (yaml.YAMLError, ValueError) as error:
        raise InputError.of(str(path), f"is not YAML: {' '.join(str(error).split())}") from error


def seen_from(name: str, folder: Path) -> str:
    """Return the path of a name that a file in a folder states: it leads from there, or else from where we are.

    Of FILE.py:FUNCTION the file counts, of a set of tokens its index.
    """

    def is_there(path: Path) -> bool:
        names = path.name, f"{path.name}.idx", path.name.partition(":")[0]
        return any(path.with_name(name).exists() for name in names if name)

    return str(folder / name) if is_there(folder / name) else name
