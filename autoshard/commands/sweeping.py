"""What somebody who waits for a sweep sees: a line for each point, on a terminal a bar with what is under way."""

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from autoshard.units import format_seconds

if TYPE_CHECKING:
    from autoshard.sweep.work import Row, SweepJob

_MOST_NAMES = 4  # of points that are under way


class SweepProgress:
    """How far a sweep is."""

    def __init__(self, num_points: int, num_done: int, *, silent: bool) -> None:
        self._count, self._done, self._silent = num_points, num_done, silent
        self._width = len(str(num_points))
        self._under_way: dict[str, str] = {}
        self._bar: Any = None
        if sys.stderr.isatty() and not silent:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._bar = Bar(*columns, console=Console(stderr=True, markup=False), transient=True)
            self._task = self._bar.add_task("", total=num_points, completed=num_done)

    def __enter__(self) -> "SweepProgress":
        """Start to draw."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def begun(self, job: "SweepJob") -> None:
        """Note that a job is under way."""
        self._under_way[job.points[0].id] = job.name
        self._draw()

    def ended(self, rows: "Sequence[Row]") -> None:
        """Say what came of a job."""
        self._under_way.pop(rows[0]["id"], None)
        for row in rows:
            self._done += 1
            if not self._silent:
                self._say(f"{self._done:{self._width}}/{self._count}  {row['point']}: {_outcome(row)}")
        self._draw()

    def _draw(self) -> None:
        if self._bar is not None:
            names = list(self._under_way.values())
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            self._bar.update(self._task, completed=self._done, description=", ".join(names[:_MOST_NAMES]) + more)

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            print(line, flush=True)


def _outcome(row: "Row") -> str:
    if row["message"] is not None:
        return f"{row['status']}: {' '.join(str(row['message']).split())}"
    took = f", measured {format_seconds(row['measured_step_time_s'])}" if row["status"] == "ran" else ""
    return f"step {format_seconds(row['step_time_s'])}{took}  {row['candidate']}"
