"""Two plans compared, and why a plan is not another, for a terminal."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.plan.diff import Breakdown, Diff, Figures, PlanChange, Term, diff
from autoshard.plan.explanation import Flip, WhyNot
from autoshard.plan.plan import Plan
from autoshard.report.terminal import WIDTH, at_commas, make_table
from autoshard.report.words import TIME_WORDS, misfits, sentences
from autoshard.units import format_bytes, format_count, format_dollars, format_seconds

_MOST_CHANGES, _MOST_LINES = 16, 6
_MOST_CHARACTERS = 240  # of a choice: action lists are long
_BLOCK = "block, operation"
_FIGURES: tuple[tuple[str, Callable[[Figures], Any], Callable[[Any], str]], ...] = (
    ("step", lambda side: side.step_time_s, format_seconds),
    ("  its interval", lambda side: f"{format_seconds(side.low_s)} to {format_seconds(side.high_s)}", str),
    ("tokens/s", lambda side: side.tokens_per_s, format_count),
    ("tokens/s per rank", lambda side: side.tokens_per_s / side.num_ranks, format_count),
    ("MFU", lambda side: side.mfu, "{:.1%}".format),
    ("peak memory of a rank", lambda side: side.peak_bytes, format_bytes),
    ("memory that a rank may fill", lambda side: side.capacity_bytes, format_bytes),
    ("dollars per step", lambda side: side.dollars and side.dollars.usd_per_step, format_dollars),
    ("dollars per billion tokens", lambda side: side.dollars and side.dollars.usd_per_billion_tokens, format_dollars),
    ("compiling before the first step", lambda side: side.compile_s, format_seconds),
)


def comparison_report(diff: Diff, names: tuple[str, str], remarks: Sequence[str]) -> Group:
    """Return what differs in a sentence, then in the choices, then in every part of what is predicted."""
    verdict, *more = sentences(diff)
    parts: list[RenderableType] = [_named("a", names[0], diff.a), _named("b", names[1], diff.b), ""]
    parts += [Text(verdict, "bold"), *map(Text, more), *(Text(line, "bold red") for line in misfits(diff))]
    parts += [Text(f"note: {remark}", "yellow") for remark in remarks]
    if diff.is_nothing:
        return Group(*parts)
    tables = [
        *([_changes("What is asked differently", diff.asked)] if diff.asked else []),
        *([_changes("What is chosen differently", diff.chosen)] if diff.chosen else []),
        _predicted(diff),
    ]
    ranks = diff.a.fullest_rank, diff.b.fullest_rank
    which = f"pipeline rank {ranks[0]}" if ranks[0] == ranks[1] else f"{ranks[0]} of a, {ranks[1]} of b"
    if any(term.difference for term in diff.time.parts):
        title = "Time of a step" if diff.same_tokens else "Time per million tokens"
        tables.append(_breakdown(title, diff.time, format_seconds))
    if any(term.difference for term in diff.memory.parts):
        tables.append(_breakdown(f"Memory of the fullest rank ({which})", diff.memory, format_bytes))
    if any(term.difference for term in diff.sent):
        rows = [(term.name, *_cells(term, format_bytes)) for term in diff.sent]
        tables.append(make_table("Sent in a step by the busiest rank", ("axis", ">a", ">b", ">b - a"), rows))
    if diff.lines or diff.blocks:
        tables.append(_lines(diff))
    bases = [f"prediction of {name} {side.basis}" for name, side in (("a", diff.a), ("b", diff.b))]
    bases = [f"predictions {diff.a.basis}"] if diff.a.basis == diff.b.basis else bases
    return Group(
        *parts, *(part for table in tables for part in ("", table)), "", *(Text(one, "yellow") for one in bases)
    )


def why_not_report(plan: Plan, found: WhyNot) -> Group:
    """Return what forbids the other, or how it compares; then what would turn the order."""
    parts: list[RenderableType] = [Text.assemble(("refused ", "bold red"), reason) for reason in found.against]
    if found.other is None:
        return Group(*parts)
    if found.other.candidate == plan.candidate:
        return Group(Text(f"{found.asked}: this is the plan", "bold"))
    names = ("the plan", f"the {'best' if found.fits else 'smallest'} with {found.asked}")
    parts += [*([""] if parts else []), comparison_report(diff(plan, found.other), names, ()), ""]
    if found.flips:
        title = "The smallest change of one thing after which b is faster, or fits where a does not"
        rows = [
            (flip.name, _quantity(flip, flip.now), _quantity(flip, flip.then), f"{flip.factor:.3g}")
            for flip in found.flips
        ]
        parts.append(make_table(title, ("what", ">now", ">then", ">times"), rows))
    if found.unmoved:
        parts.append(Text(f"no change up to 16 times turns the order: {', '.join(found.unmoved)}", "dim"))
    return Group(*parts)


def _quantity(flip: Flip, value: float) -> str:
    if flip.name.startswith("memory"):
        return format_bytes(round(value))
    if flip.name.startswith("bandwidth"):
        return f"{value:.0%}"
    return format_count(value) if value >= 1e6 else f"{value:g}"


def _named(letter: str, name: str, side: Figures) -> Text:
    candidate = at_commas(side.candidate, WIDTH - 3).replace("\n", "\n   ")
    return Text.assemble((f"{letter}  ", "bold"), name, "\n   ", (candidate, "bold green"))


def _changes(title: str, changes: Sequence[PlanChange]) -> Table:
    rows: list[Iterable[str | Text]] = [
        (change.name, _short(change.a), _short(change.b)) for change in changes[:_MOST_CHANGES]
    ]
    if len(changes) > _MOST_CHANGES:
        rows.append((Text(f"and {len(changes) - _MOST_CHANGES} more", "dim"), "", ""))
    return make_table(title, ("", "a", "b"), map(tuple, rows))


def _short(text: str | None) -> str:
    if text is None:
        return "-"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _predicted(diff: Diff) -> Table:
    """Return the whole of each plan, side by side; what is known of neither is left out."""
    rows: list[tuple[str, ...]] = []
    for name, value, text in _FIGURES:
        values = [value(side) for side in (diff.a, diff.b)]
        if values != [None, None]:
            a, b = values
            share = b / a - 1 if isinstance(a, float | int) and isinstance(b, float | int) else 0.0
            cells = ["-" if one is None else text(one) for one in values]
            rows.append((name, *cells, f"{share:+.1%}" if round(share, 9) else ""))
    return make_table("What is predicted", ("", ">a", ">b", ">b against a"), rows)


def _breakdown(title: str, whole: Breakdown, text: Callable[[float], str]) -> Table:
    table = make_table(title, ("part", ">a", ">b", ">b - a", ">of the difference"))
    for part in whole.parts:
        share = whole.share(part)
        share_text = f"{round(share, 3) + 0.0:.1%}" if share else ""
        table.add_row(TIME_WORDS.get(part.name, part.name), *_cells(part, text), share_text)
    table.add_section()
    table.add_row(*(Text(cell, "bold") for cell in (whole.total.name, *_cells(whole.total, text))), "")
    return table


def _cells(term: Term, text: Callable[[float], str]) -> tuple[str, str, str]:
    more = term.difference
    return text(term.a), text(term.b), f"{'+' if more > 0 else ''}{text(more)}" if more else "same"


def _lines(diff: Diff) -> Table:
    """Return the lines of the tables that differ: what is sent otherwise before what is only laid out."""
    count = len(diff.lines)
    first = f", of which {_MOST_LINES} are shown" if count > _MOST_LINES else ""
    differs = f": {count} {'line differs' if count == 1 else 'lines differ'}{first}" if count else ""
    rows: list[tuple[str, str, str]] = []
    for line in diff.lines[:_MOST_LINES]:
        rows += [(f"{line.block}, {line.op}", "a", line.a or "-"), ("", "b", line.b or "-")]
    for block in diff.blocks:
        name, lines = ("a", block.a) if block.b is None else ("b", block.b)
        rows.append((block.name, name, f"only {name} has this block, in {lines} lines"))
    return make_table(f"How operations are cut{differs}", (_BLOCK, "", "line"), rows, widths={_BLOCK: 24})
