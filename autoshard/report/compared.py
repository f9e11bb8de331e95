"""Two plans compared, for a terminal."""

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.plan.diff import Breakdown, Diff, Figures, PlanChange, Term
from autoshard.report.comparison import misfits, part_words, sentences
from autoshard.report.terminal import WIDTH, at_commas, make_table
from autoshard.units import format_bytes, format_count, format_dollars, format_seconds

_MOST_CHANGES, _MOST_LINES = 16, 6
_MOST_CHARACTERS = 240  # of a choice: action lists are long
_BLOCK = 24  # columns
_UNKNOWN = (None, "-")


def comparison_report(diff: Diff, names: tuple[str, str], remarks: Sequence[str]) -> Group:
    """Return what differs in a sentence, then in the choices, then in every part of what is predicted."""
    verdict, *more = sentences(diff)
    parts: list[RenderableType] = [_named("a", names[0], diff.a), _named("b", names[1], diff.b), ""]
    parts += [Text(verdict, "bold"), *map(Text, more), *(Text(line, "bold red") for line in misfits(diff))]
    parts += [Text(f"note: {remark}", "yellow") for remark in remarks]
    if diff.is_nothing:
        return Group(*parts)
    parts += ["", _changes("What is asked differently", diff.asked)] if diff.asked else []
    parts += ["", _changes("What is chosen differently", diff.chosen)] if diff.chosen else []
    parts += ["", _predicted(diff)]
    if _moves(diff.time.parts):
        parts += ["", _breakdown(_time_title(diff), diff.time, format_seconds, part_words)]
    if _moves(diff.memory.parts):
        parts += ["", _breakdown(_memory_title(diff), diff.memory, format_bytes, str)]
    if _moves(diff.sent):
        parts += ["", _sent(diff.sent)]
    if diff.lines or diff.blocks:
        parts += ["", _lines(diff)]
    return Group(*parts, "", *_bases(diff))


def _named(letter: str, name: str, side: Figures) -> Text:
    candidate = at_commas(side.candidate, WIDTH - 3).replace("\n", "\n   ")
    return Text.assemble((f"{letter}  ", "bold"), name, "\n   ", (candidate, "bold green"))


def _moves(terms: Sequence[Term]) -> bool:
    return any(term.difference for term in terms)


def _time_title(diff: Diff) -> str:
    return "Time of a step" if diff.same_tokens else "Time per million tokens"


def _memory_title(diff: Diff) -> str:
    ranks = diff.a.fullest_rank, diff.b.fullest_rank
    which = f"pipeline rank {ranks[0]}" if ranks[0] == ranks[1] else f"{ranks[0]} of a, {ranks[1]} of b"
    return f"Memory of the fullest rank ({which})"


def _table(title: str, *columns: str) -> Table:
    table = make_table(title)
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _changes(title: str, changes: Sequence[PlanChange]) -> Table:
    table = make_table(title)
    for column in ("", "a", "b"):
        table.add_column(column, overflow="fold")
    for change in changes[:_MOST_CHANGES]:
        table.add_row(change.name, _short(change.a), _short(change.b))
    if len(changes) > _MOST_CHANGES:
        table.add_row(Text(f"and {len(changes) - _MOST_CHANGES} more", "dim"), "", "")
    return table


def _short(text: str | None) -> str:
    if text is None:
        return "-"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _predicted(diff: Diff) -> Table:
    """Return the whole of each plan, side by side."""
    table = _table("What is predicted", "", "a", "b", "b against a")
    a, b = _figures(diff.a), _figures(diff.b)
    for name in a | b:
        (a_value, a_text), (b_value, b_text) = a.get(name, _UNKNOWN), b.get(name, _UNKNOWN)
        table.add_row(name, a_text, b_text, _relative(b_value / a_value - 1) if a_value and b_value else "")
    return table


def _figures(side: Figures) -> dict[str, tuple[float | None, str]]:
    """Return what is predicted of a plan, by name, as a number and in words; what is not known is left out."""
    interval = f"{format_seconds(side.low_s)} to {format_seconds(side.high_s)}"
    per_rank = side.tokens_per_s / side.num_ranks
    figures: dict[str, tuple[float | None, str]] = {
        "step": (side.step_time_s, format_seconds(side.step_time_s)),
        "  its interval": (None, interval),
        "tokens/s": (side.tokens_per_s, format_count(side.tokens_per_s)),
        "tokens/s per rank": (per_rank, format_count(per_rank)),
        "MFU": (side.mfu, f"{side.mfu:.1%}"),
        "peak memory of a rank": (side.peak_bytes, format_bytes(side.peak_bytes)),
        "memory that a rank may fill": (side.capacity_bytes, format_bytes(side.capacity_bytes)),
    }
    if side.dollars:
        step, tokens = side.dollars.usd_per_step, side.dollars.usd_per_billion_tokens
        figures["dollars per step"] = (step, format_dollars(step))
        figures["dollars per billion tokens"] = (tokens, format_dollars(tokens))
    if side.compile_s is not None:
        figures["compiling before the first step"] = (side.compile_s, format_seconds(side.compile_s))
    return figures


def _relative(share: float) -> str:
    return "" if round(share, 9) == 0 else f"{share:+.1%}"


def _breakdown(title: str, whole: Breakdown, shown: Callable[[float], str], named: Callable[[str], str]) -> Table:
    table = _table(title, "part", "a", "b", "b - a", "of the difference")
    for part in whole.parts:
        share = whole.share(part)
        table.add_row(named(part.name), *_cells(part, shown), "" if not share else f"{round(share, 3) + 0.0:.1%}")
    table.add_section()
    table.add_row(*(Text(cell, "bold") for cell in (whole.total.name, *_cells(whole.total, shown))), "")
    return table


def _cells(term: Term, shown: Callable[[float], str]) -> tuple[str, str, str]:
    more = term.difference
    return shown(term.a), shown(term.b), f"{'+' if more > 0 else ''}{shown(more)}" if more else "same"


def _sent(sent: Sequence[Term]) -> Table:
    table = _table("Sent in a step by the busiest rank", "axis", "a", "b", "b - a")
    for term in sent:
        table.add_row(term.name, *_cells(term, format_bytes))
    return table


def _lines(diff: Diff) -> Table:
    """Return the lines of the tables that differ: what is sent otherwise before what is only laid out."""
    count = len(diff.lines)
    first = f", of which {_MOST_LINES} are shown" if count > _MOST_LINES else ""
    differs = f": {count} {'line differs' if count == 1 else 'lines differ'}{first}" if count else ""
    table = make_table(f"How operations are cut{differs}")
    table.add_column("block, operation", overflow="fold", max_width=_BLOCK)
    table.add_column("")
    table.add_column("line", overflow="fold")
    for line in diff.lines[:_MOST_LINES]:
        table.add_row(f"{line.block}, {line.op}", "a", line.a or "-")
        table.add_row("", "b", line.b or "-")
    for block in diff.blocks:
        name, lines = ("a", block.a) if block.b is None else ("b", block.b)
        table.add_row(block.name, name, f"only {name} has this block, in {lines} lines")
    return table


def _bases(diff: Diff) -> list[Text]:
    if diff.a.basis == diff.b.basis:
        return [Text(f"predictions {diff.a.basis}", "yellow")]
    return [Text(f"prediction of {name} {side.basis}", "yellow") for name, side in (("a", diff.a), ("b", diff.b))]
