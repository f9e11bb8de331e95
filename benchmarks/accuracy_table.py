"""The tables of docs/developers/accuracy.md and benchmarks/README.md: ``python -m benchmarks accuracy --write``.

Runs are told apart by chip, on Trainium by release of the SDK, on GPUs by FP8; each is predicted by the fit that left
out its model, or its layout, which calibrations state row by row.

Lines about rows that are not part of this repository stay as they were written, each with its date, until ``--rows`` is
given.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autoshard.calibration.measured_run import MeasuredRun, run_of
from autoshard.calibration.rows import MeasuredRow, measured_rows
from autoshard.calibration.validate import Accuracy, Compared, SetAccuracy, Validation, accuracy, noise_floor
from autoshard.cost.built_in import built_in
from autoshard.cost.calibration import Calibration, Fit
from autoshard.report.validation import groups_words, regret_words
from autoshard.spec.cluster_catalogue import cluster_names, load_node_type
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
    "groups": lambda entry: groups_words(entry.step_time) if entry.step_time else "-",
    "Spearman": _time("spearman", ".2f"),
    "regret": lambda entry: regret_words(entry.step_time, "regret") if entry.step_time else "-",
    "worst regret": lambda entry: regret_words(entry.step_time, "worst_regret") if entry.step_time else "-",
    "memory MAPE": lambda entry: _share(entry.peak_memory.mape if entry.peak_memory else None),
}
_PARTS: Mapping[str, Callable[[Accuracy], str]] = {
    "rows": lambda entry: str(entry.count),
    "layouts": lambda entry: str(entry.num_layouts),
    "noise floor": lambda entry: _share(entry.noise_floor),
    "left-out MAPE": lambda entry: _share(entry.mape),
    "median": lambda entry: _share(entry.median),
    "bias": lambda entry: _share(entry.bias, "+.1%"),
    "inside": lambda entry: _share(entry.coverage, ".0%"),
}
_SHORT = ("set", "rows", "layouts", "noise floor", "MAPE", "inside", "groups", "Spearman", "regret", "memory MAPE")
PAGES: Mapping[Path, Sequence[str]] = {
    ROOT / "docs" / "developers" / "accuracy.md": _SHORT,
    ROOT / "benchmarks" / "README.md": tuple(_COLUMNS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSets:
    """What was predicted: the sets of this repository, and those of another folder, if there was one, with a date."""

    own: tuple[SetAccuracy, ...]
    parts: Mapping[str, Accuracy]  # of the rows of this repository, predicted with fits that left each out
    other: tuple[SetAccuracy, ...] | None = None
    date: str = ""


def left_out(rows: Path, found: Validation) -> dict[str, Accuracy]:
    """Return the errors of the rows of this repository by what ran, each under a fit without its model or layout.

    A row that is in no fit is predicted as any other plan is.
    """
    predicted = {row.id: row for row in found.rows}
    parts: dict[str, list[Compared]] = defaultdict(list)
    for row in measured_rows(rows).rows.values():
        if not row.step_time_s or row.id not in predicted:
            continue
        run, fitted = run_of(row), predicted[row.id]
        fit = run.constants.fit
        time_s = fit.rows[row.id] * row.step_time_s if fit and row.id in fit.rows else fitted.predicted_step_time_s
        scale = time_s / fitted.predicted_step_time_s
        work = (row.global_batch_seqs, row.seq_len)
        parts[_part(run)].append(
            Compared(
                id=row.id,
                group=row.group or row.id,
                layout=(*row.layout, *work),
                predicted=time_s,
                measured=row.step_time_s,
                low=fitted.low_s * scale,
                high=fitted.high_s * scale,
            )
        )
    errors = {name: accuracy(parts[name]) for name in sorted(parts)}
    return {name: one for name, one in errors.items() if one}


def _part(run: MeasuredRun) -> str:
    """Say what ran a row: the chip, and the software that decides most."""
    chip, products = run.cluster.chip.name, run.workload.precision.products
    if software := run.constants.software:
        is_old = software.slowness(None, run.release) > 1
        return f"{chip}, SDK before {software.settled}" if is_old else f"{chip}, SDK {software.settled} and later"
    return f"{chip}, {products.upper()}" if products else chip


def page_text(text: str, columns: Sequence[str], found: PredictedSets, calibrations: str) -> str:
    """Return a page with its tables written anew; everything outside the markers stays."""
    kept = [known for known in table_in(text, "accuracy").splitlines() if _DATED.search(known)]
    own = [_set_line(entry, columns, _HERE) for entry in found.own]
    others = kept if found.other is None else _others(columns, found)
    table = "\n".join([*head([*columns, "rows from"], ("set", "rows from")), *own, *others])
    parts = [line([name, *(show(one) for show in _PARTS.values())]) for name, one in found.parts.items()]
    tables = {
        "accuracy": table,
        "calibrations": calibrations,
        "left-out": "\n".join([*head(["runs", *_PARTS], ("runs",)), *parts]),
    }
    for name, written in tables.items():
        text = with_table(text, name, written, _COMMAND)
    return text


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
    """Return the constants of whole platforms; those of programs on GPUs have a table of departures."""
    platforms = (name for name in cluster_names() if load_node_type(name).engine == "nxd")
    found = {built_in(name).name: built_in(name) for name in platforms}
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
