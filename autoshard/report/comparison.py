"""The sheets of a comparison of two plans, and of the answer to --why-not: sentences (also for JSON), then tables."""

from collections.abc import Callable, Iterator, Sequence

from autoshard.cost.doubt import compared
from autoshard.plan.diff import Breakdown, Diff, PlanChange, Term
from autoshard.plan.explanation import WhyNot
from autoshard.plan.plan import Plan
from autoshard.report.sheet import Cell, Column, Fact, Node, Sheet, Table, Words, largest_of, sheet_rows
from autoshard.report.words import TIME_WORDS, ratio_words
from autoshard.units import GIB, format_bytes, format_change, format_count, format_named, format_seconds

_MOST_CHANGES, _MOST_LINES, _MOST_REASONS = 16, 6, 2
_SHORT = 24  # characters of a value that stands in a table
_MOST_CHARACTERS = 240  # of a value: action lists are long
_LEAST_REASON = 0.1  # share of the difference; smaller parts are not named as reasons
_TIMES = 2.0  # from this ratio on, a factor is clearer than a percentage
_LETTERS = ("a", "b")
_MANY = 1e6  # of a count, from which on it has a unit
_FIGURES = {  # what is predicted -> its keys in the JSON of a side
    "step": ("step_time_s",), "step, at least": ("low_s",), "step, at most": ("high_s",),
    "tokens/s": ("tokens_per_s",), "MFU": ("mfu",), "peak memory of a rank": ("peak_bytes",),
    "memory that a rank may fill": ("capacity_bytes",), "dollars per step": ("dollars", "usd_per_step"),
    "dollars per billion tokens": ("dollars", "usd_per_billion_tokens"),
    "compiling before the first step": ("compile_s",),
}  # fmt: skip

Names = tuple[str, str]


def sentences(diff: Diff, names: Names = _LETTERS) -> list[str]:
    """Return the verdict in sentences, the most important first; ``misfits`` returns the sentences about memory."""
    a, b = names
    a_s, b_s = format_seconds(diff.a.step_time_s), format_seconds(diff.b.step_time_s)
    if diff.is_nothing:
        return [f"nothing differs: the plans are the same, {a_s} a step"]
    if diff.question:
        lines = _different_questions(diff, names)
    elif diff.slower_by == 0:
        return [f"{b} takes as long as {a}, {a_s} a step"]
    else:
        ratio = diff.b.step_time_s / diff.a.step_time_s
        if ratio >= _TIMES:
            verdict = f"takes {ratio:.1f} times as long"
        elif ratio <= 1 / _TIMES:
            verdict = f"is {1 / ratio:.1f} times as fast"
        else:
            verdict = f"is {_percent(diff.slower_by)} {'slower' if ratio > 1 else 'faster'}"
        lines = [f"{b} {verdict} ({b_s} against {a_s} a step){_because(diff.time)}"]
    if diff.ratio and diff.slower_by:
        lines.append(
            f"{b} against {a}, with the 80% interval (an error that both predictions share cancels): "
            f"{ratio_words(diff.ratio)}"
        )
    elif diff.is_within_intervals and diff.slower_by:
        widths = f"a factor of {1 + diff.a.width:.2f} for {a}, {1 + diff.b.width:.2f} for {b}"
        lines.append(f"each lies within the other's interval ({widths}), so a prediction cannot say which is faster")
    if diff.a.basis != diff.b.basis:
        cause = "which may cause a part of the difference"
        lines.append(f"the predictions use different calibrations (see the end), {cause}")
    return lines


def misfits(diff: Diff, names: Names = _LETTERS) -> list[str]:
    """Return one sentence for each plan that needs more memory than a rank has."""
    return [
        f"{name} does not fit in memory: {side.peak_bytes / GIB:.2f} of {side.capacity_bytes / GIB:.2f} GiB"
        for name, side in zip(names, (diff.a, diff.b), strict=True)
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


def _different_questions(diff: Diff, names: Names) -> list[str]:
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
    lines = [
        f"the plans answer different questions: {' and '.join(parts)} {verb}",
        f"{names[1]} has {'; '.join(texts)}",
    ]
    if "model" in parts:
        lines.append("a token costs each model different work: compare MFU to see how well each plan uses its ranks")
    return lines


def comparison_sheets(diff: Diff, figures: Node, names: Names, heads: Names = _LETTERS) -> Iterator[Sheet]:
    """Yield the verdict, then tables of the choices that differ and of every part of the predictions.

    ``figures`` is the JSON of the comparison. Sentences and columns call the plans by ``heads``.
    """
    misfit = misfits(diff, heads)
    verdict, *more = [*sentences(diff, heads), *misfit]
    notes = [Words(line, "bad") if line in misfit else line for line in more]
    remarks = [Words(f"note: {remark}", "warning") for remark in figures["remarks"].value]
    sides = [Fact(letter, name) for letter, name in zip("ab", names, strict=True)]
    sides[1:1] = [Fact("", Words(diff.a.candidate, "code"))]
    yield Sheet(facts=[*sides, Fact("", Words(diff.b.candidate, "code"))])
    yield Sheet(title=verdict, notes=[*notes, *remarks])
    if diff.is_nothing:
        return
    tables = [
        *_changes("The questions differ in", diff.question, heads),
        *_changes("The plans differ in", diff.choices, heads),
        _predicted(figures, heads), *_breakdowns(diff, figures, heads), *_line_table(diff, heads),
    ]  # fmt: skip
    bases = [f"prediction of {name} {side.basis}" for name, side in zip(heads, (diff.a, diff.b), strict=True)]
    bases = [f"predictions {diff.a.basis}"] if diff.a.basis == diff.b.basis else bases
    yield Sheet(tables=tables)
    yield Sheet(notes=[Words(basis, "warning") for basis in bases])


def why_not_sheets(plan: Plan, answer: WhyNot, figures: Node) -> Iterator[Sheet]:
    """Yield why the other layout is refused, or how it compares, then the changes that would make it the faster."""
    if answer.against:
        yield Sheet(facts=[Fact(Words("refused", "bad"), reason) for reason in answer.against])
    if answer.rival is None:
        return
    if answer.rival.candidate == plan.candidate:
        yield Sheet(notes=[Words(f"{answer.pins}: the plan has these values already", "strong")])
        return
    names = ("the plan", f"the {'best' if answer.fits else 'smallest'} with {answer.pins}")
    yield from comparison_sheets(compared(plan, answer.rival), figures["difference"], names)
    columns: dict[str, Column] = {
        "what": "name",
        ">now": lambda flip: _quantity(flip, "now"),
        ">then": lambda flip: _quantity(flip, "then"),
        ">times": lambda flip: flip["factor"].figure("{:.3g}".format),
    }
    rows = sheet_rows(figures["flips"], columns)
    title = "The smallest change of one thing after which b is faster, or fits where a does not"
    unmoved = f"a change of up to 16 times does not make b the faster: {', '.join(answer.unmoved)}"
    yield Sheet(
        tables=[Table(title, [*columns], rows)] if rows else [],
        notes=[Words(unmoved, "soft")] if answer.unmoved else [],
    )


def _quantity(flip: Node, key: str) -> Cell:
    name = flip["name"].value
    if name.startswith("memory"):
        return flip[key].figure(lambda size: format_bytes(round(size)))
    if name.startswith("bandwidth"):
        return flip[key].figure("{:.0%}".format)
    return flip[key].figure(lambda count: format_count(count) if count >= _MANY else f"{count:g}")


def _changes(title: str, changes: Sequence[PlanChange], heads: Names) -> Iterator[Table]:
    """Yield a table of what differs; values that are too long for it stand below, so that they can be pasted."""
    if not changes:
        return
    first = changes[:_MOST_CHANGES]
    values = [(change.name, *(_value(change.name, value) for value in (change.a, change.b))) for change in first]
    left_out = [(f"and {len(changes) - _MOST_CHANGES} more", "", "")] if len(changes) > _MOST_CHANGES else []
    short = [row for row in values if max(map(len, row[1:])) <= _SHORT]
    yield Table(title, ("", *heads), [*short, *left_out])
    if long := [row for row in values if row not in short]:
        rows = [(name, *(Words(_cut(text), "code") for text in texts)) for name, *texts in long]
        yield Table("", ("", *heads), rows, stacked=True, whole=heads)


def _value(name: str, value: str | float | None) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value is None else value if isinstance(value, str) else format_named(name, value)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _predicted(figures: Node, heads: Names) -> Table:
    """Return the figures of both plans side by side, without those that neither plan has."""
    rows: list[tuple[Cell, ...]] = []
    for name, keys in _FIGURES.items():
        first, second = (figures[side].at(*keys) for side in "ab")
        if first.value is not None or second.value is not None:
            share = second.value / first.value - 1 if first.value and second.value is not None else 0.0
            larger = largest_of((first, second))
            both = first.figure(beside=larger), second.figure(beside=larger)
            rows.append((name, *both, format_change(share) if round(share, 9) else ""))
    a, b = heads
    columns = ("", f">{a}", f">{b}", f">{b} against {a}")
    return Table("What is predicted", columns, rows, drop=columns[-1:])


def _breakdowns(diff: Diff, figures: Node, heads: Names) -> Iterator[Table]:
    """Yield where the time goes and what it rests on, what the fullest rank holds, and what is sent."""
    a, b = heads
    ranks = diff.a.fullest_rank, diff.b.fullest_rank
    which = f"pipeline rank {ranks[0]}" if ranks[0] == ranks[1] else f"{ranks[0]} of {a}, {ranks[1]} of {b}"
    if any(term.difference for term in diff.time.parts):
        title = "Time of a step" if diff.same_tokens else "Time per million tokens"
        yield _breakdown(title, figures["time"], format_seconds, heads)
        rests = [(TIME_WORDS.get(part.name, part.name), diff.evidence.get(part.name, "")) for part in diff.time.parts]
        if diff.evidence:
            yield Table("What each part rests on", ("part", "evidence"), rests)
    if any(term.difference for term in diff.memory.parts):
        yield _breakdown(f"Memory of the fullest rank ({which})", figures["memory"], format_bytes, heads)
    if any(term.difference for term in diff.sent):
        rows = [(term["name"].value, *_cells(term, format_bytes)) for term in figures["sent"]]
        yield Table("Sent in a step by the busiest rank", ("axis", f">{a}", f">{b}", f">{b} - {a}"), rows)


def _breakdown(title: str, whole: Node, text: Callable[[float, float], str], heads: Names) -> Table:
    rows: list[tuple[Cell, ...]] = []
    cancels = any(
        abs(part["share"].value or 0.0) > _TIMES for part in whole["parts"]
    )  # shares of what is left say nothing
    for part in whole["parts"]:
        name, share = str(part["name"].value), part["share"].figure(lambda share: f"{round(share, 3) + 0.0:.1%}")
        rows.append(
            (TIME_WORDS.get(name, name), *_cells(part, text), share if part["share"].value and not cancels else "")
        )
    rows.append((whole["total"]["name"].value, *_cells(whole["total"], text), ""))
    rows = [row[:-1] for row in rows] if cancels else rows
    a, b = heads
    columns = ("part", f">{a}", f">{b}", f">{b} - {a}", *([] if cancels else [">of the difference"]))
    return Table(title, columns, rows, drop=columns[4:], total=True)


def _cells(term: Node, text: Callable[[float, float], str]) -> tuple[Cell, ...]:
    """Return both sides of a row and their difference, in one unit."""
    larger = largest_of((term["a"], term["b"]))
    more = term["difference"].figure(lambda more: f"{'+' if more > 0 else ''}{text(more, larger)}" if more else "same")
    return *(term[side].figure(lambda size: text(size, larger)) for side in "ab"), more


def _line_table(diff: Diff, heads: Names) -> Iterator[Table]:
    """Yield a table of the lines that differ, in the order of the difference, and of blocks that one plan lacks."""
    count = len(diff.lines)
    first = f", the first {_MOST_LINES} are printed" if count > _MOST_LINES else ""
    differs = f": {count} {'line differs' if count == 1 else 'lines differ'}{first}" if count else ""
    rows: list[tuple[Cell, ...]] = [
        (f"{line.block}, {line.op}", Words(line.a or "-", "code"), Words(line.b or "-", "code"))
        for line in diff.lines[:_MOST_LINES]
    ]
    for block in diff.blocks:
        name, lines = (heads[0], block.a) if block.b is None else (heads[1], block.b)
        rows.append((f"{block.name}: only {name} has this block ({lines} {'line' if lines == 1 else 'lines'})", "", ""))
    if rows:
        yield Table(f"Layouts of operations{differs}", ("", *heads), rows, stacked=True, whole=heads)
