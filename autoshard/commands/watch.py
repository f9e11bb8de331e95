"""``autoshard watch``: how a run is doing, on any machine that sees its folder."""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from rich.live import Live

from autoshard.commands.output import print_answer, write_text
from autoshard.commands.writing.places import page_checks
from autoshard.errors import InputError, require
from autoshard.report.terminal import make_console
from autoshard.report.watch.content import read_run
from autoshard.report.watch.progress import RunProgress, progress_of
from autoshard.report.watch.structured import progress_json
from autoshard.report.watch.terminal import progress_report


def watch(folder: Path, once: bool = False, every: float = 2.0, html: Path | None = None, json: bool = False) -> int:
    """Show how a run is doing: steps, loss, speed and memory beside the prediction, checkpoints, and what is wrong.

    It reads the folder of the run, starts nothing and changes nothing there. The exit code is 1 if the run hangs, is
    silent, was killed or has failed, and 0 otherwise.

    Args:
        folder: The folder of the run, which autoshard run got as --out.
        once: Show one picture and end. So it is also where the output is no terminal.
        every: Seconds between two pictures; they end with the run, or with Ctrl-C.
        html: Also write a page to look at, again and again, which loads itself again: one HTML file without network.
        json: Print one JSON object instead of a picture.
    """
    checks = page_checks(html, "--html") if html else []
    require((every > 0, "--every", f"must be positive, not {every:g}"), *checks)
    on_terminal = sys.stdout.isatty() and not json

    def look() -> RunProgress:
        progress = progress_of(read_run(folder), time.time())
        if html:
            from autoshard.report.watch.page import progress_page  # who wants no page need not wait for it

            write_text(progress_page(progress, every), html, "--html")
        return progress

    now = look()
    if not (once or now.is_over) and (on_terminal or html):
        now = _follow(look, now, every, drawn=on_terminal)
        if on_terminal:
            return int(now.is_bad)
    if json:
        print_answer(progress_json(now))
    else:
        make_console().print(progress_report(now), crop=False)
    return int(now.is_bad)


def _follow(look: Callable[[], RunProgress], now: RunProgress, every: float, *, drawn: bool) -> RunProgress:
    """Look at the run again and again, until it is over or the user has seen enough; draw it on a terminal."""
    picture = Live(progress_report(now), console=make_console(), auto_refresh=False) if drawn else nullcontext()
    with picture as live, suppress(KeyboardInterrupt):
        while not now.is_over:
            time.sleep(every)
            try:
                now = look()
            except (OSError, InputError) as error:  # a shared folder may be away for a while
                now = replace(now, remarks=(f"the folder cannot be read just now: {error}",))
            if live is not None:
                live.update(progress_report(now), refresh=True)
    return now
