"""How few of the published rows would have been enough, had advice chosen them: against random rows and a grid.

For each cluster with enough rows, rows are chosen without a look at what those that are not chosen took. Constants are
fitted to the chosen rows alone, and all others are predicted with them. Advice takes row after row where the belief of
`autoshard advise` is narrowed most, over all rows together, and begins anew around the constants of the rows so far; a
grid takes rows spread evenly over nodes, tp and pp. A choice reaches the accuracy of all rows from that size on from
which the rows that were not chosen are off by no more, on average, than rows are that were left out of the fit to all
of them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.calibration.belief import Belief, belief_of
from autoshard.calibration.calibrate import fit, samples_in
from autoshard.calibration.fitting import FitRows, Sample, fitted
from autoshard.calibration.prior import Array, Prior, prior_of
from autoshard.cost.built_in import built_in
from autoshard.cost.calibration import Calibration
from benchmarks.accuracy import DATA
from benchmarks.measure import yardstick_s
from benchmarks.result import Extra, Result

BAR = 0.25  # of the rows
CLUSTERS = ("a100-80", "b200", "h100-96", "trn1.32xlarge")  # those with 12 rows or more
PARTS = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2)  # of the rows, at which the choices are compared
_SEEDS = 9  # random choices
_LEAST = 2  # rows
_QUARTILES = (25, 50, 75)

Errors = Mapping[int, float]  # chosen rows -> mean error of those that were not chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a cluster, what is known without them, and the error of all of them when left out."""

    samples: tuple[Sample, ...]
    prior: Prior
    target: float

    @classmethod
    def of(cls, cluster: str) -> "Rows":
        """Read the published rows of a cluster, and what a fit to them says; that of Trainium comes with autoshard."""
        rows = samples_in(DATA, cluster)
        rests_on = built_in(cluster).fit or fit(rows, cluster).fit
        assert rests_on, "a fit says what it rests on"
        prior = prior_of([sample.run for sample in rows.samples], [sample.id for sample in rows.samples])
        return cls(samples=rows.samples, prior=prior, target=rests_on.left_out_mape)

    @property
    def sizes(self) -> list[int]:
        """How many rows are chosen, from few to many."""
        return sorted({max(_LEAST, int(part * len(self.samples))) for part in PARTS})

    def fitted(self, chosen: Sequence[int]) -> Calibration:
        """Return the constants of the chosen rows."""
        rows = FitRows(samples=tuple(self.samples[number] for number in chosen), prior=self.prior)
        return self.prior.constants(fitted(rows))

    def error(self, chosen: Sequence[int], constants: Calibration) -> float:
        """Return the mean error of the rows that were not chosen."""
        rest = [number for number in range(len(self.samples)) if number not in chosen]
        residuals = FitRows(samples=self.samples, prior=self.prior).residuals_under(constants, rest)
        return float(np.abs(np.expm1(residuals)).mean())

    def errors(self, choose: Callable[[int], Sequence[int]]) -> Errors:
        """Return the errors of a choice of so many rows, size by size."""
        choices = {size: choose(size) for size in self.sizes}
        return {size: self.error(chosen, self.fitted(chosen)) for size, chosen in choices.items()}

    def advised(self) -> list[int]:
        """Return the rows that advice chooses, one by one."""
        runs, chosen = [sample.run for sample in self.samples], list[int]()
        start = around = belief_of(runs, self.prior.centre)
        for size in self.sizes:
            while len(chosen) < size:
                told = lowered_variance(around)
                told[chosen] = -1.0
                chosen.append(int(told.argmax()))
                around = start.given(chosen, [self.samples[number].step_time_s for number in chosen])
            start = belief_of(runs, self.fitted(chosen))
            around = start.given(chosen, [self.samples[number].step_time_s for number in chosen])
        return chosen

    def spread(self, size: int) -> list[int]:
        """Return a grid of rows: in order of nodes, tp and pp, at equal distances."""

        def place(number: int) -> tuple[int, ...]:
            run = self.samples[number].run
            return run.cluster.num_nodes, run.candidate.tp, run.candidate.pp, run.candidate.mbs, number

        count = len(self.samples)
        ordered = sorted(range(count), key=place)
        return [ordered[int((number + 0.5) * count / size)] for number in range(size)]

    def part(self, errors: Errors) -> float:
        """Return the part of the rows from which on a choice is as accurate as all rows; 1 if it never is."""
        least = 1.0
        for size in reversed(self.sizes):
            if errors[size] > self.target:
                break
            least = size / len(self.samples)
        return least


def lowered_variance(belief: Belief) -> Array:
    """Return by how much one more measurement of each run lowers the variances of all runs together."""
    return (belief.covariance**2).sum(axis=0) / (belief.covariance.diagonal() + belief.noise**2)


def run() -> Result:
    """Choose rows of every cluster, and hold the largest part that advice needs against the bar."""
    start_s = time.process_time()
    found = {cluster: compared(Rows.of(cluster)) for cluster in CLUSTERS}
    return judge(found, time.process_time() - start_s)


def compared(rows: Rows, seeds: int = _SEEDS) -> dict[str, Extra]:
    """Return the curves of all choices of a cluster's rows, and which part of the rows each needs."""
    orders = [np.random.default_rng(seed).permutation(len(rows.samples)).tolist() for seed in range(seeds)]
    drawn = [rows.errors(lambda size, order=order: order[:size]) for order in orders]
    advised = rows.advised()
    curves: dict[str, Errors] = {
        "advice": rows.errors(lambda size: advised[:size]),
        "grid": rows.errors(rows.spread),
    }
    for share in _QUARTILES:
        curves[f"random_{share}"] = {
            size: float(np.percentile([one[size] for one in drawn], share)) for size in rows.sizes
        }
    found: dict[str, Extra] = {"rows": len(rows.samples), "target": round(rows.target, 4)}
    for name, errors in curves.items():
        found[f"{name}.part"] = round(rows.part(errors), 4)
        found |= {f"{name}.{size}": round(error, 4) for size, error in errors.items()}
    return found


def judge(found: Mapping[str, Mapping[str, Extra]], cpu_s: float) -> Result:
    """Hold the largest part of any cluster's rows that advice needs against the bar."""
    parts = [float(one["advice.part"] or 0.0) for one in found.values()]
    return Result(
        name="advice",
        value=max(parts),
        unit="part of the rows, worst cluster",
        bar=BAR,
        holds=max(parts) <= BAR,
        extras={
            **{f"{cluster}.{key}": value for cluster, one in found.items() for key, value in one.items()},
            "cpu_s": round(cpu_s, 3),
            "yardstick_s": yardstick_s(),
        },
    )
