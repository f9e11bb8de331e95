"""Output that commands share: writing of files, printing of answers and refusals."""

import json as json_text
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from autoshard.errors import Fault, file_faults
from autoshard.files import replace_text
from autoshard.plan.rules.rule import Rejection
from autoshard.report.plan_sheets import rejections_sheet
from autoshard.report.sheet import Sheet, Words
from autoshard.report.structured import rejection_json
from autoshard.report.terminal import drawn, make_console


def write_text(text: str, out: Path, option: str = "--out") -> None:
    """Write a file; an error names the option that gave the path."""
    with file_faults(f"{option} {out}"):
        replace_text(out, text)


def print_left_out(faults: Iterable[Fault]) -> None:
    """Print on stderr, one per line, which rows were left out and why."""
    for fault in faults:
        print(f"left out {' '.join(str(fault).split())}", file=sys.stderr)


def print_answer(answer: Mapping[str, object] | str | Iterable[Sheet]) -> None:
    """Print an answer: data as one JSON object, text unchanged, and sheets as wide as the terminal."""
    if isinstance(answer, Mapping):
        print(json_text.dumps(answer, indent=2))
    elif isinstance(answer, str):
        print(answer)
    else:
        make_console().print(drawn(*answer), crop=False)


def print_notes(*notes: str | Words) -> None:
    """Print lines, which are broken between words."""
    print_answer([Sheet(notes=notes)])


def print_refused(rejections: Sequence[Rejection], *, json: bool) -> int:
    """Print why a plan cannot run; return the exit code."""
    print_answer({"rejections": list(map(rejection_json, rejections))} if json else [rejections_sheet(rejections)])
    return 1
