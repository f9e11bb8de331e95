"""Progress on stderr, in one line that is redrawn on a terminal: of searches, and of bytes."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from autoshard.search.bound.watch import Look, SearchProgress
from autoshard.units import counted, format_bytes, format_seconds, format_wait

_START_UP_S = 0.4  # that Python and imports take before: the limit counts it. Measured 2026-11 on a cloud machine
_ANSWER_S = 0.3  # that the answer takes after the search, which the limit counts as well. Measured likewise
_PATIENCE_S = 0.2  # before the line of a search: shorter ones need none
_AT_MOST_S = 0.9  # between Ctrl-C and the end of a search that does not come to its next step
_FRAME_S = 0.1  # between two drawings on a terminal
_LINE_S = 10.0  # between two lines of a log


class StatusLine:
    """One line that is redrawn on a terminal; elsewhere nothing, or a new line every 10 s."""

    def __init__(self, *, silent: bool = False, logs: bool = False) -> None:
        self._on_terminal = sys.stderr.isatty() and not silent
        self._pause_s = _FRAME_S if self._on_terminal else _LINE_S if logs and not silent else math.inf
        self._drawn_s = -math.inf if self._on_terminal else time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether a text would be drawn: none was less than a frame ago."""
        return self._pause_s < math.inf and time.monotonic() - self._drawn_s >= self._pause_s

    def show(self, text: str, *, at_once: bool = False) -> None:
        """Draw a text, if it is due or wanted at once."""
        if not (self.is_due or (at_once and self._pause_s < math.inf)):
            return
        self._drawn_s = time.monotonic()
        if not self._on_terminal:
            print(text, file=sys.stderr)
            return
        width = os.get_terminal_size(2).columns if os.isatty(2) else 120
        print(f"\r{text[: width - 1]}\x1b[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Erase the line, so that other lines can be printed."""
        if self._on_terminal and self._drawn_s > -math.inf:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class Watcher:
    """Shows the progress of a search, and stops it at its time limit or on Ctrl-C."""

    def __init__(self, time_limit_s: float | None, show: Callable[[float], str]) -> None:
        self._start_s = time.monotonic()
        self._limit_s, self._show = time_limit_s, show
        self.line = StatusLine()
        self.interrupted = False

    def interrupt(self, *_: object) -> None:
        """Stop the search at its next step; a second call stops at once."""
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        signal.setitimer(signal.ITIMER_REAL, _AT_MOST_S)

    def __call__(self, look: Look) -> str:
        """Draw the progress; return why the search should stop, or an empty string."""
        waited_s = time.monotonic() - self._start_s
        if waited_s > _PATIENCE_S and self.line.is_due:
            self.line.show(f"{search_state(look(), waited_s, self._show)} (Ctrl-C takes the best)")
        if self.interrupted:
            signal.setitimer(signal.ITIMER_REAL, 0)
            return "interrupted"
        is_late = self._limit_s is not None and waited_s > self._limit_s - _START_UP_S - _ANSWER_S
        return f"stopped after {self._limit_s:g} s" if is_late else ""


def search_state(progress: SearchProgress, waited_s: float, show: Callable[[float], str]) -> str:
    """Say how far a search is; ``show`` formats the objective.

    >>> search_state(SearchProgress(), 1.0, format_seconds)
    'searching, 1.00 s: no plan yet'
    >>> search_state(SearchProgress(num_done=10, num_points=228, best=3.94, bound=2.28), 15.0, format_seconds)
    'searching, 15.00 s: best 3.94 s, none can be below 2.28 s, 218 layouts open'
    """
    words = [f"best {show(progress.best)}" if math.isfinite(progress.best) else "no plan yet"]
    words += [f"none can be below {show(progress.bound)}"] if progress.bound > 0 else []
    num_open = progress.num_points - progress.num_done
    words += [f"{counted(num_open, 'layout', form=',')} open"] if num_open > 0 else []
    return f"searching, {format_seconds(waited_s)}: {', '.join(words)}"


@contextmanager
def watching(time_limit_s: float | None, show: Callable[[float], str]) -> Iterator[Watcher]:
    """Watch a search: Ctrl-C ends it with the best plan so far. ``show`` formats the objective."""
    watcher = Watcher(time_limit_s, show)
    handlers = {number: signal.signal(number, watcher.interrupt) for number in (signal.SIGINT, signal.SIGALRM)}
    try:
        yield watcher
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, before in handlers.items():
            signal.signal(number, before)
        watcher.line.clear()


@contextmanager
def byte_progress(
    what: str, more: Callable[[Any], str] = lambda _: "", *, quiet: bool
) -> Iterator[Callable[[Any], None]]:
    """Show progress in bytes: ``done_bytes`` of ``all_bytes``; ``kept_bytes`` are those of an earlier start."""
    line, start_s = StatusLine(silent=quiet, logs=True), time.monotonic()

    def report(now: Any) -> None:
        done, time_s, remaining = now.done_bytes - now.kept_bytes, max(1e-9, time.monotonic() - start_s), ""
        if done > 0:
            remaining = f", {format_wait(time_s * (now.all_bytes - now.done_bytes) / done)} left"
        resumes = now.kept_bytes > 0 and done == 0
        share = f"{'going on: ' if resumes else ''}{now.done_bytes / max(1, now.all_bytes):.0%}"
        text = (
            f"{what}, {share} of {format_bytes(now.all_bytes)}, {more(now)}{format_bytes(done / time_s)}/s{remaining}"
        )
        line.show(text, at_once=resumes)

    yield report
    line.clear()
