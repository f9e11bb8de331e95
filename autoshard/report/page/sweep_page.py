"""The page of a sweep: how its points scale, which sizes of tp and pp are best, the frontier, what was measured."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from autoshard.report.page.charts import Axis, Dot, Line, heat_map, line_chart, pareto_points, scatter
from autoshard.report.page.document import document
from autoshard.report.page.elements import Markup, section, sheet_head, sheet_section, tag
from autoshard.report.sweep import (
    GOOD,
    SIZES,
    Row,
    scaling_efficiency,
    series_of,
    short_layout,
    sweep_sheets,
    varied_in,
)
from autoshard.spec.cluster import LOCAL
from autoshard.units import GIB, counted, format_count, format_dollars, format_seconds

_MOST_ROWS = 500
_MOST_LINES = 8  # of a chart
_MOST_NAMES, _LONGEST_NAME = 6, 36  # of dots of a chart, and letters of a name
_FEWEST_CELLS = 2  # of a map; so many are read faster in the table
_OTHERS = ("fix.tp", "fix.pp", *SIZES)


def sweep_page(name: str, rows: Sequence[Row]) -> str:
    """Return the page of a sweep's rows."""
    good, sheets = [row for row in rows if row["status"] in GOOD], sweep_sheets(name, rows, _MOST_ROWS)
    sections = [
        ("scaling", "Scaling", _scaling(good)),
        ("sizes", "tp x pp", _sizes(good)),
        ("pareto", "Trade-offs", _pareto(good)),
        ("measured", "Measured", _measured(good)),
        ("losses", "Losses", _losses(good)),
        *((key, words, sheet_section(sheets[key])) for key, words in (("points", "Points"), ("failed", "No plan"))
          if key in sheets),
    ]  # fmt: skip
    drawn = [(key, entry, part) for key, entry, part in sections if part is not None]
    return document(f"sweep {name}", drawn, head=sheet_head(sheets["head"]))


def _scaling(rows: Sequence[Row]) -> Markup | None:
    """Return speed, efficiency and dollars over the number of ranks, a line for each question that is otherwise one."""
    lines: dict[object, list[Row]] = {}
    for row in rows:
        lines.setdefault(series_of(row), []).append(row)
    series = {key: sorted(series_rows, key=lambda row: row["ranks"]) for key, series_rows in lines.items()}
    series = {key: series_rows for key, series_rows in series.items() if len({row["ranks"] for row in series_rows}) > 1}
    if not series:
        return None
    shares = scaling_efficiency(rows)
    nodes = len({row["nodes"] for row in rows}) > 1
    ticks = tuple(
        sorted({row["nodes" if nodes else "ranks"] for series_rows in series.values() for row in series_rows})
    )
    across = Axis(name="nodes" if nodes else "ranks", text="{:g}".format, log=True, ticks=ticks)
    values: list[tuple[str, Axis, Callable[[Row], float | None]]] = [
        ("Speed", Axis(name="tokens/s", text=format_count, log=True), lambda row: row["tokens_per_s"]),
        ("Efficiency: tokens/s of a rank, over those on the fewest ranks",
         Axis(name="share", text="{:.0%}".format, from_zero=True), lambda row: shares[row["id"]]),
        ("Cost", Axis(name="$ a billion tokens", text=format_dollars), lambda row: row["usd_per_billion_tokens"]),
    ]  # fmt: skip
    charts: list[Markup] = []
    for title, axis, value in values:
        drawn = [
            Line(
                name=_named(series_rows[0]),
                points=_over(series_rows, axis, value, "nodes" if nodes else "ranks"),
                kind=f"line c{number}",
            )
            for number, series_rows in enumerate(list(series.values())[:_MOST_LINES])
        ]
        drawn = [line for line in drawn if line.points]  # each in its colour in all charts
        charts += [line_chart(title, drawn, across, axis)] if drawn else []
    about = f"The first {_MOST_LINES} of {len(series)} series are drawn." if len(series) > _MOST_LINES else None
    return section("scaling", "How the points scale", tag("div", charts, class_="charts"), about=about)


def _over(rows: Sequence[Row], axis: Axis, value: Callable[[Row], float | None], across: str) -> list[Dot]:
    pairs = [(row, number) for row in rows if (number := value(row)) is not None]
    return [Dot(x=row[across], y=number, tip=f"{row['point']}: {axis.text(number)}") for row, number in pairs]


def _named(row: Row) -> str:
    """Name a series by what varies in the sweep but its size."""
    parts = [f"{key.removeprefix('at.')} {value}" for key, value in row.items() if key.startswith("at.")
             and key not in SIZES and value is not None]  # fmt: skip
    parts += [f"plan {row['choice']}"] if row["choice"] > 1 else []
    return ", ".join(parts) or str(row["model"])


def _sizes(rows: Sequence[Row]) -> Markup | None:
    """Return the best step time for every tp and pp, a map for each question that is otherwise one."""
    questions: dict[str, list[Row]] = {}
    for row in rows:
        key = {name: row[name] for name in row if name.startswith("at.") and name.removeprefix("at.") not in _OTHERS}
        sizes = {"ranks": row["ranks"], **{name.removeprefix("at."): value for name, value in key.items()}}
        words = ", ".join(f"{name} {value}" for name, value in sizes.items() if value is not None)
        questions.setdefault(words, []).append(row)
    maps: list[Markup] = []
    for words, rows_of_question in questions.items():
        best: dict[tuple[str, str], Row] = {}
        for row in sorted(rows_of_question, key=lambda row: row["step_time_s"]):
            best.setdefault((str(row["tp"]), str(row["pp"])), row)
        if len(best) > _FEWEST_CELLS:
            cells = {at: _cell(row) for at, row in best.items()}
            tps, pps = (sorted({at[place] for at in best}, key=int) for place in (0, 1))
            maps.append(heat_map(f"Step time by tp and pp: {words}", tps, pps, cells, ("tp", "pp")))
    if not maps:
        return None
    about = "The best plan of the sweep with these sizes; the darkest is the fastest."
    return section("sizes", "Sizes of tp and pp", tag("div", maps, class_="charts"), about=about)


def _cell(row: Row) -> Dot:
    step_s = row["step_time_s"]
    return Dot(x=0, y=step_s, label=format_seconds(step_s), tip=f"{row['point']}: {row['candidate']}")


def _pareto(rows: Sequence[Row]) -> Markup | None:
    """Return time against memory, and speed of a rank against dollars, with their frontiers."""
    if len(rows) < 2:
        return None
    step, peak = Axis(name="a step", text=format_seconds, log=True), Axis(name="fullest rank, GiB", text="{:g}".format)
    token = Axis(name="seconds a million tokens", text=format_seconds, log=True)
    usd = Axis(name="$ a billion tokens", text=format_dollars)
    memory = [_dot(row, row["step_time_s"], row["peak_bytes"] / GIB) for row in rows]
    priced = [row for row in rows if row["usd_per_billion_tokens"] is not None]
    dollars = [_dot(row, 1e6 / row["tokens_per_s"], row["usd_per_billion_tokens"]) for row in priced]
    charts = [scatter("Time and memory", _frontier_named(memory), step, peak)]
    charts += [scatter("Time and dollars", _frontier_named(dollars), token, usd)] if len(dollars) > 1 else []
    about = "Predicted: each dot is a point of the sweep; the line joins those that nothing betters in both directions."
    rented = {row.get("cluster") for row in rows} - {LOCAL}
    about += (
        " No price is known of these machines: the key price of a sweep gives one." if rented and not priced else ""
    )
    title = "Time, memory and dollars" if len(dollars) > 1 else "Time and memory"
    return section("pareto", title, tag("div", charts, class_="charts"), about=about)


def _dot(row: Row, x: float, y: float) -> Dot:
    kind = "plan" if row["status"] == "ran" else "other"
    return Dot(x=x, y=y, tip=f"{row['point']}: {short_layout(row)}", kind=kind, label=row["point"])


def _frontier_named(dots: Sequence[Dot]) -> list[Dot]:
    """Return the dots, of which those that nothing betters keep their names, unless these are many or long."""
    best = set(pareto_points([(dot.x, dot.y) for dot in dots]))
    names = {dot.label for dot in dots if (dot.x, dot.y) in best}
    is_room = len(names) <= _MOST_NAMES and max(map(len, names), default=0) <= _LONGEST_NAME
    return [dot if is_room and (dot.x, dot.y) in best else replace(dot, label="") for dot in dots]


def _measured(rows: Sequence[Row]) -> Markup | None:
    """Return measured against predicted step times of the points that ran."""
    ran = [row for row in rows if row["status"] == "ran"]
    if not ran:
        return None
    dots = [
        Dot(x=row["ran_predicted_s"], y=row["measured_step_time_s"], kind="plan",
            tip=f"{row['point']}: predicted {format_seconds(row['ran_predicted_s'])}, measured "
                f"{format_seconds(row['measured_step_time_s'])}")
        for row in ran
    ]  # fmt: skip
    ends = [end_of(size for dot in dots for size in (dot.x, dot.y)) for end_of in (min, max)]
    equal = [Dot(x=end, y=end, tip="") for end in ends]
    predicted, measured = (
        Axis(name=f"{word} step", text=format_seconds, log=True) for word in ("predicted", "measured")
    )
    lines = [
        Line(name="as predicted", points=equal, kind="frontier"),
        Line(name="runs", points=dots, kind="plan", joined=False),
    ]
    chart = line_chart("Measured over predicted step time", lines, predicted, measured)
    elsewhere = [row for row in ran if row["measured_over_predicted"] is None]
    about = f"{counted(len(ran), 'point')} ran."
    if elsewhere:
        about += f" {len(elsewhere)} of them ran on another machine than their prediction is about."
    return section("measured", "Predicted and measured", tag("div", chart, class_="charts"), about=about)


def _losses(rows: Sequence[Row]) -> Markup | None:
    """Return the last loss of the runs over each number of training that varies."""
    charts: list[Markup] = []
    for key in varied_in(rows, training=True):
        ran = [row for row in rows if row.get("last_loss") is not None and type(row.get(key)) in (int, float)]
        values = {row[key] for row in ran}
        if len(values) > 1:
            across = Axis(name=key.removeprefix("at."), text="{:g}".format, log=min(values) > 0)
            dots = [
                Dot(x=row[key], y=row["last_loss"], kind="plan", tip=f"{row['point']}: {row['last_loss']:.4f}")
                for row in ran
            ]
            runs = [Line(name="runs", points=dots, kind="plan", joined=False)]
            charts.append(line_chart(f"Loss over {across.name}", runs, across, Axis(name="loss", text="{:.3g}".format)))
    if not charts:
        return None
    about = "The loss of the last step: with one seed, of the same tokens for all runs that took as many steps."
    return section("losses", "Losses", tag("div", charts, class_="charts"), about=about)
