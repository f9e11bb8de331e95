"""What commands share: where files may go, how they are written, how JSON and refusals are printed."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from autoshard.errors import Fault, InputError

if TYPE_CHECKING:
    from autoshard.cost.calibration import Calibration
    from autoshard.plan.rules.rule import Rejection


def place_checks(out: Path, option: str = "--out") -> list[tuple[bool, str, str]]:
    """Check that a file can stand where an option says."""
    return [
        (not out.is_dir(), f"{option} {out}", "is a folder. Name a file in it"),
        (out.parent.is_dir(), f"{option} {out}", f"there is no folder {out.parent}. Make it first"),
    ]


def constants_in(calibration: Path | None) -> "Calibration | None":
    """Read a calibration file, if one is named."""
    from autoshard.cost.calibration import load_calibration

    return None if calibration is None else load_calibration(calibration)


def write_text(text: str, out: Path, option: str = "--out") -> None:
    """Write a file; where that fails, say which option named it."""
    try:
        out.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # the latter: a path that no file can have
        reason = error.strerror if isinstance(error, OSError) else None
        raise InputError.of(f"{option} {out}", f"cannot be written: {reason or error}") from None


def print_left_out(faults: Iterable[Fault]) -> None:
    """Print on stderr, in a line each, what was left out of the answer and why."""
    for fault in faults:
        print(f"left out {' '.join(str(fault).split())}", file=sys.stderr)


def print_json(value: object) -> None:
    """Print one JSON object."""
    import json

    print(json.dumps(value, indent=2))


def print_refused(rejections: "tuple[Rejection, ...]", *, json: bool) -> int:
    """Print why a plan may not run; return the exit code."""
    from autoshard.report.structured import rejection_json
    from autoshard.report.terminal import make_console, rejections_report

    if json:
        print_json({"rejections": [rejection_json(entry) for entry in rejections]})
    else:
        make_console().print(rejections_report(rejections))
    return 1
