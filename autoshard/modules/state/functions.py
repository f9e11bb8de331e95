"""What functions read beside their arguments, found in their code: globals, closures, attributes of both."""

import dis
import functools
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "einops", "einx", "autoshard", "builtins"}
_READS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF", "STORE_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_CALLED = ("__init__", "__post_init__", "__call__", "forward")  # what a call of a class or of an object runs


def is_library(name: str | None) -> bool:
    """Say whether a module is of a library whose state changes no result: of torch, numpy, einops, einx, of Python."""
    return (name or "builtins").partition(".")[0] in _LIBRARIES


def is_own(kind: type) -> bool:
    """Say whether a class is a user's, or of a library of modules."""
    return not is_library(kind.__module__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeReads:
    """The names that a code reads, each with the attributes that follow it: CONFIG.model.scale."""

    globals: tuple[tuple[str, ...], ...]
    cells: tuple[tuple[str, ...], ...]
    attributes: frozenset[str]  # of anything


@functools.cache
def reads_of(code: types.CodeType) -> CodeReads:
    """Return the names that a code object reads, those of its inner functions included."""
    chains: dict[bool, list[list[str]]] = {True: [], False: []}
    attributes, chain = set[str](), list[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _READS:
            chain = [str(instruction.argval)]
            chains[instruction.opname.endswith("DEREF")].append(chain)
        elif instruction.opname in _ATTRIBUTES:
            attributes.add(str(instruction.argval))
            chain.append(str(instruction.argval))
        elif instruction.opname not in ("CACHE", "PUSH_NULL", "PRECALL", "COPY"):
            chain = []
    inside = [reads_of(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return CodeReads(
        globals=tuple(
            dict.fromkeys([*map(tuple, chains[False]), *(name for reads in inside for name in reads.globals)])
        ),
        cells=tuple(dict.fromkeys([*map(tuple, chains[True]), *(name for reads in inside for name in reads.cells)])),
        attributes=frozenset(attributes.union(*(reads.attributes for reads in inside))),
    )


def functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yield the functions that are called where a value is: of methods, properties, partials, classes, objects."""
    if isinstance(value, types.FunctionType):
        if not is_library(value.__module__):
            yield value
    elif isinstance(value, property):
        yield from functions_in(value.fget)
    elif isinstance(value, types.MethodType | staticmethod | classmethod):
        yield from functions_in(value.__func__)
    elif isinstance(value, functools.partial | functools.cached_property):
        yield from functions_in(value.func)
    elif isinstance(wrapped := _wrapped(value), types.FunctionType):
        yield from functions_in(wrapped)
    elif not isinstance(value, torch.Tensor | types.ModuleType):
        kind = value if isinstance(value, type) else type(value)
        for name in _CALLED if is_own(kind) else ():
            yield from (method for method in [static(kind, name)] if isinstance(method, types.FunctionType))


def _wrapped(value: Any) -> Any:
    attributes = getattr(value, "__dict__", {})
    return attributes.get("__wrapped__") if isinstance(attributes, dict) else None


def methods_of(kind: type, first_names: Sequence[str] = ("forward", "__call__")) -> dict[str, Any]:
    """Return the attributes of a class that its forward may read: those that its methods name, and all data."""
    attributes, names = dict[str, Any](), [*first_names]
    for base in kind.__mro__:
        if is_own(base):
            names += [name for name, value in base.__dict__.items() if not name.startswith("__") and _is_data(value)]
    while names:
        name = names.pop()
        value = static(kind, name)
        if name in attributes or value is MISSING:
            continue
        attributes[name] = value
        for function in functions_in(value):
            names.extend(reads_of(function.__code__).attributes)
    return attributes


def _is_data(value: Any) -> bool:
    return not callable(value) and not hasattr(type(value), "__get__")


class Missing:
    """The value of what is not there."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


def static(kind: type, name: str) -> Any:
    """Return an attribute of a class as it was written there."""
    for base in kind.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return MISSING
