"""Places that hold state: attributes of objects and classes, lists, dicts, globals, cells; what each holds just now."""

import argparse
import enum
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from autoshard.modules.state.functions import MISSING, functions_in, is_library, is_own, reads_of, static

Kind = Literal["fields", "class", "dict", "items", "set", "cell", "function", "array"]
_INTERNAL = frozenset({*vars(torch.nn.Module()), "_is_full_backward_hook", "__dict__", "__class__"}) - {"forward"}
_FLAT_WEIGHTS = frozenset({"_flat_weights", "_flat_weight_refs"})  # which torch's recurrent nets keep beside parameters
MOST = 1000  # parts of a list, or numbers of an array, that are watched one by one
_DEEPEST = 8
_SIMPLE = (
    int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, torch.layout,
    torch.memory_format, slice, range, enum.Enum, types.EllipsisType,
)  # fmt: skip
_OF_PARTS: tuple[tuple[Any, Kind], ...] = (
    (dict, "dict"), (list | tuple | deque, "items"), (set | frozenset, "set"),
)  # fmt: skip
_OPEN = (types.SimpleNamespace, argparse.Namespace)  # of Python, and without methods: all fields are watched


def own_names(owner: Any, names: Iterable[str]) -> list[str]:
    """Leave out the attributes that torch itself keeps, such as the tables of parameters and submodules."""
    skipped = _INTERNAL | _FLAT_WEIGHTS if isinstance(owner, torch.nn.RNNBase) else _INTERNAL
    return [name for name in names if name not in skipped]


def is_simple(value: Any) -> bool:
    """Say whether a value cannot change, and compares with others by its contents."""
    return isinstance(value, _SIMPLE) and not (isinstance(value, int | str) and hasattr(value, "__dict__"))


def is_open(value: Any) -> bool:
    """Say whether the fields of an object are state: those of a user's class, and of modules of torch."""
    kind = type(value)
    is_data = not isinstance(value, type | torch.Tensor | types.ModuleType | enum.Enum | BaseException | torch.Size)
    return isinstance(value, _OPEN) or (is_data and (is_own(kind) or isinstance(value, torch.nn.Module)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StatePlace:
    """A place that holds values by name, or in order."""

    owner: Any
    kind: Kind
    label: str
    names: tuple[Any, ...]  # of items: their numbers
    values: tuple[Any, ...]

    def named(self, name: Any) -> str:
        """Say where a value is."""
        return f"{self.label}[{name!r}]" if self.kind in ("dict", "items") else f"{self.label}{name}"


def contents(kind: Kind, owner: Any, names: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a space holds by these names; of lists and dicts all that they hold."""
    match kind:
        case "fields":
            attributes = own_attributes(owner)
            return tuple(attributes[name] if name in attributes else field_of(owner, name) for name in names)
        case "class":
            return tuple(static(owner, name) for name in names)
        case "dict" if names:
            return tuple(dict.get(owner, name, MISSING) for name in names)
        case "dict":
            return (*dict.keys(owner), *dict.values(owner))
        case "items" | "set":
            return tuple(owner)
        case "cell":
            return (owner.cell_contents,) if _is_full(owner) else (MISSING,)
        case "function":
            return owner.__defaults__, owner.__kwdefaults__, owner.__code__
        case "array":
            return f"{owner.dtype} {owner.shape}", owner.tobytes()


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not MISSING
    except ValueError:
        return False


def own_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object, past what its class does to look them up."""
    try:
        return object.__getattribute__(owner, "__dict__")
    except AttributeError:  # it has slots only
        return {}


def field_of(owner: Any, name: str) -> Any:
    """Return what an object holds itself by a name, also where its class looks it up in a way of its own."""
    attributes = own_attributes(owner)
    if name in attributes:
        return attributes[name]
    static_value = static(type(owner), name)
    if isinstance(static_value, types.MemberDescriptorType):  # a slot
        return static_value.__get__(owner) if hasattr(owner, name) else MISSING
    if isinstance(owner, torch.nn.Module):
        spaces = [attributes.get(table) or {} for table in ("_parameters", "_buffers", "_modules")]
        return next((space[name] for space in spaces if name in space), MISSING)
    looks_up = type(owner).__getattribute__ is not object.__getattribute__ or hasattr(type(owner), "__getattr__")
    return getattr(owner, name, MISSING) if static_value is MISSING and looks_up else MISSING


def _kind_of(value: Any) -> Kind | None:
    return next((kind for kinds, kind in _OF_PARTS if isinstance(value, kinds)), None)


class Visitor:
    """Collects the spaces that are reached from modules and functions.

    Without ``reads`` all that objects have is collected; else what was read of each, by its id, and all of others.
    """

    def __init__(self, reads: Mapping[int, Mapping[str, None]] | None, within: Sequence[torch.nn.Module]) -> None:
        self.reads, self.spaces = reads, dict[tuple[int, str], tuple[Any, Kind, str, dict[Any, None]]]()
        self.within, self.seen, self.tensors = (
            {id(module) for module in within},
            set[int](),
            list[tuple[str, torch.Tensor]](),
        )
        self.open = [*within]  # the objects whose fields are state
        self.kept = list[Any]()  # so that no id is given twice

    def add(self, owner: Any, kind: Kind, label: str, names: Sequence[Any] = ()) -> None:
        """Add names to a space; values that lie there are visited by the caller."""
        *_, space_names = self.spaces.setdefault((id(owner), kind), (owner, kind, label, {}))
        space_names.update(dict.fromkeys(names))

    def module(self, path: str, module: torch.nn.Module, names: Sequence[str]) -> None:
        """Visit what a module has: values of its own, and attributes of its class."""
        label = f"{path}." if path else ""
        attributes = vars(module)
        for name in own_names(module, [*attributes] if "__dict__" in names else names):
            if name in attributes:
                self.value(attributes[name], label + name)
            else:
                self.of_class(type(module), name)

    def of_class(self, kind: type, name: str) -> None:
        """Visit an attribute of a class."""
        value = static(kind, name)
        is_torch = name in vars(torch.nn.Module) and issubclass(kind, torch.nn.Module) and name != "forward"
        if value is MISSING or is_torch or name.startswith("__") or isinstance(value, types.MemberDescriptorType):
            return
        self.add(kind, "class", f"{kind.__name__}.", [name])
        self.value(value, f"{kind.__name__}.{name}")

    def value(self, value: Any, label: str, depth: int = 0) -> None:
        """Visit a value that something holds."""
        if is_simple(value) or id(value) in self.seen or id(value) in self.within or depth > _DEEPEST:
            return
        self.seen.add(id(value))
        self.kept.append(value)
        if isinstance(value, torch.Tensor):
            self.tensors.append((label, value))
        elif kind := _kind_of(value):
            self._parts(value, kind, label, depth)
        elif type(value).__module__ == "numpy" and getattr(value, "size", MOST + 1) <= MOST:
            self.add(value, "array", label)
        elif isinstance(value, types.MethodType):
            self.value(value.__self__, f"{label}.", depth + 1)
        elif isinstance(value, functools.partial):
            for part in (*value.args, value.keywords):
                self.value(part, label, depth + 1)
        elif is_open(value):
            self._fields(value, label, depth)
        for function in functions_in(value):
            self.function(function, depth)

    def _parts(self, value: Any, kind: Kind, label: str, depth: int) -> None:
        if len(value) > MOST:
            return
        self.add(value, kind, label)
        for name, part in dict.items(value) if isinstance(value, dict) else enumerate(value):
            self.value(part, f"{label}[{name!r}]", depth + 1)
        if is_open(value):  # a user's subclass of a dict or a list
            self._fields(value, label, depth)

    def _fields(self, value: Any, label: str, depth: int) -> None:
        kind, attributes = type(value), getattr(value, "__dict__", None) or {}
        self.open.append(value)
        slots = [name for base in kind.__mro__ for name in base.__dict__.get("__slots__", ()) if name in base.__dict__]
        read = None if self.reads is None else self.reads.get(id(value))
        names = own_names(value, [*attributes, *slots] if read is None or "__dict__" in read else read)
        self.add(value, "fields", f"{label}.", names)
        for name in names:
            if (part := field_of(value, name)) is MISSING:
                self.of_class(kind, name)
            else:
                self.value(part, f"{label}.{name}", depth + 1)
        if isinstance(value, torch.nn.Module):
            for name, part in [*value.named_parameters(), *value.named_buffers()] if self.reads is None else ():
                self.value(part, f"{label}.{name}", depth + 1)

    def function(self, function: types.FunctionType, depth: int = 0) -> None:
        """Visit what a function reads beside its arguments."""
        if (id(function), "function") in self.spaces or is_library(function.__module__):
            return
        label = f"{function.__module__}.{function.__qualname__}"
        self.add(function, "function", f"the defaults of {label}")
        for defaults in (function.__defaults__, function.__kwdefaults__):
            self.value(defaults, f"the defaults of {label}", depth + 1)
        reads, space = reads_of(function.__code__), function.__globals__
        for name, *attributes in reads.globals:
            if name in space:
                self.add(space, "dict", f"the globals of {function.__module__}", [name])
                self._chain(space[name], name, attributes, depth)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, *attributes in reads.cells:
            if name in cells and _is_full(cells[name]):
                self.add(cells[name], "cell", f"{name} of {label}", [""])
                self._chain(cells[name].cell_contents, f"{name} of {label}", attributes, depth)

    def _chain(self, value: Any, label: str, attributes: Sequence[str], depth: int) -> None:
        """Visit a value, and what a function reads of it by name where it is a module or a class."""
        for name in attributes:
            if isinstance(value, types.ModuleType) and not is_library(value.__name__) and name in vars(value):
                self.add(vars(value), "dict", f"the globals of {value.__name__}", [name])
                value, label = vars(value)[name], f"{label}.{name}"
            elif isinstance(value, type) and is_own(value):
                self.of_class(value, name)
                return
            else:
                break
        if not isinstance(value, types.ModuleType):
            self.value(value, label, depth + 1)

    def places(self) -> Iterator[StatePlace]:
        """Yield the spaces with what they hold."""
        for owner, kind, label, names in self.spaces.values():
            yield StatePlace(
                owner=owner, kind=kind, label=label, names=(*names,), values=contents(kind, owner, (*names,))
            )  # fmt: skip
