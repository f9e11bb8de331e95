"""The tables of kernels and their conditions in docs/developers/trainium.md."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "developers" / "trainium.md"
CALLERS = "| caller | kernels |"
CONDITIONS = "| caller or kernel | condition | kept by |"


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel, who calls it, what it asks, and the Rule or function of the engine that sees to it."""

    kernel: str
    called_by: str
    condition: str
    kept_by: str


def table() -> list[Row]:
    """Read both tables: a row for each kernel, and for each Rule or function that keeps its condition."""
    callers = {named(caller)[0]: named(kernels) for caller, kernels in cells(CALLERS)}
    called_by = {kernel: caller for caller, kernels in callers.items() for kernel in kernels}
    return [
        Row(kernel, called_by[kernel], condition, rule)
        for names, condition, rules in cells(CONDITIONS)
        for name in named(names)
        for kernel in callers.get(name, [name])
        for rule in named(rules)
    ]


def cells(head: str) -> Iterator[list[str]]:
    """The rows of the table with this head, cell by cell."""
    for line in PAGE.read_text(encoding="utf-8").partition(head)[2].partition("\n\n")[0].splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def named(cell: str) -> list[str]:
    """What a cell names as code."""
    return re.findall("`(.*?)`", cell)
