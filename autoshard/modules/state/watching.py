"""Whether what a traced module has read is still what it was: asked at every call, so nearly all is by identity."""

import copy
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch

from autoshard.modules.state.functions import MISSING
from autoshard.modules.state.spaces import StatePlace, contents, is_simple, own_names

_OF_TORCH = frozenset(vars(torch.nn.Module)) - {"forward"}
_COLUMNS = {"function": ("__defaults__", "__kwdefaults__", "__code__"), "cell": ("cell_contents",)}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def modules_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a module and all below it, each once, with their paths: near ones first."""
    found, seen = [("", module)], {module}
    for path, one in found:
        yield path, one
        for name, child in one.__dict__["_modules"].items():
            if child is not None and child not in seen:
                seen.add(child)
                found.append((f"{path}.{name}" if path else name, child))


def _walked(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules in the same order, without their paths, since every call asks."""
    found, seen = [module], {module}
    for one in found:
        for child in one.__dict__["_modules"].values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """Return what a module calls around its passes."""
    own = module.__dict__
    return [one for name in _HOOKS if own[name] for one in own[name].values()]


def _buffers(own: Mapping[str, Any]) -> list[Any]:
    return [one if one is None else (name, one.shape, one.dtype) for name, one in own["_buffers"].items()]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fields:
    """What one module of a tree has: attributes that were read, those that it lacks, hooks, and what is below it."""

    path: str
    kind: type
    names: tuple[str, ...]
    values: tuple[Any, ...]
    absent: frozenset[str]
    hooks: list[Any]
    children: list[str]
    lacks: list[bool]  # which parameters are None
    buffers: list[Any]

    @classmethod
    def of(cls, path: str, module: torch.nn.Module, read: Sequence[str]) -> "Fields":
        """Return what a module has just now."""
        own = module.__dict__
        skipped = _OF_TORCH.union(*(own[name] for name in ("_parameters", "_buffers", "_modules")))
        kept = [name for name in own_names(module, own if "__dict__" in read else read) if name not in skipped]
        names = tuple(name for name in kept if name in own)
        return cls(
            path=path,
            kind=type(module),
            names=names,
            values=tuple(own[name] for name in names),
            absent=frozenset(name for name in kept if name not in own),
            hooks=hooks_of(module) if path else [],
            children=[*own["_modules"]],
            lacks=[one is None for one in own["_parameters"].values()],
            buffers=_buffers(own),
        )

    def place(self, name: str) -> str:
        """Say where an attribute is."""
        return f"{self.path}.{name}" if self.path else name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WatchedState:
    """All that a traced forward pass has read beside inputs, parameters and numbers of buffers."""

    fields: tuple[Fields, ...]
    spaces: tuple[StatePlace, ...]
    inside: Mapping[int, tuple[StatePlace, ...]]  # by the id of what holds values
    named: tuple[
        tuple[StatePlace, Any, tuple[Any, ...], tuple[Any, ...]], ...
    ]  # with the read of each dict, names and values
    others: tuple[StatePlace, ...]  # that can change, and are none of these
    columns: tuple[tuple[Any, list[Any], list[Any]], ...]  # one attribute of many functions or cells, with its values
    tensors: tuple[tuple[str, torch.Tensor, Any], ...]
    notes: tuple[tuple[str, str, Any], ...]  # what forward writes for others: path, name, value

    @classmethod
    def of(
        cls,
        fields: Sequence[Fields],
        spaces: Sequence[StatePlace],
        tensors: Sequence[tuple[str, torch.Tensor]],
        notes: Sequence[tuple[str, str, Any]],
    ) -> "WatchedState":
        """Return what is to be watched."""
        inside: dict[int, tuple[StatePlace, ...]] = {}
        for one in spaces:
            inside[id(one.owner)] = (*inside.get(id(one.owner), ()), one)
        columns: list[tuple[Any, list[Any], list[Any]]] = []
        for kind, names in _COLUMNS.items():
            own = [one for one in spaces if one.kind == kind]
            for at, name in enumerate(names):
                columns.append((attrgetter(name), [one.owner for one in own], [one.values[at] for one in own]))
        return cls(
            fields=tuple(fields),
            spaces=tuple(spaces),
            inside=inside,
            named=tuple((one, one.owner.get, one.names, one.values) for one in spaces if _is_named(one)),
            others=tuple(one for one in spaces if not _is_named(one) and _may_change(one)),
            columns=tuple(columns),
            tensors=tuple((label, one, _look(one)) for label, one in tensors),
            notes=tuple(notes),
        )

    def difference(self, module: torch.nn.Module) -> str | None:
        """Return the place of something that is no longer as it was; None where there is none."""
        modules = _walked(module)
        if len(modules) != len(self.fields):
            return "the submodules"
        for one, known in zip(modules, self.fields, strict=True):
            if (found := self._moved(one.__dict__, known)) is not None:
                return found
            if known.path and (type(one) is not known.kind or hooks_of(one) != known.hooks):
                return f"{known.path} or its hooks"
        for space in self._unlike():
            if not self._holds(space, contents(space.kind, space.owner, space.names)):
                return space.label.rstrip(".")
        return next((label for label, one, look in self.tensors if _look(one) != look), None)

    def _moved(self, own: Mapping[str, Any], known: Fields) -> str | None:
        """Return the place of something that a module no longer has as it was."""
        if not all(map(is_, map(own.get, known.names, repeat(MISSING)), known.values)):
            for name, value in zip(known.names, known.values, strict=True):
                if not self._alike(value, own.get(name, MISSING)):
                    return known.place(name)
        if not own.keys().isdisjoint(known.absent):
            return known.place(next(name for name in known.absent if name in own))
        if [*own["_modules"]] != known.children or [p is None for p in own["_parameters"].values()] != known.lacks:
            return f"what {known.path or 'the module'} has"
        if own["_buffers"] and _buffers(own) != known.buffers:
            return f"the shape of a buffer of {known.path or 'the module'}"
        return None

    def _unlike(self) -> Iterator[StatePlace]:
        """Yield the spaces that do not hold the very same objects."""
        for space, get, names, values in self.named:
            if not all(map(is_, map(get, names, repeat(MISSING)), values)):
                yield space
        for space in self.others:
            now, values = contents(space.kind, space.owner, space.names), space.values
            if len(now) != len(values) or not all(map(is_, now, values)):
                yield space
        try:
            same = all(all(map(is_, map(get, owners), values)) for get, owners, values in self.columns)
        except ValueError:  # a cell without contents
            same = False
        yield from () if same else (one for one in self.spaces if one.kind in _COLUMNS)

    def _holds(self, space: StatePlace, now: tuple[Any, ...]) -> bool:
        same = len(now) == len(space.values)
        return same and (all(map(is_, now, space.values)) or all(map(self._alike, space.values, now)))

    def _alike(self, kept: Any, now: Any) -> bool:
        """Say whether two values are the same, or copies that hold the same."""
        if kept is now:
            return True
        if type(kept) is not type(now) or isinstance(kept, torch.Tensor):
            return False
        if is_simple(kept):
            return bool(kept == now) and repr(kept) == repr(now)  # -0.0 is not 0.0
        if isinstance(kept, types.MethodType):
            return kept.__func__ is now.__func__ and self._alike(kept.__self__, now.__self__)
        if isinstance(kept, functools.partial):
            pairs = zip((kept.func, *kept.args), (now.func, *now.args), strict=False)
            given, others = kept.keywords, now.keywords
            same = len(kept.args) == len(now.args) and given.keys() == others.keys()
            return same and all(self._alike(*pair) for pair in (*pairs, *((given[key], others[key]) for key in given)))
        spaces = [one for one in self.inside.get(id(kept), ()) if one.kind not in ("function", "class", "cell")]
        return bool(spaces) and all(self._holds(one, contents(one.kind, now, one.names)) for one in spaces)

    def note(self, module: torch.nn.Module) -> None:
        """Write what forward writes for others."""
        for path, name, value in self.notes:
            module.get_submodule(path).__dict__[name] = copy.copy(value)


def _is_named(space: StatePlace) -> bool:
    return space.kind == "dict" and bool(space.names)


def _may_change(space: StatePlace) -> bool:
    """Say whether a space is none of the columns, and can hold something else."""
    return space.kind not in _COLUMNS and not isinstance(space.owner, tuple | frozenset)


def _look(tensor: torch.Tensor) -> Any:
    """Return what changes when a tensor does."""
    if tensor.is_inference() or type(tensor) is not torch.Tensor:
        return tensor.shape
    return tensor._version, tensor.data_ptr()
