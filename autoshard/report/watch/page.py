"""A run that is watched, as a page that loads itself again: its sheets with charts of its steps."""

import math
from collections.abc import Iterator
from datetime import UTC, datetime

from autoshard.report.page.charts import Axis, Dot, Line, line_chart
from autoshard.report.page.document import document
from autoshard.report.page.elements import Markup, sheet_head, sheet_section, tag
from autoshard.report.sheet import Node
from autoshard.report.watch.progress import RunProgress
from autoshard.report.watch.sheets import failures_sheet, headline_sheet, ranks_sheet, steps_sheet
from autoshard.report.watch.structured import progress_json
from autoshard.units import format_seconds

_STEP = Axis(name="step", text="{:g}".format, whole=True)
_LOSS = Axis(name="", text=lambda value: f"{value:.3g}")
_TIME = Axis(name="", text=format_seconds)


def progress_page(progress: RunProgress, every_s: float) -> str:
    """Return the page of a run at a moment; as long as the run goes on, a browser loads it again after a while."""
    figures = Node(progress_json(progress))
    charts, steps, ranks, failures = (
        list(_charts(figures)), steps_sheet(figures), ranks_sheet(progress), failures_sheet(progress)
    )  # fmt: skip
    sections: list[tuple[str, str, Markup]] = []
    if charts or steps.tables:
        sections.append(("steps", "Steps", sheet_section(steps, tag("div", charts, class_="charts"))))
    sections += [(sheet.name, name, sheet_section(sheet)) for name, sheet in (("Ranks", ranks), ("Failures", failures))
                 if sheet.notes]  # fmt: skip
    seen = tag("p", f"Seen at {datetime.fromtimestamp(progress.at, UTC):%Y-%m-%d %H:%M:%S} UTC.", class_="about")
    title = f"{progress.state}: step {progress.step}, {progress.folder}"
    refresh_s = 0 if progress.is_over else max(1, math.ceil(every_s))
    return document(title, sections, head=[*sheet_head(headline_sheet(progress, figures)), seen], refresh_s=refresh_s)


def _charts(figures: Node) -> Iterator[Markup]:
    losses = [Dot(x=step, y=loss, tip=f"step {step}: {loss:.4f}") for step, loss in figures["losses"].value
              if loss is not None]  # fmt: skip
    if losses:
        yield line_chart("Loss", [Line(name="loss", points=losses)], _STEP, _LOSS)
    times = [
        Dot(x=step, y=time_s, tip=f"step {step}: {format_seconds(time_s)}") for step, time_s in figures["times"].value
    ]
    if not times:
        return
    lines, pace = [Line(name="measured", points=times)], figures["pace"]
    if not pace or pace["predicted_s"].value is None:
        yield line_chart("Step time", lines, _STEP, _TIME)
        return
    ends = (Dot(x=dot.x, y=pace["predicted_s"].value, tip="") for dot in (times[0], times[-1]))
    lines.append(Line(name="predicted", points=list(ends)))
    band = pace["low_s"].value, pace["high_s"].value
    yield line_chart("Step time", lines, _STEP, _TIME, band=band, band_name="interval of the prediction")
