"""Tables and lines that fit any terminal: numbers and what can be pasted are never broken, bars go first."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 120  # of what is no terminal, so that files do not depend on the machine
_GAP = 2  # columns between two columns of a table
_LEAST = 14  # columns that a column of words keeps
_ASCII_HEAD = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def make_console() -> Console:
    """Return a console; names are never read as markup."""
    console = Console(markup=False, highlight=False, emoji=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, emoji=False, width=WIDTH)


def unbroken(text: str | Text, style: str = "") -> Text:
    """Return a line that is printed whole, however narrow the terminal is, so that it can be pasted."""
    line = Text(text, style=style) if isinstance(text, str) else text
    line.no_wrap, line.overflow = True, "ignore"
    return line


@dataclass(frozen=True, slots=True)
class Labelled:
    """Prose beside a label, broken between words only."""

    label: str
    text: Text
    style: str = ""
    indent: int = 9

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        ends, start = list[int](), 0  # where lines end, and where the last one starts
        for word in re.finditer(r"\S+\s*", self.text.plain):
            if word.start() > start and len(word[0].rstrip()) + word.start() - start > options.max_width - self.indent:
                start = word.start()
                ends.append(start)
        for number, line in enumerate(self.text.divide(ends)):
            line.rstrip()
            label = ("" if number else self.label).ljust(self.indent)
            yield unbroken(Text.assemble((label, self.style), line))


def prose(text: str | Text, style: str = "") -> Labelled:
    """Return a text that is broken between words only."""
    return Labelled("", Text(text, style=style) if isinstance(text, str) else text, indent=0)


@dataclass(frozen=True, slots=True)
class Bar:
    """A share as a bar."""

    share: float
    width: int = 16

    def text(self, *, ascii_only: bool) -> str:
        """Return the bar; full from a share of 1 on."""
        return ("#" if ascii_only else "█") * min(self.width, round(self.share * self.width))


Cell = str | Text | Bar


@dataclass(frozen=True, slots=True, eq=False)
class FittingTable:
    """A table that leaves out bars, then the columns of ``drop`` one by one, until it fits.

    A column ``>name`` has numbers, which stand to the right. Neither they nor ``whole`` columns are ever broken; where
    they do not fit even so, each row becomes a few lines.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    _: KW_ONLY
    whole: Collection[str] = ()
    widths: Mapping[str, int] = field(default_factory=dict[str, int])  # the most characters of a column
    drop: Sequence[str] = ()
    total: int | None = None  # the number of a row that stands apart

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        columns, width = list(range(len(self.columns))), options.max_width
        bars = [number for number in columns if any(isinstance(row[number], Bar) for row in self.rows)]
        named = [self.columns.index(name) for name in self.drop]
        for number in (*bars, *named):
            if self._least_width(columns) <= width:
                break
            columns.remove(number)
        if self._least_width(columns) <= width:
            yield self._table(columns, ascii_only=options.ascii_only)
        else:
            yield self._records(columns)

    def _name(self, number: int) -> str:
        return self.columns[number].lstrip(">")

    def _whole(self, number: int) -> bool:
        return self.columns[number].startswith(">") or self._name(number) in self.whole

    def _least_width(self, columns: Sequence[int]) -> int:
        def least(number: int) -> int:
            texts = [self._name(number), *(_text(row[number]).plain for row in self.rows)]
            natural = max(map(len, texts))
            word = max(map(len, " ".join(texts).split()), default=0)
            return natural if self._whole(number) else min(natural, max(_LEAST, word))

        return sum(map(least, columns)) + _GAP * (len(columns) - 1)

    def _table(self, columns: Sequence[int], *, ascii_only: bool) -> Table:
        table = Table(
            title=self.title, title_justify="left", title_style="bold", pad_edge=False, show_edge=False,
            box=_ASCII_HEAD if ascii_only else box.SIMPLE_HEAD, safe_box=False, padding=(0, _GAP - 1, 0, 0),
        )  # fmt: skip
        for number in columns:
            name, right = self._name(number), self.columns[number].startswith(">")
            side, width = "right" if right else "left", self.widths.get(name)
            table.add_column(name, justify=side, no_wrap=self._whole(number), overflow="fold", max_width=width)
        for number, row in enumerate(self.rows):
            if number == self.total:
                table.add_section()
            table.add_row(*(_text(row[column], ascii_only=ascii_only) for column in columns))
        return table

    def _records(self, columns: Sequence[int]) -> Group:
        """Return each row as lines of a name and a value."""
        named = max(len(self._name(number)) for number in columns)
        lines: list[RenderableType] = [Text(self.title, style="bold")]
        for row in self.rows:
            for number in columns:
                cell, name = _text(row[number]), self._name(number).ljust(named + _GAP)
                if cell.plain and self._whole(number):
                    lines.append(unbroken(Text.assemble(name, cell)))
                elif cell.plain:
                    lines.append(Labelled(name, cell, indent=named + _GAP))
            lines.append("")
        return Group(*lines[:-1])


def _text(cell: Cell, *, ascii_only: bool = False) -> Text:
    text = cell.text(ascii_only=ascii_only) if isinstance(cell, Bar) else cell
    return Text(text) if isinstance(text, str) else text
