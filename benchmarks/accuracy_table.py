"""The accuracy tables of docs/accuracy.md and benchmarks/README.md: ``python -m benchmarks accuracy --write``.

Lines about rows that are not part of this repository stay as they were written, each with its date, until ``--rows`` is
given.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autoshard.calibration.rows import MeasuredRow, measured_rows
from autoshard.calibration.validate import SetAccuracy, noise_floor
from autoshard.cost.calibration import Calibration, Fit, built_in
from autoshard.spec.cluster_catalogue import cluster_names
from benchmarks.pages import ROOT, head, line, table_in, with_table

_COMMAND = "accuracy"
_DATED = re.compile(r"\| \d{4}-\d{2}-\d{2} \|$")  # of rows that are not part of this repository
_HERE = "here"  # the last cell of a set whose rows are part of this repository; else the date of the line


def _share(value: float | None, form: str = ".1%") -> str:
    return "-" if value is None else f"{value:{form}}"


def _time(name: str, form: str = ".1%") -> Callable[[SetAccuracy], str]:
    """Show one number of the errors of time."""
    return lambda entry: _share(getattr(entry.step_time, name) if entry.step_time else None, form)


_COLUMNS: Mapping[str, Callable[[SetAccuracy], str]] = {
    "set": lambda entry: entry.name,
    "rows": lambda entry: str(entry.num_rows),
    "layouts": lambda entry: str(entry.step_time.num_layouts if entry.step_time else 0),
    "noise floor": _time("noise_floor"),
    "MAPE": _time("mape"),
    "median": _time("median"),
    "p90": _time("p90"),
    "worst": _time("worst", "+.1%"),
    "bias": _time("bias", "+.1%"),
    "inside": _time("coverage"),
    "Spearman": _time("spearman", ".2f"),
    "regret": _time("regret"),
    "worst regret": _time("worst_regret"),
    "memory MAPE": lambda entry: _share(entry.peak_memory.mape if entry.peak_memory else None),
}
_SHORT = ("set", "rows", "layouts", "noise floor", "MAPE", "inside", "Spearman", "regret", "memory MAPE")
PAGES: Mapping[Path, Sequence[str]] = {
    ROOT / "docs" / "accuracy.md": _SHORT,
    ROOT / "benchmarks" / "README.md": tuple(_COLUMNS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSets:
    """What was predicted: the sets of this repository, and those of another folder, if there was one, with a date."""

    own: tuple[SetAccuracy, ...]
    other: tuple[SetAccuracy, ...] | None = None
    date: str = ""


def page_text(text: str, columns: Sequence[str], found: PredictedSets, calibrations: str) -> str:
    """Return a page with its tables written anew; everything outside the markers stays."""
    kept = [known for known in table_in(text, "accuracy").splitlines() if _DATED.search(known)]
    own = [_set_line(entry, columns, _HERE) for entry in found.own]
    others = kept if found.other is None else _others(columns, found)
    table = "\n".join([*head([*columns, "rows from"], ("set", "rows from")), *own, *others])
    return with_table(with_table(text, "accuracy", table, _COMMAND), "calibrations", calibrations, _COMMAND)


def calibration_table(rows: Path) -> str:
    """Return what the constants that come with autoshard were fitted to, and their errors."""
    known = {row.id: row for row in measured_rows(rows).rows.values()}
    names = ("calibration", "rows", "layouts", "noise floor", "fitted MAPE", "left-out MAPE", "left out", "interval")
    lines = head([*names, "newest row"], ("calibration", "newest row"))
    lines += [line(_calibration_cells(one, one.fit, known)) for one in _calibrations() if one.fit]
    return "\n".join(lines)


def write_pages(found: PredictedSets, rows: Path, pages: Mapping[Path, Sequence[str]] = PAGES) -> None:
    """Write the tables of all pages; ``rows`` are those of this repository."""
    calibrations = calibration_table(rows)
    for page, columns in pages.items():
        text = page_text(page.read_text(encoding="utf-8"), columns, found, calibrations)
        page.write_text(text, encoding="utf-8")


def _set_line(entry: SetAccuracy, columns: Sequence[str], origin: str) -> str:
    return line([*(_COLUMNS[name](entry) for name in columns), origin])


def _others(columns: Sequence[str], found: PredictedSets) -> list[str]:
    """Return the lines of the sets of another folder; one with the name of a set of this repository is that set."""
    own = {entry.name for entry in found.own}
    return [_set_line(entry, columns, found.date) for entry in found.other or () if entry.name not in own]


def _calibrations() -> list[Calibration]:
    found = {built_in(name).name: built_in(name) for name in cluster_names()}
    return [found[name] for name in sorted(found)]


def _calibration_cells(calibration: Calibration, fit: Fit, known: Mapping[str, MeasuredRow]) -> list[str]:
    again: dict[object, list[float]] = defaultdict(list)
    for row in (known[name] for name in fit.rows if name in known):
        work = (row.global_batch_seqs, row.seq_len, row.optimizer, row.documents)
        again[row.group or row.id, *row.layout, *work].extend([row.step_time_s] if row.step_time_s else [])
    noise = noise_floor(again.values()) if known.keys() >= set(fit.rows) else None
    errors = [_share(noise), _share(fit.in_sample_mape), _share(fit.left_out_mape)]
    return [calibration.name, str(len(fit.rows)), str(fit.num_layouts), *errors, fit.left_out_by,
            _share(calibration.interval), fit.date]  # fmt: skip
