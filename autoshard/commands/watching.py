"""What somebody who waits for a search sees: after a second, how far it has come and the best so far."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from autoshard.search.pool import Progress

_PATIENCE_S = 1.0


class Watcher:
    """Shows a bar on a terminal, and stops the search when its time is over."""

    def __init__(self, time_limit_s: float | None, show: Callable[[float], str]) -> None:
        self._start_s = time.monotonic()
        self._limit_s, self._show = time_limit_s, show
        self._bar: Bar | None = None

    def __call__(self, progress: "Progress") -> str:
        """Draw what is known, and say why to stop, if there is a reason."""
        waited_s = time.monotonic() - self._start_s
        if waited_s > _PATIENCE_S and sys.stderr.isatty():
            self._draw(progress)
        return f"stopped after {self._limit_s:g} s" if self._limit_s and waited_s > self._limit_s else ""

    def _draw(self, progress: "Progress") -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeElapsedColumn

            columns = (TextColumn("searching"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task("")
            self._bar.start()
        best, open_points = self._show(progress.best), progress.num_points - progress.num_done
        text = f"best {best}, bound {self._show(progress.bound)}, {open_points} points open (Ctrl-C takes the best)"
        self._bar.update(
            self._bar.task_ids[0], total=progress.num_points, completed=progress.num_done, description=text
        )

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def watching(time_limit_s: float | None, show: Callable[[float], str]) -> Iterator[Watcher]:
    """Watch a search; ``show`` writes what is minimised."""
    watcher = Watcher(time_limit_s, show)
    try:
        yield watcher
    finally:
        watcher.close()
