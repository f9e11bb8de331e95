"""Robust non-negative least squares on relative error: constants that a model needs to predict what was measured.

The unknowns are slownesses, inverse efficiencies, of at least 1: a step's time is close to linear in them, because each
part is its work over a rate. So a few Gauss-Newton steps on the model itself arrive: with ``r = log(predicted /
measured)`` and its derivatives J at x, the next x minimises ``|W (r + J (x' - x))|`` over x' >= 1. Where it is small r
is the relative error; unlike that, it is as large for twice as for half, and J does not grow where a row is wrong: a
time that was published ten times too short would else have ten times the lever of the others. The weights W are Huber's
(P. J. Huber, Robust Estimation of a Location Parameter, 1964): what lies further out than 1.345 standard deviations,
estimated from the median residual, counts by its distance and not by its square.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any  # a numpy array of floats
Predict = Callable[[Array], Array]  # slownesses -> predicted over measured, row by row

_HUBER = 1.345  # 95% as efficient as least squares where residuals are normal
_SCALE = 1.4826  # from the median absolute residual of a normal distribution to its standard deviation
_LEAST_SCALE = 1e-3  # measurements are not published more exactly
_STEP = 1e-2  # of a finite difference, relative: kernels change what they are bound by at kinks, not smoothly
_STEPS, _SWEEPS = 8, 500
_TIE = 1e-9  # pulls what the rows do not decide to where it started, and nothing else
_CLOSE = 1e-5  # of a slowness: rows are far from deciding that much


def fitted(predict: Predict, start: Array) -> Array:
    """Return the slownesses, each at least 1, under which the predictions come closest to 1.

    >>> fitted(lambda x: np.array([x[0] + x[1], 2 * x[0] + x[1]]) / np.array([3.5, 5.0]), np.ones(2)).round(6).tolist()
    [1.5, 2.0]
    """
    current = np.asarray(start, dtype=float)
    best, least = current, np.inf
    for _ in range(_STEPS):
        residuals = np.log(predict(current))
        loss = float(np.abs(residuals).sum())
        if loss < least:
            best, least = current, loss
        slopes, root = _slopes(predict, current, residuals), np.sqrt(huber_weights(residuals))
        following = _bounded(root[:, None] * slopes, root * (slopes @ current - residuals), current, start)
        if np.max(np.abs(following - current)) < _CLOSE:
            return following
        current = following
    return best


def huber_weights(residuals: Array) -> Array:
    """Return how much each residual counts: 1 near zero, less the further out it lies."""
    sizes = np.abs(residuals)
    reach = _HUBER * max(_LEAST_SCALE, _SCALE * float(np.median(sizes)))
    return reach / np.maximum(sizes, reach)


def _slopes(predict: Predict, at: Array, residuals: Array) -> Array:
    """Differentiate towards larger slownesses, which are always allowed."""
    columns: list[Array] = []
    for place, step in enumerate(_STEP * at):
        moved = at.copy()
        moved[place] += step
        columns.append((np.log(predict(moved)) - residuals) / step)
    return np.stack(columns, axis=1)


def _bounded(matrix: Array, target: Array, current: Array, start: Array) -> Array:
    """Minimise ``|matrix x - target|`` over x >= 1 one coordinate after the other, which ends at the only minimum."""
    gram = matrix.T @ matrix + _TIE * np.eye(len(current))
    wanted = matrix.T @ target + _TIE * start
    found = current.copy()
    for _ in range(_SWEEPS):
        before = found.copy()
        for place in range(len(found)):
            rest = wanted[place] - gram[place] @ found + gram[place, place] * found[place]
            found[place] = max(1.0, rest / gram[place, place])
        if np.max(np.abs(found - before)) < _CLOSE * 1e-3:
            break
    return found
