"""A run that is watched, as a page that loads itself again: its sheets with charts of its steps."""

import math
from datetime import UTC, datetime

from autoshard.report.page.charts import step_charts
from autoshard.report.page.document import document
from autoshard.report.page.elements import Markup, sheet_head, sheet_section, tag
from autoshard.report.sheet import Node, plain
from autoshard.report.watch.progress import RunProgress
from autoshard.report.watch.sheets import failures_sheet, headline_sheet, ranks_sheet, steps_sheet
from autoshard.report.watch.structured import progress_json


def progress_page(progress: RunProgress, every_s: float) -> str:
    """Return the page of a run at a moment; as long as the run goes on, a browser loads it again after a while."""
    figures = Node(progress_json(progress))
    pace, sections = figures["pace"], list[tuple[str, str, Markup]]()
    prediction = None
    if pace and pace["predicted_s"].value is not None:
        prediction = pace["predicted_s"].value, pace["low_s"].value, pace["high_s"].value
    if progress.losses:
        charts = step_charts(progress.losses, progress.times, prediction)
        sections.append(("steps", "Steps", sheet_section(steps_sheet(figures), charts)))
    sections += [(sheet.name, plain(sheet.title), sheet_section(sheet))
                 for sheet in (ranks_sheet(progress), failures_sheet(progress)) if sheet.notes]  # fmt: skip
    seen = tag("p", f"Seen at {datetime.fromtimestamp(progress.at, UTC):%Y-%m-%d %H:%M:%S} UTC.", class_="about")
    title = f"{progress.state}: step {progress.step}, {progress.folder}"
    refresh_s = 0 if progress.is_over else max(1, math.ceil(every_s))
    return document(title, sections, head=[*sheet_head(headline_sheet(progress, figures)), seen], refresh_s=refresh_s)
