"""Draws the picture of a plan that the README shows: ``python docs/picture.py`` writes ``docs/plan.svg``."""

import os
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

_ROOT = Path(__file__).parents[1]
COMMAND = ("plan", "--model", "llama3-70b", "--nodes", "16")
PICTURE = Path(__file__).parent / "plan.svg"
_WIDTH = 112
_LAST = "Answers"  # the heading of the first table that is left out


def terminal_text(folder: Path) -> Text:
    """Return what the command prints on a terminal, with colours, up to the table of runners-up."""
    env = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(_WIDTH), "PYTHONPATH": str(_ROOT)}
    env.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "autoshard.cli", *COMMAND]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    lines = Text.from_ansi(done.stdout).split("\n")
    end = next(number for number, line in enumerate(lines) if line.plain.startswith(_LAST))
    for line in lines[:end]:
        line.rstrip()
    return Text("\n").join([Text(f"$ autoshard {' '.join(COMMAND)}", style="bold"), Text(), *lines[: end - 1]])


def svg(text: Text) -> str:
    """Return the picture of a terminal that shows a text."""
    console = Console(record=True, width=_WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(text)
    return console.export_svg(title="autoshard", unique_id="autoshard-plan")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PICTURE.write_text(svg(terminal_text(Path(folder))), encoding="utf-8")
