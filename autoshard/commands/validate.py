"""``autoshard validate``: the errors of predictions against measured runs."""

from pathlib import Path

from autoshard.calibration.choices import LEFT_OUT, choices, user_choosers
from autoshard.calibration.frozen import FrozenRows, left_out, splits_beside
from autoshard.calibration.suspects import suspects
from autoshard.calibration.validate import validated
from autoshard.commands.output import print_answer, print_left_out
from autoshard.cost.calibration import load_calibration
from autoshard.report.validation import validation_sheets
from autoshard.spec.record import encode


def validate(
    rows: Path,
    calibration: Path | None = None,
    predictor: str | None = None,
    chooser: str | None = None,
    json: bool = False,
) -> int:
    """Predict measured runs from their layouts, and print the errors per data set.

    Rows that look wrong (units, batches, outliers beside their neighbours) are named with the reason, and count all the
    same. Rows that cannot be used are left out, each with a line that says why, and the exit code is then 1; rehearsals
    in a folder, and runs that did not end, are left out too. The format of rows is in docs/reference/rows.md.

    Args:
        rows: A file with one measured run per line of JSON (see benchmarks/data), or a folder of such files or of runs.
        calibration: A calibration file, made by `autoshard calibrate`. Default: the one that comes with each cluster.
        predictor: FILE.py:FUNCTION, or several with commas: other cost models, functions of a run (its model, cluster,
            workload, candidate) that return seconds. What their choices cost stands beside what the planner's do. A
            parameter `split` gets the name of the rows in splits.json that a fit must leave out for this run.
        chooser: FILE.py:FUNCTION, or several with commas: other ways to choose, functions of the runs of a group that
            return the place of the one to run, or of several.
        json: Print one JSON object instead of tables.
    """
    choosers = user_choosers(predictor, chooser)
    report = validated(rows, calibration and load_calibration(calibration))
    splits, validation = splits_beside(rows), report.validation
    frozen = splits and FrozenRows.of(splits, report.rows)
    more = {LEFT_OUT: left_out(report.times, frozen.same)} if frozen and not calibration else {}
    chosen = choices(report.times, *choosers, more, splits and splits.by_row)
    print_left_out(validation.left_out)
    named = suspects(report)
    data = {**encode(validation), "choices": encode(chosen), "splits": encode(frozen), "suspects": encode(named)}
    print_answer(data if json else validation_sheets(validation, chosen, frozen, named))
    return 1 if validation.num_unread else 0
