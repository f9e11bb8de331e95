"""One way between JSON and frozen dataclasses: decode (strict, all faults at once) and encode.

A field's annotation is its format. Supported: ``str``, ``int``, ``float``, ``bool``, ``None``, ``Literal``,
unions with None, ``tuple[T, ...]``, ``tuple[A, B]``, ``Mapping[str, T]``, other dataclasses, classes with a text
form (``parse`` and ``str``), and ``object`` for any JSON.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeVar

from autoshard.errors import Fault, InputError, nearest

T = TypeVar("T")
MAX_WHOLE = 2**63 - 1  # what other JSON readers keep exactly, and small enough for any product to be printed
_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


def decode(kind: type[T], data: object, where: str = "") -> T:
    """Build a value of ``kind`` from parsed JSON, or raise one InputError with the path of every fault."""
    faults: list[Fault] = []
    value = _decode(kind, data, where, faults)
    if faults:
        raise InputError(faults)
    return typing.cast(T, value)


def encode(value: object) -> Any:
    """Turn a value made of frozen dataclasses into plain JSON data."""
    if dataclasses.is_dataclass(value) and not _has_text_form(type(value)):
        return {name: _encode_field(field.type, getattr(value, name)) for name, field in _fields(type(value)).items()}
    if isinstance(value, tuple):
        return [encode(item) for item in typing.cast(tuple[object, ...], value)]
    if isinstance(value, Mapping):
        pairs = typing.cast(Mapping[str, object], value)
        return {key: encode(pairs[key]) for key in sorted(pairs)}
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


def _encode_field(kind: Any, value: object) -> Any:
    """Encode; a whole number in a field of floats becomes a float, as decoding makes it one."""
    encoded, members = encode(value), typing.get_args(kind)
    if type(value) is int and (kind is float or float in members):
        return float(value)
    if members and members[-1] is float and isinstance(value, Mapping):
        return {key: float(number) for key, number in encoded.items()}
    return encoded


def _has_text_form(kind: type) -> bool:
    return hasattr(kind, "parse")


def _refuse(faults: list[Fault], where: str, message: str) -> None:
    faults.append(Fault(where=where, message=message))


def _decode(kind: Any, data: object, where: str, faults: list[Fault]) -> object:
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in members:
            return None
        (member,) = (member for member in members if member is not type(None))
        return _decode(member, data, where, faults)
    if origin is Literal:
        known = any(data == choice and type(data) is type(choice) for choice in members)
        says = f"expected one of {', '.join(map(str, members))}, found {_shown(data)}"
        return data if known else _refuse(faults, where, says)
    if origin is tuple:
        return _decode_tuple(kind, data, where, faults)
    if origin is not None:
        return _decode_mapping(kind, data, where, faults)
    if kind in _NAMES:
        return _decode_plain(kind, data, where, faults)
    if kind is object:
        return data
    if _has_text_form(kind):
        return _decode_text(kind, data, where, faults)
    return data if isinstance(data, kind) else _decode_dataclass(kind, data, where, faults)


def _decode_text(kind: Any, data: object, where: str, faults: list[Fault]) -> object:
    if not isinstance(data, str):
        return _refuse(faults, where, f"expected text, found {_shown(data)}")
    return _guarded(lambda: kind.parse(data), where, faults)


def _decode_plain(kind: type, data: object, where: str, faults: list[Fault]) -> object:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        try:
            return float(data)
        except OverflowError:
            return _refuse(faults, where, "this number is too large")
    fits = isinstance(data, kind) and not (isinstance(data, bool) and kind is not bool)
    if not fits:
        return _refuse(faults, where, f"expected {_NAMES[kind]}, found {_shown(data)}")
    if isinstance(data, float) and not math.isfinite(data):
        return _refuse(faults, where, "must be finite")
    if isinstance(data, int) and abs(data) > MAX_WHOLE:
        return _refuse(faults, where, "this number is too large")
    return data


def _decode_tuple(kind: Any, data: object, where: str, faults: list[Fault]) -> object:
    members = typing.get_args(kind)
    if not isinstance(data, list | tuple):
        return _refuse(faults, where, f"expected a list, found {_shown(data)}")
    items = typing.cast(list[object], data)
    if not _is_open(members) and len(items) != len(members):
        return _refuse(faults, where, f"expected a list of {len(members)}, found one of {len(items)}")
    kinds = [members[0]] * len(items) if _is_open(members) else members
    return tuple([_decode(kinds[index], item, f"{where}[{index}]", faults) for index, item in enumerate(items)])


def _is_open(members: tuple[Any, ...]) -> bool:
    """Tell ``tuple[T, ...]`` from a tuple with a format per place."""
    return len(members) == 2 and members[1] is Ellipsis


def _decode_mapping(kind: Any, data: object, where: str, faults: list[Fault]) -> object:
    (_, item_kind) = typing.get_args(kind)
    if not isinstance(data, Mapping):
        return _refuse(faults, where, f"expected an object, found {_shown(data)}")
    pairs = typing.cast(Mapping[object, object], data)
    values: dict[str, object] = {}
    for key, item in pairs.items():
        if isinstance(key, str):
            values[key] = _decode(item_kind, item, _inside(where, key), faults)
        else:
            _refuse(faults, where, f"the key {_shown(key)} must be text; put it in quotes")
    return types.MappingProxyType(values)


def _decode_dataclass(kind: Any, data: object, where: str, faults: list[Fault]) -> object:
    if not isinstance(data, Mapping):
        return _refuse(faults, where, f"expected an object, found {_shown(data)}")
    pairs = typing.cast(Mapping[str, object], data)
    fields = _fields(kind)
    before = len(faults)
    for key in pairs:
        if key not in fields:
            _refuse(faults, _inside(where, str(key)), f"unknown key. {nearest(str(key), list(fields))}")
    values: dict[str, object] = {}
    faulty: set[str] = set()
    for name, field in fields.items():
        found = len(faults)
        if name in pairs:
            values[name] = _decode(field.type, pairs[name], _inside(where, name), faults)
        elif not _has_default(field):
            _refuse(faults, _inside(where, name), "missing")
        if len(faults) > found:
            faulty.add(name)
    if len(faults) == before:
        return _guarded(lambda: kind(**values), where, faults)
    faults += _other_faults(kind, values, faulty, where)
    return None


def _other_faults(kind: Any, values: Mapping[str, object], faulty: Collection[str], where: str) -> list[Fault]:
    """Return what else is wrong with a value whose faulty fields are known.

    Stand-ins take the place of these fields. A fault that two different stand-ins cause alike is not theirs.
    """
    found: list[dict[Fault, None]] = []
    for number in (1, 2):
        try:
            kind(**{**values, **{name: _stand_in(_fields(kind)[name].type, number) for name in faulty}})
            return []
        except InputError as error:
            found.append(dict.fromkeys(error.faults))
        except (ArithmeticError, AttributeError, TypeError, ValueError, KeyError):  # of a stand-in of another kind
            return []
    both = [fault for fault in found[0] if fault in found[1]]
    return [fault.under(where) for fault in both if fault.where.split(".")[0].split("[")[0] not in faulty]


def _stand_in(kind: Any, number: int) -> object:
    """Return some value of a type, another one for each of the numbers 1 and 2 where there are two."""
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _stand_in(next(member for member in members if member is not type(None)), number)
    if origin is Literal:
        return members[min(number, len(members)) - 1]
    known: dict[Any, object] = {str: "x" * number, int: number, float: float(number), bool: number == 1}
    return () if origin is tuple else {} if origin is Mapping else known.get(kind)


@functools.cache
def _fields(kind: Any) -> "Mapping[str, dataclasses.Field[Any]]":
    return {field.name: field for field in dataclasses.fields(kind) if field.init}


def _guarded(build: Callable[[], object], where: str, faults: list[Fault]) -> object:
    try:
        return build()
    except InputError as error:
        faults.extend(error.under(where).faults)
    except ArithmeticError as error:  # a check computed with numbers so extreme that they left the range of floats
        _refuse(faults, where, f"holds a number that cannot be computed with: {error}")
    return None


def _has_default(field: "dataclasses.Field[Any]") -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def _inside(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _shown(data: object) -> str:
    if isinstance(data, Mapping):
        return "an object"
    if isinstance(data, list | tuple):
        return "a list"
    if data is None or isinstance(data, bool):
        return {True: "true", False: "false", None: "null"}[data]
    if isinstance(data, int) and data.bit_length() > 200:
        return "a huge number"  # printing thousands of digits takes Python long, or is refused
    text = repr(data)
    return text if len(text) <= 60 else f"{text[:57]}..."
