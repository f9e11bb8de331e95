"""Constants of a cluster from measured runs: as many as the rows can tell apart, and the error on what was left out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from autoshard.calibration.accuracy import left_out_interval
from autoshard.calibration.fitting import Unknowns, fitted
from autoshard.calibration.measured import MeasuredRow
from autoshard.calibration.measured_run import MeasuredRun, run_of
from autoshard.calibration.validate import left_out, outlined_run, predicted_run, row_sets, without
from autoshard.cost.calibration import EFFICIENCIES, Calibration, Fit, Reach, uncalibrated
from autoshard.cost.predict import step_timer
from autoshard.errors import Fault, InputError, require
from autoshard.plan.prediction import rounded
from autoshard.spec.cluster_catalogue import load_node_type

Array = Any  # a numpy array of floats
Kinds = tuple[tuple[str, ...], ...]  # the constants that share a value, kind by kind

LEAST_ROWS = 3
_AXES = ("tp", "pp", "cp", "ep", "dp", "vp")
_DIGITS = 6  # of a constant: far beyond what rows decide, and a file that people can read
_WIDEST = 2.0  # an interval, over the mean error of what was left out
_NO_WORSE = 1e-3  # two left-out errors nearer than this are equal

# From one constant for all that is slower than its data sheet to as many as a platform may have. Constants that rows of
# a few layouts cannot tell apart fit them better and predict others worse, so that the left-out error decides how many
# there are. The first splits what a chip does from what is sent; then arithmetic from memory.
_MATRIX, _CHIP, _LINKS = EFFICIENCIES[:2], EFFICIENCIES[:4], EFFICIENCIES[4:]
_COMPILED: Mapping[str, Kinds] = {
    "one for all": (EFFICIENCIES,),
    "chip, link": (_CHIP, _LINKS),
    "arithmetic, memory, link": (EFFICIENCIES[:3], ("memory_efficiency",), _LINKS),
    "matrix, vector, memory, link": (_MATRIX, ("vector_efficiency",), ("memory_efficiency",), _LINKS),
}
# Hosts that start kernels one by one take time of their own, and more of it to start what waits for other ranks. Vector
# units hardly bind where memory is as slow.
_PASSES = ("vector_efficiency", "memory_efficiency")
_EACH = (*((name,) for name in _MATRIX), _PASSES, *((name,) for name in _LINKS))
_LAUNCH, _COLLECTIVE = ("launch_s",), ("collective_s",)
_EAGER: Mapping[str, Kinds] = {
    "one for all": (EFFICIENCIES,),
    "one for all, launch": (EFFICIENCIES, _LAUNCH),
    "chip, link, launch": (_CHIP, _LINKS, _LAUNCH),
    "matrix, memory, link, launch": (_MATRIX, _PASSES, _LINKS, _LAUNCH),
    "chip, link, launch, collective": (_CHIP, _LINKS, _LAUNCH, _COLLECTIVE),
    "matrix, attention, memory, near link, far link, launch, collective": (*_EACH, _LAUNCH, _COLLECTIVE),
}
_UNEVEN = 4.0  # a machine that is so much faster than declared may be faster by this once more in one of its rates
_LAUNCHES = (0.5, 1.0, 2.0, 4.0, 8.0)  # tried first, in their unit
_UNITS = {"launch_s": 1e-5, "collective_s": 1e-4}  # of what is fitted in seconds: what is usual


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A run and what it took; what is left out together with it."""

    id: str
    run: MeasuredRun
    step_time_s: float
    apart: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """One split: the constants fitted to all rows, and the ratio of predicted to measured of each row left out."""

    split: str
    fitted: tuple[str, ...]
    calibration: Calibration
    left_out: Array

    @property
    def error(self) -> float:
        return float(np.abs(self.left_out - 1).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Usable:
    """The runs of a cluster that a fit can use, from when the newest is, and why other rows are left out."""

    samples: tuple[Sample, ...]
    left_out_by: Literal["model", "layout"]
    newest: str
    left_out: tuple[Fault, ...]


def calibrate(path: Path, cluster: str, name: str, date: str | None = None) -> Calibration:
    """Fit the constants of a cluster to rows that were run on it; ``date`` is that of the newest row."""
    return fit(usable(path, cluster, date), name)


def usable(path: Path, cluster: str, date: str | None = None) -> Usable:
    """Take the rows of a path that a fit can use, or say why they are too few."""
    node_type = load_node_type(cluster)
    sets = row_sets(path)
    rows = {where: row for one in sets.values() for where, row in one.rows.items()}
    samples, apart, faults = samples_of(list(rows.items()), node_type.name)
    out = left_out(without(sets, faults))
    layouts = len({sample.run for sample in samples})
    try:
        require(
            (len(samples) >= LEAST_ROWS, str(path),
             f"{len(samples)} rows of {node_type.name} with a step_time_s are too few; a fit needs {LEAST_ROWS}"),
            (layouts > 1 or not samples, str(path),
             "all rows are of one layout; a fit needs two, to predict one from the other"),
        )  # fmt: skip
    except InputError as error:
        raise InputError([*error.faults, *out]) from None
    newest = date or max((row.first_seen or "" for where, row in rows.items() if where not in faults), default="")
    require((bool(newest), "--date", f"missing; no row of {path} has first_seen, so say from when they are"))
    return Usable(samples=tuple(samples), left_out_by=apart, newest=newest, left_out=out)


def fit(found: Usable, name: str) -> Calibration:
    """Fit the constants of a cluster to its runs."""
    samples = found.samples
    layouts = len({sample.run for sample in samples})
    node_type = load_node_type(samples[0].run.cluster.name)
    splits = _COMPILED if node_type.engine == "nxd" else _EAGER
    trials = [_trial(split, kinds, samples) for split, kinds in splits.items() if len(kinds) < layouts]
    least = min(trial.error for trial in trials)
    best = next(trial for trial in trials if trial.error <= least + _NO_WORSE)
    rests_on = Fit(
        date=found.newest,
        rows=tuple(sample.id for sample in samples),
        num_layouts=layouts,
        left_out_by=found.left_out_by,
        in_sample_mape=rounded(float(np.abs(_ratios(samples, best.calibration) - 1).mean())),
        left_out_mape=rounded(best.error),
        tried={trial.split: rounded(trial.error) for trial in trials},
    )
    return _described(best, rests_on, name)


def _described(best: _Trial, fit: Fit, name: str) -> Calibration:
    """Say what fitted constants rest on.

    The interval is the one that holds four of five left-out rows, but no wider than twice their mean error: a few rows
    far out would widen it for all.
    """
    interval = rounded(min(left_out_interval(best.left_out.tolist()), _WIDEST * fit.left_out_mape))
    inside = float((np.abs(1 / best.left_out - 1) <= interval).mean())
    require((interval < 1 and fit.left_out_mape < 1, "interval", f"rows are {fit.left_out_mape:.0%} off when they are "
             "left out: the cost model does not describe these rows, and no constants make it"))  # fmt: skip
    reach = best.calibration.reach
    assert reach, "what was fitted knows to what"
    fitted_to = f"fitted to {len(fit.rows)} rows of {reach.cluster}, constants told apart: {best.split}"
    left_out = f"{inside:.0%} of rows are within it when their {fit.left_out_by} is left out of the fit"
    return replace(
        best.calibration,
        name=name,
        interval=interval,
        basis=f"calibrated on {len(fit.rows)} rows of {reach.cluster} ({fit.num_layouts} layouts, newest {fit.date}): "
        f"mean error {fit.in_sample_mape:.1%}, {fit.left_out_mape:.1%} where the {fit.left_out_by} is left out; "
        f"nominal 80% interval of {interval:.0%} either way, which holds {inside:.0%} of those",
        fit=fit,
        sources={**best.calibration.sources, **dict.fromkeys(best.fitted, fitted_to), "interval": left_out},
    )


def samples_of(
    rows: Sequence[tuple[str, MeasuredRow]], cluster: str
) -> tuple[list[Sample], Literal["model", "layout"], dict[str, InputError]]:
    """Understand the rows; left out together is a model, or where there is one, a layout. Also name what is wrong."""
    faults: dict[str, InputError] = {}
    runs: list[tuple[MeasuredRow, MeasuredRun]] = []
    for where, row in rows:
        try:
            runs.append((row, _run(row, cluster)))
        except InputError as error:
            faults[where] = error
    layouts = list(dict.fromkeys(run for _, run in runs))
    models = len({run.model.name for run in layouts}) > 1
    samples = [
        Sample(
            id=row.id,
            run=run,
            step_time_s=row.step_time_s or 0.0,
            apart=run.model.name if models else f"layout {layouts.index(run)}",
        )
        for row, run in runs
    ]
    return samples, "model" if models else "layout", faults


def _run(row: MeasuredRow, cluster: str) -> MeasuredRun:
    require((not row.unfit, "", row.unfit), (bool(row.step_time_s), "step_time_s", "is not there to be fitted to"))
    run = run_of(row.unmeasured)
    if isinstance(run, str):
        raise InputError.of("arch", run)
    if run.cluster.name != cluster:
        raise InputError.of("platform", f"was run on {run.cluster.name}, not on {cluster}")
    _timer(run)
    return run


def _reach(samples: Sequence[Sample]) -> Reach:
    runs = {sample.run for sample in samples}
    found = [run.candidate for run in runs]
    axes = tuple(axis for axis in _AXES if any(getattr(candidate, axis) > 1 for candidate in found))
    kernels = sorted({run.candidate.kernels or run.cluster.kernels for run in runs})
    return Reach(cluster=samples[0].run.cluster.name, axes=axes, kernels=tuple(kernels))


def _trial(split: str, kinds: Kinds, samples: Sequence[Sample]) -> _Trial:
    """Fit to all rows, and to all but those of each model; predict what was left out as any other run."""
    left_out = np.ones(len(samples))
    for apart in sorted({sample.apart for sample in samples}):
        held = [place for place, sample in enumerate(samples) if sample.apart == apart]
        rest = [sample for sample in samples if sample.apart != apart]
        left_out[held] = _ratios([samples[place] for place in held], fit_constants(kinds, rest))
    names = tuple(name for kind in kinds for name in kind)
    return _Trial(split=split, fitted=names, calibration=fit_constants(kinds, samples), left_out=left_out)


def fit_constants(kinds: Kinds, samples: Sequence[Sample]) -> Calibration:
    """Return the constants under which the predictions come closest to what was measured."""
    predict_all = _predictor(samples)
    nominal = _as_fast(tuple(samples))

    def ratios(unknowns: Array) -> Array:
        return predict_all(_with(nominal, kinds, unknowns))

    start = np.array([_unknown(kind[0], getattr(nominal, kind[0])) for kind in kinds])
    declared = nominal.most_efficient > 1
    fastest = np.maximum(start / _UNEVEN, 1 / nominal.most_efficient) if declared else np.ones(len(kinds))
    least = np.where([kind[0] in _UNITS for kind in kinds], 0.0, fastest)
    found = fitted(ratios, Unknowns(start=start, least=least), current=_launching(kinds, start, ratios))
    return _with(nominal, kinds, found)


@cache  # by all splits
def _as_fast(samples: tuple[Sample, ...]) -> Calibration:
    """Begin where rates are declared with one factor for all of them: single ones would leave the reach of a fit."""
    nominal = replace(uncalibrated(), reach=_reach(samples))
    if nominal.most_efficient == 1:
        return nominal
    one: Kinds = (EFFICIENCIES,)
    predict_all = _predictor(samples)
    start, least = 1 / nominal.matrix_efficiency, 1 / nominal.most_efficient
    unknowns = Unknowns(start=np.array([start]), least=np.array([least]))
    return _with(nominal, one, fitted(lambda factor: predict_all(_with(nominal, one, factor)), unknowns))


def _launching(kinds: Kinds, start: Array, ratios: Callable[[Array], Array]) -> Array:
    """Begin with the launches that fit best: where kernels are longer than those, nothing says in which direction."""
    if _LAUNCH not in kinds:
        return start
    place = kinds.index(_LAUNCH)
    return min((_moved(start, place, size) for size in _LAUNCHES), key=lambda one: _error(ratios(one)))


def _moved(unknowns: Array, place: int, value: float) -> Array:
    moved = unknowns.copy()
    moved[place] = value
    return moved


def _error(ratios: Array) -> float:
    return float(np.abs(np.log(ratios)).mean())


def _unknown(name: str, value: float) -> float:
    """Return what is fitted: a slowness, or a time in its unit."""
    return value / _UNITS[name] if name in _UNITS else 1 / value


def _with(calibration: Calibration, kinds: Kinds, unknowns: Array) -> Calibration:
    values = {name: _constant(name, float(one)) for kind, one in zip(kinds, unknowns, strict=True) for name in kind}
    return replace(calibration, **values)


def _constant(name: str, unknown: float) -> float:
    """Return a constant as a file states it: digits far beyond what rows decide would be noise to read."""
    return float(f"{unknown * _UNITS[name] if name in _UNITS else 1 / unknown:.{_DIGITS}g}")


def _predictor(samples: Sequence[Sample]) -> Callable[[Calibration], Array]:
    """Return how to predict all rows over what they took, each layout once."""
    runs = list(dict.fromkeys(sample.run for sample in samples))
    places = [runs.index(sample.run) for sample in samples]
    timers = [_timer(run) for run in runs]
    measured = np.array([sample.step_time_s for sample in samples])
    return lambda calibration: np.array([time_s(calibration) for time_s in timers])[places] / measured


def _ratios(samples: Sequence[Sample], calibration: Calibration) -> Array:
    """Predict rows as ``validate`` does, each with the cutting that is best under these constants."""
    known = {run: predicted_run(run, calibration).step_time_s for run in {sample.run for sample in samples}}
    return np.array([known[sample.run] / sample.step_time_s for sample in samples])


@cache
def _timer(run: MeasuredRun) -> Callable[[Calibration], float]:
    """Return how to time a run, its blocks cut as is best at nominal rates: a fit moves rates, not what was run."""
    return step_timer(*outlined_run(run, uncalibrated()))
