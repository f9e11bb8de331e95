"""What three measured rows are worth to somebody whose program nobody has measured before.

For each sweep that others ran, its program is taken to be unknown: constants are those of the chip and what other
programs add. Then three rows are drawn, constants are fitted to them as `autoshard import` does with logs, and both
choose among the rows that were not drawn. Rows are drawn of one group, where it has layouts enough (the same question),
and of the whole sweep (the same program). The last columns say with which chance the layout that `import` would name as
the next one to try was expected to take less than the fastest of the three, and how often it did.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from statistics import fmean, median

import numpy as np

from autoshard.calibration.fitting import Sample, log_seconds
from autoshard.calibration.measured_run import MeasuredRun, run_of
from autoshard.calibration.next_layout import FEWEST, known_rows, next_layout
from autoshard.calibration.prior import Array, Prior, prior_of
from autoshard.calibration.validate import LEAST_LAYOUTS, validated
from autoshard.cost.calibration import Calibration
from benchmarks.pages import head, line, with_table
from benchmarks.result import Extra, Result
from benchmarks.sweep_choices import PAGE, SWEEPS

DRAWS = 5
BAR = 0.0  # three rows make no choice worse, on average
_COLUMNS = (
    "sweep", "three rows of", "choices", "regret", "with three rows", "error", "with three rows",
    "said to win", "won",
)  # fmt: skip
_MOST_OPTIONS = 16  # as `autoshard import` and `autoshard advise` choose among


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A layout that was measured: the median of its times for each sequence, and the group that it is of."""

    run: MeasuredRun
    group: str
    seconds: float  # for each sequence
    ids: tuple[str, ...]

    def sample(self) -> Sample:
        """Return it as a row of a fit."""
        step_s = self.seconds * self.run.workload.global_batch
        return Sample(id=self.ids[0], run=self.run, step_time_s=step_s, group=self.group)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The layouts of a sweep, and what would be known of them had nobody measured any row of their program."""

    name: str
    layouts: tuple[Layout, ...]
    prior: Prior

    @cached_property
    def without_rows(self) -> Array:
        """Seconds of each layout for each sequence, as predicted without any row of the program."""
        return self.seconds(self.prior.centre)

    def seconds(self, constants: Calibration) -> Array:
        """Return the seconds of each layout for each sequence."""
        runs = [layout.run for layout in self.layouts]
        return np.exp(log_seconds(runs, constants)) / np.array([run.workload.global_batch for run in runs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What three rows changed of a choice among the rest of a group; the last two are of the layout to try."""

    regret: float  # without rows
    regret_with: float
    error: float
    error_with: float
    chance: float | None = None  # None where none of the three rows is of the same question
    won: bool = False


def sweeps() -> Iterator[Sweep]:
    """Yield the sweeps of this repository, those whose rows all have groups of fewer than three layouts left out."""
    read = validated(SWEEPS).rows
    rows = [(read.sets[where], row) for where, row in read.rows.items() if row.step_time_s and not row.unfit]
    for name, members in groupby(sorted(rows, key=lambda entry: entry[0]), key=lambda entry: entry[0]):
        timed = [(run_of(row), row) for _, row in members]
        times: dict[tuple[MeasuredRun, str], dict[str, float]] = {}
        for run, row in timed:
            step_s = (row.step_time_s or 0.0) / run.workload.global_batch
            times.setdefault((run, row.group or row.id), {})[row.id] = step_s
        layouts = tuple(
            Layout(run=run, group=group, seconds=median(seconds.values()), ids=tuple(seconds))
            for (run, group), seconds in times.items()
        )
        if max(len(places) for places in groups_of(layouts).values()) >= LEAST_LAYOUTS:
            prior = prior_of([run for run, _ in timed], [row.id for _, row in timed])
            yield Sweep(name=name, layouts=layouts, prior=prior)


def groups_of(layouts: Sequence[Layout]) -> Mapping[str, Sequence[int]]:
    """Return the places of the layouts of each group."""
    places: dict[str, list[int]] = {}
    for place, layout in enumerate(layouts):
        places.setdefault(layout.group, []).append(place)
    return places


def drawn_of_group(sweep: Sweep, seed: int) -> Iterator[Draw]:
    """Yield what three rows of each group change of the choice among the rest of it."""
    for places in groups_of(sweep.layouts).values():
        if len(places) >= LEAST_LAYOUTS + FEWEST:
            drawn = np.random.default_rng(seed).permutation(places)[:FEWEST].tolist()
            yield compared(sweep, drawn, [place for place in places if place not in drawn])


def drawn_of_sweep(sweep: Sweep, seed: int) -> Iterator[Draw]:
    """Yield what three rows of a sweep change of the choice among the rest of each group."""
    drawn = np.random.default_rng(seed).permutation(len(sweep.layouts))[:FEWEST].tolist()
    for places in groups_of(sweep.layouts).values():
        rest = [place for place in places if place not in drawn]
        if len(rest) >= LEAST_LAYOUTS:
            yield compared(sweep, drawn, rest)


def compared(sweep: Sweep, drawn: Sequence[int], rest: Sequence[int]) -> Draw:
    """Choose among some layouts without rows and with those that were drawn, and name the next one to try."""
    layouts = sweep.layouts
    known = known_rows([layouts[place].sample() for place in drawn], sweep.prior)
    measured = np.array([layout.seconds for layout in layouts])
    without, with_rows = sweep.without_rows, sweep.seconds(known.constants)

    def regret(seconds: Array) -> float:
        return float(measured[min(rest, key=lambda place: seconds[place])] / measured[[*rest]].min() - 1)

    def error(seconds: Array) -> float:
        return float(np.abs(seconds[[*rest]] / measured[[*rest]] - 1).mean())

    draw = Draw(
        regret=regret(without), regret_with=regret(with_rows), error=error(without), error_with=error(with_rows)
    )
    shortlist = sorted(rest, key=lambda place: with_rows[place])[:_MOST_OPTIONS]
    best = known.best_of(layouts[rest[0]].run)
    to_try = next_layout(known, [layouts[place].run for place in shortlist], best) if best else None
    if best is None or to_try is None:
        return draw
    tried = next(layout for layout in layouts if layout.run == to_try.run and layout.group == layouts[rest[0]].group)
    won = tried.seconds * tried.run.workload.global_batch < best.step_s
    return replace(draw, chance=to_try.chance, won=won)


def few_rows(draws: int = DRAWS) -> Mapping[tuple[str, str], Sequence[Draw]]:
    """Return what three rows change, by sweep and by what they were drawn of."""
    results: dict[tuple[str, str], list[Draw]] = {}
    for sweep in sweeps():
        for what, drawn_of in (("the group", drawn_of_group), ("the sweep", drawn_of_sweep)):
            results[sweep.name, what] = [draw for seed in range(draws) for draw in drawn_of(sweep, seed)]
    return {key: drawn for key, drawn in results.items() if drawn}


def run(write: bool = False) -> Result:
    """Draw rows of every sweep, and hold what three rows change of the mean regret against nothing."""
    start_s = time.process_time()
    drawn = few_rows()
    if write:
        table = "\n".join([*head(_COLUMNS, _COLUMNS[:2]), *(line([*key, *_cells(drawn[key])]) for key in drawn)])
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), "few rows", table, "few_rows"), encoding="utf-8")
    return judge(drawn, time.process_time() - start_s)


def _cells(draws: Sequence[Draw]) -> list[str]:
    """Return the means of some draws, as a table has them."""
    tried = [draw for draw in draws if draw.chance is not None]
    chance, won = fmean(draw.chance or 0.0 for draw in tried), fmean(draw.won for draw in tried)
    shares = [fmean(getattr(draw, name) for draw in draws) for name in ("regret", "regret_with", "error", "error_with")]
    return [str(len(draws)), *(f"{share:.1%}" for share in shares), f"{chance:.0%}", f"{won:.0%} of {len(tried)}"]


def judge(drawn: Mapping[tuple[str, str], Sequence[Draw]], cpu_s: float) -> Result:
    """Hold the mean change of regret over sweeps, which count once each, against none."""
    changes = {key: fmean(draw.regret_with - draw.regret for draw in draws) for key, draws in drawn.items()}
    value = fmean(changes.values())
    extras: dict[str, Extra] = {f"{name}, {what}": round(change, 4) for (name, what), change in changes.items()}
    return Result(
        name="few_rows", value=round(value, 4), unit="change of the mean regret by three rows", bar=BAR,
        holds=value <= BAR, extras={**extras, "cpu_s": round(cpu_s, 1)},
    )  # fmt: skip
