"""What a report prints where there is no terminal, or on a terminal of any width."""

import io

from rich.console import Console, RenderableType

from autoshard.report.sheet import Sheet, Table
from autoshard.report.terminal import WIDTH, drawn


def printed(*parts: RenderableType | Sheet | Table, width: int = WIDTH, encoding: str = "utf-8") -> str:
    """Print to text without spaces at the ends of lines; only lines without a space to break at may be too wide."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, markup=False, highlight=False, emoji=False, width=width)
    tables = (Sheet(tables=[part]) if isinstance(part, Table) else part for part in parts)
    console.print(*(drawn(part) if isinstance(part, Sheet) else part for part in tables), crop=False)
    file.seek(0)
    return "".join(f"{line.rstrip()}\n" for line in file.read().splitlines())
