"""How far apart the errors of predictions are: of two plans, what both share cancels in the ratio of their steps.

The logarithms of step times are Gaussian together. A part of a model's error stays with a layout, and layouts that are
alike share some of it; what lies outside the rows of a fit is off together where it lies outside in the same way; and
the rates of a device, of its links and of what starts kernels are off together in all plans, each by its share.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.built_in import calibration_of
from autoshard.cost.calibration import WIDEST, Calibration, excesses_of
from autoshard.cost.evidence import evidence_of
from autoshard.cost.outside import features_of
from autoshard.plan.diff import Diff, diff
from autoshard.plan.explanation import Ratio
from autoshard.plan.plan import Plan, rounded

Array = NDArray[np.float64]
EIGHTY_PERCENT = 1.2816  # standard deviations either way hold 80% of a normal distribution
TO_DEVIATION = math.sqrt(math.pi / 2)  # from a mean error to the standard deviation of a normal distribution
# Mean error on rows that were left out of a fit: 0.057 to 0.060 on the three clusters with rows of many models
# (docs/developers/accuracy.md).
UNFITTED_ERROR = 0.06
_OTHERS = 10  # rows that this counts as, beside those of a fit
# Of the residuals of left-out rows, four fits, 2737 pairs: correlation 0.54 where the layouts are equal, 0.20 where one
# axis or the micro-batch differs by a factor of 2, 0.07 at two such steps, then none.
_SHARED = 0.5
_AXES = ("tp", "pp", "cp", "ep", "vp", "mbs")
# Standard deviation of the logarithm of what each part of a step takes, in all plans at once, and the parts of a step
# that it moves. It is what the 42 rows of trn1 leave open of the constants that a fit may tell apart: 0.19 and 0.20 of
# products and memory, 0.19 of links, 0.85 of the time of a task (calibration/belief.py given these rows, 2026-11; a
# test compares). Waiting in a pipeline follows the others.
_RATES: Mapping[float, tuple[str, ...]] = {
    0.19: ("compute", "update"),
    0.194: ("tp", "cp", "ep", "pp", "dp"),
    0.85: ("waiting", "fixed"),
}


def model_error(constants: Calibration) -> float:
    """Return the standard deviation of what no constants explain, of a mean error over the rows of the fit and others.

    With few rows the left-out error is mostly of constants that these do not decide.
    """
    count, fit_error = (len(constants.fit.rows), constants.fit.left_out_mape) if constants.fit else (0, 0.0)
    return TO_DEVIATION * math.sqrt((_OTHERS * UNFITTED_ERROR**2 + count * fit_error**2) / (_OTHERS + count))


def alike(plans: Sequence[Plan]) -> Array:
    """Return which part of the model's error two plans share: half of it for each step between them.

    A step is a factor of 2 in an axis or in the micro-batch, or another width of the model, kind of recompute,
    schedule, ZeRO stage, table of kernels or format of products. More replicas and more layers are none: they repeat
    the same work.
    """
    sizes = np.log2([[getattr(plan.candidate, axis) for axis in _AXES] for plan in plans])
    steps = np.abs(sizes[:, None] - sizes[None]).sum(axis=2)
    words = list(map(_words, plans))
    steps += [[sum(a != b for a, b in zip(first, second, strict=True)) for second in words] for first in words]
    return _SHARED**steps


def beyond(plans: Sequence[Plan], constants: Calibration) -> Array:
    """Return what intervals are wider by where plans lie outside the rows of a fit, as a covariance.

    Plans that lie outside in the same way, with the same kernels that no row has, are off together.
    """
    deviations: dict[tuple[str, str], Array] = {}
    for number, plan in enumerate(plans):
        excesses = excesses_of(constants, plan)
        total, most = sum(square for _, square in excesses.values()), max(0.0, WIDEST**2 - constants.interval**2)
        for feature, (words, square) in excesses.items():
            deviation = deviations.setdefault((feature, words), np.zeros(len(plans)))
            deviation[number] = math.sqrt(square * min(1.0, most / total) if square else 0.0) / EIGHTY_PERCENT
    return sum(
        (np.outer(deviation, deviation) for deviation in deviations.values()), np.zeros((len(plans), len(plans)))
    )


def ratio_of(a: Plan, b: Plan) -> Ratio:
    """Return how long a takes as a multiple of what b takes, what holds 80% of it, and the chance that a is faster.

    Both are predicted plans of the same number of tokens a step, with the constants that they carry.
    """
    assert a.prediction and b.prediction, "only predicted plans are compared"
    constants = calibration_of(a)
    covariance = model_error(constants) ** 2 * alike([a, b]) + beyond([a, b], constants)
    variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    variance += sum(
        (rate * (first - second)) ** 2 for rate, first, second in zip(_RATES, _shares(a), _shares(b), strict=True)
    )
    mean = math.log(a.prediction.step_time_s / b.prediction.step_time_s)
    half = EIGHTY_PERCENT * math.sqrt(variance)
    faster = NormalDist().cdf(-EIGHTY_PERCENT * mean / half) if half > 1e-9 else 0.5 - 0.5 * np.sign(mean)
    low, value, high = (rounded(math.exp(mean + side * half)) for side in (-1, 0, 1))
    return Ratio(value=value, low=low, high=high, faster=rounded(float(faster)))


def compared(a: Plan, b: Plan) -> Diff:
    """Compare two predicted plans; where they answer one question, with the ratio of their steps and its evidence."""
    difference = diff(a, b)
    if difference.question or difference.is_nothing:
        return difference
    evidence = {part.name: evidence_of(part.name, (a, b)) for part in difference.time.parts}
    return replace(difference, ratio=ratio_of(b, a), evidence=evidence)


def _shares(plan: Plan) -> list[float]:
    """Return which share of a step each rate moves, of all that is not waiting in the pipeline."""
    assert plan.prediction, "only predicted plans are compared"
    parts = plan.prediction.time_parts
    busy_s = sum(time_s for part, time_s in parts.items() if part != "bubble")
    return [sum(parts.get(part, 0.0) for part in moved) / busy_s for moved in _RATES.values()]


def _words(plan: Plan) -> tuple[object, ...]:
    features = features_of(plan.candidate, plan.model, plan.cluster, plan.workload)
    width = (plan.model.hidden, plan.model.ffn, plan.model.num_experts)
    return width, plan.candidate.zero, *(features[name] for name in ("recompute", "schedule", "kernels", "products"))
