"""Whether what a traced module has read is still what it was: asked at every call, so nearly all is by identity."""

import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from typing import Any

import torch

from autoshard.modules.state.columns import StateColumn, columns_of
from autoshard.modules.state.functions import MISSING
from autoshard.modules.state.spaces import StatePlace, contents, is_simple, own_names
from autoshard.modules.state.tree import ModuleTree

_OF_TORCH = frozenset(vars(torch.nn.Module)) - {"forward"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def modules_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a module and all below it, each once, with their paths: near ones first."""
    modules, seen = [("", module)], {module}
    for path, submodule in modules:
        yield path, submodule
        for name, child in submodule.__dict__["_modules"].items():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append((f"{path}.{name}" if path else name, child))


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """Return the hooks that a module calls around its passes."""
    attributes = module.__dict__
    return [hook for name in _HOOKS if attributes[name] for hook in attributes[name].values()]


def _buffers(attributes: Mapping[str, Any]) -> list[Any]:
    return [
        buffer if buffer is None else (name, buffer.shape, buffer.dtype)
        for name, buffer in attributes["_buffers"].items()
    ]


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
        attributes = module.__dict__
        skipped = _OF_TORCH.union(*(attributes[name] for name in ("_parameters", "_buffers", "_modules")))
        watched = [
            name for name in own_names(module, attributes if "__dict__" in read else read) if name not in skipped
        ]
        names = tuple(name for name in watched if name in attributes)
        return cls(
            path=path,
            kind=type(module),
            names=names,
            values=tuple(attributes[name] for name in names),
            absent=frozenset(name for name in watched if name not in attributes),
            hooks=hooks_of(module) if path else [],
            children=[*attributes["_modules"]],
            lacks=[parameter is None for parameter in attributes["_parameters"].values()],
            buffers=_buffers(attributes),
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
    columns: tuple[StateColumn, ...]  # spaces that are read at once
    single: tuple[StatePlace, ...]  # that can change, and are none of these
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
        for space in spaces:
            inside[id(space.owner)] = (*inside.get(id(space.owner), ()), space)
        columns = tuple(columns_of(spaces))
        at_once = {id(space) for column in columns for space in column.places}
        return cls(
            fields=tuple(fields),
            spaces=tuple(spaces),
            inside=inside,
            columns=columns,
            single=tuple(
                space for space in spaces if id(space) not in at_once and not isinstance(space.owner, tuple | frozenset)
            ),
            tensors=tuple((label, tensor, _look(tensor)) for label, tensor in tensors),
            notes=tuple(notes),
        )

    def difference(self, tree: ModuleTree) -> str | None:
        """Return the place of the first change since the trace; None where nothing has changed."""
        quick = tree.tests.get(self)
        if quick is None or not quick():
            if (place := self._difference_of_fields(tree)) is not None:
                return place
            if quick is None:
                tree.tests[self] = self._quick_test(tree)
        for space in self._unlike():
            if not self._holds(space, contents(space.kind, space.owner, space.names)):
                return space.label.rstrip(".")
        return next((label for label, tensor, look in self.tensors if _look(tensor) != look), None)

    def _difference_of_fields(self, tree: ModuleTree) -> str | None:
        """Return the place of the first change of a module of the tree."""
        if len(tree.attributes) != len(self.fields):
            return "the submodules"
        for submodule, attributes, expected in zip((None, *tree.below), tree.attributes, self.fields, strict=True):
            if (place := self._moved(attributes, expected)) is not None:
                return place
            if submodule and (type(submodule) is not expected.kind or hooks_of(submodule) != expected.hooks):
                return f"{expected.path} or its hooks"
        return None

    def _quick_test(self, tree: ModuleTree) -> Callable[[], bool]:
        """Return a test that is true only where no module of the tree has changed: all is the very same object.

        A copy of a module has lists and objects of its own, which may change inside: it always fails the test.
        """
        pairs = [*zip(tree.attributes, self.fields, strict=True)]
        read = [pair for space, fields in pairs for pair in zip(repeat(space), fields.names, fields.values)]
        absent = [(space, name) for space, fields in pairs for name in fields.absent]
        buffered = [(space, fields.buffers) for space, fields in pairs if fields.buffers]
        bare = [space for space, fields in pairs if not fields.buffers]
        kinds, lacks = (
            [fields.kind for fields in self.fields[1:]],
            [lack for fields in self.fields for lack in fields.lacks],
        )
        hooked = any(fields.hooks for fields in self.fields)
        spaces, names, values = zip(*read, strict=True) if read else ((), (), ())
        absent_spaces, absent_names = zip(*absent, strict=True) if absent else ((), ())

        def test() -> bool:
            return (
                not hooked
                and all(map(is_, map(dict.get, spaces, names, repeat(MISSING)), values))
                and not any(map(dict.__contains__, absent_spaces, absent_names))
                and all(map(is_, map(type, tree.below), kinds))
                and not any(any(map(dict.get, tree.attributes[1:], repeat(name))) for name in _HOOKS)
                and [parameter is None for parameter in tree.parameters()] == lacks
                and not any(map(dict.get, bare, repeat("_buffers")))
                and all(_buffers(space) == buffers for space, buffers in buffered)
            )

        return test

    def _moved(self, attributes: Mapping[str, Any], expected: Fields) -> str | None:
        """Return the place of the first attribute of a module that has changed; None where none has."""
        if not all(map(is_, map(attributes.get, expected.names, repeat(MISSING)), expected.values)):
            for name, value in zip(expected.names, expected.values, strict=True):
                if not self._alike(value, attributes.get(name, MISSING)):
                    return expected.place(name)
        if not attributes.keys().isdisjoint(expected.absent):
            return expected.place(next(name for name in expected.absent if name in attributes))
        if [*attributes["_modules"]] != expected.children or [
            p is None for p in attributes["_parameters"].values()
        ] != expected.lacks:
            return f"what {expected.path or 'the module'} has"
        if attributes["_buffers"] and _buffers(attributes) != expected.buffers:
            return f"the shape of a buffer of {expected.path or 'the module'}"
        return None

    def _unlike(self) -> Iterator[StatePlace]:
        """Yield the spaces that do not hold the very same objects."""
        for column in self.columns:
            if not column.is_same():
                yield from column.places
        for space in self.single:
            now, values = contents(space.kind, space.owner, space.names), space.values
            if len(now) != len(values) or not all(map(is_, now, values)):
                yield space

    def _holds(self, space: StatePlace, now: tuple[Any, ...]) -> bool:
        same = len(now) == len(space.values)
        return same and (all(map(is_, now, space.values)) or all(map(self._alike, space.values, now)))

    def _alike(self, before: Any, now: Any) -> bool:
        """Say whether two values are the same, or copies that hold the same."""
        if before is now:
            return True
        if type(before) is not type(now) or isinstance(before, torch.Tensor):
            return False
        if is_simple(before):
            return bool(before == now) and repr(before) == repr(now)  # -0.0 is not 0.0
        if isinstance(before, types.MethodType):
            return before.__func__ is now.__func__ and self._alike(before.__self__, now.__self__)
        if isinstance(before, functools.partial):
            pairs = zip((before.func, *before.args), (now.func, *now.args), strict=False)
            keywords, now_keywords = before.keywords, now.keywords
            same = len(before.args) == len(now.args) and keywords.keys() == now_keywords.keys()
            return same and all(
                self._alike(*pair) for pair in (*pairs, *((keywords[key], now_keywords[key]) for key in keywords))
            )
        spaces = [space for space in self.inside.get(id(before), ()) if space.kind not in ("function", "class", "cell")]
        return bool(spaces) and all(self._holds(space, contents(space.kind, now, space.names)) for space in spaces)

    def note(self, module: torch.nn.Module) -> None:
        """Write what forward writes for others."""
        for path, name, value in self.notes:
            module.get_submodule(path).__dict__[name] = copy.copy(value)


def _look(tensor: torch.Tensor) -> Any:
    """Return what differs once a tensor has changed: its version and its place in memory, or its shape."""
    if tensor.is_inference() or type(tensor) is not torch.Tensor:
        return tensor.shape
    return tensor._version, tensor.data_ptr()
