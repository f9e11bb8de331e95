"""Nested data as values under dotted paths; references from one value to another are followed."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_MOST_STEPS = 16  # of references that lead to references


def flat(data: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return the values of nested objects by their paths; lists are values.

    >>> flat({"model": {"num_layers": 2, "optim": {"name": "adamw"}}})
    {'model.num_layers': 2, 'model.optim.name': 'adamw'}
    """
    return dict(_flat(data, before))


def _flat(data: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        path = f"{before}{key}"
        if isinstance(value, dict):
            yield from _flat({str(name): item for name, item in cast(dict[Any, Any], value).items()}, f"{path}.")
        else:
            yield path, value


def resolved_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Follow references of OmegaConf, ``${trainer.max_steps}`` and ``${.beside}``; others stay as they are.

    >>> resolved_keys({"model.length": 8, "model.positions": "${.length}", "data.length": "${model.positions}"})
    {'model.length': 8, 'model.positions': 8, 'data.length': 8}
    """
    return {path: _followed(values, path) for path in values}


def _followed(values: Mapping[str, Any], path: str) -> Any:
    for _ in range(_MOST_STEPS):
        value = values[path]
        match = _REFERENCE.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            return value
        name = match[1]
        target = f"{path.rpartition('.')[0]}{name}" if name.startswith(".") else name
        target = target.removeprefix(".")
        if target not in values:
            return value
        path = target
    return values[path]
