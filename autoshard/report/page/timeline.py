"""The pipeline's timeline: one row per pipeline rank, every action where it runs, what is sent, and memory over time.

An action is a piece of a horizontal line: one path for each rank, kind and stage, so that thousands of actions are few
elements. Distances are whole units, and each is taken from the last one drawn, so that none is off by more than half.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.cost.timeline import RankTimeline, StepTimeline
from autoshard.plan.plan import Plan
from autoshard.report.page.charts import legend
from autoshard.report.page.elements import Content, Markup, tag
from autoshard.report.rank_row import PASSES, RankRow, rank_words
from autoshard.report.words import ranks_text
from autoshard.units import format_bytes, format_seconds

MOST_ACTIONS = 9000  # that are drawn, about ten bytes each
MOST_ROWS = 32
MOST_MEMORIES = 8
_UNITS_PER_ACTION = 24  # of the shortest action, so that gaps between actions can be seen
_LEAST_UNITS, _MOST_UNITS = 4000, 400_000
_GAP = 0.06  # of an action is left free at its end
_ROW, _BAR = 22, 12
_MEMORY_HEIGHT = 64
_MEMORY_POINTS = 300
_IN_FLIGHT = ("activations", "logits")


def timeline(plan: Plan, step: StepTimeline, end_s: float, name: str = "") -> Markup:
    """Return the drawing of a step on an axis that ends at ``end_s``; where it is too large, with its ends alone."""
    rows = shown_ranks(len(step.ranks), MOST_ROWS)
    keep = MOST_ACTIONS // (2 * len(rows))
    actions = [rank.end_s - rank.start_s for rank in step.ranks]
    shortest = min(float(times_s[times_s > 0].min(initial=end_s)) for times_s in actions)
    units = int(np.clip(_UNITS_PER_ACTION * end_s / shortest, _LEAST_UNITS, _MOST_UNITS))
    per_s = units / end_s
    drawn = [
        tag("g", _row(RankRow(step, number, keep), per_s), transform=f"translate(0 {place * _ROW})", data_rank=number)
        for place, number in enumerate(rows)
    ]
    about = f"timeline of a step of {plan.model.name}: {len(step.ranks)} pipeline ranks, {format_seconds(step.end_s)}"
    picture = tag(
        "svg", drawn, viewBox=f"0 0 {units} {len(rows) * _ROW}", preserveAspectRatio="none", role="img",
        aria_label=about, style=f"height:{len(rows) * _ROW}px",
    )  # fmt: skip
    labels = tag(
        "div",
        (tag("span", f"rank {number}", data_tip=_rank_tip(plan, step, number)) for number in rows),
        class_="rows",
    )
    seconds = ";".join(
        f"{kind}{stage}={its.time_s:.6g}" for (kind, stage), its in step.passes.items() if _runs(step, kind)
    )
    buttons = (
        tag("button", text, type="button", data_zoom=what, aria_label=label, data_tip=label)
        for text, what, label in (("+", "in", "zoom in"), ("-", "out", "zoom out"), ("<", "left", "earlier"),
                                  (">", "right", "later"), ("all", "all", "the whole step"))
    )  # fmt: skip
    stage = tag("div", picture, tag("div", class_="ticks", aria_hidden="true"), class_="stage", tabindex=0,
                role="group", aria_label="timeline; arrow keys move it, plus and minus zoom, 0 shows all")  # fmt: skip
    notes = _notes(step, rows, keep)
    return tag(
        "figure",
        tag("figcaption", name or "One training step as it is predicted", tag("span", buttons, class_="zoom")),
        tag("div", labels, stage, class_="timeline", data_end=float(end_s), data_units=units, data_seconds=seconds),
        [tag("p", note, class_="about") for note in notes],
        class_="wide",
    )  # fmt: skip


def timeline_legend(steps: Sequence[StepTimeline]) -> Markup:
    """Return what the colours of timelines mean."""
    kinds = {word: kind for kind, word in PASSES.items() if any(_runs(step, kind) for step in steps)}
    return legend(kinds | {"sends": "send", "after the pipeline": "phase", "waiting": "wait"})


def shown_ranks(count: int, most: int) -> list[int]:
    """Return the ranks that are drawn: all, or the first, the last, and some between at equal distances.

    >>> shown_ranks(4, 8), shown_ranks(64, 4)
    ([0, 1, 2, 3], [0, 21, 42, 63])
    """
    return list(range(count)) if count <= most else [round(place * (count - 1) / (most - 1)) for place in range(most)]


def _runs(step: StepTimeline, kind: str) -> bool:
    return any(kind in rank.kinds for rank in step.ranks)


def _notes(step: StepTimeline, rows: Sequence[int], keep: int) -> list[str]:
    notes = list[str]()
    if len(rows) < len(step.ranks):
        notes.append(f"Drawn are {len(rows)} of {len(step.ranks)} pipeline ranks: {ranks_text(rows)}.")
    if any(RankRow(step, number, keep).left_out for number in rows):
        notes.append(
            f"Drawn are the first and the last {keep} actions of each rank; those between repeat the same pattern. "
            "autoshard explain --trace writes all of them for ui.perfetto.dev."
        )
    return notes


def _rank_tip(plan: Plan, step: StepTimeline, number: int) -> str:
    rank = step.ranks[number]
    idle_s = step.makespan_s - rank.busy_s - rank.sending_s
    return (
        f"{rank_words(plan, number)} "
        f"works {format_seconds(rank.busy_s)}, sends {format_seconds(rank.sending_s)}, waits {format_seconds(idle_s)}"
    )


def _row(row: RankRow, per_s: float) -> list[Content]:
    rank, step, positions, left_out = row.rank, row.step, row.positions, row.left_out
    starts, ends = np.rint(rank.start_s * per_s).astype(int), np.rint(rank.end_s * per_s).astype(int)
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for position in positions:
        groups[row.action(position)[:2]].append(position)
    middle = _ROW // 2
    shapes: list[Content] = [
        tag("rect", x=0, y=middle - _BAR // 2, width=round(step.makespan_s * per_s), height=_BAR, class_="wait")
    ]
    if left_out:
        first, last = round(rank.start_s[left_out[0]] * per_s), round(rank.end_s[left_out[-1]] * per_s)
        place = {"x": first, "width": last - first}
        shapes.append(tag("rect", y=middle - _BAR // 2, height=_BAR, class_="folded", data_tip="not drawn", **place))
    for (kind, stage), places in groups.items():
        numbers = rank.micro_batches[places].tolist()
        in_turn = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        batches = str(numbers[0]) if in_turn else " ".join(map(str, numbers))
        path = _pieces([(int(starts[place]), int(ends[place])) for place in places], middle)
        shapes.append(tag("path", d=path, class_=kind, data_stage=stage, data_batches=batches))
    if step.send_s:
        sent = np.rint((rank.end_s + step.send_s) * per_s).astype(int)
        sends = [(int(ends[at]), int(sent[at])) for at in positions if row.pass_of(at).sends_to is not None]
        shapes.append(tag("path", d=_pieces(sends, _ROW - 3, gap=0.0), class_="send"))
    for phase in step.phases:
        start, end = round(phase.start_s * per_s), round((phase.start_s + phase.seconds[row.number]) * per_s)
        tip = f"{phase.name}: {format_seconds(phase.seconds[row.number])}"
        shapes.append(tag("path", d=f"M{start} {middle}h{end - start}", class_="phase", data_tip=tip))
    return shapes


def _pieces(spans: Sequence[tuple[int, int]], height: int, gap: float = _GAP) -> str:
    """Return a path of pieces of one horizontal line."""
    texts, at = list[str](), 0
    for number, (start, end) in enumerate(spans):
        length = max(1, int((1 - gap) * (end - start)))
        texts.append(f"m{start - at} 0h{length}" if number else f"M{start} {height}h{length}")
        at = start + length
    return "".join(texts)


def memory_charts(plan: Plan, step: StepTimeline, end_s: float) -> Markup:
    """Return the memory of pipeline ranks over the step: what is always there at the bottom, activations on top."""
    prediction = plan.prediction
    assert prediction, "only predicted plans are drawn"
    capacity, usable = prediction.capacity_bytes, plan.cluster.rank_memory_bytes
    top = max(usable, *(rank.most_bytes for rank in step.ranks))
    drawings: list[Markup] = []
    numbers = shown_ranks(len(step.ranks), MOST_MEMORIES)
    fullest = max(range(len(step.ranks)), key=lambda number: step.ranks[number].most_bytes)
    if fullest not in numbers:
        nearest = min(numbers, key=lambda number: abs(number - fullest))
        numbers[numbers.index(nearest)] = fullest
    for number in numbers:
        rank, parts = step.ranks[number], prediction.stage_memory[number].parts
        title = f"rank {number}: at most {format_bytes(rank.most_bytes)}"
        marks = [
            tag("line", x1=0, x2=1000, y1=_down(size, top), y2=_down(size, top), class_=kind, data_tip=tip)
            for size, kind, tip in (
                (capacity, "capacity", f"a plan may fill {format_bytes(capacity)}"),
                (usable, "usable", f"a rank can use {format_bytes(usable)}; between lies the headroom"),
            )
        ]
        area = tag("path", d=_area(rank, end_s, top), class_="m-activations", data_tip="activations in flight")
        picture = tag(
            "svg", area, _bands(rank, parts, top), marks, viewBox=f"0 0 1000 {_MEMORY_HEIGHT}", role="img",
            preserveAspectRatio="none", aria_label=f"memory of {title}",
        )  # fmt: skip
        drawings.append(tag("figure", tag("figcaption", title), picture, class_="memory"))
    is_part = len(numbers) < len(step.ranks)
    note = f"Drawn are {len(numbers)} of {len(step.ranks)} pipeline ranks, with the fullest: {ranks_text(numbers)}."
    return tag("div", tag("div", drawings, class_="memories"), tag("p", note, class_="about") if is_part else None)


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
