"""Typed text becomes values of the options' types; what is wrong with it becomes faults."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from jsonargparse import ArgumentError, ArgumentParser

from autoshard.command_line.options import DEFAULT_PLAN, REQUIRED, Configuration, Counts, Option, Paths, PlanOrRecipe
from autoshard.errors import Fault, nearest
from autoshard.files import FolderPath
from autoshard.spec.recipe import Pins, plain_number

EXPECTED: dict[Any, tuple[str, str]] = {  # type -> how the help and how a fault names it
    bool: ("", "true or false"),
    int: ("N", "a whole number"),
    float: ("X", "a number like 0.001, 1e-3 or 10%"),
    int | str: ("N", "a whole number, or tokens like 4M"),
    float | str: ("USD", "dollars like 21.5 or 2.5/chip"),
    Counts: ("N[,N...]", "a whole number, or several like 4,8,16"),
    Path: ("PATH", "a path"),
    Paths: ("PATH", "paths"),
    Pins: ("KEY=VALUE[,...]", "text"),
    Configuration: ("FILE", "a file"),
}
MISSING = "missing"  # the fault of an option that has no default


def pairs_of(option: Option, texts: Sequence[str], faults: list[Fault]) -> dict[str, str]:
    """Split NAME=VALUE; a name alone weighs 1 where values are weights."""
    pairs: dict[str, str] = {}
    for text in texts:
        weighs = option.kind == Mapping[str, float]
        name, equals, value = text.rpartition("=") if weighs else text.partition("=")
        name, value = (name, value) if equals else (text, "1" if weighs else "")
        if name in pairs:
            faults.append(Fault(where=f"{option.flag} {name}", message="is given twice; keep one"))
        pairs[name.strip()] = value
    return pairs


def value_of(option: Option, stated: tuple[str, Any] | None, faults: list[Fault]) -> object:
    """Return the value of an option in its type, or its default; what is wrong with it joins the faults."""
    if stated is None:
        faults += _missing(option)
        return {} if option.repeats else None if option.default is REQUIRED else option.default
    (where, raw), kind = stated, option.kind
    if isinstance(raw, int | float) and not isinstance(raw, bool) and kind not in (int, float, int | str, float | str):
        raw = str(raw)
    if isinstance(raw, str) and (not raw.strip() or "\0" in raw):
        faults.append(Fault(where=where, message="must not be empty"))
        return None
    reader = ArgumentParser(exit_on_error=False)
    reader.add_argument("--value", type=getattr(kind, "__supertype__", kind))
    try:
        listed = f"[{raw}]" if kind == Counts and isinstance(raw, str) else plain_number(option.name, option.kind, raw)
        value = reader.parse_object({"value": listed}, defaults=False).value
    except ArgumentError:
        value = None
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        faults.append(Fault(where=where, message=_mismatch(option, raw)))
    return FolderPath(value) if isinstance(value, Path) and str(raw).endswith("/") else value


def _missing(option: Option) -> list[Fault]:
    """Return what is missing: an option without a default, or the plan file that is read where none is typed."""
    if option.default is REQUIRED:
        choices = f"; one of {', '.join(option.words)}" if option.words else ""
        return [Fault(where=option.label, message=f"{MISSING}{choices}")]
    reads_plan = option.is_positional and option.default in (DEFAULT_PLAN, (DEFAULT_PLAN,))
    if reads_plan and not DEFAULT_PLAN.exists():
        form = "a plan file or a recipe" if option.kind is PlanOrRecipe else "a plan file"
        message = (
            f"missing, and this folder has no {DEFAULT_PLAN}. Type {form}, or make one: autoshard plan MODEL --nodes N"
        )
        return [Fault(where=option.label, message=message)]
    return []


def _mismatch(option: Option, raw: object) -> str:
    """Say what an option expects instead of what was typed."""
    if option.repeats:
        values = "numbers" if option.kind == Mapping[str, float] else "text in quotes"
        return f"must map names to {values}, one `name: value` per line"
    is_list_of_counts = option.kind == Counts and isinstance(raw, list)
    if isinstance(raw, dict | list | bool) and option.kind is not bool and not is_list_of_counts:
        joined = _joined(raw) if option.kind is Pins else ""
        return f"expected a single value. Write {joined}" if joined else "expected a single value"
    if option.words and option.kind not in EXPECTED:
        number = " A whole number is fine too." if int in get_args(option.kind) else ""
        return f"{str(raw)!r} is not one of them. {nearest(str(raw), option.words)}{number}"
    return f"expected {EXPECTED.get(option.kind, ('', 'text'))[1]}, found {str(raw)!r}"


def _joined(values: object) -> str:
    """Return a list or a mapping of plain values as the text that pins are; nothing for any other.

    >>> _joined({"tp": 8, "pp": 2}), _joined(["tp=8", "pp=2"]), _joined([["tp=8"]])
    ('tp=8,pp=2', 'tp=8,pp=2', '')
    """
    parts = list(cast(Mapping[Any, Any], values).items()) if isinstance(values, dict) else []
    texts = [f"{name}={value}" for name, value in parts if isinstance(value, str | int | float)]
    if isinstance(values, list):
        parts = cast(list[Any], values)
        texts = [str(value) for value in parts if isinstance(value, str | int | float)]
    return ",".join(texts) if len(texts) == len(parts) else ""
