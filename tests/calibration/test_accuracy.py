"""Statistics against numbers computed by hand."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest
from hypothesis import given, strategies as st

from autoshard.calibration.accuracy import Compared, accuracy, group_orders, spearman


def compared(predicted: float, measured: float, **other: Any) -> Compared:
    values = {"id": f"{predicted}/{measured}", "group": "g", "layout": (predicted, measured), **other}
    return Compared(predicted=predicted, measured=measured, **values)


# Errors: +10%, -20%, +50%, 0, -40%.
FIVE = [
    compared(1.1, 1.0, low=0.9, high=1.2),
    compared(1.6, 2.0, low=1.5, high=1.7),
    compared(6.0, 4.0, low=4.0, high=8.0),
    compared(3.0, 3.0, low=2.0, high=4.0),
    compared(3.6, 6.0, low=3.5, high=5.9),
]


def test_errors_by_hand():
    found = accuracy(FIVE)
    assert found is not None
    assert found.count == 5
    assert found.mape == pytest.approx((0.1 + 0.2 + 0.5 + 0.0 + 0.4) / 5)
    assert found.median == pytest.approx(0.2)
    assert found.p90 == pytest.approx(0.4 + 0.6 * 0.1)  # place 3.6 of 0, .1, .2, .4, .5
    assert (found.worst, found.worst_id) == (pytest.approx(0.5), "6.0/4.0")
    assert found.bias == pytest.approx((0.1 - 0.2 + 0.5 + 0.0 - 0.4) / 5)
    assert found.coverage == pytest.approx(3 / 5)


def test_nothing_measured_has_no_accuracy_and_the_sign_of_the_worst_is_kept():
    assert accuracy([]) is None
    found = accuracy([compared(1.0, 4.0), compared(1.5, 1.0)])
    assert found is not None and found.worst == -0.75


def test_no_interval_has_no_coverage():
    found = accuracy([compared(1.0, 2.0)])
    assert found is not None
    assert (found.coverage, found.spearman, found.regret, found.worst_regret) == (None, None, None, None)


@pytest.mark.parametrize(
    ("first", "second", "value"),
    [
        ([1, 2, 3], [4, 5, 6], 1.0),
        ([1, 2, 3], [6, 5, 4], -1.0),
        # 1 - 6 * sum(d^2) / (n (n^2 - 1)): ranks 1 4 2 5 3 differ by 0, 2, 1, 1 and 2.
        ([1, 2, 3, 4, 5], [10, 40, 20, 40.5, 30], 1 - 6 * (0 + 4 + 1 + 1 + 4) / 120),
        # Ranks 1.5 1.5 3 against 1 2 3: covariance 1.5, spreads 1.5 and 2.
        ([1, 1, 2], [1, 2, 3], 1.5 / (1.5 * 2) ** 0.5),
    ],
)
def test_spearman_by_hand(first: Sequence[float], second: Sequence[float], value: float):
    assert spearman(first, second) == pytest.approx(value)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=2, max_size=12))
def test_spearman_is_bounded_symmetric_and_blind_to_scale(pairs: list[tuple[float, float]]):
    first, second = [one for one, _ in pairs], [other for _, other in pairs]
    found = spearman(first, second)
    assert found is None or -1 - 1e-9 <= found <= 1 + 1e-9
    assert found == spearman(second, first)
    assert found == spearman([2.0 * value for value in first], second)


def test_groups_are_averaged_and_the_worst_is_kept():
    pairs = {"a": ((1.0, 2.0), (2.0, 1.0)), "b": ((1.0, 1.0), (2.0, 2.0)), "alone": ((5.0, 5.0),)}
    found = accuracy([compared(*pair, group=group) for group, own in pairs.items() for pair in own])
    assert found is not None
    assert (found.spearman, found.regret, found.worst_regret, len(found.groups)) == (0.0, 0.5, 1.0, 2)


def test_layouts_of_a_group_are_compared_per_work():
    halved = [
        compared(4.0, 8.0, layout="tp=1", work=4.0),
        compared(1.5, 1.8, layout="tp=2", work=1.0),
    ]
    (found,) = group_orders(halved)
    assert (found.num_layouts, found.spearman, found.regret) == (2, -1.0, pytest.approx(2.0 / 1.8 - 1))


def test_a_layout_that_was_measured_often_is_one_choice():
    often = [compared(1.0, value, layout="tp=1") for value in (2.0, 3.0, 10.0)]
    assert group_orders(often) == ()
    (found,) = group_orders([*often, compared(2.0, 2.5, layout="tp=2")])
    assert (found.num_layouts, found.regret) == (2, pytest.approx(3.0 / 2.5 - 1))


def test_the_noise_floor_is_the_error_of_the_median():
    rows = [compared(9.0, value, layout="tp=1") for value in (8.0, 10.0, 12.5)]
    found = accuracy([*rows, compared(1.0, 7.0, layout="tp=2"), compared(1.0, 5.0, group="other", layout="tp=1")])
    assert found is not None
    assert (found.num_layouts, found.noise_floor) == (3, pytest.approx((10 / 8 - 1 + 0 + 1 - 10 / 12.5) / 3))
    alone = accuracy([compared(1.0, 2.0), compared(1.0, 3.0)])
    assert alone is not None and (alone.num_layouts, alone.noise_floor) == (2, None)


@given(st.lists(st.lists(st.floats(1, 100), min_size=2, max_size=5), min_size=1, max_size=5))
def test_the_median_of_each_layout_reaches_the_noise_floor(layouts: list[list[float]]):
    rows = [compared(median(same), value, layout=number) for number, same in enumerate(layouts) for value in same]
    found = accuracy(rows)
    assert found is not None and found.noise_floor == pytest.approx(found.mape)
