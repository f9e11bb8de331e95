"""What is believed about step times of runs that nobody has measured, and how much measured rows narrow it down.

The logarithms of all step times are Gaussian together (Laplace's approximation around some constants). Two things move
them. The constants are as uncertain as before a fit (``prior.py``), and how far a step follows is a finite difference
through the cost model. And the cost model is wrong by an error of its own, which no number of rows takes away: it stays
with a layout, and layouts that are alike share part of it. What lies outside the rows of a fit is off by more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.calibration.fitting import HUBER, log_seconds
from autoshard.calibration.measured_run import MeasuredRun
from autoshard.calibration.prior import Array, believed_prior
from autoshard.cost.calibration import Calibration
from autoshard.cost.doubt import EIGHTY_PERCENT, TO_DEVIATION, alike, beyond, model_error
from autoshard.plan.build import build_plan
from autoshard.plan.plan import Plan, rounded

# Of the logarithm of a row, as a standard deviation. Rows of several releases of a platform's software are 0.058 apart
# on average where they repeat a layout (trn1, docs/developers/accuracy.md), those of one program 0.000 (a100-80); a
# run of one's own on one machine lies between.
_NOISE, _NOISE_OF_RELEASES = 0.02, 0.058 * TO_DEVIATION
_STEP = 1e-2  # of a finite difference, as in a fit
_DRAWS = 4096  # a mean over them is off by 2% of a deviation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Belief:
    """Logarithms of the step times of some runs: what is expected of each, and how they vary together."""

    mean: Array
    covariance: Array

    noise: Array  # standard deviation of one measurement of each run

    def gain(self, measured: Sequence[int]) -> Array:
        """Return how much each mean moves with the result of each run that is measured."""
        numbers = list(measured)
        among = self.covariance[np.ix_(numbers, numbers)] + np.diag(self.noise[numbers] ** 2)
        return np.asarray(np.linalg.solve(among, self.covariance[numbers]), dtype=np.float64).T

    def given(self, measured: Sequence[int], seconds: Sequence[float]) -> "Belief":
        """Return what is believed once runs, by their numbers, have taken so many seconds; a run may come again."""
        gain, numbers = self.gain(measured), list(measured)
        mean = self.mean + gain @ (np.log(seconds) - self.mean[numbers])
        return replace(self, mean=mean, covariance=self.covariance - gain @ self.covariance[numbers])

    def given_robustly(self, seconds: Sequence[float]) -> "Belief":
        """Return what is believed once the first runs have taken so many seconds, any of which may be wrong.

        A result that is far from what is expected of it counts by its distance, as in a fit: its noise grows until it
        is 1.345 standard deviations away.
        """
        first = slice(len(seconds))
        variances = self.covariance.diagonal()[first]
        expected = variances + self.noise[first] ** 2
        away = np.abs(np.log(seconds) - self.mean[first]) / np.sqrt(expected)
        noise = self.noise.copy()
        noise[first] = np.sqrt(expected * np.maximum(away / HUBER, 1.0) ** 2 - variances)
        return replace(replace(self, noise=noise).given(range(len(seconds)), seconds), noise=self.noise)

    def regrets(self, options: Sequence[int], measured: Sequence[Sequence[int]]) -> list[float]:
        """Return, for each set of runs, the expected regret of the choice among options after these are measured.

        That is how much longer, as a logarithm, the option takes that then has the least mean than the fastest one
        does: the mean over draws of this belief, the same draws for every set, so that sets can be compared.
        """
        if len(options) < 2:
            return [0.0] * len(measured)
        normal = np.random.default_rng(0).standard_normal((2, _DRAWS, len(self.mean)))
        values, vectors = np.linalg.eigh(self.covariance)
        true = normal[0] @ (vectors * np.sqrt(np.maximum(values, 0.0))).T  # less their means
        seen, option_runs = true + normal[1] * self.noise, list(options)
        means, draws = self.mean[option_runs], np.arange(_DRAWS)
        times = means + true[:, option_runs]
        regrets: list[float] = []
        for runs in measured:
            expected = means + seen[:, list(runs)] @ self.gain(runs)[option_runs].T
            regrets.append(float((times[draws, expected.argmin(axis=1)] - times.min(axis=1)).mean()))
        return regrets


def belief_of(runs: Sequence[MeasuredRun], constants: Calibration) -> Belief:
    """Return what is believed of runs where nothing was measured, around what some constants predict."""
    prior, plans = believed_prior(constants, runs), plans_of(runs)
    nothing = log_seconds(runs, prior.centre)
    steps = np.eye(len(prior.unknowns)) * _STEP
    slopes = np.stack([log_seconds(runs, prior.constants(step)) - nothing for step in steps], axis=1) / _STEP
    moved = slopes * prior.deviations
    covariance = moved @ moved.T + model_error(constants) ** 2 * alike(plans)
    if constants.fit:
        covariance += beyond(plans, constants)
    noise = np.array([_NOISE_OF_RELEASES if run.release else _NOISE for run in runs])
    return Belief(mean=log_seconds(runs, constants), covariance=covariance, noise=noise)


def believed_seconds(mean: float, variance: float) -> tuple[float, float, float]:
    """Return the seconds of a logarithm that is believed: its median, between the bounds that hold 80 %.

    >>> believed_seconds(0.0, 0.0)
    (1.0, 1.0, 1.0)
    """
    half = EIGHTY_PERCENT * math.sqrt(max(variance, 0.0))
    low_s, step_s, high_s = (rounded(math.exp(mean + side * half)) for side in (-1, 0, 1))
    return low_s, step_s, high_s


def plans_of(runs: Sequence[MeasuredRun]) -> list[Plan]:
    """Return the plans of runs, without predictions."""
    return [build_plan(run.candidate, run.model, run.cluster, run.workload, run.cluster.engine) for run in runs]
