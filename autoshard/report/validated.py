"""Predictions against measurements, for a terminal."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.calibration.accuracy import Accuracy
from autoshard.calibration.validation import SetAccuracy, Validation
from autoshard.report.terminal import make_table

_COLUMNS = (
    "rows",
    "layouts",
    "noise",
    "MAPE",
    "median",
    "p90",
    "worst",
    "bias",
    "inside",
    "Spearman",
    "regret",
    "groups",
)
_LEGEND = (
    "Relative errors, predicted over measured less 1: MAPE, median and p90 without their sign, worst and bias with it. "
    "Noise: the same for the median of each layout that was measured again, which no look at layouts betters by much. "
    "Inside: measured within the stated interval. Groups: those with a choice, two layouts or more, times taken per "
    "token; in them Spearman's correlation, and regret: the layout that would have been picked over the best, less 1."
)


def validation_report(validation: Validation) -> Group:
    """Return one table for times and one for memory, then what was assumed and what could not be predicted."""
    times = [(entry.name, entry.step_time) for entry in validation.sets]
    sizes = [(entry.name, entry.peak_memory) for entry in validation.sets if entry.peak_memory]
    stages = [(entry.name, entry.stage_memory) for entry in validation.sets if entry.stage_memory]
    parts: list[RenderableType] = [_accuracies("Step time", times), ""]
    for title, found in (("Peak memory", sizes), ("Peak memory by stage", stages)):
        parts += [_accuracies(title, found), ""] if found else []
    parts += [Text(_LEGEND, "dim"), "", *_worst(validation.sets)]
    if any(row.assumed for row in validation.rows):
        parts += ["", _assumptions(validation)]
    if validation.unrepresented:
        parts += ["", _unrepresented(validation)]
    bases = dict.fromkeys(entry.basis for entry in validation.sets)
    return Group(*parts, "", *(Text(f"predictions {basis}", "yellow") for basis in bases))


def _accuracies(title: str, found: Sequence[tuple[str, Accuracy | None]]) -> Table:
    table = make_table(title)
    table.padding = (0, 1, 0, 0)  # all columns on a terminal of 120
    table.add_column("set", overflow="fold")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for name, errors in found:
        table.add_row(name, *(_cells(errors) if errors else ["0", "0", *["-"] * (len(_COLUMNS) - 2)]))
    return table


def _cells(errors: Accuracy) -> list[str]:
    shares = [_share(value) for value in (errors.noise_floor, errors.mape, errors.median, errors.p90)]
    signed = [f"{value:+.1%}" for value in (errors.worst, errors.bias)]
    order = "-" if errors.spearman is None else f"{errors.spearman:.2f}"
    ranked = [_share(errors.coverage), order, _share(errors.regret), str(len(errors.groups))]
    return [str(errors.count), str(errors.num_layouts), *shares, *signed, *ranked]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _worst(sets: Sequence[SetAccuracy]) -> list[RenderableType]:
    """Name the row of each set that is furthest off."""
    named = [
        f"{what} furthest off in {entry.name}: {errors.worst_id}"
        for entry in sets
        for what, errors in (("time", entry.step_time), ("memory", entry.stage_memory or entry.peak_memory))
        if errors
    ]
    return [Text(line) for line in named]


def _assumptions(validation: Validation) -> Table:
    counts = Counter((column, says) for row in validation.rows for column, says in row.assumed.items())
    table = make_table(f"Assumed where rows leave it open, of {len(validation.rows)} predicted")
    table.add_column("column")
    table.add_column("assumed", overflow="fold")
    table.add_column("rows", justify="right")
    for (column, says), count in sorted(counts.items()):
        table.add_row(column, says, str(count))
    return table


def _unrepresented(validation: Validation) -> Table:
    table = make_table("Not predicted")
    table.add_column("row", overflow="fold")
    table.add_column("reason", overflow="fold")
    for row in validation.unrepresented:
        table.add_row(row.id, row.reason)
    return table
