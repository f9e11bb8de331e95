"""Sheets in a terminal of any width: numbers and what can be pasted are never broken, bars go first."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from autoshard.report.sheet import Bar, Cell, Fact, Kind, Sheet, Table, Words, plain

WIDTH = 120  # of what is no terminal, so that files do not depend on the machine
_GAP = 2  # columns between two columns of a table
_LEAST = 14  # columns that a column of words keeps
_LABEL = 9  # columns of the name of a fact, at least
_ASCII_HEAD = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
_STYLES: Mapping[Kind, str] = {
    "strong": "bold", "code": "green", "sent": "cyan", "soft": "dim", "good": "green", "warning": "yellow",
    "bad": "bold red",
}  # fmt: skip


class PipedConsole(Console):
    """A console whose reader may go away, as ``head`` does; rich would end the process with an error."""

    def on_broken_pipe(self) -> None:
        """Let the command line end as it does for other output."""
        self.quiet = True
        raise BrokenPipeError


def make_console() -> Console:
    """Return a console; names are never read as markup."""
    console = PipedConsole(markup=False, highlight=False, emoji=False)
    return console if console.is_terminal else PipedConsole(markup=False, highlight=False, emoji=False, width=WIDTH)


def drawn(*sheets: Sheet) -> Group:
    """Return sheets for a terminal, with an empty line between their blocks."""
    blocks = [block for sheet in sheets for block in _blocks(sheet)]
    return Group(*(part for number, block in enumerate(blocks) for part in ([""] if number else []) + block))


def _blocks(sheet: Sheet) -> Iterator[list[RenderableType]]:
    """Yield what belongs together: head, facts and tables; notes follow the last of them, and a title its table."""
    head: list[RenderableType] = [prose(_text(sheet.title, "bold"))] if sheet.title else []
    head += [prose(_text(sheet.about, "dim"))] if sheet.about else []
    blocks = [head, list(_facts(sheet.facts)), *map(_table_parts, sheet.tables)]
    if sheet.tables and not sheet.tables[0].title:
        blocks[0:3] = [blocks[1], head + blocks[2]]
    blocks = [block for block in blocks if block] or [[]]
    blocks[-1] += [_line("", note, 0) for note in sheet.notes]
    return (block for block in blocks if block)


def _facts(facts: Sequence[Fact]) -> Iterator[RenderableType]:
    """Yield facts after their names; names that are verdicts, as ``refused``, stand a little nearer."""
    longest = max((len(plain(fact.name)) for fact in facts), default=0)
    are_verdicts = all(isinstance(fact.name, Words) or not fact.name for fact in facts)
    indent = _LABEL - 1 if are_verdicts else max(_LABEL, longest + 2)
    for fact in facts:
        value = Text.assemble(_text(fact.value, "bold"), _text(fact.beside)) if fact.beside else fact.value
        yield _line(fact.name, value, indent)


def _line(label: str | Words, cell: Cell | Text, indent: int) -> RenderableType:
    """Return a cell after its label; what can be pasted stays on one line."""
    text = cell if isinstance(cell, Text) else _text(cell)
    style = "dim" if isinstance(label, str) else _STYLES[label.kind]
    if isinstance(cell, Words) and cell.kind == "code":
        return unbroken(Text.assemble((plain(label).ljust(indent), style), text))
    return Labelled(plain(label), text, style, indent)


def _table_parts(table: Table) -> list[RenderableType]:
    parts: list[RenderableType] = [FittingTable(table)] if table.rows else []
    if table.below:
        place = [table.named(number) for number in range(len(table.columns))].index(table.below)
        named = [(plain(row[0]), row[place]) for row in table.rows if plain(row[place])]
        indent = max((len(name) for name, _ in named), default=0) + 2
        parts += ["", *(_line(name, cell, indent) for name, cell in named)] if named else []
    return [prose(table.title, "bold"), *parts] if table.title else parts


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
    indent: int = _LABEL

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
class FittingTable:
    """A table without its title, and without the columns for which a terminal is too narrow.

    Where its numbers and whole columns do not fit even so, each row becomes a few lines.
    """

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        table, width = self.table, options.max_width
        columns = [number for number in range(len(table.columns)) if not self._is_elsewhere(number)]
        bars = [number for number in columns if any(isinstance(row[number], Bar) for row in table.rows)]
        for number in (*bars, *(table.columns.index(name) for name in table.drop)):
            if table.stacked or self._least_width(columns) <= width:
                break
            columns.remove(number)
        if table.stacked or self._least_width(columns) > width:
            yield self._records(columns)
        else:
            yield self._drawn(columns, ascii_only=options.ascii_only)

    def _is_elsewhere(self, number: int) -> bool:
        """Say whether a column is written below, or drawn on pages only."""
        cells = [row[number] for row in self.table.rows]
        return self.table.named(number) == self.table.below != "" or any(
            isinstance(cell, Bar) and not cell.width for cell in cells
        )

    def _least_width(self, columns: Sequence[int]) -> int:
        def least(number: int) -> int:
            texts = [self.table.named(number), *(_text(row[number]).plain for row in self.table.rows)]
            natural = max(map(len, texts))
            word = max(map(len, " ".join(texts).split()), default=0)
            return natural if self.table.is_whole(number) else min(natural, max(_LEAST, word))

        return sum(map(least, columns)) + _GAP * (len(columns) - 1)

    def _drawn(self, columns: Sequence[int], *, ascii_only: bool) -> RichTable:
        table = self.table
        grid = RichTable(
            pad_edge=False, show_edge=False, box=_ASCII_HEAD if ascii_only else box.SIMPLE_HEAD, safe_box=False,
            padding=(0, _GAP - 1, 0, 0),
        )  # fmt: skip
        for number in columns:
            name, side = table.named(number), "right" if table.is_number(number) else "left"
            width = table.widths.get(name)
            grid.add_column(name, justify=side, no_wrap=table.is_whole(number), overflow="fold", max_width=width)
        for number, row in enumerate(table.rows):
            is_sum = table.total and number == len(table.rows) - 1
            if is_sum:
                grid.add_section()
            cells = (_text(row[column], ascii_only=ascii_only) for column in columns)
            grid.add_row(*cells, style="bold" if is_sum else None)
        return grid

    def _records(self, columns: Sequence[int]) -> Group:
        """Return each row as lines of a name and a value."""
        indent = max(len(self.table.named(number)) for number in columns) + _GAP
        lines: list[RenderableType] = []
        for row in self.table.rows:
            for number in columns:
                cell, name = _text(row[number]), self.table.named(number)
                name = name.ljust(indent) if name else ""
                if cell.plain and self.table.is_whole(number):
                    lines.append(unbroken(Text.assemble(name, cell)))
                elif cell.plain:
                    lines.append(Labelled(name, cell, indent=len(name)))
            lines.append("")
        return Group(*lines[:-1])


def _text(cell: Cell, style: str = "", *, ascii_only: bool = False) -> Text:
    if isinstance(cell, tuple):
        return Text.assemble(*(_text(part, ascii_only=ascii_only) for part in cell))
    if isinstance(cell, Bar):  # full from a share of 1 on
        return Text(("#" if ascii_only else "█") * min(cell.width, round(cell.share * cell.width)))
    return Text(plain(cell), _STYLES[cell.kind] if isinstance(cell, Words) else style)
