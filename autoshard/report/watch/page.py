"""A run that is watched, as a page that loads itself again; its figures are those of the JSON answer."""

import math
from collections.abc import Iterator
from datetime import UTC, datetime

from autoshard.report.page.charts import Axis, Dot, Line, line_chart
from autoshard.report.page.document import document
from autoshard.report.page.elements import Content, Markup, Node, facts, section, tag
from autoshard.report.watch.progress import RunProgress
from autoshard.report.watch.structured import progress_json
from autoshard.report.watch.terminal import starts_words, state_words
from autoshard.report.words import counted
from autoshard.units import format_bytes, format_count, format_seconds

_STEP = Axis(name="step", text="{:g}".format, whole=True)
_LOSS = Axis(name="", text=lambda value: f"{value:.3g}")
_TIME = Axis(name="", text=format_seconds)


def progress_page(one: RunProgress, every_s: float) -> str:
    """Return the page of a run at a moment; as long as the run goes on, a browser loads it again after a while."""
    data = Node(progress_json(one))
    parts: list[tuple[str, str, Markup]] = []
    if charts := list(_charts(data)):
        parts.append(("steps", "Steps", section("steps", "Steps", tag("div", charts, class_="charts"))))
    if one.behind:
        about, lines = "The one that most likely keeps the others waiting comes first.", map(_item, one.behind)
        ranks = section("ranks", "Where its ranks are", tag("ul", lines), about=about)
        parts.append(("ranks", "Ranks", ranks))
    parts.append(("starts", "Starts", section("starts", "Starts", _starts(one))))
    title = f"{one.state}: step {one.step}, {one.folder}"
    return document(title, parts, head=_headline(one, data), refresh_s=0 if one.is_over else max(1, math.ceil(every_s)))


def _headline(one: RunProgress, data: Node) -> list[Content]:
    what = f"{one.model} on {counted(one.num_ranks, 'rank')}: {one.candidate}" if one.num_ranks else "no plan yet"
    reason = [tag("p", line) for line in one.reason.splitlines()[1:]]
    warnings = tag("ul", map(_item, (*one.drifts, *one.remarks)), class_="warnings")
    return [
        tag("h1", one.folder, tag("small", what)),
        tag("p", tag("strong", one.state), ": ", state_words(one), class_="warnings" if one.is_bad else "lead"),
        reason,
        tag("p", f"Seen at {datetime.fromtimestamp(one.at, UTC):%Y-%m-%d %H:%M:%S} UTC.", class_="about"),
        facts(_facts(data)),
        warnings if one.drifts or one.remarks else None,
    ]


def _facts(data: Node) -> Iterator[tuple[str, Content]]:
    if data["last"]:
        yield "loss", (data["last"]["loss"].figure("{:.4f}".format), tag("small", "of the last step"))
    if data["left_s"].value is not None:
        yield "left", data["left_s"].figure(format_seconds)
    if pace := data["pace"]:
        ratio: Content = "not predicted for this machine"
        if pace["ratio"].value is not None:
            inside = "inside" if pace["inside"].value else "outside"
            ratio = (pace["ratio"].figure("{:.2f}".format), f" x predicted, {inside} the interval")
        yield "a step (median)", (pace["step_time_s"].figure(format_seconds), tag("small", ratio))
        predicted = pace["predicted_tokens_per_s"]
        beside = tag("small", "predicted ", predicted.figure(format_count)) if predicted.value is not None else None
        yield "tokens a second", (pace["tokens_per_s"].figure(format_count), beside)
    if memory := data["memory"]:
        what: Content = "of the whole process"
        if not memory["of_process"].value and memory["predicted_bytes"].value is not None:
            what = ("predicted ", memory["predicted_bytes"].figure(format_bytes))
        yield "memory of rank 0", (memory["measured_bytes"].figure(format_bytes), tag("small", what))
    if kept := data["checkpoint"]:
        about = (kept["age_s"].figure(format_seconds), " ago, ", kept["num_bytes"].figure(format_bytes))
        yield "last checkpoint", ("step ", kept["step"].figure(str), tag("small", about))


def _charts(data: Node) -> Iterator[Markup]:
    losses = [Dot(x=step, y=loss, tip=f"step {step}: {loss:.4f}") for step, loss in data["losses"].value
              if loss is not None]  # fmt: skip
    if losses:
        yield line_chart("Loss", [Line(name="loss", points=losses)], _STEP, _LOSS)
    times = [
        Dot(x=step, y=time_s, tip=f"step {step}: {format_seconds(time_s)}") for step, time_s in data["times"].value
    ]
    if not times:
        return
    lines, pace = [Line(name="measured", points=times)], data["pace"]
    if not pace or pace["predicted_s"].value is None:
        yield line_chart("Step time", lines, _STEP, _TIME)
        return
    ends = (Dot(x=one.x, y=pace["predicted_s"].value, tip="") for one in (times[0], times[-1]))
    lines.append(Line(name="predicted", points=list(ends)))
    band = pace["low_s"].value, pace["high_s"].value
    yield line_chart("Step time", lines, _STEP, _TIME, band=band, band_name="interval of the prediction")


def _starts(one: RunProgress) -> list[Markup]:
    failed = [_item(text.strip().partition("\n")[0]) for text in one.failures]
    return [tag("p", starts_words(one)), *([tag("ul", failed)] if failed else [])]


def _item(text: str) -> Markup:
    return tag("li", text)
