"""The benchmarks over time as a page to look at: a chart for each, those that drift first."""

from collections.abc import Sequence

from autoshard.report.page.charts import Axis, Dot, Line, line_chart
from autoshard.report.page.document import document
from autoshard.report.page.elements import Markup, section, table, tag
from autoshard.report.sheet import Cell, Node, Table, Words
from benchmarks.history import Drift, PastResult, history_json
from benchmarks.result import Result


def history_page(drifts: Sequence[Drift]) -> str:
    """Return the page; its figures are those of the JSON answer."""
    data = Node({"benchmarks": history_json(drifts)})
    by_machine: dict[str, list[tuple[Drift, Node]]] = {}
    for one, node in zip(drifts, data["benchmarks"], strict=True):
        by_machine.setdefault(one.last.machine, []).append((one, node))
    sections = [
        (f"machine-{number}", machine, _machine(f"machine-{number}", machine, found))
        for number, (machine, found) in enumerate(by_machine.items())
    ]
    num_drifts = sum(bool(one.words) for one in drifts)
    about = f"{len(drifts)} benchmarks, of which {num_drifts} drift. A time is compared in yardsticks, a fixed loop."
    head = tag("h1", "Benchmarks over time", tag("small", about))
    return document("autoshard benchmarks over time", sections, head=head)


def results_page(results: Sequence[Result]) -> str:
    """Return the results of benchmarks as a page; numbers named ``CHART.LINE.X`` are drawn as lines."""
    data = Node([one.row() for one in results])
    sections = [(one.name, one.name, _result(one, node)) for one, node in zip(results, data, strict=True)]
    return document("autoshard benchmarks", sections, head=tag("h1", "Benchmarks"))


def _result(one: Result, node: Node) -> Markup:
    lines: dict[str, dict[str, list[Dot]]] = {}
    values: list[tuple[Cell, ...]] = []
    for key, value in node.entries():
        chart, _, rest = key.rpartition(".")[0].rpartition(".")
        x = key.rpartition(".")[2]
        if chart and x.isdecimal():
            dot = Dot(x=int(x), y=float(value.value), tip=f"{rest}, {x}: {value.value:.4g}")
            lines.setdefault(chart, {}).setdefault(rest, []).append(dot)
        else:
            is_number = isinstance(value.value, int | float) and not isinstance(value.value, bool)
            values.append((key, value.figure("{:.6g}".format) if is_number else str(value.value)))
    y = Axis(name="", text=lambda number: f"{number:.3g}", from_zero=True)
    charts = [
        line_chart(
            f"{one.name}, {chart}",
            [Line(name=name, points=sorted(dots, key=lambda dot: dot.x)) for name, dots in found.items()],
            Axis(name="", text="{:g}".format, whole=True),
            y,
        )
        for chart, found in lines.items()
    ]
    about = None if one.bar is None else f"bar {one.bar:.4g} {one.unit}: {'holds' if one.holds else 'is missed'}"
    return section(
        one.name, one.name, tag("div", charts, class_="charts"), table(Table("", ("", ">value"), values)), about=about
    )


def _machine(name: str, machine: str, found: Sequence[tuple[Drift, Node]]) -> Markup:
    """Return the table and the charts of a machine."""
    ordered = sorted(found, key=lambda pair: not pair[0].words)
    rows = [_row(one, node) for one, node in ordered]
    columns = ("benchmark", ">last", "unit", ">bar", ">change", "drift", "commit")
    charts = tag("div", (_chart(one) for one, _ in ordered), class_="charts")
    return section(name, machine, table(Table("The last values", columns, rows)), charts)


def _row(one: Drift, node: Node) -> tuple[Cell, ...]:
    change: Cell = node["change"].figure("{:+.1%}".format) if one.change is not None else "-"
    held = "" if one.last.holds else " (missed)"
    bar = (node["bar"].figure("{:.4g}".format), held)
    said = Words(one.words, "strong") if one.words else ""
    return one.last.name, node["value"].figure("{:.4g}".format), one.last.unit, bar, change, said, one.last.commit


def _chart(one: Drift) -> Markup:
    """Return the compared values, with what of them may be noise as a band."""
    points = [Dot(x=number, y=past.compared, tip=_tip(past)) for number, past in enumerate(one.past, 1)]
    band = None
    if one.change is not None and one.noise is not None and 1 + one.change > 0:
        middle = one.last.compared / (1 + one.change)
        band = middle * (1 - one.noise), middle * (1 + one.noise)
    unit = "yardsticks" if one.last.is_time else ""
    return line_chart(
        f"{one.last.name}: {unit or one.last.unit}", [Line(name=one.last.name, points=points)],
        Axis(name="result", text="{:g}".format, whole=True), Axis(name="", text=lambda value: f"{value:.4g}"),
        band=band, band_name="within noise",
    )  # fmt: skip


def _tip(past: PastResult) -> str:
    held = "" if past.holds else ", misses its bar"
    return f"{past.date[:10]}, {past.commit or 'no commit'}: {past.value:.4g} {past.unit}{held}"
