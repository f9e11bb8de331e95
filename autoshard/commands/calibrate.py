"""``autoshard calibrate``: fit the constants of the cost model to measured runs."""

from pathlib import Path

from autoshard.calibration.calibrate import fit, samples_in
from autoshard.commands.output import print_answer, print_left_out, write_text
from autoshard.commands.writing.places import CALIBRATION, place_checks
from autoshard.cost.calibration import calibration_text
from autoshard.errors import require
from autoshard.report.validation import calibration_report
from autoshard.spec.record import encode


def calibrate(rows: Path, cluster: str, out: Path, date: str | None = None, json: bool = False) -> int:
    """Fit the constants of the cost model to measured runs, and write them to a calibration file.

    Rows that cannot be used are left out, each with a line that says why.

    Args:
        rows: A file with one measured run per line of JSON (see benchmarks/data), or a folder of such files or of runs.
            Rows of other clusters, rehearsals and runs that did not finish are not used.
        cluster: The cluster that the rows were run on, by name or as the path of a cluster file.
        out: The calibration file to write, for the option --calibration of the other commands.
        date: The date of the calibration. Default: the newest date in the rows.
        json: Print one JSON object instead of text.
    """
    require(*place_checks(out, holds=CALIBRATION))
    samples = samples_in(rows, cluster, date)
    print_left_out(samples.left_out)
    constants = fit(samples, out.stem)
    write_text(calibration_text(constants), out)
    print_answer(encode(constants) if json else f"{calibration_report(constants)}\nwrote {out}")
    return 0
