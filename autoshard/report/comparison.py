"""The comparison of two plans, and the answer to --why-not: sentences (also for JSON), then tables."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autoshard.cost.doubt import compared
from autoshard.plan.diff import Breakdown, Diff, Figures, PlanChange, Term
from autoshard.plan.explanation import Flip, WhyNot
from autoshard.plan.plan import Plan
from autoshard.report.tables import Cell, FittingTable, prose, unbroken
from autoshard.report.words import TIME_WORDS, ratio_words
from autoshard.units import GIB, format_bytes, format_count, format_dollars, format_seconds

_MOST_CHANGES, _MOST_LINES, _MOST_REASONS = 16, 6, 2
_SHORT = 24  # characters of a value that stands in a table
_MOST_CHARACTERS = 240  # of a value: action lists are long
_LEAST_REASON = 0.1  # share of the difference; smaller parts are not named as reasons
_TIMES = 2.0  # from this ratio on, a factor is clearer than a percentage
_FIGURES: tuple[tuple[str, Callable[[Figures], Any], Callable[[Any], str]], ...] = (
    ("step", lambda side: side.step_time_s, format_seconds),
    ("step, at least", lambda side: side.low_s, format_seconds),
    ("step, at most", lambda side: side.high_s, format_seconds),
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
    """Return the verdict in sentences, the most important first; ``misfits`` returns the sentences about memory."""
    a_s, b_s = format_seconds(diff.a.step_time_s), format_seconds(diff.b.step_time_s)
    if diff.is_nothing:
        return [f"nothing differs: the plans are the same, {a_s} a step"]
    if diff.question:
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
    if diff.ratio and diff.slower_by:
        lines.append(f"80% interval of b against a, without what both are off by together: {ratio_words(diff.ratio)}")
    elif diff.is_within_intervals and diff.slower_by:
        widths = f"a factor of {1 + diff.a.width:.2f} for a, {1 + diff.b.width:.2f} for b"
        lines.append(f"each lies within the other's interval ({widths}), so a prediction cannot say which is faster")
    if diff.a.basis != diff.b.basis:
        cause = "which may cause a part of the difference"
        lines.append(f"the predictions use different calibrations (see the end), {cause}")
    return lines


def misfits(diff: Diff) -> list[str]:
    """Return one sentence for each plan that needs more memory than a rank has."""
    return [
        f"{name} does not fit in memory: {side.peak_bytes / GIB:.2f} of {side.capacity_bytes / GIB:.2f} GiB"
        for name, side in (("a", diff.a), ("b", diff.b))
        if not side.fits
    ]


def _percent(share: float) -> str:
    """Print a share without its sign; a share that would round to 0.0% is printed as "less than 0.1%".

    >>> _percent(-0.0316), _percent(0.0001)
    ('3.2%', 'less than 0.1%')
    """
    return f"{abs(share):.1%}" if abs(share) >= 0.0005 else "less than 0.1%"


def _because(time: Breakdown) -> str:
    """Name the parts of the time that cause the difference, then the parts that reduce it."""

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
    """Compare plans for different models, batches or clusters by tokens per second, per rank and per dollar."""
    a, b = diff.a, diff.b
    parts = sorted({change.name.partition(".")[0] for change in diff.question})
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
        lines.append("a token costs each model different work: compare MFU to see how well each plan uses its ranks")
    return lines


def comparison_report(diff: Diff, names: tuple[str, str], remarks: Sequence[str]) -> Group:
    """Return the verdict, then tables of the choices that differ and of every part of the predictions."""
    parts: list[RenderableType] = []
    for letter, name, side in zip("ab", names, (diff.a, diff.b), strict=True):
        parts.append(unbroken(Text.assemble((f"{letter}  ", "bold"), name)))
        parts.append(unbroken(Text.assemble("   ", (side.candidate, "bold green"))))
    verdict, *more = sentences(diff)
    parts += ["", prose(verdict, "bold"), *map(prose, more), *(prose(line, "bold red") for line in misfits(diff))]
    parts += [prose(f"note: {remark}", "yellow") for remark in remarks]
    if diff.is_nothing:
        return Group(*parts)
    tables: list[RenderableType] = [
        *([_changes("The questions differ in", diff.question)] if diff.question else []),
        *([_changes("The plans differ in", diff.choices)] if diff.choices else []),
        _predicted(diff),
    ]
    ranks = diff.a.fullest_rank, diff.b.fullest_rank
    which = f"pipeline rank {ranks[0]}" if ranks[0] == ranks[1] else f"{ranks[0]} of a, {ranks[1]} of b"
    if any(term.difference for term in diff.time.parts):
        title = "Time of a step" if diff.same_tokens else "Time per million tokens"
        tables.append(_breakdown(title, diff.time, format_seconds))
        rests = [(TIME_WORDS.get(part.name, part.name), diff.evidence.get(part.name, "")) for part in diff.time.parts]
        tables += [FittingTable("What each part rests on", ("part", "evidence"), rests)] if diff.evidence else []
    if any(term.difference for term in diff.memory.parts):
        tables.append(_breakdown(f"Memory of the fullest rank ({which})", diff.memory, format_bytes))
    if any(term.difference for term in diff.sent):
        rows = [(term.name, *_cells(term, format_bytes)) for term in diff.sent]
        tables.append(FittingTable("Sent in a step by the busiest rank", ("axis", ">a", ">b", ">b - a"), rows))
    if diff.lines or diff.blocks:
        tables.append(_lines(diff))
    bases = [f"prediction of {name} {side.basis}" for name, side in (("a", diff.a), ("b", diff.b))]
    bases = [f"predictions {diff.a.basis}"] if diff.a.basis == diff.b.basis else bases
    parts += [part for table in tables for part in ("", table)]
    return Group(*parts, "", *(prose(one, "yellow") for one in bases))


def why_not_report(plan: Plan, found: WhyNot) -> Group:
    """Return why the other layout is refused, or how it compares, then the changes that would make it the faster."""
    parts: list[RenderableType] = [prose(Text.assemble(("refused ", "bold red"), reason)) for reason in found.against]
    if found.other is None:
        return Group(*parts)
    if found.other.candidate == plan.candidate:
        return Group(unbroken(f"{found.pins}: the plan has these values already", "bold"))
    names = ("the plan", f"the {'best' if found.fits else 'smallest'} with {found.pins}")
    parts += [*([""] if parts else []), comparison_report(compared(plan, found.other), names, ()), ""]
    if found.flips:
        title = "The smallest change of one thing after which b is faster, or fits where a does not"
        numbers = ((flip, (_quantity(flip, value) for value in (flip.now, flip.then))) for flip in found.flips)
        rows = [(flip.name, *quantities, f"{flip.factor:.3g}") for flip, quantities in numbers]
        parts.append(FittingTable(title, ("what", ">now", ">then", ">times"), rows))
    if found.unmoved:
        parts.append(Text(f"a change of up to 16 times does not make b the faster: {', '.join(found.unmoved)}", "dim"))
    return Group(*parts)


def _quantity(flip: Flip, value: float) -> str:
    if flip.name.startswith("memory"):
        return format_bytes(round(value))
    if flip.name.startswith("bandwidth"):
        return f"{value:.0%}"
    return format_count(value) if value >= 1e6 else f"{value:g}"


def _changes(title: str, changes: Sequence[PlanChange]) -> Group:
    """Return a table of what differs; values that are too long for it stand below, so that they can be pasted."""

    def text(value: str | float | None) -> str:
        return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    first = changes[:_MOST_CHANGES]
    long = [one for one in first if max(len(text(one.a)), len(text(one.b))) > _SHORT]
    rows = [(one.name, text(one.a), text(one.b)) for one in first if one not in long]
    parts: list[RenderableType] = [FittingTable(title, ("", "a", "b"), rows) if rows else Text(title, "bold")]
    for one in long:
        values = [text(value) for value in (one.a, one.b)]
        cut = [value if len(value) <= _MOST_CHARACTERS else f"{value[:_MOST_CHARACTERS]}..." for value in values]
        parts += [Text(one.name), unbroken(f"  a  {cut[0]}"), unbroken(f"  b  {cut[1]}")]
    if len(changes) > _MOST_CHANGES:
        parts.append(Text(f"and {len(changes) - _MOST_CHANGES} more", "dim"))
    return Group(*parts)


def _predicted(diff: Diff) -> FittingTable:
    """Return the figures of both plans side by side, without those that neither plan has."""
    rows: list[tuple[str, ...]] = []
    for name, value, text in _FIGURES:
        a, b = (value(side) for side in (diff.a, diff.b))
        if a is not None or b is not None:
            share = b / a - 1 if isinstance(a, float | int) and isinstance(b, float | int) else 0.0
            cells = ["-" if one is None else text(one) for one in (a, b)]
            rows.append((name, *cells, f"{share:+.1%}" if round(share, 9) else ""))
    columns = ("", ">a", ">b", ">b against a")
    return FittingTable("What is predicted", columns, rows, drop=columns[-1:])


def _breakdown(title: str, whole: Breakdown, text: Callable[[float], str]) -> FittingTable:
    rows: list[tuple[Cell, ...]] = []
    for part in whole.parts:
        share = whole.share(part)
        share_text = f"{round(share, 3) + 0.0:.1%}" if share else ""
        rows.append((TIME_WORDS.get(part.name, part.name), *_cells(part, text), share_text))
    total = [Text(cell, "bold") for cell in (whole.total.name, *_cells(whole.total, text))]
    columns = ("part", ">a", ">b", ">b - a", ">of the difference")
    return FittingTable(title, columns, [*rows, (*total, "")], drop=columns[-1:], total=len(rows))


def _cells(term: Term, text: Callable[[float], str]) -> tuple[str, str, str]:
    more = term.difference
    return text(term.a), text(term.b), f"{'+' if more > 0 else ''}{text(more)}" if more else "same"


def _lines(diff: Diff) -> Group:
    """Return the table lines that differ: first those with other collectives, then those with other layouts only."""
    count = len(diff.lines)
    first = f", the first {_MOST_LINES} are printed" if count > _MOST_LINES else ""
    differs = f": {count} {'line differs' if count == 1 else 'lines differ'}{first}" if count else ""
    parts = [Text(f"Layouts of operations{differs}", "bold")]
    for line in diff.lines[:_MOST_LINES]:
        parts.append(Text(f"{line.block}, {line.op}"))
        parts += [unbroken(f"  a  {line.a or '-'}"), unbroken(f"  b  {line.b or '-'}")]
    for block in diff.blocks:
        name, lines = ("a", block.a) if block.b is None else ("b", block.b)
        parts.append(Text(f"{block.name}: only {name} has this block ({lines} lines)"))
    return Group(*parts)
