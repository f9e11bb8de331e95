"""What runs on this machine teach: rows of its last runs in a folder of the user, and constants fitted to them.

The rates of ``local`` are declared, so that plans are the same on all machines; no machine has just these. A plan names
the constants by their hash, so that equal questions with equal constants have equal plans.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from autoshard.calibration.calibrate import FitSamples, fit, timed_rows
from autoshard.cost.calibration import OUTSIDE, Calibration, calibration_text
from autoshard.errors import Fault, InputError
from autoshard.files import replace_text
from autoshard.spec.cluster import LOCAL
from autoshard.spec.files import parsed_json

ROWS, CONSTANTS = "local.jsonl", "local.json"
_MOST_ROWS = 8  # the last ones: a machine changes, and a fit takes its time
_ENOUGH, _OF_FEW = 3, 0.5  # layouts that say something of others; the interval of constants fitted to fewer
_DIGITS = 8  # of the hash that is part of the name


def constants_file(folder: Path | None) -> Path | None:
    """Return the file of constants in a folder of the user, if runs have written it."""
    file = folder / CONSTANTS if folder else None
    return file if file and file.is_file() else None


def learn(folder: Path, row: str) -> Calibration:
    """Add a measured row of this machine to those of a folder, and fit constants to them, for the plans to come."""
    rows = folder / ROWS
    lines = rows.read_text("utf-8").splitlines() if rows.is_file() else []
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(rows, "\n".join([*lines, row][-_MOST_ROWS:]) + "\n")
    timed, fields = timed_rows(rows, LOCAL), cast(dict[str, Any], parsed_json(row, str(rows)))
    if fields["id"] not in {measured.id for measured, _ in timed.runs}:  # as of a model that no row can state
        replace_text(rows, "".join(f"{line}\n" for line in lines))
        raise InputError([Fault(where=str(rows), message="takes no such run"), *timed.rows.left_out_lines])
    newest = max(measured.first_seen or "" for measured, _ in timed.runs)
    few = len({run for _, run in timed.runs}) < _ENOUGH
    constants = fit(FitSamples(samples=timed.samples, newest=newest, left_out=()), LOCAL, _OF_FEW if few else OUTSIDE)
    digest = hashlib.sha256(calibration_text(constants).encode()).hexdigest()[:_DIGITS]
    # A machine that was busy may be faster than any of its runs.
    constants = replace(constants, name=f"this machine ({digest})", best_mfu=None)
    replace_text(folder / CONSTANTS, calibration_text(constants))
    return constants
