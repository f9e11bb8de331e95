"""Which layout to run next, once some layouts of a question are measured: its chance to win, and what it would show.

The constants are those of a fit to the rows, pulled to what is known of the program and the machine without them. The
layouts to choose from are those of the rows and the best plans under these constants. The next one is that whose
measurement lowers the expected regret of the choice most.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

from autoshard.calibration.belief import Belief, belief_of, believed_seconds
from autoshard.calibration.fitting import FitRows, Sample, fitted
from autoshard.calibration.measured_run import MeasuredRun
from autoshard.calibration.prior import Prior, prior_of
from autoshard.cost.calibration import Calibration
from autoshard.plan.plan import rounded

FEWEST = 3  # rows to which constants are fitted
_LEAST_VARIANCE = 1e-12  # of two layouts that are believed to take the same


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutToTry:
    """A layout that nobody has measured, and what to expect of measuring it; regrets are shares of a step."""

    run: MeasuredRun
    step_s: float  # the median of what is believed
    low_s: float  # 80 % lies between these
    high_s: float
    chance: float  # that it takes less than the fastest layout of the rows
    regret: float  # expected of today's choice
    regret_after: float  # expected once it is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBest:
    """The layout of the rows that took least, and the median of its step times."""

    run: MeasuredRun
    step_s: float
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRows:
    """The rows of a user, and the constants that follow from them."""

    samples: tuple[Sample, ...]
    constants: Calibration
    is_fitted: bool  # else the rows are too few, or all of one layout

    def best_of(self, like: MeasuredRun) -> MeasuredBest | None:
        """Return the fastest layout of the rows whose model, cluster and workload are those of a run."""
        times: dict[MeasuredRun, list[float]] = {}
        for sample in self.samples:
            run = sample.run
            if (run.model, run.cluster, run.workload) == (like.model, like.cluster, like.workload):
                times.setdefault(run, []).append(sample.step_time_s)
        medians = {run: median(seconds) for run, seconds in times.items()}
        fastest = min(medians, key=lambda run: medians[run], default=None)
        return fastest and MeasuredBest(run=fastest, step_s=medians[fastest], num_rows=len(self.samples))

    def belief_of(self, runs: Sequence[MeasuredRun]) -> Belief:
        """Return what is believed of the runs of the rows, in their order, and after them of other runs."""
        prior = belief_of([*(sample.run for sample in self.samples), *runs], self.constants)
        return prior.given_robustly([sample.step_time_s for sample in self.samples])


def known_rows(samples: Sequence[Sample], prior: Prior | None = None) -> KnownRows:
    """Return some rows with the constants that are fitted to them; ``prior`` is what is known without them."""
    prior = prior or prior_of([sample.run for sample in samples], [sample.id for sample in samples])
    is_fitted = len(samples) >= FEWEST and len({sample.run for sample in samples}) > 1
    rows = FitRows(samples=tuple(samples), prior=prior)
    constants = prior.constants(fitted(rows)) if is_fitted else prior.centre
    return KnownRows(samples=rows.samples, constants=constants, is_fitted=is_fitted)


def next_layout(rows: KnownRows, runs: Sequence[MeasuredRun], best: MeasuredBest) -> LayoutToTry | None:
    """Return which of some runs to measure next, beside the fastest layout of the rows; None where all are measured.

    Of runs that lower the regret equally, the next is that of least expected time.
    """
    measured = {sample.run for sample in rows.samples}
    untried = [run for run in runs if run not in measured]
    if not untried:
        return None
    belief = rows.belief_of([best.run, *untried])
    fastest = len(rows.samples)  # the place of the fastest layout of the rows; those to try follow it
    options = range(fastest, len(belief.mean))
    today, *after = belief.regrets(options, [(), *((place,) for place in options[1:])])
    regret_after, mean, place = min(zip(after, belief.mean[options[1:]].tolist(), options[1:], strict=True), key=_order)
    low_s, step_s, high_s = believed_seconds(mean, float(belief.covariance[place, place]))
    return LayoutToTry(
        run=untried[place - fastest - 1],
        step_s=step_s,
        low_s=low_s,
        high_s=high_s,
        chance=rounded(_chance(belief, place, fastest)),
        regret=rounded(1 - math.exp(-today)),
        regret_after=rounded(1 - math.exp(-regret_after)),
    )


def _order(entry: tuple[float, float, int]) -> tuple[float, float, int]:
    regret_after, mean, place = entry
    return round(regret_after, 4), mean, place


def _chance(belief: Belief, place: int, rival: int) -> float:
    """Return the chance that one run takes less than another one."""
    covariance = belief.covariance
    variance = float(covariance[place, place] + covariance[rival, rival] - 2 * covariance[place, rival])
    ahead = float(belief.mean[rival] - belief.mean[place])
    return NormalDist(0.0, math.sqrt(max(variance, _LEAST_VARIANCE))).cdf(ahead)
