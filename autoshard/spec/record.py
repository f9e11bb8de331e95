"""Convert between JSON and frozen dataclasses: decode (strict, all faults at once) and encode.

A field's annotation is its format. Supported: ``str``, ``int``, ``float``, ``bool``, ``None``, ``Literal``,
unions with None, ``tuple[T, ...]``, ``tuple[A, B]``, ``Mapping[str, T]``, other dataclasses, classes with a text
form (``parse`` and ``str``), and ``object`` for any JSON.
"""

import copyreg
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from autoshard.errors import Fault, Faults, InputError, inside, nearest

T = TypeVar("T")
MAX_WHOLE = 2**63 - 1  # what other JSON readers keep exactly, and small enough for any product to be printed
_OPTION = "option"  # in the metadata of a field
_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


def _view(content: dict[str, Any]) -> Mapping[str, Any]:
    return types.MappingProxyType(content)


# Python itself copies no view of a mapping, so that no plan could be copied, or come back from a pool of processes.
copyreg.pickle(types.MappingProxyType, lambda view: (_view, (dict(view),)))  # pyright: ignore


def option(default: T, **metadata: str) -> T:
    """Return a field of a dataclass that a file holds only where its value is not the default.

    Files that are older than the field keep their text, and a plan keeps the hash of its text: no migration is needed.
    """
    return dataclasses.field(default=default, metadata={_OPTION: True, **metadata})


def options_on(value: Any) -> Mapping[str, Any]:
    """Return the options of a dataclass, by name, that are not at their defaults."""
    stated = {
        field.name: getattr(value, field.name) for field in dataclasses.fields(value) if _OPTION in field.metadata
    }
    usual = {field.name: field.default for field in dataclasses.fields(value)}
    return {name: chosen for name, chosen in stated.items() if chosen != usual[name]}


def decode(kind: type[T], data: object, where: str | Path = "") -> T:
    """Build a value of type ``kind`` from parsed JSON, or raise one InputError with the path of every fault."""
    with inside(where):
        return typing.cast(T, _decode(kind, data))


def encode(value: object) -> Any:
    """Turn a value made of frozen dataclasses into plain JSON data."""
    if dataclasses.is_dataclass(value) and not hasattr(value, "parse"):
        return {
            name: _encode_field(field.type, getattr(value, name))
            for name, field in _fields(type(value)).items()
            if not (_OPTION in field.metadata and getattr(value, name) == field.default)
        }
    if isinstance(value, tuple | list):  # the latter in what was read as plain data
        return [encode(item) for item in typing.cast(Sequence[object], value)]
    if isinstance(value, Mapping):
        pairs = typing.cast(Mapping[str, object], value)
        return {key: encode(pairs[key]) for key in sorted(pairs)}
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


def _encode_field(kind: Any, value: object) -> Any:
    """Encode a field; an int in a float field becomes a float, as in decoding."""
    encoded, members = encode(value), typing.get_args(kind)
    if type(value) is int and (kind is float or float in members):
        return float(value)
    if members and members[-1] is float and isinstance(value, Mapping):
        return {key: float(number) for key, number in encoded.items()}
    return encoded


def _decode(kind: Any, data: object) -> object:
    kind = getattr(kind, "__supertype__", kind)  # of a NewType
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        kinds = [member for member in members if member is not type(None)]
        member = next((kind for kind in kinds if kind is type(data)), kinds[0])
        return None if data is None and type(None) in members else _decode(member, data)
    if origin is Literal:
        if not any(data == choice and type(data) is type(choice) for choice in members):
            raise InputError.of("", f"expected one of {', '.join(map(str, members))}, found {_found(data)}")
        return data
    if origin is tuple:
        return _decode_tuple(members, data)
    if origin is not None:
        return types.MappingProxyType(_decode_each({key: (members[1], item) for key, item in _object(data).items()}))
    if kind in _NAMES:
        return _decode_plain(kind, data)
    if hasattr(kind, "parse"):
        return _computed(lambda: kind.parse(_expected(data, str, "text")))
    return data if isinstance(data, kind) else _decode_dataclass(kind, data)


def _decode_plain(kind: type, data: object) -> object:
    if isinstance(data, int) and not isinstance(data, bool) and kind in (int, float):
        if abs(data) > MAX_WHOLE and (kind is int or data.bit_length() > 1023):
            raise InputError.of("", "this number is too large")
        return kind(data)
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise InputError.of("", f"expected {_NAMES[kind]}, found {_found(data)}")
    if isinstance(data, float) and not math.isfinite(data):
        raise InputError.of("", "must be finite")
    return data


def _decode_tuple(members: tuple[Any, ...], data: object) -> tuple[object, ...]:
    items: list[object] = list(_expected(data, (list, tuple), "a list"))
    if members[1:] == (Ellipsis,):
        members = members[:1] * len(items)
    if len(items) != len(members):
        raise InputError.of("", f"expected a list of {len(members)}, found one of {len(items)}")
    pairs = zip(members, items, strict=True)
    return tuple(_decode_each({f"[{index}]": pair for index, pair in enumerate(pairs)}).values())


def _decode_dataclass(kind: Any, data: object) -> object:
    pairs, fields = _object(data), _fields(kind)
    unknown = (key for key in pairs if key not in fields)
    faults = [Fault(where=key, message=f"unknown key. {nearest(key, list(fields))}") for key in unknown]
    values: dict[str, object] = {}
    faulty: set[str] = set()
    for name, field in fields.items():
        try:
            if name in pairs:
                values[name] = _decode(field.type, pairs[name])
            elif field.default is field.default_factory is dataclasses.MISSING:
                raise InputError.of("", "missing")
        except InputError as error:
            faults += error.under(name).faults
            faulty.add(name)
    if not faults:
        return _computed(lambda: kind(**values))
    # More faults, with stand-ins in the faulty fields: one that two different stand-ins give is not caused by them.
    stand_ins = ({name: _stand_in(fields[name].type, number) for name in faulty} for number in (1, 2))
    first, second = (_faults_of(kind, {**values, **others}) for others in stand_ins)
    both = [fault for fault in first if fault in second]
    raise InputError((*faults, *(fault for fault in both if fault.where.split(".")[0].split("[")[0] not in faulty)))


def _decode_each(parts: Mapping[str, tuple[Any, object]]) -> dict[str, object]:
    """Decode the parts of a list or an object, each with its type and data; raise the faults of all parts together."""
    values, faults = dict[str, object](), Faults()
    for where, (kind, data) in parts.items():
        with faults.of(where):
            values[where] = _decode(kind, data)
    faults.refuse()
    return values


def _object(data: object) -> Mapping[str, object]:
    pairs = typing.cast(Mapping[object, object], _expected(data, Mapping, "an object"))
    for key in pairs:
        if not isinstance(key, str):
            raise InputError.of("", f"the key {_found(key)} must be text; put it in quotes")
    return typing.cast(Mapping[str, object], pairs)


def _expected(data: object, kind: Any, name: str) -> Any:
    if not isinstance(data, kind):
        raise InputError.of("", f"expected {name}, found {_found(data)}")
    return data


def _faults_of(kind: Any, values: Mapping[str, object]) -> tuple[Fault, ...]:
    """Return the faults that a class finds in these values, some of which are stand-ins."""
    try:
        kind(**values)
    except InputError as error:
        return error.faults
    except (ArithmeticError, AttributeError, TypeError, ValueError, KeyError):  # of a stand-in of another kind
        pass
    return ()


def _stand_in(kind: Any, number: int) -> object:
    """Return a value of a type to stand in; numbers 1 and 2 give different values where the type has two."""
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _stand_in(next(member for member in members if member is not type(None)), number)
    if origin is Literal:
        return members[min(number, len(members)) - 1]
    values: dict[Any, object] = {str: "x" * number, int: number, float: float(number), bool: number == 1}
    return () if origin is tuple else {} if origin is Mapping else values.get(kind)


@functools.cache
def _fields(kind: Any) -> "Mapping[str, dataclasses.Field[Any]]":
    return {field.name: field for field in dataclasses.fields(kind) if field.init}


def _computed(build: Callable[[], object]) -> object:
    """Build a value; refuse numbers so large or small that its checks overflow."""
    try:
        return build()
    except ArithmeticError as error:
        raise InputError.of("", f"has a number that is too large or too small to compute with: {error}") from None


def _found(data: object) -> str:
    if isinstance(data, Mapping):
        return "an object"
    return "a list" if isinstance(data, list | tuple) else show_value(data)


def show_value(value: object) -> str:
    """Return a JSON value as text for a message, cut after 60 characters.

    >>> show_value(None), show_value(True), show_value("x"), show_value([1, 2])
    ('null', 'true', "'x'", '[1, 2]')
    """
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int) and value.bit_length() > 200:
        return "a huge number"  # printing thousands of digits takes Python long, or is refused
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
