"""Reads fields of foreign configuration data one by one, and collects everything that is wrong."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from autoshard.errors import Fault, InputError, nearest
from autoshard.spec.model import MAX_DIM
from autoshard.spec.record import decode

T = TypeVar("T")
N = TypeVar("N", int, float)


class ConfigReader:
    """A reader that goes on after a fault with a harmless value, so that all faults are found in one go.

    Every ``names`` is one field and its aliases; messages name the one that is in the data.
    """

    def __init__(self, data: Mapping[str, object]) -> None:
        self.data = data
        self.faults: list[Fault] = []

    def refuse(self, field: str, message: str) -> None:
        """Note a fault."""
        self.faults.append(Fault(where=field, message=message))

    def check(self, holds: Callable[[], bool], fields: tuple[str, ...], message: str) -> None:
        """Refuse the first field that is there unless the rule holds; not asked where one is faulty."""
        faulty = {fault.where for fault in self.faults}
        if not faulty.intersection(fields) and not holds():
            self.refuse(self._spelled(fields), message)

    def only(self, field: str, allowed: tuple[object, ...], reason: str) -> None:
        """Refuse a field that is there and has another value than those allowed."""
        if field in self.data and self.data[field] not in allowed:
            known = " or ".join(shown(value) for value in allowed)
            self.refuse(field, f"must be {known}, not {shown(self.data[field])}: {reason}")

    def whole(self, *names: str, default: int | None = None, low: int = 1, high: int = MAX_DIM) -> int:
        """Read a whole number; without a default it must be there."""
        found = self._value(int, names, default)
        return low if found is None else self._within(names, found, low, high)

    def whole_or_null(self, *names: str, default: int | None) -> int | None:
        """Read a whole number of at least 1 that may also be null."""
        field = self._spelled(names)
        if field not in self.data:
            return default
        return None if self.data[field] is None else self.whole(*names)

    def number(self, *names: str, default: float | None, low: float, high: float = math.inf) -> float:
        """Read a number; without a default it must be there."""
        found = self._value(float, names, default)
        return low if found is None else self._within(names, found, low, high)

    def flag(self, name: str, default: bool) -> bool:
        """Read true or false."""
        return bool(self._value(bool, (name,), default))

    def choice(self, *names: str, default: str, known: Iterable[str]) -> str:
        """Read one of the words that are known."""
        found = self._value(str, names, default)
        words = sorted(known)
        if found is None or found in words:
            return found or default
        self.refuse(self._spelled(names), f"{shown(found)} is not known. {nearest(found, words)}")
        return default

    def _spelled(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if name in self.data), names[0])

    def _value(self, kind: type[T], names: tuple[str, ...], default: T | None) -> T | None:
        field = self._spelled(names)
        if field not in self.data:
            if default is None:
                self.refuse(field, "missing, and it has no default")
            return default
        for other in names:
            if other != field and other in self.data and self.data[other] != self.data[field]:
                self.refuse(other, f"{shown(self.data[other])} contradicts {field}, {shown(self.data[field])}")
        try:
            return decode(kind, self.data[field], field)
        except InputError as error:
            self.faults.extend(error.faults)
            return None

    def _within(self, names: tuple[str, ...], value: N, low: N, high: N) -> N:
        if low <= value <= high:
            return value
        limit = f"at least {low}" if value < low else f"at most {high}"
        self.refuse(self._spelled(names), f"must be {limit}, not {shown(value)}")
        return low


def shown(value: object) -> str:
    """Print a JSON value in a message, cut where it would fill the screen.

    >>> shown(None), shown(True), shown("x"), shown([1, 2])
    ('null', 'true', "'x'", '[1, 2]')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
