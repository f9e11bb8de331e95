"""Places of one kind, read all at once: every call asks whether they hold the very same objects as before."""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

from autoshard.modules.state.functions import MISSING
from autoshard.modules.state.spaces import StatePlace, own_attributes

Reads = Callable[[], Iterable[Any]]
Prepare = Callable[[Sequence[StatePlace]], tuple[Reads, list[Any]]]  # returns what reads values, and what they are now


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateColumn:
    """Places of one kind, whose values one by one are read at once."""

    places: tuple[StatePlace, ...]
    reads: Reads
    values: list[Any]

    def is_same(self) -> bool:
        """Say whether the places hold the very same objects."""
        try:
            return all(map(is_, self.reads(), self.values))
        except ValueError:  # a cell without contents
            return False


def columns_of(places: Sequence[StatePlace]) -> Iterator[StateColumn]:
    """Yield a column for each kind of places that can be read at once."""
    for is_member, prepare in COLUMNS.values():
        members = tuple(place for place in places if is_member(place))
        if members:
            reads, values = prepare(members)
            yield StateColumn(places=members, reads=reads, values=values)


def _of_dicts(places: Sequence[StatePlace]) -> tuple[Reads, list[Any]]:
    owners, names = [place.owner for place in places for _ in place.names], _names(places)
    return lambda: map(dict.get, owners, names, repeat(MISSING)), _values(places)


def _of_objects(places: Sequence[StatePlace]) -> tuple[Reads, list[Any]]:
    owners = [place.owner for place in places]
    tables = [own_attributes(owner) for owner in owners]
    by_name = [table for place, table in zip(places, tables, strict=True) for _ in place.names]
    names = _names(places)

    def reads() -> Iterable[Any]:
        spaces = map(object.__getattribute__, owners, repeat("__dict__"))
        return chain(spaces, map(dict.get, by_name, names, repeat(MISSING)))

    return reads, [*tables, *_values(places)]


def _of_classes(places: Sequence[StatePlace]) -> tuple[Reads, list[Any]]:
    """Read attributes of a class and of the classes that Python asks before it."""
    kinds = [place.owner for place in places]
    entries = [
        (base.__dict__, name) for place in places for name in place.names for base in _bases_asked(place.owner, name)
    ]
    tables, names = [table for table, _ in entries], [name for _, name in entries]

    def reads() -> Iterable[Any]:
        return chain(map(attrgetter("__mro__"), kinds), map(types.MappingProxyType.get, tables, names, repeat(MISSING)))

    return reads, [*reads()]


def _bases_asked(kind: type, name: str) -> Iterator[type]:
    """Yield the classes that are asked for an attribute until one has it."""
    for base in kind.__mro__:
        yield base
        if name in base.__dict__:
            return


def _of_functions(places: Sequence[StatePlace]) -> tuple[Reads, list[Any]]:
    owners, get = [place.owner for place in places], attrgetter("__defaults__", "__kwdefaults__", "__code__")
    return lambda: chain.from_iterable(map(get, owners)), _values(places)


def _of_cells(places: Sequence[StatePlace]) -> tuple[Reads, list[Any]]:
    owners, get = [place.owner for place in places], attrgetter("cell_contents")
    return lambda: map(get, owners), _values(places)


def _names(places: Sequence[StatePlace]) -> list[Any]:
    return [name for place in places for name in place.names]


def _values(places: Sequence[StatePlace]) -> list[Any]:
    return [value for place in places for value in place.values]


def _is_in_dict(place: StatePlace) -> bool:
    return place.kind == "fields" and own_attributes(place.owner).keys() >= {*place.names}


COLUMNS: Mapping[str, tuple[Callable[[StatePlace], bool], Prepare]] = {
    "dict": (lambda place: place.kind == "dict" and bool(place.names), _of_dicts),
    "fields": (_is_in_dict, _of_objects),
    "class": (lambda place: place.kind == "class", _of_classes),
    "function": (lambda place: place.kind == "function", _of_functions),
    "cell": (lambda place: place.kind == "cell", _of_cells),
}
