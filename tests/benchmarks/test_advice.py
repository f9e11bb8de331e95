"""Advice on published rows: what was not chosen is not looked at, and a curve is judged by where it stays low."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
from hypothesis import given

from autoshard.calibration.belief import Belief
from benchmarks import advice
from benchmarks.advice import BAR, Rows, compared, judge, lowered_variance
from tests.calibration.test_belief import beliefs


@pytest.fixture(scope="module")
def rows() -> Rows:
    """The cluster with the fewest rows, without the fit that says how good one to all of them is: 10 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice, "fit", lambda *_: Mock(fit=Mock(left_out_mape=0.04)))
        return Rows.of("b200")


@pytest.fixture(scope="module")
def fitted_rows() -> Rows:
    """The same with that fit."""
    return Rows.of("b200")


@pytest.mark.thorough
def test_advice_does_not_look_at_rows_that_it_does_not_choose(fitted_rows: Rows) -> None:
    rows = fitted_rows
    chosen = rows.advised()
    assert len(set(chosen)) == len(chosen) == rows.sizes[-1]
    others = (replace(one, step_time_s=7 * one.step_time_s) for one in rows.samples)
    pairs = enumerate(zip(rows.samples, others, strict=True))
    samples = [one if number in chosen else other for number, (one, other) in pairs]
    assert replace(rows, samples=tuple(samples)).advised() == chosen


@pytest.mark.slow
def test_an_error_is_that_of_the_rows_that_were_not_chosen(rows: Rows) -> None:
    chosen, count = [0, 5, 7], len(rows.samples)
    constants = rows.fitted(chosen)
    alone = [rows.error([other for other in range(count) if other != one], constants) for one in range(count)]
    rest = [error for number, error in enumerate(alone) if number not in chosen]
    assert rows.error(chosen, constants) == pytest.approx(sum(rest) / len(rest))


@given(beliefs())
def test_the_run_that_is_chosen_next_is_the_one_after_which_variances_are_least(belief: Belief) -> None:
    left = [belief.given([row], [1.0]).covariance.trace() for row in range(len(belief.mean))]
    assert belief.covariance.trace() - lowered_variance(belief) == pytest.approx(left)


@pytest.mark.thorough
def test_every_choice_has_the_same_sizes_and_needs_some_part(fitted_rows: Rows) -> None:
    rows = fitted_rows
    found = compared(rows, seeds=2)
    assert rows.sizes == [2, 3, 4, 6] and [len(set(rows.spread(size))) for size in rows.sizes] == rows.sizes
    for name in ("advice", "grid", "random_25", "random_50", "random_75"):
        assert {f"{name}.{size}" for size in rows.sizes} <= found.keys() and 0 < float(found[f"{name}.part"] or 0) <= 1


@pytest.mark.parametrize(
    ("errors", "part"),
    [((1, 1, 1, 1), 2 / 12), ((9, 1, 1, 1), 3 / 12), ((1, 1, 9, 1), 6 / 12), ((1, 1, 1, 9), 1.0)],
)
def test_a_choice_must_stay_as_good(errors: tuple[float, ...], part: float) -> None:
    rows = Rows(samples=(Mock(),) * 12, prior=Mock(), target=0.04)
    scaled = {size: rows.target * error for size, error in zip(rows.sizes, errors, strict=True)}
    assert rows.part(scaled) == pytest.approx(part)


def test_the_worst_cluster_is_judged() -> None:
    good, bad = {"advice.part": 0.125}, {"advice.part": 0.5}
    assert judge({"a": good}, 1.0).holds
    found = judge({"a": good, "b": bad}, 1.0)
    assert (found.value, found.bar, found.holds, found.extras["a.advice.part"]) == (0.5, BAR, False, 0.125)
