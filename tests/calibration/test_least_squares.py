"""Least squares on relative error: known slownesses are found again, an outlier is not, and bounds hold."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.calibration.least_squares import huber_weights, least_squares

WORK = np.array([[5.0, 1.0, 2.0], [1.0, 4.0, 1.0], [2.0, 2.0, 7.0], [6.0, 3.0, 0.5], [1.0, 1.0, 9.0], [3.0, 8.0, 2.0]])
PULL = 2e-2  # one unit away from the start counts as much as a row that is 2% off
START = np.full(3, 1.4)
slownesses = st.lists(st.floats(1, 3), min_size=3, max_size=3).map(np.array)


def seconds(x):
    """A step with a kernel that is bound by the slower of two units."""
    return WORK @ x + np.maximum(x[0], 1.5 * x[1])


@given(slownesses)
def test_known_slownesses_are_found_again_but_for_what_the_pull_moves(true):
    measured = seconds(true)
    found = least_squares(lambda x: seconds(x) / measured, START, np.ones(3), START)
    # That is about PULL^2 |true - start| / s^2, with s the least singular value of the slopes of log(seconds).
    assert found == pytest.approx(true, rel=1e-2)
    assert seconds(found) == pytest.approx(measured, rel=1e-2)


@given(slownesses, st.integers(0, 2 * len(WORK) - 1), st.sampled_from([0.1, 3.0, 10.0]))
def test_one_gross_outlier_moves_the_others_little(true, place, factor):
    measured = np.tile(seconds(true), 2)
    measured[place] *= factor
    found = least_squares(lambda x: np.tile(seconds(x), 2) / measured, START, np.ones(3), START)
    assert np.abs(seconds(found) / seconds(true) - 1).max() < 0.1


def test_nothing_is_faster_than_its_data_sheet():
    measured = 0.5 * seconds(np.ones(3))
    assert least_squares(lambda x: seconds(x) / measured, START, np.ones(3), START) == pytest.approx(np.ones(3))


def test_what_the_rows_do_not_decide_stays_where_it_was():
    measured = 3.0 * WORK[:, 0]
    found = least_squares(lambda x: WORK[:, 0] * x[0] / measured, START, np.ones(3), START)
    # The rows' log(x / 3) weighs 1/9 for each of them; the pull towards 1.4 weighs PULL^2.
    moved = PULL**2 * (3.0 - 1.4) / (len(WORK) / 9)
    assert found == pytest.approx([3.0 - moved, 1.4, 1.4], rel=1e-5)


def test_a_time_may_come_out_as_nothing_and_a_slowness_as_one():
    start, least = np.array([1.4, 0.5]), np.array([1.0, 0.0])
    work = np.array([1.0, 2.0, 4.0])
    found = least_squares(
        lambda x: (work * x[0] + x[1]) / (0.9 * work), start, least, start
    )  # faster than a data sheet allows
    assert found == pytest.approx([1.0, 0.0], abs=1e-6)
    found = least_squares(lambda x: (work * x[0] + x[1]) / (2.0 * work + 0.3), start, least, start)
    assert found == pytest.approx([2.0, 0.3], abs=5e-3)


def test_a_residual_within_the_rest_counts_in_full():
    assert huber_weights(np.zeros(3)).tolist() == [1.0, 1.0, 1.0]
    near, *_, far = huber_weights(np.array([0.01, -0.01, 0.01, 1.0]))
    assert near == 1.0 and 0 < far < 0.05
