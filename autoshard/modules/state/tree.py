"""A module and all below it, laid out flat: a call sees in few steps whether the tree is still what it was."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import attrgetter, eq, is_
from typing import Any
from weakref import WeakKeyDictionary

import torch

_TABLES = ("_modules", "_parameters")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleTree:
    """The modules of a tree, each once, near ones first, with their attributes, children and places of parameters.

    The module at the top is not held, so that a tree may be remembered for as long as its module lives.
    """

    below: tuple[torch.nn.Module, ...]
    attributes: tuple[dict[str, Any], ...]  # of all modules, the one at the top first
    tables: tuple[tuple[str, tuple[dict[str, Any], ...]], ...]  # of children and of parameters, for each module
    keys: tuple[tuple[str, ...], ...]
    children: tuple[torch.nn.Module | None, ...]
    paths: tuple[tuple[str, int], ...]  # every path of every parameter, and its number among the parameters
    trained_by: dict[tuple[bool, ...], frozenset[str]] = field(default_factory=dict[tuple[bool, ...], frozenset[str]])
    # Quick tests of states, by the state: whether all that it watches in this tree is the very same object.
    tests: dict[object, Callable[[], bool]] = field(default_factory=dict[object, Callable[[], bool]])

    @classmethod
    def of(cls, module: torch.nn.Module) -> "ModuleTree":
        """Lay a module out."""
        modules, seen = [module], {module}
        for submodule in modules:
            for child in submodule.__dict__["_modules"].values():
                if child is not None and child not in seen:
                    seen.add(child)
                    modules.append(child)
        attributes = tuple(submodule.__dict__ for submodule in modules)
        tables = tuple((name, tuple(space[name] for space in attributes)) for name in _TABLES)
        (_, children), (_, parameters) = tables
        places = [(id(owner), name) for owner, table in zip(modules, parameters, strict=True) for name in table]
        numbers = {place: number for number, place in enumerate(places)}
        return cls(
            below=tuple(modules[1:]), attributes=attributes, tables=tables,
            keys=tuple(tuple(table) for _, named in tables for table in named),
            children=tuple(_values(children)),
            paths=tuple(
                (f"{path}{name}", numbers[id(owner), name])
                for path, owner in _paths(module)
                for name in owner.__dict__["_parameters"]
            ),
        )  # fmt: skip

    def is_same(self, module: torch.nn.Module) -> bool:
        """Say whether the module has the same modules below it in the same places, and names of parameters."""
        return (
            module.__dict__ is self.attributes[0]
            and all(map(is_, map(attrgetter("__dict__"), self.below), self.attributes[1:]))
            and all(all(map(is_, map(dict.get, self.attributes, repeat(name)), tables)) for name, tables in self.tables)
            and all(map(eq, map(tuple, (table for _, tables in self.tables for table in tables)), self.keys))
            and all(map(is_, _values(self.tables[0][1]), self.children))
        )

    def parameters(self) -> list[torch.nn.Parameter | None]:
        """Return the parameters as they are just now."""
        return [*_values(self.tables[1][1])]

    def trained(self) -> frozenset[str]:
        """Return all paths of the parameters that get a gradient."""
        flags = tuple(parameter is not None and parameter.requires_grad for parameter in self.parameters())
        if flags not in self.trained_by:
            self.trained_by[flags] = frozenset(path for path, number in self.paths if flags[number])
        return self.trained_by[flags]

    def modes(self) -> tuple[bool | None, ...]:
        """Return of all modules whether they train; what torch.compile makes of a module says nothing by itself."""
        return tuple(map(dict.get, self.attributes, repeat("training")))


def tree_of(module: torch.nn.Module, trees: WeakKeyDictionary[torch.nn.Module, ModuleTree]) -> ModuleTree:
    """Return the tree of a module: the one that was remembered, if it is still the same."""
    tree = trees.get(module)
    if tree is None or not tree.is_same(module):
        tree = trees[module] = ModuleTree.of(module)
    return tree


def _values(tables: tuple[dict[str, Any], ...]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, tables))


def _paths(module: torch.nn.Module, path: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a module and all below it under all their paths."""
    yield path, module
    for name, child in module.__dict__["_modules"].items():
        if child is not None:
            yield from _paths(child, f"{path}{name}.")
