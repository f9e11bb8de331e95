"""The pipeline's timeline: one row per pipeline rank, every action where it runs, what is sent, and memory over time.

An action is a piece of a horizontal line: one path for each rank, kind and stage, so that thousands of actions are few
elements. Distances are whole units, and each is taken from the last one drawn, so that none is off by more than half.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.cost.timeline import RankTimeline, StepTimeline
from autoshard.plan.plan import Plan
from autoshard.report.page.charts import legend
from autoshard.report.page.elements import Content, Markup, details, tag
from autoshard.report.page.stretch import Stretch, stretch_of
from autoshard.report.rank_row import PASSES, RankRow, rank_words
from autoshard.report.words import TIME_WORDS, ranks_text
from autoshard.schedule.waves import Floats, Ints
from autoshard.units import GIB, format_bytes, format_seconds

MOST_ACTIONS = 9000  # that are drawn, about ten bytes each
MOST_ROWS = 32
MOST_MEMORIES = 8
_UNITS_PER_ACTION = 24  # of the shortest action, so that gaps between actions can be seen
_LEAST_UNITS, _MOST_UNITS = 4000, 400_000
_GAP = 0.06  # of an action is left free at its end
_ROW, _BAR = 22, 12
_MEMORY_HEIGHT = 96
_MEMORY_POINTS = 300
_LITTLE, _LITTLE_TOP = 0.25, 0.9  # of what a rank can use; of the drawing, where less than that is held
_SIZES = 4  # numbers at a drawing of memory, about
_REPEATS = "not drawn: here the pattern repeats itself"
_IN_FLIGHT = ("activations", "logits")


def timelines(plan: Plan, step: StepTimeline, shown_s: tuple[float, float], name: str = "") -> Markup:
    """Return the drawing of a step as it opens: how the pipeline fills, two periods and how it drains; then the whole.

    ``shown_s`` holds the lengths of both axes, of the short drawing and of the whole.
    """
    short = stretch_of(step)
    if not short:
        return timeline(plan, step, shown_s[1], name)
    count = plan.schedule.num_micro_batches
    words = f"{name}: the" if name else "The"
    whole = timeline(plan, step, shown_s[1])
    first = timeline(plan, step, shown_s[0], name, short)
    return tag("div", first, details(f"{words} whole step, all {count} micro-batches", whole))


def lengths_of(steps: Sequence[StepTimeline]) -> tuple[float, float]:
    """Return the lengths of the axes that all steps share: of their short drawings, and of the whole."""
    stretches = [(step, stretch_of(step)) for step in steps]
    short = [stretch.drawn_s(step.end_s) for step, stretch in stretches if stretch]
    return max(short, default=0.0), max(step.end_s for step in steps)


def timeline(plan: Plan, step: StepTimeline, end_s: float, name: str = "", short: Stretch | None = None) -> Markup:
    """Return the drawing of a step on an axis that ends at ``end_s``, without what is left out of a ``short`` one.

    Where a whole step is too large, its ends alone are drawn.
    """
    rows = shown_ranks(len(step.ranks), MOST_ROWS)
    keep = MOST_ACTIONS // (2 * len(rows))
    actions = [rank.end_s - rank.start_s for rank in step.ranks]
    shortest = min(float(times_s[times_s > 0].min(initial=end_s)) for times_s in actions)
    units = int(np.clip(_UNITS_PER_ACTION * end_s / shortest, _LEAST_UNITS, _MOST_UNITS))
    height = len(rows) * _ROW
    drawn = [
        tag("g", _row(RankRow(step, number, keep), units / end_s, short), transform=f"translate(0 {place * _ROW})",
            data_rank=number)
        for place, number in enumerate(rows)
    ]  # fmt: skip
    about = f"timeline of a step of {plan.model.name}: {len(step.ranks)} pipeline ranks, {format_seconds(step.end_s)}"
    picture = tag(
        "svg", drawn, viewBox=f"0 0 {units} {height}", preserveAspectRatio="none", role="img",
        aria_label=about, style=f"height:{height}px",
    )  # fmt: skip
    drawing = tag("div", picture, _undrawn(step, rows, keep, end_s, short), class_="drawing")
    labels = tag(
        "div",
        (tag("span", f"pp {number}", data_tip=_rank_tip(plan, step, number)) for number in rows),
        class_="rows",
    )
    seconds = ";".join(
        f"{kind}{stage}={its.time_s:.6g}" for (kind, stage), its in step.passes.items() if _runs(step, kind)
    )
    stage = tag("div", drawing, tag("div", class_="ticks", aria_hidden="true"), class_="stage", tabindex=0,
                role="group", aria_label="timeline; arrow keys move it, plus and minus zoom, 0 shows all")  # fmt: skip
    cut = f"{short.from_s:.6g} {short.until_s:.6g} {short.gap_s:.6g}" if short else None
    caption = name or ("How the pipeline fills, two periods and how it drains" if short else "One predicted step")
    return tag(
        "figure",
        tag("figcaption", caption, tag("span", _buttons(short), class_="zoom")),
        tag("div", labels, stage, class_="timeline", data_end=float(end_s), data_units=units, data_seconds=seconds,
            data_cut=cut),
        [tag("p", note, class_="about") for note in _notes(plan, step, rows, keep, short)],
        class_="wide",
    )  # fmt: skip


def _buttons(short: Stretch | None) -> list[Markup]:
    whole = "all that is drawn" if short else "the whole step"
    return [
        tag("button", text, type="button", data_zoom=what, aria_label=label, data_tip=label)
        for text, what, label in (("+", "in", "zoom in"), ("-", "out", "zoom out"), ("<", "left", "earlier"),
                                  (">", "right", "later"), ("all", "all", whole))
    ]  # fmt: skip


def _undrawn(step: StepTimeline, rows: Sequence[int], keep: int, end_s: float, short: Stretch | None) -> list[Markup]:
    """Return hatched areas over what is not drawn: of all rows together, or of each."""
    spans: list[tuple[float, float, int, int]] = []
    if short:
        spans.append((short.from_s, short.from_s + short.gap_s, 0, len(rows) * _ROW))
    for place, row in enumerate(RankRow(step, number, keep) for number in rows):
        if row.left_out and not short:
            first_s, last_s = float(row.rank.start_s[row.left_out[0]]), float(row.rank.end_s[row.left_out[-1]])
            spans.append((first_s, last_s, place * _ROW + (_ROW - _BAR) // 2, _BAR))
    return [
        tag("div", class_="hatched", data_from=first_s / end_s, data_until=last_s / end_s, data_tip=_REPEATS,
            style=f"left:{first_s / end_s:.3%};width:{(last_s - first_s) / end_s:.3%};top:{top}px;height:{height}px")
        for first_s, last_s, top, height in spans
    ]  # fmt: skip


def timeline_legend(steps: Sequence[StepTimeline]) -> Markup:
    """Return what the colours of timelines mean."""
    kinds = {word: f"{kind} key" for kind, word in PASSES.items() if any(_runs(step, kind) for step in steps)}
    kinds |= {TIME_WORDS["pp"]: "t-pp"} if any(step.send_s for step in steps) else {}
    parts = dict.fromkeys(phase.part for step in steps for phase in step.phases)
    kinds |= {TIME_WORDS.get(part, part): f"t-{part}" for part in parts}
    hidden = {"not drawn": "hatched"} if any(map(stretch_of, steps)) or any(map(_is_large, steps)) else {}
    return legend(kinds | {"waiting": "t-bubble"} | hidden)


def _is_large(step: StepTimeline) -> bool:
    """Whether some of its actions are not drawn even where the whole step is."""
    rows = shown_ranks(len(step.ranks), MOST_ROWS)
    return any(RankRow(step, number, MOST_ACTIONS // (2 * len(rows))).left_out for number in rows)


def shown_ranks(count: int, most: int) -> list[int]:
    """Return the ranks that are drawn: all, or the first, the last, and some between at equal distances.

    >>> shown_ranks(4, 8), shown_ranks(64, 4)
    ([0, 1, 2, 3], [0, 21, 42, 63])
    """
    return list(range(count)) if count <= most else [round(place * (count - 1) / (most - 1)) for place in range(most)]


def _runs(step: StepTimeline, kind: str) -> bool:
    return any(kind in rank.kinds for rank in step.ranks)


def _notes(plan: Plan, step: StepTimeline, rows: Sequence[int], keep: int, short: Stretch | None) -> list[str]:
    notes = list[str]()
    if len(rows) < len(step.ranks):
        notes.append(f"Drawn are {len(rows)} of {len(step.ranks)} pipeline ranks: {ranks_text(rows)}.")
    if short:
        hidden, count = format_seconds(short.until_s - short.from_s), plan.schedule.num_micro_batches
        notes.append(f"The hatched part stands for {hidden}, in which the pattern before it repeats until all {count} "
                     "micro-batches have begun.")  # fmt: skip
    elif any(RankRow(step, number, keep).left_out for number in rows):
        notes.append(
            f"Drawn are the first and the last {keep} actions of each rank; those in the hatched part repeat the same "
            "pattern. autoshard explain --trace writes all of them for ui.perfetto.dev."
        )
    return notes


def _rank_tip(plan: Plan, step: StepTimeline, number: int) -> str:
    rank = step.ranks[number]
    idle_s = step.makespan_s - rank.busy_s - rank.sending_s
    return (
        f"{rank_words(plan, number)} "
        f"works {format_seconds(rank.busy_s)}, sends {format_seconds(rank.sending_s)}, waits {format_seconds(idle_s)}"
    )


def _row(row: RankRow, per_s: float, short: Stretch | None) -> list[Content]:
    rank, step, positions = row.rank, row.step, row.positions

    def units(times_s: Floats) -> Ints:
        return np.rint((short.place(times_s) if short else times_s) * per_s).astype(int)

    if short:
        hidden = short.hides(rank.start_s, rank.end_s)
        positions = [position for position in positions if not hidden[position]]
    starts, ends = units(rank.start_s), units(rank.end_s)
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for position in positions:
        groups[row.action(position)[:2]].append(position)
    middle, ends_at = _ROW // 2, int(units(np.array(step.makespan_s)))
    shapes: list[Content] = [tag("rect", x=0, y=middle - _BAR // 2, width=ends_at, height=_BAR, class_="wait")]
    for (kind, stage), places in groups.items():
        numbers = rank.micro_batches[places].tolist()
        in_turn = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        batches = str(numbers[0]) if in_turn else " ".join(map(str, numbers))
        path = _pieces([(int(starts[place]), int(ends[place])) for place in places], middle)
        shapes.append(tag("path", d=path, class_=kind, data_stage=stage, data_batches=batches))
    if step.send_s:
        sent = units(rank.end_s + step.send_s)
        sends = [(int(ends[at]), int(sent[at])) for at in positions if row.pass_of(at).sends_to is not None]
        shapes.append(tag("path", d=_pieces(sends, _ROW - 3, gap=0.0), class_="send"))
    for phase in step.phases:
        time_s = phase.seconds[row.number]
        start, end = units(np.array([phase.start_s, phase.start_s + time_s])).tolist()
        tip = f"{phase.name}: {format_seconds(time_s)}"
        shapes.append(tag("path", d=f"M{start} {middle}h{end - start}", class_=f"phase t-{phase.part}", data_tip=tip))
    return shapes


def _pieces(spans: Sequence[tuple[int, int]], height: int, gap: float = _GAP) -> str:
    """Return a path of pieces of one horizontal line."""
    texts, at = list[str](), 0
    for number, (start, end) in enumerate(spans):
        length = max(1, int((1 - gap) * (end - start)))
        texts.append(f"m{start - at} 0h{length}" if number else f"M{start} {height}h{length}")
        at = start + length
    return "".join(texts)


def shows_limits(plan: Plan, step: StepTimeline) -> bool:
    """Say whether drawings of memory reach up to what a rank can use, or that would press what is held into a line."""
    return max(rank.most_bytes for rank in step.ranks) >= _LITTLE * plan.cluster.rank_memory_bytes


def memory_charts(plan: Plan, step: StepTimeline, end_s: float) -> Markup:
    """Return the memory of pipeline ranks over the step: what is always there at the bottom, activations on top."""
    prediction = plan.prediction
    assert prediction, "only predicted plans are drawn"
    capacity, usable = prediction.capacity_bytes, plan.cluster.rank_memory_bytes
    most, is_empty = max(rank.most_bytes for rank in step.ranks), not shows_limits(plan, step)
    top = most / _LITTLE_TOP if is_empty else max(usable, most)
    limits = [] if is_empty else [
        (capacity, "capacity", f"a plan may fill {format_bytes(capacity)}"),
        (usable, "usable", f"a rank can use {format_bytes(usable)}; between lies the headroom"),
    ]  # fmt: skip
    drawings: list[Markup] = []
    numbers = shown_ranks(len(step.ranks), MOST_MEMORIES)
    fullest = max(range(len(step.ranks)), key=lambda number: step.ranks[number].most_bytes)
    if fullest not in numbers:
        nearest = min(numbers, key=lambda number: abs(number - fullest))
        numbers[numbers.index(nearest)] = fullest
    for number in numbers:
        rank, parts = step.ranks[number], prediction.stage_memory[number].parts
        title = f"pipeline rank {number}: at most {format_bytes(rank.most_bytes)}"
        marks = [
            tag("line", x1=0, x2=1000, y1=_down(size, top), y2=_down(size, top), class_=kind, data_tip=tip)
            for size, kind, tip in limits
        ]
        area = tag("path", d=_area(rank, end_s, top), class_="m-activations", data_tip="activations in flight")
        picture = tag(
            "svg", area, _bands(rank, parts, top), marks, viewBox=f"0 0 1000 {_MEMORY_HEIGHT}", role="img",
            preserveAspectRatio="none", aria_label=f"memory of {title}",
        )  # fmt: skip
        axes = _upward(top), picture, tag("div", map(_mark, (0.0, end_s / 2, end_s)), class_="across")
        drawings.append(tag("figure", tag("figcaption", title), axes, class_="memory"))
    is_part = len(numbers) < len(step.ranks)
    note = f"Drawn are {len(numbers)} of {len(step.ranks)} pipeline ranks, with the fullest: {ranks_text(numbers)}."
    notes = [note] if is_part else []
    notes += [f"What a rank can use, {format_bytes(usable)}, lies far above what is drawn."] if is_empty else []
    return tag("div", tag("div", drawings, class_="memories"), (tag("p", note, class_="about") for note in notes))


def _upward(top: float) -> Markup:
    """Return the numbers at the side of a drawing of memory, at round sizes."""
    unit, name = next(
        ((size, name) for size, name in ((GIB, "GiB"), (GIB / 1024, "MiB")) if top >= size), (1024, "KiB")
    )
    rough = top / unit / _SIZES
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
    sizes = [number * step for number in range(math.floor(top / unit / step) + 1)]
    marks = (
        tag(
            "span",
            f"{size:g}" + (f" {name}" if size == sizes[-1] else ""),
            style=f"bottom:{100 * size * unit / top:.3g}%",
        )
        for size in sizes
    )
    return tag("div", marks, class_="upward", aria_hidden="true")


def _mark(time_s: float) -> Markup:
    return tag("span", format_seconds(time_s))


def _down(size: float, top: float) -> float:
    return round(_MEMORY_HEIGHT * (1 - size / top), 1)


def _bands(rank: RankTimeline, parts: Mapping[str, int], top: float) -> list[Markup]:
    """Return what a rank holds all the time, part on part."""
    bands, below = list[Markup](), 0
    for name, size in parts.items():
        if size and name not in _IN_FLIGHT:
            place = {"y": _down(below + size, top), "height": round(_MEMORY_HEIGHT * size / top, 1)}
            bands.append(
                tag("rect", x=0, width=1000, class_=f"m-{name}", data_tip=f"{name} {format_bytes(size)}", **place)
            )
            below += size
    return bands


def _area(rank: RankTimeline, end_s: float, top: float) -> str:
    """Return the outline of what a rank holds, the most of each small piece of time."""
    columns = np.minimum((rank.held_from_s / end_s * _MEMORY_POINTS).astype(int), _MEMORY_POINTS - 1)
    most = np.full(_MEMORY_POINTS, -1, dtype=np.int64)
    last = most.copy()
    np.maximum.at(most, columns, rank.held_bytes)
    last[columns] = rank.held_bytes
    held, drawn, path = rank.idle_bytes, -1, f"M0 {_MEMORY_HEIGHT}"
    for column in range(_MEMORY_POINTS):
        size = max(int(most[column]), held)
        if size != drawn:
            path += f"H{round(1000 * column / _MEMORY_POINTS)}V{_down(size, top)}"
            drawn = size
        held = int(last[column]) if last[column] >= 0 else held
    return f"{path}H1000V{_MEMORY_HEIGHT}Z"
