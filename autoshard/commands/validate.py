"""``autoshard validate``: the errors of predictions against measured runs."""

from pathlib import Path

from autoshard.calibration.validate import validate as validated
from autoshard.commands.output import print_answer, print_left_out
from autoshard.cost.calibration import load_calibration
from autoshard.report.validation import validation_report
from autoshard.spec.record import encode


def validate(rows: Path, calibration: Path | None = None, json: bool = False) -> int:
    """Predict measured runs from their layouts, and print the errors per data set.

    Rows that cannot be used are left out, each with a line that says why, and the exit code is then 1; rehearsals in a
    folder, and runs that did not end, are left out too. The format of rows is in docs/accuracy.md.

    Args:
        rows: A file with one measured run per line of JSON (see benchmarks/data), or a folder of such files or of runs.
        calibration: A calibration file, made by `autoshard calibrate`. Default: the one that comes with each cluster.
        json: Print one JSON object instead of tables.
    """
    validation = validated(rows, calibration and load_calibration(calibration))
    print_left_out(validation.left_out)
    print_answer(encode(validation) if json else validation_report(validation))
    return 1 if validation.num_unread else 0
