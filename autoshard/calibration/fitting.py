"""One fit for all platforms: the constants that are likeliest after rows, and the errors on rows that were left out.

A maximum of the posterior: Gaussian priors of stated widths pull constants to where they are known to lie
(``prior.py``), so that a few rows move little. Residuals are those of ``log(predicted / measured)``, which are as large
for twice as for half. Further out than 1.345 standard deviations they count by their distance, not by its square
(P. J. Huber, 1964), and the deviation is that of the rows themselves, at least 5 %.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import numpy as np

from autoshard.calibration.measured_run import MeasuredRun
from autoshard.calibration.prior import Array, Prior, Unknown
from autoshard.calibration.validate import outlined_run, predicted_run
from autoshard.cost.calibration import Calibration, uncalibrated
from autoshard.cost.outside import Fit, Seen, features_of, holding, seen_in
from autoshard.cost.predict import step_timer
from autoshard.plan.plan import rounded

HUBER = 1.345  # standard deviations from which on a residual counts by its distance
_SCALE, _LEAST_SCALE = 1.4826, 0.05
_STEP, _STEPS = 0.02, 16
_LONGEST, _SHORTEST = 1.0, 1e-3  # steps of a fit, in units of what moves most
_ENOUGH = 3e-4  # of the loss: a fit that gains less has ended
_STILL = 1e-9  # a slope that is rounding
_NARROW = 0.15  # an interval that says enough, however small the median error


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A run and what it took; rows of one group could be chosen between."""

    id: str
    run: MeasuredRun
    step_time_s: float
    group: str = ""


@cache
def timer(run: MeasuredRun) -> Callable[[Calibration], float]:
    """Return how to time a run, its blocks cut as is best at nominal rates: a fit moves rates, not what was run."""
    return step_timer(*outlined_run(run, uncalibrated()))


def log_seconds(runs: Sequence[MeasuredRun], constants: Calibration) -> Array:
    """Return the logarithms of what runs take, each layout timed once."""
    software = constants.software
    seconds = {run: timer(run)(constants) for run in dict.fromkeys(runs)}
    slower = [software.slowness(run.framework, run.release) if software else 1.0 for run in runs]
    return np.log([seconds[run] for run in runs]) + np.log(slower)


@dataclass(frozen=True, kw_only=True)
class FitRows:
    """Rows of a cluster, and what was known of its constants before any of them.

    No fit is to rows that are ``suspected`` of being wrong; errors are those of all rows.
    """

    samples: tuple[Sample, ...]
    prior: Prior
    suspected: frozenset[str] = frozenset()  # ids

    @cached_property
    def runs(self) -> tuple[MeasuredRun, ...]:
        """What was run, row by row."""
        return tuple(sample.run for sample in self.samples)

    @cached_property
    def believed(self) -> tuple[int, ...]:
        """The rows that a fit is to."""
        return tuple(number for number, sample in enumerate(self.samples) if sample.id not in self.suspected)

    @cached_property
    def measured(self) -> Array:
        """Logarithms of the seconds of every row."""
        return np.log([sample.step_time_s for sample in self.samples])

    @property
    def left_out_by(self) -> Literal["model", "group", "layout"]:
        """What is left out together: three or more groups of one model, or of three layouts on average; else models."""
        groups, models = {sample.group for sample in self.samples}, {run.model.name for run in self.runs}
        if len(groups) > 2 and (len(models) == 1 or 3 * len(groups) <= len({*self.runs})):
            return "group"
        return "model" if len(models) > 1 else "layout"

    @cached_property
    def apart(self) -> tuple[str, ...]:
        """What every row is left out with."""
        by = self.left_out_by
        if by == "group":
            return tuple(sample.group for sample in self.samples)
        return tuple(run.model.name if by == "model" else str(run.candidate) for run in self.runs)

    def residuals(self, values: Array, numbers: Sequence[int]) -> Array:
        """Return the logarithms of predicted over measured, of the rows with these numbers, under some unknowns."""
        return self.residuals_under(self.prior.constants(values), numbers)

    def residuals_under(self, constants: Calibration, numbers: Sequence[int] | None = None) -> Array:
        """Return the logarithms of predicted over measured, of all rows or of those with these numbers."""
        numbers = range(len(self.samples)) if numbers is None else numbers
        return log_seconds([self.runs[number] for number in numbers], constants) - self.measured[[*numbers]]

    def slopes(self, values: Array, numbers: Sequence[int]) -> Array:
        """Return how far the residuals of some rows move with each unknown."""
        moved = [self.residuals(values + step, numbers) for step in np.eye(len(values)) * _STEP]
        return (np.stack(moved, axis=1) - self.residuals(values, numbers)[:, None]) / _STEP


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedUnknowns:
    """The unknowns of a fit to all rows, and how far each row moves with them."""

    values: Array
    slopes: Array

    @classmethod
    def of(cls, rows: FitRows) -> "FittedUnknowns":
        """Fit to all rows."""
        values = fitted(rows)
        return cls(values=values, slopes=rows.slopes(values, range(len(rows.samples))))

    def moving(self, prior: Prior) -> Sequence[Unknown]:
        """Return the unknowns that move any row."""
        most = np.abs(self.slopes).max(axis=0)
        return [unknown for unknown, slope in zip(prior.unknowns, most.tolist(), strict=True) if slope > _STILL]


def fitted(rows: FitRows) -> Array:
    """Return the unknowns under which predictions of all rows come closest, pulled to where they were before.

    The deviation of rows is that of a fit which trusts them: before any, rows that are far off would not be believed.
    """
    here, believed = np.zeros(len(rows.prior.unknowns)), rows.believed
    here = _descended(rows, believed, here, rows.slopes(here, believed), _LEAST_SCALE)
    return _descended(rows, believed, here, rows.slopes(here, believed), _deviation(rows.residuals(here, believed)))


def fitted_without(rows: FitRows, whole: FittedUnknowns, out: Sequence[int]) -> Array:
    """Return the unknowns of a fit to all rows but some, which starts from the fit to all."""
    rest = [number for number in rows.believed if number not in {*out}]
    if not rest:
        return np.zeros_like(whole.values)
    scale = _deviation(rows.residuals(whole.values, rest))
    return _descended(rows, rest, whole.values, whole.slopes[rest], scale)


def _descended(rows: FitRows, numbers: Sequence[int], here: Array, slopes: Array, scale: float) -> Array:
    """Walk down the loss, first along slopes that are known, then along new ones until these gain nothing."""
    here, _ = _walked(rows, numbers, here, slopes, scale)
    for _ in range(_STEPS):
        here, gain = _walked(rows, numbers, here, rows.slopes(here, numbers), scale)
        if gain < _ENOUGH:
            break
    return here


def _deviation(residuals: Array) -> float:
    return max(_LEAST_SCALE, _SCALE * float(np.median(np.abs(residuals))))


def _walked(rows: FitRows, numbers: Sequence[int], here: Array, slopes: Array, scale: float) -> tuple[Array, float]:
    """Walk down the loss by Gauss-Newton steps along some slopes, each shortened until it gains.

    Return where that ends, and which part of the loss has gone.
    """
    widths = rows.prior.deviations

    def loss(residuals: Array, values: Array) -> float:
        sizes = np.abs(residuals) / scale
        huber = np.where(sizes < HUBER, 0.5 * sizes**2, HUBER * (sizes - 0.5 * HUBER))
        return float(huber.sum() + 0.5 * ((values / widths) ** 2).sum())

    residuals, slopes = rows.residuals(here, numbers), slopes / rows.prior.speeds(here)
    start = current = loss(residuals, here)
    for _ in range(_STEPS):
        weights = np.sqrt(HUBER / np.maximum(np.abs(residuals) / scale, HUBER)) / scale
        matrix = np.vstack([weights[:, None] * slopes * rows.prior.speeds(here), np.diag(1 / widths)])
        target = np.concatenate([-weights * residuals, -here / widths])
        step = np.linalg.lstsq(matrix, target, rcond=None)[0]
        gain, there, following = 0.0, here, residuals
        length = float(np.abs(step).max())
        share = min(1.0, _LONGEST / length) if length else 0.0
        while gain <= 0 and share * length > _SHORTEST:
            there, share = here + share * step, share / 2
            following = rows.residuals(there, numbers)
            gain = current - loss(following, there)
        if gain <= 0:
            break
        here, residuals, current = there, following, current - gain
        if gain < _ENOUGH * current:
            break
    return here, (start - current) / (start or 1.0)


def left_out_residuals(rows: FitRows, whole: FittedUnknowns) -> Array:
    """Return the residual of each row under a fit to the rows of other labels, which starts from the fit to all."""
    residuals = np.zeros(len(rows.samples))
    for label in sorted({*rows.apart}):
        out = [number for number, row_label in enumerate(rows.apart) if row_label == label]
        residuals[out] = rows.residuals(fitted_without(rows, whole, out), out)
    return residuals


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Constants that were fitted to rows, and what they are worth where rows are left out."""

    constants: Calibration
    moving: tuple[str, ...]  # the constants on which the seconds of any row depend
    fit: Fit
    interval: float  # 0 where nothing could be left out
    inside: float  # share of left-out rows that the interval holds
    seen: Mapping[str, Seen]
    best_mfu: float


def judged(rows: FitRows, date: str) -> Judged:
    """Fit constants to all rows, and to all but some of them."""
    numbers = range(len(rows.samples))
    whole = FittedUnknowns.of(rows)
    off, constants = left_out_residuals(rows, whole), rows.prior.constants(whole.values)
    features = [features_of(run.candidate, run.model, run.cluster, run.workload) for run in rows.runs]

    def left_out_errors(out: list[int]) -> Array:
        return np.abs(np.expm1(rows.residuals(fitted_without(rows, whole, out), out)))

    several = len({*rows.apart}) > 1
    interval = interval_of(off) if several else 0.0
    named = zip(rows.samples, np.exp(off).tolist(), strict=True)
    return Judged(
        constants=constants,
        moving=tuple(name for unknown in whole.moving(rows.prior) for name in unknown.names),
        fit=Fit(
            date=date,
            rows={sample.id: float(f"{ratio:.4g}") for sample, ratio in named},
            num_layouts=len({*rows.runs}),
            left_out_by=rows.left_out_by,
            in_sample_mape=rounded(float(np.abs(np.expm1(rows.residuals(whole.values, numbers))).mean())),
            left_out_mape=rounded(float(np.abs(np.expm1(off)).mean())),
        ),
        interval=interval,
        inside=float((np.abs(off) <= np.log1p(interval) + 1e-9).mean()),
        seen=seen_in(features, left_out_errors) if several else {},
        best_mfu=max(_mfu(sample, constants) for sample in rows.samples),
    )


def _mfu(sample: Sample, constants: Calibration) -> float:
    """Return the utilisation that a row measured, without masked pairs."""
    prediction = predicted_run(sample.run, constants)
    return rounded((prediction.mfu_causal or 0.0) * prediction.step_time_s / sample.step_time_s)


def interval_of(logarithms: Array) -> float:
    """Return the factor, less 1, within which four of five ratios lie; no wider than three times the median error.

    A few rows that are far off would widen it for all.
    """
    sizes = np.abs(logarithms)
    return rounded(float(min(np.expm1(holding(sizes.tolist())), max(_NARROW, 3 * np.expm1(np.median(sizes))))))
