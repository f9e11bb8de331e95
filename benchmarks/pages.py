"""Tables that a command writes into a page between two markers, as Markdown."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from autoshard.errors import InputError

ROOT = Path(__file__).parents[1]


def table_in(text: str, name: str) -> str:
    """Return what stands between the markers of a name."""
    return _block(text, name).group(2)


def with_table(text: str, name: str, table: str, command: str) -> str:
    """Return a page with another table between the markers of a name; everything outside them stays."""
    block = _block(text, name)
    note = f"<!-- written by `python -m benchmarks {command} --write`; do not edit -->"
    return f"{text[: block.end(1)]}{note}\n\n{table}\n\n{text[block.start(3) :]}"


def line(cells: Iterable[str]) -> str:
    """Write one line of a table.

    >>> line(["set", "rows"])
    '| set | rows |'
    """
    return f"| {' | '.join(cells)} |"


def head(names: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Write the head of a table; the columns of numbers stand to the right, those of ``texts`` to the left."""
    return [line(names), line("---" if name in texts else "---:" for name in names)]


def _block(text: str, name: str) -> re.Match[str]:
    found = re.search(rf"(<!-- {name} -->\n)(.*?)(<!-- /{name} -->)", text, re.DOTALL)
    if found is None:
        raise InputError.of("--write", f"a page has no place for a table: <!-- {name} --> and <!-- /{name} -->")
    return found
