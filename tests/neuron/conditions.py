"""The table of kernels and their conditions in docs/developers/trainium.md."""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "developers" / "trainium.md"
HEAD = "| kernel | called by | condition | kept by | test |"


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel, who calls it, what it asks, the Rule or function of the engine that sees to it, and its test."""

    kernel: str
    called_by: str
    condition: str
    kept_by: str
    test: str


def table() -> list[Row]:
    """Read the table; a cell for several kernels makes a row for each."""
    lines = PAGE.read_text(encoding="utf-8").partition(HEAD)[2].partition("\n\n")[0].splitlines()[2:]
    rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines)
    return [
        Row(name, *(cell.strip("`") for cell in rest))
        for kernels, *rest in rows
        for name in re.findall("`(.*?)`", kernels)
    ]
