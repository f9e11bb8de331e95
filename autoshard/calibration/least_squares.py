"""Robust non-negative least squares on relative error: constants that a model needs to predict what was measured.

The unknowns are slownesses, inverse efficiencies, of at least 1, and times of at least 0: a step's time is close to
linear in them, because each part is its work over a rate. So a few Gauss-Newton steps on the model itself arrive: with
``r = log(predicted / measured)`` and its derivatives J at x, the next x minimises ``|W (r + J (x' - x))|`` over x' at
or above their least. A weak pull keeps near the start what the rows hardly decide. Where it is small r
is the relative error; unlike that, it is as large for twice as for half, and J does not grow where a row is wrong: a
time that was published ten times too short would else have ten times the lever of the others. The weights W are Huber's
(P. J. Huber, Robust Estimation of a Location Parameter, 1964): what lies further out than 1.345 standard deviations,
estimated from the median residual, counts by its distance and not by its square.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Predict = Callable[[Array], Array]  # unknowns -> predicted over measured, row by row

_HUBER = 1.345  # 95% as efficient as least squares where residuals are normal
_SCALE = 1.4826  # from the median absolute residual of a normal distribution to its standard deviation
_LEAST_SCALE = 1e-3  # measurements are not published more exactly
_STEP = 1e-2  # of a finite difference: kernels change what they are bound by at kinks, not smoothly
_STEPS, _SWEEPS = 8, 500
_PULL = 2e-2  # one unit away from where it started counts as much as a row that is 2% off
_CLOSE = 1e-3  # rows are far from deciding that much


def least_squares(predict: Predict, start: Array, least: Array, current: Array) -> Array:
    """Return the unknowns, each at or above its least, under which the predictions come closest to 1.

    Unknowns are pulled to ``start``. The search begins at ``current`` and ends where they do not move any more, or
    after some steps at the best of them.

    >>> one = np.ones(2)
    >>> measured = np.array([3.5, 5.0])
    >>> least_squares(lambda x: np.array([x[0] + x[1], 2 * x[0] + x[1]]) / measured, one, one, one).round(1).tolist()
    [1.5, 2.0]
    """

    def loss_at(unknowns: Array, residuals: Array) -> float:
        return float(np.abs(residuals).sum()) + _PULL * float(np.abs(unknowns - start).sum())

    here, best, best_loss = current.astype(np.float64), current, np.inf
    for _ in range(_STEPS):
        residuals = np.log(predict(here))
        loss = loss_at(here, residuals)
        if loss < best_loss:
            best, best_loss = here, loss
        slopes, root = _slopes(predict, here, residuals, least), np.sqrt(huber_weights(residuals))
        matrix = np.vstack([root[:, None] * slopes, _PULL * np.eye(len(here))])
        target = np.concatenate([root * (slopes @ here - residuals), _PULL * start])
        following = _bounded(matrix, target, here, least)
        if np.max(np.abs(following - here)) < _CLOSE:
            return following
        here = following
    return here if loss_at(here, np.log(predict(here))) < best_loss else best


def huber_weights(residuals: Array) -> Array:
    """Return how much each residual counts: 1 near zero, less the further out it lies."""
    sizes = np.abs(residuals)
    reach = _HUBER * max(_LEAST_SCALE, _SCALE * float(np.median(sizes)))
    return reach / np.maximum(sizes, reach)


def _slopes(predict: Predict, at: Array, residuals: Array, least: Array) -> Array:
    """Differentiate towards larger unknowns, which are always allowed; what may be nothing changes by its unit."""
    steps = _STEP * np.maximum(at, np.where(least > 0, least, 1.0))
    moved = at + np.diag(steps)
    return np.stack([np.log(predict(one)) - residuals for one in moved], axis=1) / steps


def _bounded(matrix: Array, target: Array, current: Array, least: Array) -> Array:
    """Minimise ``|matrix x - target|`` over x >= least one coordinate after the other, which ends at its minimum."""
    gram, wanted = matrix.T @ matrix, matrix.T @ target
    found = current.copy()
    for _ in range(_SWEEPS):
        before = found.copy()
        for number in range(len(found)):
            rest = wanted[number] - gram[number] @ found + gram[number, number] * found[number]
            found[number] = max(least[number], rest / gram[number, number])
        if np.max(np.abs(found - before)) < _CLOSE * 1e-3:
            break
    return found
