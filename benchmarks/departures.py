"""Fit how programs depart from their hardware, with models, clusters and programs left out.

With ``--write`` it writes ``autoshard/cost/departures.json`` and the table of left-out errors in
docs/developers/accuracy.md.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from autoshard.calibration.fitting import Sample
from autoshard.calibration.measured_run import run_of
from autoshard.calibration.prior import Array
from autoshard.calibration.suspects import suspects
from autoshard.calibration.validate import validated
from autoshard.cost.calibration import uncalibrated
from autoshard.cost.departures import Departure, Departures, mean_constants, numbers_of
from autoshard.cost.outside import holding
from autoshard.plan.plan import rounded
from autoshard.spec import record
from benchmarks.pages import ROOT, head, line, with_table
from benchmarks.pooled import ProgramRows, departure_of, program_rows
from benchmarks.result import Extra, Result

DATA = ROOT / "benchmarks" / "data"
FILE = ROOT / "autoshard" / "cost" / "departures.json"
PAGE = ROOT / "docs" / "developers" / "accuracy.md"
BAR = 0.10
_ENOUGH = 5  # rows, of which an interval says something
_COLUMNS = ("program", "cluster", "rows", "left out", "error", "inside", "without its cluster", "without its program")


def departing_rows() -> list[ProgramRows]:
    """Return the timed rows of this repository that hosts of accelerators started, by program and cluster."""
    samples, dates, suspected = list[Sample](), dict[str, str](), set[str]()
    for folder in (DATA, DATA / "sweeps", DATA / "engine"):
        found = validated(folder)
        suspected |= {one.id for one in suspects(found)}
        for row in found.rows.rows.values():
            if row.step_time_s and not row.unfit:
                run = run_of(row)
                if run.cluster.engine == "torch":
                    group, dates[row.id] = row.group or row.id, row.first_seen or ""
                    samples.append(Sample(id=row.id, run=run, step_time_s=row.step_time_s, group=group))
    return program_rows(samples, dates, suspected)


def fit_all(programs: Sequence[ProgramRows]) -> Departures:
    """Fit every program on every cluster, and judge each by the others."""
    found = list(map(departure_of, programs))
    elsewhere, unknown = list[Array](), list[Array]()
    for rows, departure in zip(programs, found, strict=True):
        moved, new = judged_by_others(rows, departure, found)
        elsewhere += [] if moved is None else [moved]
        unknown.append(new)
    widest = _interval(unknown)
    known = [one if len(one.fit.rows) >= _ENOUGH else replace(one, interval=max(one.interval, widest)) for one in found]
    known.sort(key=lambda one: (one.framework.casefold(), one.cluster))
    return Departures(programs=tuple(known), elsewhere=_interval(elsewhere), unknown=widest)


def _interval(errors: Sequence[Array]) -> float:
    """Return the factor, less 1, that holds four of five of nine quantiles of each program, which all count once."""
    quantiles = np.concatenate([np.quantile(one, np.linspace(0.1, 0.9, 9)) for one in errors])
    return rounded(float(np.expm1(holding(np.abs(quantiles).tolist()))))


def judged_by_others(rows: ProgramRows, departure: Departure, every: Sequence[Departure]) -> tuple[Array | None, Array]:
    """Return the errors of rows, as logarithms, predicted from their program elsewhere, and from other programs."""
    same = [one for one in every if one.framework == departure.framework and one.cluster != departure.cluster]
    others = [one for one in every if one.framework != departure.framework]
    return _errors(rows, same, [*others, *same]) if same else None, _errors(rows, others, others)


def _errors(program: ProgramRows, used: Sequence[Departure], everyone: Sequence[Departure]) -> Array:
    numbers = numbers_of(program.chip, mean_constants(used, everyone))
    return program.rows.residuals_under(replace(uncalibrated(), **numbers))


def left_out_table(programs: Sequence[ProgramRows], found: Departures) -> str:
    """Return the left-out errors of every program on every cluster."""
    return "\n".join([*head(_COLUMNS, _COLUMNS[:2]), *_lines(programs, found)])


def _lines(programs: Sequence[ProgramRows], found: Departures) -> Iterator[str]:
    by_name = {(one.framework, one.cluster): one for one in found.programs}
    for rows in sorted(programs, key=lambda one: (one.framework.casefold(), one.cluster)):
        departure = by_name[rows.framework, rows.cluster]
        ratios = np.array([*departure.fit.rows.values()])
        inside = float((np.abs(np.log(ratios)) <= np.log1p(departure.interval)).mean())
        moved, new = judged_by_others(rows, departure, found.programs)
        errors = ["-" if one is None else f"{np.abs(np.expm1(one)).mean():.1%}" for one in (moved, new)]
        yield line(
            [rows.framework, rows.cluster, str(len(ratios)), departure.fit.left_out_by,
             f"{departure.fit.left_out_mape:.1%}", f"{inside:.0%}", *errors]
        )  # fmt: skip


def departures_text(found: Departures) -> str:
    """Return the file of departures."""
    return json.dumps(record.encode(found), indent=1, allow_nan=False) + "\n"


def run(write: bool = False) -> Result:
    """Fit all programs; write the file of departures and the table of the page if asked to."""
    programs, start_s = departing_rows(), time.process_time()
    found = fit_all(programs)
    if write:
        FILE.write_text(departures_text(found), "utf-8")
        table = left_out_table(programs, found)
        PAGE.write_text(with_table(PAGE.read_text("utf-8"), "departures", table, "departures"), "utf-8")
    errors = {f"{one.framework}, {one.cluster}": one.fit.left_out_mape for one in found.programs}
    value = fmean(errors.values())
    extras: dict[str, Extra] = {name: round(error, 4) for name, error in errors.items()}
    extras |= {"elsewhere": found.elsewhere, "unknown": found.unknown, "cpu_s": round(time.process_time() - start_s, 1)}
    return Result(
        name="departures", value=round(value, 4), unit="mean left-out error of a program", bar=BAR,
        holds=value <= BAR, extras=extras,
    )  # fmt: skip
