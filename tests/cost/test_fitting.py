"""Least squares on relative error: known slownesses are found again, an outlier is not, and bounds hold."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.cost.fitting import fitted, huber_weights

WORK = np.array([[5.0, 1.0, 2.0], [1.0, 4.0, 1.0], [2.0, 2.0, 7.0], [6.0, 3.0, 0.5], [1.0, 1.0, 9.0], [3.0, 8.0, 2.0]])
START = np.full(3, 1.4)
slownesses = st.lists(st.floats(1, 8), min_size=3, max_size=3).map(np.array)


def seconds(x):
    """A step with a kernel that is bound by the slower of two units."""
    return WORK @ x + np.maximum(x[0], 1.5 * x[1])


@given(slownesses)
def test_known_slownesses_are_found_again(true):
    measured = seconds(true)
    assert fitted(lambda x: seconds(x) / measured, START) == pytest.approx(true, rel=1e-4)


@given(slownesses, st.integers(0, 2 * len(WORK) - 1), st.sampled_from([0.1, 3.0, 10.0]))
def test_one_gross_outlier_moves_the_others_little(true, place, factor):
    measured = np.tile(seconds(true), 2)
    measured[place] *= factor
    found = fitted(lambda x: np.tile(seconds(x), 2) / measured, START)
    assert np.abs(seconds(found) / seconds(true) - 1).max() < 0.1


def test_nothing_is_faster_than_its_data_sheet():
    measured = 0.5 * seconds(np.ones(3))
    assert fitted(lambda x: seconds(x) / measured, START) == pytest.approx(np.ones(3))


def test_what_the_rows_do_not_decide_stays_where_it_was():
    measured = 3.0 * WORK[:, 0]
    found = fitted(lambda x: WORK[:, 0] * x[0] / measured, START)
    assert found == pytest.approx([3.0, 1.4, 1.4], rel=1e-6)


def test_a_residual_within_the_rest_counts_in_full():
    assert huber_weights(np.zeros(3)).tolist() == [1.0, 1.0, 1.0]
    near, *_, far = huber_weights(np.array([0.01, -0.01, 0.01, 1.0]))
    assert near == 1.0 and 0 < far < 0.05
