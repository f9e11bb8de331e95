"""Two plans compared, and why a plan is not another: in sentences, for JSON as well, then in tables for a terminal."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.plan.diff import Breakdown, Diff, Figures, PlanChange, Term, diff
from autoshard.plan.explanation import Flip, WhyNot
from autoshard.plan.plan import Plan
from autoshard.report.terminal import TIME_WORDS, WIDTH, at_commas, make_table
from autoshard.units import GIB, format_bytes, format_count, format_dollars, format_seconds

_MOST_CHANGES, _MOST_LINES, _MOST_REASONS = 16, 6, 2
_MOST_CHARACTERS = 240  # of a choice: action lists are long
_LEAST_REASON = 0.1  # of the difference that it explains; what is less does not explain much
_TIMES = 2.0  # from twice as much on, percentages of time mislead
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


def sentences(diff: Diff) -> list[str]:
    """Return what a person wants to know first, the most important sentence first; ``misfits`` is about memory."""
    a_s, b_s = format_seconds(diff.a.step_time_s), format_seconds(diff.b.step_time_s)
    if diff.is_nothing:
        return [f"nothing differs: the plans are the same, {a_s} a step"]
    if diff.asked:
        lines = _different_questions(diff)
    elif diff.slower_by == 0:
        return [f"b takes as long as a, {a_s} a step"]
    else:
        ratio = diff.b.step_time_s / diff.a.step_time_s
        if ratio >= _TIMES:
            verdict = f"takes {ratio:.1f} times as long"
        elif ratio <= 1 / _TIMES:
            verdict = f"is {1 / ratio:.1f} times as fast"
        else:
            verdict = f"is {_percent(diff.slower_by)} {'slower' if ratio > 1 else 'faster'}"
        lines = [f"b {verdict} ({b_s} against {a_s} a step){_because(diff.time)}"]
    if diff.is_within_intervals and diff.slower_by:
        widths = f"{diff.a.half_width:.0%} either way for a, {diff.b.half_width:.0%} for b"
        lines.append(f"each lies within the other's interval ({widths}): which is faster is not known")
    if diff.a.basis != diff.b.basis:
        lines.append("the predictions rest on different grounds (see the end), which may be part of the difference")
    return lines


def misfits(diff: Diff) -> list[str]:
    """Return which of the plans needs more memory than a rank has."""
    return [
        f"{name} does not fit in memory: {side.peak_bytes / GIB:.2f} of {side.capacity_bytes / GIB:.2f} GiB"
        for name, side in (("a", diff.a), ("b", diff.b))
        if not side.fits
    ]


def _percent(share: float) -> str:
    """Print a share without its sign; what is too small to be seen is not printed as nothing.

    >>> _percent(-0.0316), _percent(0.0001)
    ('3.2%', 'less than 0.1%')
    """
    return f"{abs(share):.1%}" if abs(share) >= 0.0005 else "less than 0.1%"


def _because(time: Breakdown) -> str:
    """Name the parts that make the difference, then those that work against it."""

    def listed(parts: Sequence[Term]) -> str:
        verb = "take" if parts[0].name in ("pp", "dp") else "takes"  # these are named in the plural
        texts: list[str] = []
        for part in parts:
            more = f"{format_seconds(abs(part.difference))} {'more' if part.difference > 0 else 'less'}"
            texts.append(f"{TIME_WORDS.get(part.name, part.name)} {'' if texts else f'{verb} '}{more}")
        return " and ".join(texts)

    total = time.total.difference
    large = [part for part in time.parts if abs(part.difference) > _LEAST_REASON * abs(total)]
    causes = [part for part in large if part.difference * total > 0][:_MOST_REASONS]
    against = [part for part in large if part.difference * total < 0][:_MOST_REASONS]
    because = f", mostly because {listed(causes)}" if causes else ""
    return because + (f"; {listed(against)}" if against else "")


def _different_questions(diff: Diff) -> list[str]:
    """Compare what can be compared of plans for other models, batches or clusters: tokens, per rank and per dollar."""
    a, b = diff.a, diff.b
    parts = sorted({change.name.partition(".")[0] for change in diff.asked})
    rates = [("tokens/s", a.tokens_per_s, b.tokens_per_s)]
    if a.num_ranks != b.num_ranks:
        rates.append(("tokens/s per rank", a.tokens_per_s / a.num_ranks, b.tokens_per_s / b.num_ranks))
    if a.dollars and b.dollars:
        usd = a.dollars.usd_per_billion_tokens, b.dollars.usd_per_billion_tokens
        rates.append(("tokens per dollar", 1e9 / usd[0], 1e9 / usd[1]))
    texts: list[str] = []
    for unit, of_a, of_b in rates:
        share, both = round(of_b / of_a - 1, 9), f"({format_count(of_b)} against {format_count(of_a)})"
        if share == 0:
            texts.append(f"as many {unit}, {format_count(of_b)}")
        elif share >= _TIMES - 1:
            texts.append(f"{of_b / of_a:.1f} times the {unit} {both}")
        else:
            texts.append(f"{_percent(share)} {'more' if share > 0 else 'fewer'} {unit} {both}")
    verb = "differs" if len(parts) == 1 else "differ"
    lines = [f"the plans answer different questions: {' and '.join(parts)} {verb}", f"b has {'; '.join(texts)}"]
    if "model" in parts:
        lines.append("a token of another model is other work: MFU says how well either plan uses its ranks")
    return lines


def comparison_report(diff: Diff, names: tuple[str, str], remarks: Sequence[str]) -> Group:
    """Return what differs in a sentence, then in the choices, then in every part of what is predicted."""
    parts: list[RenderableType] = []
    for letter, name, side in zip("ab", names, (diff.a, diff.b), strict=True):
        candidate = at_commas(side.candidate, WIDTH - 3).replace("\n", "\n   ")
        parts.append(Text.assemble((f"{letter}  ", "bold"), name, "\n   ", (candidate, "bold green")))
    verdict, *more = sentences(diff)
    parts += ["", Text(verdict, "bold"), *map(Text, more), *(Text(line, "bold red") for line in misfits(diff))]
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


def _changes(title: str, changes: Sequence[PlanChange]) -> Table:
    def short(text: str | None) -> str:
        return "-" if text is None else text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."

    table = make_table(title, ("", "a", "b"))
    for change in changes[:_MOST_CHANGES]:
        table.add_row(change.name, short(change.a), short(change.b))
    if len(changes) > _MOST_CHANGES:
        table.add_row(Text(f"and {len(changes) - _MOST_CHANGES} more", "dim"), "", "")
    return table


def _predicted(diff: Diff) -> Table:
    """Return the whole of each plan, side by side; what is known of neither is left out."""
    rows: list[tuple[str, ...]] = []
    for name, value, text in _FIGURES:
        a, b = (value(side) for side in (diff.a, diff.b))
        if a is not None or b is not None:
            share = b / a - 1 if isinstance(a, float | int) and isinstance(b, float | int) else 0.0
            cells = ["-" if one is None else text(one) for one in (a, b)]
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
    count, block_column = len(diff.lines), "block, operation"
    first = f", of which {_MOST_LINES} are shown" if count > _MOST_LINES else ""
    differs = f": {count} {'line differs' if count == 1 else 'lines differ'}{first}" if count else ""
    rows: list[tuple[str, str, str]] = []
    for line in diff.lines[:_MOST_LINES]:
        rows += [(f"{line.block}, {line.op}", "a", line.a or "-"), ("", "b", line.b or "-")]
    for block in diff.blocks:
        name, lines = ("a", block.a) if block.b is None else ("b", block.b)
        rows.append((block.name, name, f"only {name} has this block, in {lines} lines"))
    columns = (block_column, "", "line")
    return make_table(f"How operations are cut{differs}", columns, rows, widths={block_column: 24})
