"""Try all modules of installed packages; write the table of docs/developers/foreign-modules.md."""

from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.foreign_modules.catalogue import MODULES
from benchmarks.foreign_modules.ranks import EQUAL, FAILED, REFUSED, WRONG, Outcome, compared
from benchmarks.foreign_modules.registry import PACKAGES, ForeignModule, absent_of
from benchmarks.pages import ROOT, head, line, with_table
from benchmarks.result import Extra, Result

PAGE = ROOT / "docs" / "developers" / "foreign-modules.md"
NAME = "foreign_modules"
LEAST_EQUAL = 60
_COLUMNS = ("module", "package", "format", "outcome", "results", "gradients", "losses", "kept whole")
_TEXTS = _COLUMNS[:4]

Tried = Sequence[tuple[ForeignModule, Outcome]]


def run(write: bool = False) -> Result:
    """Try every module whose package is installed; write the page if asked to, which needs all packages."""
    absent = absent_of(PACKAGES, write=write)
    tried = [(module, compared(module)) for module in MODULES if module.package not in absent]
    if write:
        PAGE.write_text(page_text(PAGE.read_text(encoding="utf-8"), tried), encoding="utf-8")
    return judge(tried, absent)


def judge(tried: Tried, absent: Sequence[str]) -> Result:
    """Count what is equal; nothing may be wrong or fail."""
    kinds = Counter(outcome.kind for _, outcome in tried)
    extras: dict[str, Extra] = {kind: kinds[kind] for kind in (REFUSED, WRONG, FAILED)}
    extras |= {f"{name} is not installed": PACKAGES[name].install for name in absent}
    extras |= {title(module): outcome.words for module, outcome in tried if outcome.kind != EQUAL}
    return Result(
        name=NAME, value=kinds[EQUAL], unit="modules of others that equal one process", bar=LEAST_EQUAL,
        holds=kinds[EQUAL] >= LEAST_EQUAL and not kinds[WRONG] and not kinds[FAILED], extras=extras,
    )  # fmt: skip


def title(module: ForeignModule) -> str:
    """Name a module and its package."""
    return f"{module.package}: {module.name}"


def page_text(text: str, tried: Tried) -> str:
    """Return the page with its table, the list of packages and the sentences of refusals written anew."""
    lines = [*head(_COLUMNS, _TEXTS), *(line(cells(*one)) for one in tried)]
    refused = [f"- **{title(module)}**: {_escaped(outcome.words)}" for module, outcome in tried if outcome.words]
    text = with_table(text, NAME, "\n".join([*lines, "", *refused]).rstrip(), NAME)
    return with_table(text, "packages", packages_table(), NAME)


def packages_table() -> str:
    """Return what was installed, under which licence."""
    rows = [line([name, one.version, one.licence, f"`{one.install}`"]) for name, one in PACKAGES.items()]
    return "\n".join([*head(_PACKAGE, _PACKAGE), *rows])


_PACKAGE = ("package", "version", "licence", "how to install it")


def cells(module: ForeignModule, outcome: Outcome) -> list[str]:
    """Return the line of a module."""
    if outcome.kind not in (EQUAL, WRONG):
        return [module.name, module.package, "-", outcome.kind, *"----"]
    texts = [module.name, module.package, outcome.format, outcome.kind]
    far = (outcome.results, outcome.gradients, outcome.losses)
    return [*texts, *(f"{one:.0e}" for one in far), str(outcome.kept_whole)]


def _escaped(words: str) -> str:
    """Write a message on one line, in which Markdown reads no marks."""
    return f"`{' '.join(words.replace('`', chr(39)).split())}`"


def rows(text: str) -> Mapping[tuple[str, str], Sequence[str]]:
    """Read the lines of a table by module and package."""
    found = [one.strip("| ").split(" | ") for one in text.splitlines() if one.startswith("| ")]
    return {(one[0], one[1]): one for one in found[2:] if len(one) == len(_COLUMNS)}
