"""How programs depart from their hardware, fitted to their rows: one departure for each program on each cluster.

What a chip reaches in micro-benchmarks is where the fit starts and what it is pulled to (``cost/hardware.json``): a
maximum of the posterior with Gaussian priors of stated widths. Factors of shares are unknown as logarithms. Seconds of
hosts are squares of their unknowns, so that they are never negative and can grow a hundredfold. Residuals are those of
``log(predicted / measured)``. Further out than 1.345 standard deviations they count by their distance, not by its
square (P. J. Huber, 1964), and the deviation is that of the rows themselves, at least 5 %.

What is left out together are the rows of a model, where a program ran several, else those of a group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from autoshard.calibration.rows import MeasuredRow
from autoshard.calibration.unknowns import Array, Sample, timer
from autoshard.calibration.validate import predicted_run
from autoshard.cost.calibration import Calibration, uncalibrated
from autoshard.cost.departures import Departure, Rows, hardware, shares_of
from autoshard.cost.outside import features_of, seen_in
from autoshard.errors import InputError
from autoshard.plan.plan import rounded

# By how much programs depart, as standard deviations of logarithms: products are a library's, attention has
# generations, passes over memory are fused or not, and networks are shared.
_WIDTHS: Mapping[str, float] = {
    "matrix_efficiency": 0.08, "attention_efficiency": 0.35, "memory_efficiency": 0.25, "near_link_efficiency": 0.25,
    "far_link_efficiency": 0.4,
}  # fmt: skip
# Seconds are the usual ones times the square of 1 + an unknown, which has this standard deviation. Those that all steps
# have are narrow: rows of large models would take them for work that the terms miss, and small models would pay for it.
_HOSTS: Mapping[str, float] = {
    "layer_s": 0.7, "collective_s": 0.7, "joined_s": 2.0, "shard_s": 2.0, "task_s": 0.7, "step_s": 0.5,
    "straggling": 1.0,
}  # fmt: skip
NAMES = (*_WIDTHS, *_HOSTS)
_SD = np.array([*_WIDTHS.values(), *_HOSTS.values()])
_HUBER, _SCALE, _LEAST_SCALE = 1.345, 1.4826, 0.05
_STEP, _STEPS = 0.02, 16
_LONGEST, _SHORTEST = 1.0, 0.05  # steps of a fit: a unit at most, and shares of it that are tried
_ENOUGH = 1e-3  # of the loss: a fit that gains less has ended
INSIDE = 0.8  # of errors that an interval holds
_NARROW = 0.15  # an interval that says enough, however small the median error
_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class ProgramRows:
    """The rows of one program on one cluster."""

    framework: str
    cluster: str
    samples: tuple[Sample, ...]
    groups: tuple[str, ...]
    newest: str

    @cached_property
    def measured(self) -> Array:
        """Seconds of every row."""
        return np.array([sample.step_time_s for sample in self.samples])

    @cached_property
    def apart(self) -> tuple[str, ...]:
        """What is left out together."""
        models = tuple(sample.run.model.name for sample in self.samples)
        return models if self.left_out_by == "model" else self.groups

    @property
    def left_out_by(self) -> Literal["model", "group"]:
        """Whether groups are left out, where there are three or more of three rows on average, or models."""
        models, groups = {sample.run.model.name for sample in self.samples}, {*self.groups}
        if 3 * len(groups) <= len(self.samples) and len(groups) > 2:
            return "group"
        return "model" if len(models) > 1 else "group"

    def constants(self, unknowns: Array) -> Calibration:
        """Return the constants of some unknowns."""
        chip = self.samples[0].run.cluster.chip.name
        hosts = {**hardware().hosts, **{name: one for name, one in departed(unknowns).items() if name in _HOSTS}}
        return replace(uncalibrated(), **shares_of(chip, departed(unknowns)), **hosts)

    def residuals(self, unknowns: Array, rows: Sequence[int]) -> Array:
        """Return the logarithms of predicted over measured under some unknowns."""
        return self.residuals_under(self.constants(unknowns), rows)

    def residuals_under(self, constants: Calibration, rows: Sequence[int] | None = None) -> Array:
        """Return the logarithms of predicted over measured, of all rows or of some."""
        rows, known = range(len(self.samples)) if rows is None else rows, dict[object, float]()
        for number in rows:
            run = self.samples[number].run
            known[run] = known.get(run) or timer(run)(constants)
        predicted = np.array([known[self.samples[number].run] for number in rows])
        return np.log(predicted / self.measured[list(rows)])


def departed(unknowns: Array) -> Mapping[str, float]:
    """Return factors of shares and seconds of hosts, as files state them."""
    found: dict[str, float] = {}
    for name, one in zip(NAMES, unknowns.tolist(), strict=True):
        value = np.exp(-one) if name in _WIDTHS else hardware().hosts[name] * max(1 + one, 0.0) ** 2
        found[name] = float(f"{value:.{_DIGITS}g}")
    return {**found, "vector_efficiency": found["memory_efficiency"]}


def fitted(rows: ProgramRows, some: Sequence[int], start: Array | None = None) -> Array:
    """Return the unknowns under which predictions of some rows come closest, pulled to those of the hardware.

    The deviation of rows is that of a fit which trusts them: before any, rows that are far off would not be believed.
    """
    here = _descended(rows, some, np.zeros(len(NAMES)), _LEAST_SCALE) if start is None else start
    deviation = _SCALE * float(np.median(np.abs(rows.residuals(here, some))))
    return _descended(rows, some, here, max(_LEAST_SCALE, deviation))


def _descended(rows: ProgramRows, some: Sequence[int], here: Array, scale: float) -> Array:
    """Walk down the loss by Gauss-Newton steps, each shortened until it gains."""

    def loss(residuals: Array, unknowns: Array) -> float:
        sizes = np.abs(residuals) / scale
        huber = np.where(sizes < _HUBER, 0.5 * sizes**2, _HUBER * (sizes - 0.5 * _HUBER))
        return float(huber.sum() + 0.5 * ((unknowns / _SD) ** 2).sum())

    residuals = rows.residuals(here, some)
    current = loss(residuals, here)
    for _ in range(_STEPS):
        slopes = [(rows.residuals(here + step, some) - residuals) / _STEP for step in np.eye(len(here)) * _STEP]
        weights = np.sqrt(_HUBER / np.maximum(np.abs(residuals) / scale, _HUBER)) / scale
        matrix = np.vstack([weights[:, None] * np.stack(slopes, axis=1), np.diag(1 / _SD)])
        target = np.concatenate([-weights * residuals, -here / _SD])
        step = np.linalg.lstsq(matrix, target, rcond=None)[0]
        step *= min(1.0, _LONGEST / float(np.abs(step).max()))
        share = 1.0
        while share > _SHORTEST:
            following = rows.residuals(here + share * step, some)
            gain = current - loss(following, here + share * step)
            if gain > 0:
                break
            share /= 2
        else:
            return here
        here, residuals, current = here + share * step, following, current - gain
        if gain < _ENOUGH * current:
            return here
    return here


def left_out_ratios(rows: ProgramRows, whole: Array) -> Array:
    """Return predicted over measured of each row, fitted to the rows of other models or groups; from the whole fit."""
    ratios = np.ones(len(rows.samples))
    for apart in sorted({*rows.apart}):
        out = [number for number, one in enumerate(rows.apart) if one == apart]
        rest = [number for number, one in enumerate(rows.apart) if one != apart]
        unknowns = fitted(rows, rest, whole) if rest else np.zeros(len(NAMES))
        ratios[out] = np.exp(rows.residuals(unknowns, out))
    return ratios


def departure_of(rows: ProgramRows) -> Departure:
    """Fit one departure, with what it rests on."""
    every = range(len(rows.samples))
    whole = fitted(rows, every)
    ratios = left_out_ratios(rows, whole)
    constants, runs = rows.constants(whole), [sample.run for sample in rows.samples]
    features = [features_of(run.candidate, run.model, run.cluster, run.workload) for run in runs]

    def left_out_errors(out: list[int], rest: list[int]) -> Array:
        return np.abs(np.expm1(rows.residuals(fitted(rows, rest, whole), out)))

    axes = ("tp", "pp", "cp", "ep", "dp", "vp")
    several = len({*rows.apart}) > 1
    return Departure(
        framework=rows.framework,
        cluster=rows.cluster,
        kernels=tuple(sorted({run.kernels for run in runs})),
        constants=departed(whole),
        interval=interval_of(np.log(ratios)) if several else 0.0,
        rows=Rows(
            newest=rows.newest,
            ratios={one.id: float(f"{ratio:.4g}") for one, ratio in zip(rows.samples, ratios.tolist(), strict=True)},
            num_layouts=len({*runs}),
            left_out_by=rows.left_out_by,
            in_sample_mape=rounded(float(np.abs(np.expm1(rows.residuals(whole, every))).mean())),
            left_out_mape=rounded(float(np.abs(ratios - 1).mean())),
            best_mfu=max(_mfu(sample, constants) for sample in rows.samples),
            axes=tuple(axis for axis in axes if any(getattr(run.candidate, axis) > 1 for run in runs)),
            seen=seen_in(features, left_out_errors) if several else {},
        ),
    )


def _mfu(sample: Sample, constants: Calibration) -> float:
    """Return the utilisation that a row measured, without masked pairs."""
    found = predicted_run(sample.run, constants)
    return rounded((found.mfu_causal or 0.0) * found.step_time_s / sample.step_time_s)


def interval_of(logarithms: Array) -> float:
    """Return the factor, less 1, within which four of five ratios lie; no wider than three times the median error.

    A few rows that are far off would widen it for all.
    """
    return min(holding(logarithms), rounded(max(_NARROW, 3 * float(np.expm1(np.median(np.abs(logarithms)))))))


def holding(logarithms: Array) -> float:
    """Return the factor, less 1, within which four of five ratios lie: of n in order the ceil(0.8 (n + 1))th."""
    sizes = np.sort(np.abs(logarithms))
    place = min(len(sizes), int(np.ceil(INSIDE * (len(sizes) + 1))))
    return rounded(float(np.expm1(sizes[place - 1])))


def program_rows(samples: Sequence[tuple[Sample, MeasuredRow]]) -> list[ProgramRows]:
    """Tell programs and clusters apart."""
    found: dict[tuple[str, str], list[tuple[Sample, MeasuredRow]]] = {}
    for sample, row in samples:
        framework = (sample.run.framework or "").partition(" (")[0]
        if not framework:
            raise InputError.of(sample.id, "has no framework, so nothing says which program ran")
        found.setdefault((framework, sample.run.cluster.name), []).append((sample, row))
    return [
        ProgramRows(
            framework=framework,
            cluster=cluster,
            samples=tuple(sample for sample, _ in rows),
            groups=tuple(row.group or row.id for _, row in rows),
            newest=max(row.first_seen or "" for _, row in rows),
        )
        for (framework, cluster), rows in found.items()
    ]
