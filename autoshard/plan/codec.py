"""Plans as files: canonical JSON out, strict JSON in."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from autoshard.errors import InputError, file_faults, inside
from autoshard.extensions import require_extensions
from autoshard.plan.plan import SCHEMA, SEARCH, Plan
from autoshard.spec.files import parsed_json, read_data
from autoshard.spec.record import decode, encode
from autoshard.version import __version__

# From a schema number to the function that rewrites a file of that number into the next one's form.
Migrations = Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]


def _with_documents(data: dict[str, Any]) -> dict[str, Any]:
    """Schema 2 says whether the documents of a sequence see each other; before, they always did."""
    work = data.get("workload")
    return {**data, "workload": {**work, "documents": "joined"}} if isinstance(work, dict) else data


def _with_reserves(data: dict[str, Any]) -> dict[str, Any]:
    """Schema 3 says how much memory a plan leaves free, and how busy an expert is; before, nothing, and as all are."""
    work = data.get("workload")
    if isinstance(work, dict):
        known = cast(dict[str, Any], work)
        data = {**data, "workload": {**known, "expert_imbalance": known.get("expert_imbalance", 0.0)}}
    return {"headroom": 0.0, **data}


def _with_code(data: dict[str, Any]) -> dict[str, Any]:
    """Schema 4 may carry a decoder that was read from its code; before, all were those of cards."""
    model = data.get("model")
    return {**data, "model": {**model, "traced": None}} if isinstance(model, dict) else data


MIGRATIONS: Migrations = {1: _with_documents, 2: _with_reserves, 3: _with_code}


def dump(plan: Plan) -> str:
    """Write a plan as JSON: the same plan gives the same bytes."""
    return _text(encode(plan))


def save(plan: Plan, path: Path, *, force: bool, remedy: str) -> None:
    """Write a plan file; what a file of this name holds already is kept, unless it is the same or to be replaced."""
    text = dump(plan)
    try:
        known = path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, UnicodeDecodeError):
        known = "not text"
    if known not in ("", text) and not force and not _is_same(known, text):
        raise InputError.of(str(path), f"holds something else, and is kept. {remedy}, or give another name")
    with file_faults(str(path)):
        path.write_text(text, encoding="utf-8")


def _is_same(one: str, other: str) -> bool:
    """Say whether two files hold the same plan, whatever their searches say of other plans."""
    try:
        plans = [json.loads(text) for text in (one, other)]
    except ValueError:
        return False
    return all(isinstance(plan, dict) for plan in plans) and _without_search(plans[0]) == _without_search(plans[1])


def load(source: str | Path, migrations: Migrations = MIGRATIONS) -> Plan:
    """Read a plan from JSON text, or from the file at a Path; all faults are reported in one InputError."""
    found = parsed_json(source, "plan") if isinstance(source, str) else read_data(source)
    with inside("" if isinstance(source, str) else source):
        if not isinstance(found, dict):
            raise InputError.of("plan", "must be a JSON object")
        data = cast(dict[str, Any], found)
        if data.get("kind") == "module":
            raise InputError.of(
                "kind", "is that of a module's plan, which explain and verify read, and autoshard.shard runs"
            )
        if isinstance(origin := data.get("provenance"), dict):
            require_extensions(cast(dict[str, object], origin))
        return decode(Plan, _migrated(data, migrations))


def fingerprint(plan: Plan) -> str:
    """Hash all of a plan but its prediction; ``prediction.of`` holds it, so that an edit shows."""
    return _hash_of(encode(replace(plan, prediction=None)))


def _hash_of(data: dict[str, Any]) -> str:
    return hashlib.sha256(_text(_without_search(data)).encode()).hexdigest()


def _without_search(data: dict[str, Any]) -> dict[str, Any]:
    """Leave out what the search of a plan says of other plans."""
    origin = data.get("provenance")
    if not isinstance(origin, dict):
        return data
    entries = cast(dict[str, Any], origin)
    return {**data, "provenance": {key: entry for key, entry in entries.items() if key != SEARCH}}


def _text(data: object) -> str:
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def _migrated(data: dict[str, Any], migrations: Migrations) -> dict[str, Any]:
    number = data.get("schema")
    if number is None:
        raise InputError.of("schema", f"missing; a plan file starts with its schema number, now {SCHEMA}")
    if not isinstance(number, int) or isinstance(number, bool):
        raise InputError.of("schema", f"expected a whole number, for example {SCHEMA}")
    if number > SCHEMA:
        provenance = data.get("provenance")
        version = cast(Mapping[str, object], provenance).get("autoshard") if isinstance(provenance, dict) else None
        newer = isinstance(version, str) and version != __version__
        writer = f" It was written by autoshard {version}." if newer else ""
        message = f"{number} is newer than {SCHEMA}, the newest that autoshard {__version__} reads.{writer}"
        raise InputError.of("schema", f"{message} Install an autoshard that knows schema {number}")
    oldest = min((SCHEMA, *migrations))
    if number < oldest:
        raise InputError.of("schema", f"{number} cannot be read; this version reads schemas {oldest} to {SCHEMA}")
    for before in range(number, SCHEMA):
        data = _sealed_again(data, _ordered({**migrations[before](data), "schema": before + 1}))
    return data


def _ordered(data: dict[str, Any]) -> dict[str, Any]:
    """Put the keys of a plan into the order of its fields, in which they are hashed."""
    names = [name for name in (field.name for field in fields(Plan)) if name in data]
    return {name: data[name] for name in (*names, *(key for key in data if key not in names))}


def _sealed_again(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Let the prediction of a file that nobody has edited be that of the file's new form."""
    prediction = old.get("prediction")
    if not isinstance(prediction, dict):
        return new
    numbers = cast(dict[str, Any], prediction)
    if numbers.get("of") != _hash_of({**old, "prediction": None}):
        return new
    return {**new, "prediction": {**numbers, "of": _hash_of({**new, "prediction": None})}}
