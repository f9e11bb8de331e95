"""How far work on bytes is: a bar on a terminal, else a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from autoshard.units import format_bytes

_LINE_S = 10.0  # between two lines where there is no terminal


@contextmanager
def shown(what: str, more: Callable[[Any], str] = lambda _: "", *, quiet: bool) -> Iterator[Callable[[Any], None]]:
    """Show what has ``done_bytes`` of ``all_bytes``, of which ``kept_bytes`` were done before; and ``more`` of it."""
    from rich.console import Console

    console, start_s = Console(stderr=True), time.monotonic()

    def speed(now: Any) -> str:
        rate = (now.done_bytes - now.kept_bytes) / max(1e-9, time.monotonic() - start_s)
        return f"{more(now)}{format_bytes(rate)}/s"

    if quiet or not console.is_terminal:
        yield _lines(speed, start_s, quiet=quiet)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress as Bar, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TextColumn("{task.fields[speed]}"))
    with Bar(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=None, speed="")
        yield lambda now: bar.update(task, completed=now.done_bytes, total=now.all_bytes, speed=speed(now))


def _lines(speed: Callable[[Any], str], start_s: float, *, quiet: bool) -> Callable[[Any], None]:
    said_s = [start_s]

    def say(now: Any) -> None:
        begins = now.kept_bytes > 0 and now.done_bytes == now.kept_bytes
        if quiet or (not begins and time.monotonic() - said_s[0] < _LINE_S):
            return
        said_s[0] = time.monotonic()
        share, left = now.done_bytes / max(1, now.all_bytes), ""
        if now.done_bytes > now.kept_bytes:
            rest_s = (said_s[0] - start_s) * (now.all_bytes - now.done_bytes) / (now.done_bytes - now.kept_bytes)
            left = f", {rest_s:.0f} s left"
        goes_on = "going on: " if begins else ""
        print(f"{goes_on}{share:.0%} of {format_bytes(now.all_bytes)}, {speed(now)}{left}", file=sys.stderr)

    return say
