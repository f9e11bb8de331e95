"""An answer that a script or a notebook holds: it prints as in a terminal, and shows as tables in a notebook."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from rich.console import Console

from autoshard.report.page.elements import sheet_section, tag
from autoshard.report.sheet import Sheet
from autoshard.report.terminal import WIDTH, drawn


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Account:
    """The sheets of an answer, and ``data``: what the command prints with ``--json``."""

    sheets: tuple[Sheet, ...]
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        text = StringIO()
        console = Console(file=text, width=WIDTH, markup=False, highlight=False, emoji=False)
        console.print(drawn(*self.sheets), crop=False)
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return tag("div", *(sheet_section(sheet) for sheet in self.sheets)).text
