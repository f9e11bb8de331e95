"""What each term of the time of a step buys on GPUs: every program is fitted again without it.

Errors and regret are those of rows whose group or model was left out. With ``--write`` the table in
docs/developers/accuracy.md is written anew. Programs with ten rows or more count, and every sixth of
nanotron's 511. A quarter of an hour of a processor.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from autoshard.calibration.fitting import FittedUnknowns, left_out_residuals
from autoshard.calibration.validate import Compared, accuracy
from benchmarks.departures import PAGE, departing_rows
from benchmarks.pages import head, line, with_table
from benchmarks.pooled import ProgramRows
from benchmarks.result import Extra, Result

_LEAST, _MOST, _EVERY = 10, 200, 6  # rows of a program, those that are all used, and which of more
_NOTHING = 5e-4  # of an error, or of regret, that a term lowers
LARGEST = "nanotron"  # most of the rows are of it, so that means are given without it as well
_ALL = "all of them"
_COLUMNS = ("without", "error", "mean regret", "error without nanotron", "regret without nanotron")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """The left-out error of a program on a cluster, and the regret in each of its groups of three layouts or more."""

    framework: str
    mape: float
    regrets: tuple[float, ...]


def thinned(programs: Sequence[ProgramRows]) -> list[ProgramRows]:
    """Return programs with rows enough to judge a term by, with a part of them where they have very many."""
    enough = [one for one in programs if len(one.samples) >= _LEAST]
    return [replace(one, samples=one.samples[::_EVERY]) if len(one.samples) > _MOST else one for one in enough]


def without_constants(*names: str) -> Callable[[ProgramRows], ProgramRows]:
    """Return how to take constants to add nothing."""
    return lambda program: replace(program, without=names)


TERMS: Mapping[str, Callable[[ProgramRows], ProgramRows]] = {
    _ALL: lambda program: program,
    "ranks that join a collective": without_constants("joined_s"),
    "ranks over which ZeRO divides": without_constants("shard_s"),
    "start of a collective": without_constants("collective_s"),
    "ratio of data parallelism to its links": without_constants("dp_ratio"),
    "seconds of hosts for a layer": without_constants("layer_s"),
}


def left_out_of(program: ProgramRows) -> LeftOut:
    """Fit a program to its rows but some, and compare what is predicted of these."""
    rows = program.rows
    seconds = np.exp(left_out_residuals(rows, FittedUnknowns.of(rows)) + rows.measured)
    compared = [
        Compared(
            id=sample.id, group=sample.group, layout=sample.run, predicted=predicted, measured=sample.step_time_s,
            work=sample.run.workload.tokens_per_step,
        )
        for sample, predicted in zip(rows.samples, seconds.tolist(), strict=True)
    ]  # fmt: skip
    errors = accuracy(compared)
    assert errors, "a program has rows"
    return LeftOut(framework=program.framework, mape=errors.mape, regrets=tuple(one.regret for one in errors.groups))


def means(found: Sequence[LeftOut]) -> tuple[float, float]:
    """Return the mean error of programs, and the mean regret of all of their groups."""
    return fmean(one.mape for one in found), fmean([regret for one in found for regret in one.regrets] or [0.0])


def lines(found: Mapping[str, Sequence[LeftOut]]) -> Iterator[str]:
    """Yield the table of what each term buys."""
    yield from head(_COLUMNS, _COLUMNS[:1])
    for name, programs in found.items():
        others = [one for one in programs if one.framework != LARGEST]
        cells = [f"{value:.2%}" for some in (programs, others) for value in means(some)]
        yield line(["nothing: all terms" if name == _ALL else name, *cells])


def run(write: bool = False) -> Result:
    """Fit all programs with all terms and without each."""
    start_s, programs = time.process_time(), thinned(departing_rows())
    found = {name: [left_out_of(change(one)) for one in programs] for name, change in TERMS.items()}
    if write:
        table = "\n".join(lines(found))
        PAGE.write_text(with_table(PAGE.read_text("utf-8"), "terms", table, "departure_terms"), "utf-8")
    gains: dict[str, Extra] = {}
    useless, base = list[str](), means(found[_ALL])
    for name, one in found.items():
        more = [value - whole for value, whole in zip(means(one), base, strict=True)]
        gains |= {f"{name}.error": round(more[0], 4), f"{name}.regret": round(more[1], 4)}
        useless += [name] if name != _ALL and max(more) < _NOTHING else []
    return Result(
        name="departure_terms", value=len(useless), unit="terms that buy nothing on left-out rows", bar=0,
        holds=not useless,
        extras={"useless": ", ".join(useless), **gains, "cpu_s": round(time.process_time() - start_s, 1)},
    )  # fmt: skip
