"""A hunt tries many cases of one promise; its last result is a row of docs/developers/soak.md."""

import datetime
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "developers" / "soak.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class HuntResult:
    """What a hunt saw: how many cases held, which were refused in a sentence, and which broke the promise."""

    held: int
    refused: int = 0
    failures: Sequence[str] = ()  # a line each: the case, what was promised, what came
    remark: str = ""  # what else a reader of the table should know

    @property
    def cells(self) -> tuple[str, ...]:
        """The result as cells of the table."""
        return str(self.held), str(self.refused), str(len(self.failures)), self.remark


Hunt = Callable[[int, int, Path], HuntResult]  # takes how many cases, a seed, and an empty folder to work in


def record(name: str, command: str, result: HuntResult, page: Path = PAGE) -> None:
    """Replace the row of a hunt in the table of the page."""
    today = f"{datetime.date.today():%Y-%m-%d}"
    row = f"| {' | '.join([name, *result.cells, today, f'`{command}`'])} |"
    text = page.read_text(encoding="utf-8")
    pattern = rf"^\| {re.escape(name)} \|.*$"
    assert re.search(pattern, text, re.MULTILINE), f"the table of {page} has no row {name}"
    page.write_text(re.sub(pattern, lambda _: row, text, flags=re.MULTILINE), encoding="utf-8")
