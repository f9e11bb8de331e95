"""What somebody who waits sees: a bar on a terminal, else lines now and then. For searches, bytes and sweeps."""

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autoshard.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from autoshard.search.progress import Progress
    from autoshard.sweep.work import Row, SweepJob

_PATIENCE_S = 1.0  # before the bar of a search
_LINE_S = 10.0  # between two lines where there is no terminal
_MOST_NAMES = 4  # of points that are under way


class Watcher:
    """Shows a bar on a terminal, and stops the search when its time is over or somebody has had enough."""

    def __init__(self, time_limit_s: float | None, show: Callable[[float], str]) -> None:
        self._start_s = time.monotonic()
        self._limit_s, self._show = time_limit_s, show
        self._bar: Bar | None = None
        self.interrupted = False

    def interrupt(self, *_: object) -> None:
        """Stop the search at its next step; called again, stop at once."""
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

    def __call__(self, progress: "Progress") -> str:
        """Draw what is known, and return why to stop, if there is a reason."""
        waited_s = time.monotonic() - self._start_s
        if waited_s > _PATIENCE_S and sys.stderr.isatty():
            self._draw(progress)
        if self.interrupted:
            return "interrupted"
        return f"stopped after {self._limit_s:g} s" if self._limit_s and waited_s > self._limit_s else ""

    def _draw(self, progress: "Progress") -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

        if self._bar is None:
            self._bar = _bar(
                TextColumn("searching"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
            )
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
    """Watch a search; Ctrl-C takes the best so far. ``show`` prints what is minimised."""
    watcher = Watcher(time_limit_s, show)
    before = signal.signal(signal.SIGINT, watcher.interrupt)
    try:
        yield watcher
    finally:
        signal.signal(signal.SIGINT, before)
        watcher.close()


def _bar(*columns: Any, transient: bool = True) -> "Bar":
    from rich.console import Console
    from rich.progress import Progress as Bar

    return Bar(*columns, console=Console(stderr=True, markup=False), transient=transient)


@contextmanager
def byte_progress(
    what: str, more: Callable[[Any], str] = lambda _: "", *, quiet: bool
) -> Iterator[Callable[[Any], None]]:
    """Show what has ``done_bytes`` of ``all_bytes``, of which ``kept_bytes`` were done before; and ``more`` of it."""
    start_s = time.monotonic()

    def speed(now: Any) -> str:
        rate = (now.done_bytes - now.kept_bytes) / max(1e-9, time.monotonic() - start_s)
        return f"{more(now)}{format_bytes(rate)}/s"

    if quiet or not sys.stderr.isatty():
        yield _lines(speed, start_s, quiet=quiet)
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TextColumn("{task.fields[speed]}"))
    with _bar(*columns, TimeRemainingColumn(), transient=False) as bar:
        task = bar.add_task("", total=None, speed="")
        yield lambda now: bar.update(task, completed=now.done_bytes, total=now.all_bytes, speed=speed(now))


def _lines(speed: Callable[[Any], str], start_s: float, *, quiet: bool) -> Callable[[Any], None]:
    last_s = start_s

    def report(now: Any) -> None:
        nonlocal last_s
        resumes = now.kept_bytes > 0 and now.done_bytes == now.kept_bytes
        if quiet or (not resumes and time.monotonic() - last_s < _LINE_S):
            return
        last_s, left = time.monotonic(), ""
        if now.done_bytes > now.kept_bytes:
            rest_s = (last_s - start_s) * (now.all_bytes - now.done_bytes) / (now.done_bytes - now.kept_bytes)
            left = f", {rest_s:.0f} s left"
        share = f"{'going on: ' if resumes else ''}{now.done_bytes / max(1, now.all_bytes):.0%}"
        print(f"{share} of {format_bytes(now.all_bytes)}, {speed(now)}{left}", file=sys.stderr)

    return report


class SweepProgress:
    """How far a sweep is: a line for each point, on a terminal a bar with what is under way."""

    def __init__(self, num_points: int, num_done: int, *, silent: bool) -> None:
        self._count, self._done, self._silent = num_points, num_done, silent
        self._under_way: dict[str, str] = {}
        self._bar: Bar | None = None
        if sys.stderr.isatty() and not silent:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

            self._bar = _bar(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._bar.add_task("", total=num_points, completed=num_done)

    def __enter__(self) -> "SweepProgress":
        """Start to draw."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def begin(self, job: "SweepJob") -> None:
        """Note that a job is under way."""
        self._under_way[job.points[0].id] = job.name
        self._draw()

    def end(self, rows: "Sequence[Row]") -> None:
        """Print what came of a job."""
        self._under_way.pop(rows[0]["id"], None)
        for row in rows:
            self._done += 1
            line = f"{self._done:{len(str(self._count))}}/{self._count}  {row['point']}: {_outcome(row)}"
            if self._bar is not None:
                self._bar.console.print(line, highlight=False)
            elif not self._silent:
                print(line, flush=True)
        self._draw()

    def _draw(self) -> None:
        if self._bar is not None:
            names = list(self._under_way.values())
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            text = ", ".join(names[:_MOST_NAMES]) + more
            self._bar.update(self._bar.task_ids[0], completed=self._done, description=text)


def _outcome(row: "Row") -> str:
    if row["message"] is not None:
        return f"{row['status']}: {' '.join(str(row['message']).split())}"
    took = f", measured {format_seconds(row['measured_step_time_s'])}" if row["status"] == "ran" else ""
    return f"step {format_seconds(row['step_time_s'])}{took}  {row['candidate']}"
