"""What somebody who waits for a search sees and can do: after a second a bar; Ctrl-C takes the best so far."""

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from autoshard.search.progress import Progress

_PATIENCE_S = 1.0


class Watcher:
    """Shows a bar on a terminal, and stops the search when its time is over or somebody has had enough."""

    def __init__(self, time_limit_s: float | None, show: Callable[[float], str]) -> None:
        self._start_s = time.monotonic()
        self._limit_s, self._show = time_limit_s, show
        self._bar: Bar | None = None
        self.interrupted = False

    def interrupt(self, *_: object) -> None:
        """Stop the search at its next step; asked again, stop at once."""
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

    def __call__(self, progress: "Progress") -> str:
        """Draw what is known, and say why to stop, if there is a reason."""
        waited_s = time.monotonic() - self._start_s
        if waited_s > _PATIENCE_S and sys.stderr.isatty():
            self._draw(progress)
        if self.interrupted:
            return "interrupted"
        return f"stopped after {self._limit_s:g} s" if self._limit_s and waited_s > self._limit_s else ""

    def _draw(self, progress: "Progress") -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeElapsedColumn

            columns = (TextColumn("searching"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task("")
            self._bar.start()
        best = self._show(progress.best) if math.isfinite(progress.best) else "none yet"
        open_points = progress.num_points - progress.num_done
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
    before = signal.signal(signal.SIGINT, watcher.interrupt)
    try:
        yield watcher
    finally:
        signal.signal(signal.SIGINT, before)
        watcher.close()
