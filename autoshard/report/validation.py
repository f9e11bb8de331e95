"""Predictions against measurements, and a fitted calibration, for a terminal."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.text import Text

from autoshard.calibration.choices import Choices
from autoshard.calibration.validate import LEAST_LAYOUTS, Accuracy, Validation
from autoshard.cost.calibration import CONSTANTS, OPTIONAL, Calibration
from autoshard.report.tables import Cell, FittingTable, prose
from autoshard.units import format_seconds

_COLUMNS = (
    "set", ">rows", ">layouts", ">noise", ">MAPE", ">median", ">p90", ">worst", ">bias", ">inside", ">Spearman",
    ">regret", ">groups",
)  # fmt: skip
_LESS_NEEDED = (">noise", ">groups", ">layouts", ">regret", ">Spearman", ">p90", ">median")
_LEGEND = (
    "Errors are predicted / measured - 1: MAPE (mean absolute), median and p90 without sign, worst and bias (mean) "
    "with sign. Noise: the error if each repeated layout were predicted by the median of its own runs. Inside: share "
    f"of runs within the stated interval. Groups: runs that differ only in layout, {LEAST_LAYOUTS} layouts or more, "
    "compared by time per token. Spearman: rank correlation within groups. Regret: time of the layout predicted best "
    "over the time of the best one, less 1; - (2): no group has more than 2 layouts. 1 of 10: of ten groups one is as "
    "large."
)


_CHOICES_LEGEND = (
    f"Regret: how much longer the chosen layout took than the fastest of its group, mean and worst over groups of "
    f"{LEAST_LAYOUTS} layouts or more; to second: than the second fastest. Error: of those who predict seconds."
)


def validation_report(validation: Validation, chosen: Sequence[Choices] = ()) -> Group:
    """Return what choices cost, tables of the errors in time and memory, then the assumptions."""
    sets = validation.sets
    sizes = [(entry.name, entry.peak_memory) for entry in sets if entry.peak_memory]
    stages = [(entry.name, entry.stage_memory) for entry in sets if entry.stage_memory]
    parts: list[RenderableType] = [choices_table(chosen), ""] if chosen else []
    parts += [_accuracies("Step time", [(entry.name, entry.step_time) for entry in sets]), ""]
    for title, found in (("Peak memory", sizes), ("Peak memory by stage", stages)):
        parts += [_accuracies(title, found), ""] if found else []
    parts += [prose(_CHOICES_LEGEND, "dim")] if chosen else []
    parts += [prose(_LEGEND, "dim"), ""]
    parts += [
        Text(f"largest error of {what} in {entry.name}: {errors.worst_id}")
        for entry in sets
        for what, errors in (("time", entry.step_time), ("memory", entry.stage_memory or entry.peak_memory))
        if errors
    ]
    counts = Counter((column, says) for row in validation.rows for column, says in row.assumed.items())
    if counts:
        title = f"Assumed where rows do not say, of {len(validation.rows)} predicted rows"
        rows = [(column, says, str(count)) for (column, says), count in sorted(counts.items())]
        parts += ["", FittingTable(title, ("column", "assumed", ">rows"), rows)]
    if validation.num_unread:
        num_rows = len(validation.rows) + validation.num_unread
        unused = f"{validation.num_unread} of {num_rows} rows could not be used and are in no figure"
        parts += ["", Text(unused, "yellow")]
    bases = dict.fromkeys(entry.basis for entry in sets)
    return Group(*parts, "", *(prose(f"predictions {basis}", "yellow") for basis in bases))


def choices_table(chosen: Sequence[Choices]) -> FittingTable:
    """Return what each way to choose costs, in groups of enough layouts."""
    columns = ("set", "who chooses", ">groups", ">regret", ">worst", ">to second", ">Spearman", ">error")
    rows = [
        (
            one.set, one.who, str(one.num_groups), *(f"{cost:.1%}" for cost in (one.regret, one.worst_regret)),
            f"{one.regret_to_second:.1%}", "-" if one.spearman is None else f"{one.spearman:.2f}",
            "-" if one.mape is None else f"{one.mape:.1%}",
        )
        for one in chosen
    ]  # fmt: skip
    return FittingTable("What a choice costs", columns, rows, drop=(">to second", ">Spearman", ">error"))


def _accuracies(title: str, found: Sequence[tuple[str, Accuracy | None]]) -> FittingTable:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    rows: list[tuple[Cell, ...]] = []
    for name, errors in found:
        if errors is None:
            rows.append((name, "0", "0", *["-"] * (len(_COLUMNS) - 3)))
            continue
        counts = str(errors.count), str(errors.num_layouts)
        shares = map(share, (errors.noise_floor, errors.mape, errors.median, errors.p90))
        signed = f"{errors.worst:+.1%}", f"{errors.bias:+.1%}"
        spearman = "-" if errors.spearman is None else f"{errors.spearman:.2f}"
        last = share(errors.coverage), spearman, regret_words(errors, "regret"), groups_words(errors)
        rows.append((name, *counts, *shares, *signed, *last))
    return FittingTable(title, _COLUMNS, rows, drop=_LESS_NEEDED)


def groups_words(errors: Accuracy) -> str:
    """Say how many groups are large enough, of all.

    >>> from autoshard.calibration.validate import Compared, accuracy
    >>> rows = [Compared(id=one, group="g", layout=one, predicted=1.0, measured=1.0) for one in "ab"]
    >>> errors = accuracy(rows)
    >>> groups_words(errors), regret_words(errors, "regret")
    ('0 of 1', '- (2)')
    """
    return f"{len(errors.groups)} of {errors.num_groups}"


def regret_words(errors: Accuracy, name: Literal["regret", "worst_regret"]) -> str:
    """Return a regret; where no group is large enough, how many layouts the largest one has."""
    value = getattr(errors, name)
    return f"- ({errors.most_layouts})" if value is None else f"{value:.1%}"


def calibration_report(calibration: Calibration) -> str:
    """Return the constants, and the rows behind them."""
    values = {name: getattr(calibration, name) for name in (*CONSTANTS, *OPTIONAL)}
    constants = {
        name: format_seconds(value) if name.endswith("_s") else f"{value:.3f}"
        for name, value in values.items()
        if value or name in CONSTANTS
    }
    return "\n".join([f"{calibration.name}: {calibration.basis}", *_aligned(constants)])


def _aligned(entries: dict[str, str]) -> list[str]:
    width = max(map(len, entries), default=0)
    return [f"  {name:<{width}} {value}" for name, value in entries.items()]
