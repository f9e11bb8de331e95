"""A run that is watched, in a terminal: its sheets with the curve of its loss between them."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType

from autoshard.report.sheet import Node
from autoshard.report.terminal import drawn, unbroken
from autoshard.report.watch.progress import RunProgress
from autoshard.report.watch.sheets import failures_sheet, headline_sheet, ranks_sheet, steps_sheet
from autoshard.report.watch.sparkline import columns
from autoshard.report.watch.structured import progress_json

_HEIGHT, _MOST_WIDTH, _INDENT = 6, 100, 12  # of the curve, in characters; where it begins


@dataclass(frozen=True, slots=True)
class _Curve:
    """The loss over steps, as wide as the terminal."""

    progress: RunProgress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        points = self.progress.losses
        finite = [loss for _, loss in points if loss is not None]
        width = max(8, min(_MOST_WIDTH, options.max_width - _INDENT - 1))
        lines = columns([loss for _, loss in points], width, _HEIGHT, ascii_only=options.ascii_only)
        labels = {0: f"{max(finite):.4g}", _HEIGHT - 1: f"{min(finite):.4g}"} if finite else {}
        for number, line in enumerate(lines):
            name = "loss" if number == 0 else ""
            yield unbroken(f"{name:<5}{labels.get(number, ''):>{_INDENT - 6}} {line}".rstrip())
        first, last = str(points[0][0]), str(points[-1][0])
        gap = max(1, len(lines[0]) - len(first) - len(last))
        yield unbroken(f"{'step':<{_INDENT}}{first}{' ' * gap}{last}")


def progress_report(progress: RunProgress) -> Group:
    """Return a picture of a run at a moment."""
    figures = Node(progress_json(progress))
    parts: list[RenderableType] = [drawn(headline_sheet(progress, figures))]
    parts += ["", _Curve(progress)] if len(progress.losses) > 1 else []
    sheets = ranks_sheet(progress), failures_sheet(progress), steps_sheet(figures)
    parts += [part for sheet in sheets if sheet.notes or sheet.tables for part in ("", drawn(sheet))]
    return Group(*parts)
