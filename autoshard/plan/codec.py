"""Plans as files: canonical JSON out, strict JSON in."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from autoshard.errors import Fault, InputError
from autoshard.extensions import require_extensions
from autoshard.plan.plan import SCHEMA, Plan
from autoshard.spec.record import decode, encode

# From a schema number to the function that rewrites a file of that number into the next one's form.
Migrations = Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]


def _with_documents(data: dict[str, Any]) -> dict[str, Any]:
    """Schema 2 says whether the documents of a sequence see each other; before, they always did."""
    work = data.get("workload")
    return {**data, "workload": {**work, "documents": "joined"}} if isinstance(work, dict) else data


MIGRATIONS: Migrations = {1: _with_documents}


def dump(plan: Plan) -> str:
    """Write a plan as JSON: the same plan gives the same bytes."""
    return _text(encode(plan))


def load(source: str | Path, migrations: Migrations = MIGRATIONS) -> Plan:
    """Read a plan from JSON text, or from the file at a Path; all faults are reported in one InputError."""
    where = "" if isinstance(source, str) else f"{source}: "
    try:
        data = _parse(source if isinstance(source, str) else _read(source))
        if not isinstance(data, dict):
            raise InputError.of("plan", "must be a JSON object")
        if isinstance(origin := cast(dict[str, Any], data).get("provenance"), dict):
            require_extensions(cast(dict[str, object], origin))
        return decode(Plan, _migrated(cast(dict[str, Any], data), migrations))
    except InputError as error:
        faults = (Fault(where=f"{where}{fault.where}".rstrip(": "), message=fault.message) for fault in error.faults)
        raise InputError(faults) from error


def fingerprint(plan: Plan) -> str:
    """Hash all of a plan but its prediction; ``prediction.of`` holds it, so that an edit shows."""
    return _hash_of(encode(replace(plan, prediction=None)))


def _hash_of(data: object) -> str:
    return hashlib.sha256(_text(data).encode()).hexdigest()


def _text(data: object) -> str:
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError.of("", f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # bytes that are no text; a path that no file can have
        raise InputError.of("", f"is not text in UTF-8: {error}") from error


class _Repeating(dict[str, Any]):
    """A JSON object; keys that stand twice wait for its path to be known."""

    repeated: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = _Repeating(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        found.repeated = tuple(key for key in found if keys.count(key) > 1)
    return found


def _parse(text: str) -> object:
    try:
        data: object = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise InputError.of(f"line {error.lineno}, column {error.colno}", f"is not JSON: {error.msg}") from error
    except RecursionError as error:
        raise InputError.of("plan", "is nested too deeply") from error
    except ValueError as error:  # a whole number of thousands of digits
        raise InputError.of("plan", f"is not usable JSON: {error}") from error
    faults = [Fault(where=path, message="this key stands twice; keep one") for path in _repeated_paths(data)]
    if faults:
        raise InputError(faults)
    return data


def _repeated_paths(data: object) -> list[str]:
    """Find the keys that stand twice, without recursion, because a file may nest deeply."""
    paths: list[str] = []
    pending: list[tuple[str, object]] = [("", data)]
    while pending:
        where, value = pending.pop()
        if isinstance(value, _Repeating):
            paths += [_inside(where, key) for key in value.repeated]
        if isinstance(value, dict):
            pairs = cast(dict[str, object], value)
            pending += [(_inside(where, key), item) for key, item in pairs.items()]
        elif isinstance(value, list):
            items = cast(list[object], value)
            pending += [(f"{where}[{index}]", item) for index, item in enumerate(items)]
    return sorted(paths)


def _inside(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _migrated(data: dict[str, Any], migrations: Migrations) -> dict[str, Any]:
    number = data.get("schema")
    if number is None:
        raise InputError.of("schema", f"missing; a plan file starts with its schema number, now {SCHEMA}")
    if not isinstance(number, int) or isinstance(number, bool):
        raise InputError.of("schema", f"expected a whole number, for example {SCHEMA}")
    if number > SCHEMA:
        provenance = data.get("provenance")
        version = cast(Mapping[str, object], provenance).get("autoshard") if isinstance(provenance, dict) else None
        writer = f"autoshard {version}" if isinstance(version, str) else f"an autoshard that knows schema {number}"
        raise InputError.of(
            "schema", f"{number} is newer than {SCHEMA}, the newest that this version reads. Use {writer} or later"
        )
    oldest = SCHEMA
    while oldest - 1 in migrations:
        oldest -= 1
    if number < oldest:
        readable = f"schema {SCHEMA}" if oldest == SCHEMA else f"schemas {oldest} to {SCHEMA}"
        raise InputError.of("schema", f"{number} cannot be read; this version reads {readable}")
    for before in range(number, SCHEMA):
        data = _sealed_again(data, {**migrations[before](data), "schema": before + 1})
    return data


def _sealed_again(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Let the prediction of a file that nobody has edited be that of the file's new form."""
    prediction = old.get("prediction")
    if not isinstance(prediction, dict):
        return new
    numbers = cast(dict[str, Any], prediction)
    try:
        if numbers.get("of") != _hash_of({**old, "prediction": None}):
            return new
    except (ValueError, RecursionError):  # what no plan holds, as decoding says
        return new
    return {**new, "prediction": {**numbers, "of": _hash_of({**new, "prediction": None})}}
