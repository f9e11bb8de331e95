"""Try all stacks of installed packages; write their table in docs/developers/foreign-modules.md."""

from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.foreign_modules.registry import PACKAGES, absent_of
from benchmarks.foreign_stacks.catalogue import STACKS, ForeignStack
from benchmarks.foreign_stacks.curves import CLUSTERS, EQUAL, FAILED, REFUSED, WRONG, Outcome, tried
from benchmarks.pages import ROOT, head, line, with_table
from benchmarks.result import Extra, Result

PAGE = ROOT / "docs" / "developers" / "foreign-modules.md"
NAME = "foreign_stacks"
LEAST_EQUAL = 12
COLUMNS = ("stack", "package", "outcome", *CLUSTERS, "went on from step", "losses", "converted back")
_TEXTS = COLUMNS[:5]

Outcomes = Sequence[tuple[ForeignStack, Outcome]]


def run(write: bool = False) -> Result:
    """Try every stack whose package is installed; write the page if asked to, which needs all packages."""
    absent = absent_of({stack.package: PACKAGES[stack.package] for stack in STACKS}, write=write)
    outcomes = [(stack, tried(stack)) for stack in STACKS if stack.package not in absent]
    if write:
        PAGE.write_text(page_text(PAGE.read_text(encoding="utf-8"), outcomes), encoding="utf-8")
    return judge(outcomes, absent)


def judge(outcomes: Outcomes, absent: Sequence[str]) -> Result:
    """Count what takes the steps of the plain module; nothing may be wrong or fail."""
    kinds = Counter(outcome.kind for _, outcome in outcomes)
    extras: dict[str, Extra] = {kind: kinds[kind] for kind in (REFUSED, WRONG, FAILED)}
    extras |= {f"{name} is not installed": PACKAGES[name].install for name in absent}
    extras |= {_title(stack): outcome.words for stack, outcome in outcomes if outcome.kind != EQUAL}
    return Result(
        name=NAME, value=kinds[EQUAL], unit="stacks of others whose curve is that of the plain module", bar=LEAST_EQUAL,
        holds=kinds[EQUAL] >= LEAST_EQUAL and not kinds[WRONG] and not kinds[FAILED], extras=extras,
    )  # fmt: skip


def page_text(text: str, outcomes: Outcomes) -> str:
    """Return the page with its table and the sentences of refusals written anew."""
    lines = [*head(COLUMNS, _TEXTS), *(line(_cells(*pair)) for pair in outcomes)]
    refused = [f"- **{_title(stack)}**: `{outcome.words}`" for stack, outcome in outcomes if outcome.words]
    return with_table(text, NAME, "\n".join([*lines, "", *refused]).rstrip(), NAME)


def _title(stack: ForeignStack) -> str:
    return f"{stack.package}: {stack.name}"


def _cells(stack: ForeignStack, outcome: Outcome) -> list[str]:
    names = [stack.name, stack.package, outcome.kind]
    if outcome.layouts is None:
        return [*names, *"-" * (len(COLUMNS) - len(names))]
    layouts = [f"`{outcome.layouts[cluster]}`" for cluster in CLUSTERS]
    return [*names, *layouts, str(outcome.killed_at), f"{outcome.losses:.0e}", f"{outcome.back:.0e}"]


def rows(text: str) -> Mapping[tuple[str, str], Sequence[str]]:
    """Read the lines of a table by stack and package."""
    lines = [text_line.strip("| ").split(" | ") for text_line in text.splitlines() if text_line.startswith("| ")]
    return {(cells[0], cells[1]): cells for cells in lines[2:] if len(cells) == len(COLUMNS)}
