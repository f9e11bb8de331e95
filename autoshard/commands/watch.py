"""``autoshard watch``: how a run is doing, on any machine that sees its folder."""

import sys
import time
from pathlib import Path

from rich.live import Live

from autoshard.commands.output import print_answer
from autoshard.errors import require
from autoshard.report.tables import make_console
from autoshard.report.watch.content import read_run
from autoshard.report.watch.progress import RunProgress, progress_of
from autoshard.report.watch.structured import progress_json
from autoshard.report.watch.terminal import progress_report


def watch(folder: Path, once: bool = False, every: float = 2.0, json: bool = False) -> int:
    """Show how a run is doing: steps, loss, speed and memory beside the prediction, checkpoints, and what is wrong.

    It reads the folder of the run, starts nothing and changes nothing there. The exit code is 1 if the run hangs, is
    silent, was killed or has failed, and 0 otherwise.

    Args:
        folder: The folder of the run, which autoshard run got as --out.
        once: Show one picture and end. So it is also where the output is no terminal.
        every: Seconds between two pictures on a terminal; they end with the run, or with Ctrl-C.
        json: Print one JSON object instead of a picture.
    """
    require((every > 0, "--every", f"must be positive, not {every:g}"))
    now = _look(folder)
    if json:
        print_answer(progress_json(now))
    elif once or now.is_over or not sys.stdout.isatty():
        print_answer(progress_report(now))
    else:
        now = _follow(folder, now, every)
    return int(now.is_bad)


def _look(folder: Path) -> RunProgress:
    return progress_of(read_run(folder), time.time())


def _follow(folder: Path, now: RunProgress, every: float) -> RunProgress:
    """Draw the run again and again, until it is over or the user has seen enough."""
    with Live(progress_report(now), console=make_console(), auto_refresh=False) as live:
        try:
            while not now.is_over:
                time.sleep(every)
                now = _look(folder)
                live.update(progress_report(now), refresh=True)
        except KeyboardInterrupt:
            pass
    return now
