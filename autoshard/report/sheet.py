"""An answer laid out once: facts, tables and notes, which ``terminal`` draws with rich and ``page`` as HTML."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, Union

from autoshard.units import format_named

Kind = Literal["strong", "code", "sent", "soft", "good", "warning", "bad"]


@dataclass(frozen=True, slots=True)
class Words:
    """A text with what it is: ``code`` can be pasted, so that no line of it is broken; ``sent`` is communication."""

    text: str
    kind: Kind
    tip: str = ""  # what a page shows under the pointer


@dataclass(frozen=True, slots=True)
class Figure:
    """A number as people read it, with its exact value and its path in the JSON answer."""

    text: str
    value: float
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a bar: its ``kind`` is the name of its colour on a page."""

    size: float
    kind: str
    tip: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A share as a bar, on a page in its parts; a terminal leaves out a bar without a width in characters."""

    share: float
    width: int = 16
    parts: tuple[Part, ...] = ()


Cell = Union[str, Words, Figure, Bar, tuple["Cell", ...]]  # noqa: UP007 (a string has no |)


def plain(cell: Cell) -> str:
    """Return the text of a cell without its looks.

    >>> plain((Words("tp", "strong"), " takes ", Figure("1.00 s", 1.0, "time_s")))
    'tp takes 1.00 s'
    """
    if isinstance(cell, tuple):
        return "".join(map(plain, cell))
    return "" if isinstance(cell, Bar) else cell if isinstance(cell, str) else cell.text


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a JSON answer with its path: every figure of a sheet comes from one, and so says where it stands."""

    value: Any
    path: str = ""

    def __getitem__(self, key: str | int) -> "Node":
        return Node(self.value[key], f"{self.path}.{key}" if self.path else str(key))

    def __iter__(self) -> Iterator["Node"]:
        return (self[key] for key in range(len(self.value)))

    def entries(self) -> Iterator[tuple[str, "Node"]]:
        """Yield the entries of an object."""
        return ((key, self[key]) for key in self.value)

    def __bool__(self) -> bool:
        return bool(self.value) or isinstance(self.value, int | float)

    def at(self, *keys: str) -> "Node":
        """Return what lies under these keys; null where one of them is missing."""
        node = self
        for key in keys:
            node = node[key] if node.value is not None and key in node.value else Node(None)
        return node

    def figure(self, text: Callable[[Any], str] | None = None, beside: float = 0) -> Figure | str:
        """Return a number as people read it: by the unit in its key, unless ``text`` says how; null is a dash.

        A number in the column or row of a larger one, ``beside``, has its unit.
        """
        if self.value is None:
            return "-"
        words = text(self.value) if text else format_named(self.path.rpartition(".")[2], self.value, beside)
        return Figure(words, self.value, self.path)


Column = str | tuple[str, ...] | Callable[[Node], Cell]


def sheet_rows(nodes: Iterable[Node], columns: Mapping[str, Column]) -> list[list[Cell]]:
    """Return a row for every object: for each column what lies under its keys, or what a function returns."""
    columns_of_cells = (_cells([*nodes], column) for column in columns.values())
    return [[*row] for row in zip(*columns_of_cells, strict=True)]


def _cells(nodes: Sequence[Node], column: Column) -> Sequence[Cell]:
    """Return the cells of a column; its numbers have one unit, but for those that would lose their digits."""
    if callable(column):
        return [column(node) for node in nodes]
    values = [node.at(*((column,) if isinstance(column, str) else column)) for node in nodes]
    largest = largest_of(values)
    return [value.value if isinstance(value.value, str) else value.figure(beside=largest) for value in values]


def largest_of(values: Iterable[Node]) -> float:
    """Return the largest of the numbers among values, without their signs, and 0 if there is none."""
    return max((abs(value.value) for value in values if isinstance(value.value, int | float)), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Rows under columns; a column ``>name`` has numbers, which stand to the right and are never broken.

    A terminal that is too narrow leaves out bars, then the columns of ``drop`` one by one.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    _: KW_ONLY
    whole: Collection[str] = ()  # further columns that are never broken
    widths: Mapping[str, int] = field(default_factory=dict[str, int])  # the most characters of a column in a terminal
    drop: Sequence[str] = ()
    below: str = ""  # a column of texts to paste: a terminal writes them under the table, each after its row's name
    total: bool = False  # whether the last row is the sum of the others
    stacked: bool = False  # whether a terminal writes a row as several lines, since its texts are too long for one

    def named(self, number: int) -> str:
        """Return the name of a column."""
        return self.columns[number].lstrip(">")

    def is_number(self, number: int) -> bool:
        """Whether a column has numbers."""
        return self.columns[number].startswith(">")

    def is_whole(self, number: int) -> bool:
        """Whether a column is never broken."""
        return self.is_number(number) or self.named(number) in self.whole


@dataclass(frozen=True, slots=True)
class Fact:
    """The value of what is named, and what is to be said beside it."""

    name: str | Words
    value: Cell
    beside: Cell = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """One part of an answer, in the order in which a terminal writes it; ``name`` is its place on a page."""

    name: str = ""
    title: Cell = ""
    about: Cell = ""
    facts: Sequence[Fact] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[Cell] = ()
