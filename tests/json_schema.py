"""The JSON Schema of records; it writes those of plans and of measured rows (``pytest --update-golden``)."""

import dataclasses
import json
import types
import typing
from typing import Any, Literal

from autoshard.plan.plan import SCHEMA, Plan

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def schema_text() -> str:
    """Give the JSON Schema of plan files, as it is shipped beside them."""
    return json.dumps({**json_schema(Plan), "title": f"autoshard plan, schema {SCHEMA}"}, indent=2) + "\n"


def json_schema(kind: object) -> dict[str, Any]:
    """Describe the JSON form of a type as JSON Schema (draft 2020-12)."""
    definitions: dict[str, Any] = {}
    root = _schema(kind, definitions)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": definitions}


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(member, definitions) for member in members]}
    if origin is Literal:
        return {"enum": list(members)}
    if origin is tuple and members[1:] == (Ellipsis,):
        return {"type": "array", "items": _schema(members[0], definitions)}
    if origin is tuple:
        items = [_schema(member, definitions) for member in members]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if origin is not None:
        return {"type": "object", "additionalProperties": _schema(members[1], definitions)}
    if kind is object:
        return {}
    if kind in _JSON_TYPES:
        return {"type": _JSON_TYPES[kind]}
    if hasattr(kind, "parse"):
        return {"type": "string", "description": _first_line(kind)}
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}
        definitions[kind.__name__] = _dataclass_schema(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _dataclass_schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    return {
        "type": "object",
        "description": _first_line(kind),
        "properties": {name: _schema(field.type, definitions) for name, field in fields.items()},
        "required": [name for name, field in fields.items() if field.default is field.default_factory],
        "additionalProperties": False,
    }


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]
