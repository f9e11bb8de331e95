"""Constants of a cluster from measured runs: as many as the rows can tell apart, and the error on what was left out.

The fit is robust non-negative least squares on relative error. The unknowns are slownesses, inverse efficiencies, of at
least 1, and times of at least 0: a step's time is close to linear in them, because each part is its work over a rate.
So a few Gauss-Newton steps on the model itself arrive: with ``r = log(predicted / measured)`` and its derivatives J at
x, the next x minimises ``|W (r + J (x' - x))|`` over x' at or above their least. A weak pull keeps near the start what
the rows hardly decide. Where it is small r is the relative error; unlike that, it is as large for twice as for half,
and J does not grow where a row is wrong: a time that was published ten times too short would else have ten times the
lever of the others. The weights W are Huber's (P. J. Huber, Robust Estimation of a Location Parameter, 1964): what lies
further out than 1.345 standard deviations, estimated from the median residual, counts by its distance and not by its
square.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from autoshard.calibration.measured_run import MeasuredRun, run_of
from autoshard.calibration.rows import MeasuredRow, MeasuredRows, measured_rows
from autoshard.calibration.splits import LAUNCH, PORTS, SETTLED, Split, physical, splits_for
from autoshard.calibration.unknowns import (
    UNITS,
    Array,
    Predict,
    Sample,
    predictor,
    slowness,
    timer,
    unknowns_of,
    with_unknowns,
)
from autoshard.calibration.validate import predicted_run
from autoshard.cost.calibration import EFFICIENCIES, Calibration, Fit, Reach, Software, uncalibrated
from autoshard.cost.outside import features_of, seen_in
from autoshard.errors import Fault, InputError, require
from autoshard.plan.plan import rounded
from autoshard.spec.cluster_catalogue import load_node_type

_LEAST_ROWS = 3
_INTERVAL = 0.8  # share of the measurements that lie inside
_WIDEST = 2.0  # an interval, over the mean error of what was left out
_NO_WORSE = 1e-3  # two left-out errors nearer than this are equal
_HUBER = 1.345  # 95% as efficient as least squares where residuals are normal
_SCALE = 1.4826  # from the median absolute residual of a normal distribution to its standard deviation
_LEAST_SCALE = 1e-3  # measurements are not published more exactly
_STEP = 1e-2  # of a finite difference: kernels change what they are bound by at kinks, not smoothly
_STEPS, _SWEEPS = 8, 500
_PULL = 2e-2  # one unit away from where it started counts as much as a row that is 2% off
_CLOSE = 1e-3  # rows are far from deciding that much

_UNEVEN = 4.0  # a machine that is so much faster than declared may be faster by this once more in one of its rates
_LAUNCHES = (0.5, 1.0, 2.0, 4.0, 8.0)  # tried first, in their unit


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSamples:
    """The runs of a cluster that a fit can use, from when the newest is, and why other rows are left out."""

    samples: tuple[Sample, ...]
    left_out_by: Literal["model", "layout"]
    newest: str
    left_out: tuple[Fault, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRows:
    """The rows of a cluster in a path that say how long a step took, with what was run; and all rows of the path."""

    runs: tuple[tuple[MeasuredRow, MeasuredRun], ...]
    rows: MeasuredRows

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The runs as a fit sees them; left out together are those of a model, or where there is one, of a layout."""
        layouts = list(dict.fromkeys(run for _, run in self.runs))
        found: list[Sample] = []
        for row, run in self.runs:
            apart = run.model.name if self.by_model else f"layout {layouts.index(run)}"
            found.append(Sample(id=row.id, run=run, step_time_s=row.step_time_s or 0.0, apart=apart))
        return tuple(found)

    @property
    def by_model(self) -> bool:
        """Whether there are several models."""
        return len({run.model.name for _, run in self.runs}) > 1


def timed_rows(path: Path, cluster: str) -> TimedRows:
    """Return the rows of a path that are of a cluster, or of its chips, and say how long a step took."""
    node_type = load_node_type(cluster)
    rows = measured_rows(path)
    faults: dict[str, InputError] = {}
    runs: list[tuple[MeasuredRow, MeasuredRun]] = []
    for where, row in rows.rows.items():
        try:
            untimed = "is not there to be fitted to"
            require((not row.unfit, "", row.unfit), (bool(row.step_time_s), "step_time_s", untimed))
            run = run_of(row, node_type if row.platform == node_type.name else rows.clusters.get(where))
            found, same = run.cluster.name, run.cluster.chip.name == node_type.chip.name
            require((same, "platform", f"was run on {found}, not on {node_type.name} or its chips"))
            timer(run)
        except InputError as error:
            faults[where] = error
        else:
            runs.append((row, run))
    return TimedRows(runs=tuple(runs), rows=rows.without(faults))


def samples_in(path: Path, cluster: str, date: str | None = None) -> FitSamples:
    """Return the rows of a path that a fit can use, or say why they are too few."""
    timed = timed_rows(path, cluster)
    name, count, left_out = load_node_type(cluster).name, len(timed.runs), timed.rows.left_out_lines
    few = f"{count} rows of {name} with a step_time_s are too few; a fit needs {_LEAST_ROWS}"
    alone = "all rows are of one layout; a fit needs two, to predict one from the other"
    several = len({run for _, run in timed.runs}) > 1
    try:
        require((count >= _LEAST_ROWS, str(path), few), (several or not count, str(path), alone))
    except InputError as error:
        raise InputError([*error.faults, *left_out]) from None
    newest = date or max(row.first_seen or "" for row, _ in timed.runs)
    require((bool(newest), "--date", f"missing; no row of {path} has first_seen, so say from when they are"))
    left_out_by = "model" if timed.by_model else "layout"
    return FitSamples(samples=timed.samples, left_out_by=left_out_by, newest=newest, left_out=left_out)


def fit(found: FitSamples, name: str) -> Calibration:
    """Fit the constants of a cluster to its runs, and say what they rest on.

    The interval is the one that holds four of five left-out rows, also where every model counts as much as any other,
    but no wider than twice their mean error: a few rows far out would widen it for all.
    """
    samples = found.samples
    num_layouts, cluster = len({sample.run for sample in samples}), ",".join(_clusters(samples))

    def left_out_ratios(split: Split) -> Array:
        """Return predicted over measured of each row, under constants fitted to all rows but those of its model."""
        ratios = np.ones(len(samples))
        for apart in sorted({sample.apart for sample in samples}):
            out = [number for number, sample in enumerate(samples) if sample.apart == apart]
            rest = [sample for sample in samples if sample.apart != apart]
            ratios[out] = _ratios([samples[number] for number in out], fit_constants(split, rest))
        return ratios

    splits = splits_for([sample.run for sample in samples])
    ratios = {name: left_out_ratios(split) for name, split in splits.items() if len(split) < num_layouts}
    tried = {name: float(np.abs(own - 1).mean()) for name, own in ratios.items()}
    best = best_of(tried)
    constants = fit_constants(splits[best], samples)
    newest, software = found.newest, constants.software
    newest += f", release {software.releases[-1]}" if software and software.releases else ""
    rests_on = Fit(
        date=found.newest,
        rows={one.id: float(f"{ratio:.4g}") for one, ratio in zip(samples, ratios[best].tolist(), strict=True)},
        num_layouts=num_layouts,
        left_out_by=found.left_out_by,
        in_sample_mape=rounded(float(np.abs(_ratios(samples, constants) - 1).mean())),
        left_out_mape=rounded(tried[best]),
        tried={name: rounded(error) for name, error in tried.items()},
    )
    errors = np.abs(1 / ratios[best] - 1)
    interval = rounded(min(_interval(errors, [sample.apart for sample in samples]), _WIDEST * rests_on.left_out_mape))
    inside = float((errors <= interval).mean())
    far_off = f"rows are {rests_on.left_out_mape:.0%} off when they are left out: the cost model does not describe them"
    require((interval < 1 and rests_on.left_out_mape < 1, "interval", f"{far_off}, and no constants make it"))
    fitted_to = f"fitted to {len(samples)} rows of {cluster}, constants told apart: {best}"
    within = f"{inside:.0%} of rows are within it when their {found.left_out_by} is left out of the fit"
    fitted = (name for group in splits[best] for name in group)

    def left_out_errors(out: list[int], rest: list[int]) -> Array:
        those, others = ([samples[number] for number in numbers] for numbers in (out, rest))
        return np.abs(1 / _ratios(those, fit_constants(splits[best], others)) - 1)

    features = [features_of(one.run.candidate, one.run.model, one.run.cluster, one.run.workload) for one in samples]
    return replace(
        constants,
        name=name,
        interval=interval,
        seen=seen_in(features, left_out_errors),
        best_mfu=max(_mfu(sample, constants) for sample in samples),
        basis=f"calibrated on {len(samples)} rows of {cluster} ({num_layouts} layouts, newest {newest}): "
        f"mean error {rests_on.in_sample_mape:.1%}, {rests_on.left_out_mape:.1%} where the {found.left_out_by} is left "
        f"out; nominal 80% interval of {interval:.0%} either way, which holds {inside:.0%} of those",
        fit=rests_on,
        sources={**constants.sources, **dict.fromkeys(fitted, fitted_to), "interval": within},
    )


def best_of(tried: Mapping[str, float]) -> str:
    """Return the first split, which has the fewest constants, with no more than the least left-out error."""
    return next(name for name, error in tried.items() if error <= min(tried.values()) + _NO_WORSE)


def _mfu(sample: Sample, calibration: Calibration) -> float:
    """Return the utilisation that a row measured, without masked pairs."""
    found = predicted_run(sample.run, calibration)
    return rounded((found.mfu_causal or 0.0) * found.step_time_s / sample.step_time_s)


def _interval(errors: Array, apart: Sequence[str]) -> float:
    """Return the half-width that holds a share of errors: of the next row, and of a row of any model.

    Of n rows in order the ceil(share * (n + 1))th: the next row is as likely to fall into any gap between them.
    """
    order = np.argsort(errors)
    of_rows = errors[order[min(len(errors), math.ceil(_INTERVAL * (len(errors) + 1))) - 1]]
    weights = np.array([1 / apart.count(name) for name in apart])[order]
    share = weights.cumsum() / weights.sum()
    of_models = errors[order][share >= _INTERVAL - 1e-9].min()
    return float(max(of_rows, of_models))


def _clusters(samples: Sequence[Sample]) -> tuple[str, ...]:
    return tuple(sorted({sample.run.cluster.name for sample in samples}))


def _ratios(samples: Sequence[Sample], calibration: Calibration) -> Array:
    """Predict rows as ``validate`` does, each with the cutting that is best under these constants."""
    known = {run: predicted_run(run, calibration).step_time_s for run in {sample.run for sample in samples}}
    return np.array([known[one.run] / one.step_time_s for one in samples]) * slowness(samples, calibration)


def fit_constants(split: Split, samples: Sequence[Sample]) -> Calibration:
    """Return the constants under which the predictions come closest to what was measured."""
    nominal = _nominal(tuple(samples))
    ratios = predictor(samples, nominal, split)
    may_be_nothing = np.array([group[0] in UNITS for group in split])
    start = unknowns_of(nominal, split)
    least, most = np.array(list(map(physical, split)), dtype=np.float64).T.copy()
    if nominal.most_efficient > 1:  # its rates are declared
        least, most = np.maximum(start / _UNEVEN, 1 / nominal.most_efficient), np.full(len(split), np.inf)
    least[may_be_nothing] = 0.0
    least[[group == PORTS for group in split]] = 1.0  # at most all of them
    current = start
    if LAUNCH in split:  # from those that fit best: where kernels are longer than launches, nothing says in which way
        starts = np.tile(start, (len(_LAUNCHES), 1))
        starts[:, split.index(LAUNCH)] = _LAUNCHES
        current = min(starts, key=lambda one: float(np.abs(np.log(ratios(one))).mean()))
    return with_unknowns(nominal, split, least_squares(ratios, start, (least, most), current))


@cache  # by all splits
def _nominal(samples: tuple[Sample, ...]) -> Calibration:
    """Return the constants to start from: nominal ones, or where rates are declared, with one factor for all of them.

    Single rates that are declared would leave the reach of a fit.
    """
    found = [sample.run.candidate for sample in samples]
    axes = ("tp", "pp", "cp", "ep", "dp", "vp")
    reach = Reach(
        cluster=",".join(_clusters(samples)),
        axes=tuple(axis for axis in axes if any(getattr(candidate, axis) > 1 for candidate in found)),
        kernels=tuple(sorted({sample.run.candidate.kernels or sample.run.cluster.kernels for sample in samples})),
    )
    nominal = replace(uncalibrated(), reach=reach, software=_software(samples))
    if nominal.most_efficient == 1:
        return nominal
    start, one = np.array([1 / nominal.matrix_efficiency]), (EFFICIENCIES,)
    limits = np.array([1 / nominal.most_efficient]), np.full(1, np.inf)
    return with_unknowns(nominal, one, least_squares(predictor(samples, nominal, one), start, limits, start))


def _software(samples: Sequence[Sample]) -> Software | None:
    """Return what ran some rows, all of it as fast; None where they do not say."""
    frameworks = {sample.run.framework for sample in samples if sample.run.framework}
    releases = sorted({sample.run.release[:2] for sample in samples if sample.run.release})
    if not frameworks and not releases:
        return None
    return Software(
        frameworks=dict.fromkeys(sorted(frameworks), 1.0),
        releases=tuple(".".join(map(str, release)) for release in releases),
        settled=SETTLED if samples[0].run.cluster.engine == "nxd" else "",
    )


def least_squares(predict: Predict, start: Array, limits: tuple[Array, Array], current: Array) -> Array:
    """Return the unknowns, each between its limits, under which the predictions come closest to 1.

    Unknowns are pulled to ``start``. The search begins at ``current`` and ends where they do not move any more, or
    after some steps at the best of them.

    >>> one = np.ones(2)
    >>> measured = np.array([3.5, 5.0])
    >>> predicted = lambda x: np.array([x[0] + x[1], 2 * x[0] + x[1]])
    >>> least_squares(lambda x: predicted(x) / measured, one, (one, 9 * one), one).round(1).tolist()
    [1.5, 2.0]
    """

    def loss_at(unknowns: Array, residuals: Array) -> float:
        return float(np.abs(residuals).sum()) + _PULL * float(np.abs(unknowns - start).sum())

    least, most = limits
    here, best, best_loss = current.astype(np.float64), current, np.inf
    for _ in range(_STEPS):
        residuals = np.log(predict(here))
        loss = loss_at(here, residuals)
        if loss < best_loss:
            best, best_loss = here, loss
        sizes = np.abs(residuals)
        reach = _HUBER * max(_LEAST_SCALE, _SCALE * float(np.median(sizes)))
        root = np.sqrt(reach / np.maximum(sizes, reach))  # of the weights
        # Differences to the side that is allowed; what may be nothing changes by its unit.
        steps = _STEP * np.maximum(here, np.where(least > 0, least, 1.0))
        steps = np.where(here + steps > most, -steps, steps)
        slopes = np.stack([np.log(predict(one)) - residuals for one in here + np.diag(steps)], axis=1) / steps
        matrix = np.vstack([root[:, None] * slopes, _PULL * np.eye(len(here))])
        target = np.concatenate([root * (slopes @ here - residuals), _PULL * start])
        following = _bounded(matrix, target, here, limits)
        if np.max(np.abs(following - here)) < _CLOSE:
            return following
        here = following
    return here if loss_at(here, np.log(predict(here))) < best_loss else best


def _bounded(matrix: Array, target: Array, current: Array, limits: tuple[Array, Array]) -> Array:
    """Minimise ``|matrix x - target|`` between limits one coordinate after the other, which ends at its minimum."""
    gram, wanted = matrix.T @ matrix, matrix.T @ target
    found = current.copy()
    for _ in range(_SWEEPS):
        before = found.copy()
        for number in range(len(found)):
            rest = wanted[number] - gram[number] @ found + gram[number, number] * found[number]
            found[number] = min(max(limits[0][number], rest / gram[number, number]), limits[1][number])
        if np.max(np.abs(found - before)) < _CLOSE * 1e-3:
            break
    return found
