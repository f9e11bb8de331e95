"""The sheets of predictions against measurements, and a fitted calibration in words."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from autoshard.calibration.choices import Choices
from autoshard.calibration.frozen import FrozenRows
from autoshard.calibration.suspects import Suspect
from autoshard.calibration.validate import LEAST_LAYOUTS, Accuracy, SetAccuracy, Validation
from autoshard.cost.calibration import CONSTANTS, OPTIONAL, RATIOS, Calibration
from autoshard.report.sheet import Cell, Sheet, Table, Words
from autoshard.units import format_seconds

_COLUMNS = (
    "set", ">rows", ">layouts", ">noise", ">MAPE", ">median", ">p90", ">worst", ">bias", ">inside", ">Spearman",
    ">regret", ">groups",
)  # fmt: skip
_MOST_NAMED = 3  # suspects of a group
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
    f"{LEAST_LAYOUTS} layouts or more (- (2): no group has more than 2); to second: than the second fastest. Error: of "
    "those who predict seconds. Inside: share of runs within the stated interval, whose mean factor either way is the "
    "width. All: each set counts once. Left out: predicted by the fit that left the split of the row out."
)


def validation_sheets(
    validation: Validation,
    chosen: Sequence[Choices] = (),
    frozen: FrozenRows | None = None,
    named: Sequence[Suspect] = (),
) -> Iterator[Sheet]:
    """Yield what choices cost, tables of the errors in time and memory, suspects, then the assumptions."""
    sets = validation.sets
    kinds = [("Step time", [(entry.name, entry.step_time) for entry in sets])]
    kinds += [("Peak memory", [(entry.name, entry.peak_memory) for entry in sets if entry.peak_memory])]
    kinds += [("Peak memory by stage", [(entry.name, entry.stage_memory) for entry in sets if entry.stage_memory])]
    tables = [choices_table(chosen)] if chosen else []
    tables += [_accuracies(title, errors) for title, errors in kinds if errors]
    legends: list[Cell] = [Words(_CHOICES_LEGEND, "soft")] if chosen else []
    legends += [frozen_words(frozen)] if frozen else []
    yield Sheet(tables=[*tables, _fitting(sets)])
    yield Sheet(notes=[*legends, Words(_LEGEND, "soft")])
    yield Sheet(notes=[
        f"largest error of {what} in {entry.name}: {errors.worst_id}"
        for entry in sets
        for what, errors in (("time", entry.step_time), ("memory", entry.stage_memory or entry.peak_memory))
        if errors
    ])  # fmt: skip
    yield Sheet(notes=list(suspect_lines(named)) if named else [])
    counts = Counter((column, says) for row in validation.rows for column, says in row.assumed.items())
    if counts:
        title = f"Assumed where rows do not say, of {len(validation.rows)} predicted rows"
        rows = [(column, says, str(count)) for (column, says), count in sorted(counts.items())]
        yield Sheet(tables=[Table(title, ("column", "assumed", ">rows"), rows)])
    if validation.num_unread:
        num_rows = len(validation.rows) + validation.num_unread
        unused = f"{validation.num_unread} of {num_rows} rows could not be used and are in no figure"
        yield Sheet(notes=[Words(unused, "warning")])
    bases = dict.fromkeys(entry.basis for entry in sets)
    yield Sheet(notes=[Words(f"predictions {basis}", "warning") for basis in bases])


def frozen_words(frozen: FrozenRows) -> str:
    """Say which figures compare with those of others.

    >>> frozen_words(FrozenRows(version="1", date="2026-11-24", same=("a",), changed=("b", "c")))
    'splits 1 of 2026-11-24: a as frozen; the rows of b, c differ, so that their figures compare with no others'
    """
    same = f"{', '.join(frozen.same)} as frozen"
    changed = f"the rows of {', '.join(frozen.changed)} differ, so that their figures compare with no others"
    parts = [same] * bool(frozen.same) + [changed] * bool(frozen.changed)
    return f"splits {frozen.version} of {frozen.date}: {'; '.join(parts)}"


def suspect_lines(named: Sequence[Suspect]) -> Iterator[str]:
    """Say which rows look wrong, and why: a line for each group, the first of its rows with their reasons."""
    rows = "1 row looks" if len(named) == 1 else f"{len(named)} rows look"
    yield f"{rows} wrong; look at their sources before you fit anything to them (--json has all):"
    groups: dict[tuple[str, str], list[Suspect]] = {}
    for suspect in sorted(named, key=lambda suspect: -abs(math.log(suspect.factor))):
        groups.setdefault((suspect.set, suspect.group), []).append(suspect)
    for (name, group), rows in groups.items():
        more = f"; and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""
        says = "; ".join(f"{row.id} {row.says}" for row in rows[:_MOST_NAMED])
        yield f"{name}, {group}, {len(rows)} rows: {says}{more}" if len(rows) > 1 else f"{name}: {says}"


def choices_table(chosen: Sequence[Choices]) -> Table:
    """Return what each way to choose costs, in groups of enough layouts."""
    columns = (
        "set", "who chooses", ">groups", ">regret", ">worst", ">to second", ">Spearman", ">error", ">inside", ">width",
    )  # fmt: skip
    names = _short_names([choices.who for choices in chosen])
    rows = [(choices.set, names[choices.who], *choices_cells(choices)) for choices in chosen]
    return Table("What a choice costs", columns, rows, drop=(">width", ">inside", ">to second", ">Spearman"))


def _short_names(names: Sequence[str]) -> Mapping[str, str]:
    """Return functions of files without the folders of these, where that tells them apart.

    >>> _short_names(["a/b.py:seconds", "a/c.py:seconds"])
    {'a/b.py:seconds': 'b.py:seconds', 'a/c.py:seconds': 'c.py:seconds'}
    >>> _short_names(["a/b.py:seconds", "c/b.py:seconds"])["a/b.py:seconds"]
    'a/b.py:seconds'
    """
    short = {name: name.rpartition("/")[2] for name in names}
    return short if len({*short.values()}) == len(short) else {name: name for name in names}


def choices_cells(choices: Choices) -> tuple[str, ...]:
    """Return the figures of a way to choose; where no group is large enough, how many layouts the largest has."""
    few = f"- ({choices.most_layouts})"
    regrets = choices.regret, choices.worst_regret, choices.regret_to_second
    costs = [few if cost is None else f"{cost:.1%}" for cost in regrets]
    rank = few if choices.regret is None else "-" if choices.spearman is None else f"{choices.spearman:.2f}"
    shares = ["-" if share is None else f"{share:.0%}" for share in (choices.mape, choices.coverage)]
    width = "-" if choices.width is None else f"x{1 + choices.width:.2f}"
    return (str(choices.num_groups), *costs, rank, *shares, width)


def _fitting(sets: Sequence[SetAccuracy]) -> Table:
    """Return how many layouts are predicted to fit, of those that ran and of those that crashed, for any reason."""
    columns = ("set", ">ran", ">fit", ">crashed", ">do not fit")
    rows: list[tuple[str, ...]] = []
    for entry in sets:
        fits = entry.fitting
        counts = fits.num_ran, fits.ran_and_fit, fits.num_crashed, fits.num_crashed - fits.crashed_and_fit
        rows.append((entry.name, *map(str, counts)))
    return Table("Predicted to fit", columns, rows)


def _accuracies(title: str, accuracies: Sequence[tuple[str, Accuracy | None]]) -> Table:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    rows: list[tuple[Cell, ...]] = []
    for name, errors in accuracies:
        if errors is None:
            rows.append((name, "0", "0", *["-"] * (len(_COLUMNS) - 3)))
            continue
        counts = str(errors.count), str(errors.num_layouts)
        shares = map(share, (errors.noise_floor, errors.mape, errors.median, errors.p90))
        signed = f"{errors.worst:+.1%}", f"{errors.bias:+.1%}"
        spearman = "-" if errors.spearman is None else f"{errors.spearman:.2f}"
        last = share(errors.coverage), spearman, regret_words(errors, "regret"), groups_words(errors)
        rows.append((name, *counts, *shares, *signed, *last))
    return Table(title, _COLUMNS, rows, drop=_LESS_NEEDED)


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
        if name in CONSTANTS or value != float(name in RATIOS)
    }
    return "\n".join([f"{calibration.name}: {calibration.basis}", *_aligned(constants)])


def _aligned(entries: dict[str, str]) -> list[str]:
    width = max(map(len, entries), default=0)
    return [f"  {name:<{width}} {value}" for name, value in entries.items()]
