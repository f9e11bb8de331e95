"""Plans as files: canonical JSON out, strict JSON in."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from autoshard.errors import InputError, file_faults, inside, no_such_file, require
from autoshard.extensions import require_extensions
from autoshard.files import replace_text
from autoshard.plan.code import PlannedCode
from autoshard.plan.plan import SCHEMA, SEARCH, Plan
from autoshard.spec.file_kinds import MODULE_PLAN_FILE, PLAN_FILE, file_kind_of, refuse_other_kinds
from autoshard.spec.files import parsed_json, read_data, shipped_files
from autoshard.spec.model_catalogue import model_names
from autoshard.spec.recipe import RECIPES
from autoshard.spec.record import decode, encode
from autoshard.version import __version__

# Beside these files a plan is that of a run, or of a job.
_OF_RUN = "plan.json"  # in the folder of a run, and of a job
_OWNERS = {"training.json": "the run in this folder", "training.yaml": "the job in this folder"}

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


def _with_dropouts(data: dict[str, Any]) -> dict[str, Any]:
    """Schema 5 says what a model drops in training; before, nothing."""
    model = data.get("model")
    return (
        {**data, "model": {**model, "hidden_dropout": 0.0, "attention_dropout": 0.0}}
        if isinstance(model, dict)
        else data
    )


def _with_zero_group(data: dict[str, Any]) -> dict[str, Any]:
    """Schema 6 says over how many ranks ZeRO divides states; before, over all that hold the same weights."""
    return {"zero_group": None, **data}


MIGRATIONS: Migrations = {
    1: _with_documents, 2: _with_reserves, 3: _with_code, 4: _with_dropouts, 5: _with_zero_group,
}  # fmt: skip


def dump(plan: Plan) -> str:
    """Write a plan as JSON: the same plan gives the same bytes."""
    return _text(encode(plan))


def save(plan: Plan, path: Path, *, force: bool, remedy: str) -> str:
    """Write a plan file; return which other plan it held before. What somebody has edited is kept without ``force``."""
    text, before = dump(plan), _text_at(path)
    if before != text and not force:
        refuse_to_replace(path, remedy)
    with file_faults(str(path)):
        replace_text(path, text)
    return _other_plan(before, text)


def refuse_to_replace(path: Path, remedy: str) -> None:
    """Refuse to write a plan over a file, unless that holds nothing, or a plan as autoshard wrote it.

    The plan in the folder of a run or of a job is one that somebody may still need.
    """
    text = _text_at(path)
    if not text:
        return
    edited = "holds a plan that was edited, and is kept" if _is_plan(text) else "holds something else, and is kept"
    owner = next((words for name, words in _OWNERS.items() if (path.parent / name).is_file()), "")
    require(
        (is_as_written(text), str(path), f"{edited}. {remedy}, or give another name"),
        (not owner, str(path), f"is the plan of {owner}, and is kept. {remedy}, or give another name"),
    )


def is_as_written(text: str) -> bool:
    """Say whether a text is a plan file as autoshard wrote it, of any schema: an edit shows in its form or its hash.

    Only what is predicted, and what a search says of other plans, is not hashed; nobody's work is lost with it.
    """
    data = _json_of(text)
    prediction = data.get("prediction")
    if not isinstance(prediction, dict) or text != _text(data):
        return False
    return cast(dict[str, Any], prediction).get("of") == _hash_of({**data, "prediction": None})


def _text_at(path: Path) -> str:
    """Return the text of a file; nothing where there is none, or a device."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, UnicodeDecodeError):
        return "not text"


def _is_plan(text: str) -> bool:
    return {"schema", "model", "cluster"} <= _json_of(text).keys()


def _json_of(text: str) -> dict[str, Any]:
    """Return the object that a text is in JSON; an empty one for any other text."""
    try:
        data = parsed_json(text, "plan")
    except InputError:
        return {}
    return cast(dict[str, Any], data) if isinstance(data, dict) else {}


def _other_plan(before: str, now: str) -> str:
    """Name the plan that was replaced; nothing if it was the same, whatever the searches say of other plans."""
    old, new = _json_of(before), _json_of(now)
    if not _is_plan(before) or _without_search(old) == _without_search(new):
        return ""
    try:
        return f"{old['model']['name']} on {old['cluster']['num_nodes']} x {old['cluster']['name']}"
    except (KeyError, TypeError):
        return "a model"


def load(source: str | Path, migrations: Migrations = MIGRATIONS) -> Plan:
    """Read a plan from JSON text, or from the file at a Path; all faults are reported in one InputError."""
    if isinstance(source, Path) and not source.exists():
        raise InputError.of(str(source), no_such_file(source, _plan_first(str(source))))
    if isinstance(source, Path) and source.is_dir():
        of_run = source / _OF_RUN
        advice = f"It holds the plan {of_run}: name that file" if of_run.is_file() else "Name a plan file"
        raise InputError.of(str(source), f"is a folder. {advice}")
    found = parsed_json(source, "plan") if isinstance(source, str) else read_data(source)
    if isinstance(source, Path) and file_kind_of(found) is not MODULE_PLAN_FILE:
        refuse_other_kinds(source, found, PLAN_FILE)
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


def _plan_first(name: str) -> str:
    """Return what makes a plan file: of the model or the recipe that was named in its place, or of any."""
    if name in model_names() or name in shipped_files(RECIPES):
        return f"To make a plan file, type: autoshard plan {name}"
    out = f" --out {name}" if name.endswith(".json") else ""
    return f"To make a plan file, type: autoshard plan MODEL --nodes N{out}"


def with_planned_code(plan: Plan, code: PlannedCode) -> Plan:
    """Return a plan with other code, of which its prediction holds as well."""
    full = replace(plan, code=code)
    return replace(full, prediction=plan.prediction and replace(plan.prediction, of=plan_hash(full)))


def plan_hash(plan: Plan) -> str:
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
