"""Three rows of a program that nobody knows: what follows from them, and which layout is to be tried next."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.calibration.advice import run_of_plan
from autoshard.calibration.belief import Belief
from autoshard.calibration.fitting import HUBER, Sample, log_seconds
from autoshard.calibration.measured_run import MeasuredRun
from autoshard.calibration.next_layout import KnownRows, known_rows, next_layout
from autoshard.calibration.prior import Prior, prior_of
from autoshard.search.ask.api import request_of
from autoshard.search.ask.planner import search
from autoshard.spec.recipe import Pins, QuestionOptions


@cache
def runs() -> tuple[MeasuredRun, ...]:
    """Layouts of one question on GPUs, as somebody may run them."""
    request = request_of(
        QuestionOptions(model="llama3-8b", cluster="h100-80", fix=Pins("cp=1,ep=1,mbs=1,schedule=1f1b"))
    )
    return tuple(run_of_plan(plan) for plan in search(request, 8).plans)


@cache
def prior() -> Prior:
    return prior_of(runs())


def seconds_under(values: Sequence[float]) -> Sequence[float]:
    """What every layout takes if constants are so many standard deviations off."""
    moved = np.resize(np.array(values), len(prior().unknowns)) * prior().deviations
    return np.exp(log_seconds(runs(), prior().constants(moved))).tolist()


def rows_of(seconds: Sequence[float], places: Sequence[int]) -> list[Sample]:
    return [Sample(id=f"row {place}", run=runs()[place], step_time_s=seconds[place]) for place in places]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "places"), [([1.5, -1.0, 0.5], [0, 3, 6]), ([-1.5, 1.0], [7, 2, 1]), ([0.1, 0.1, -1.0], [4, 5, 0])]
)
def test_rows_of_other_constants_bring_predictions_closer(values: list[float], places: list[int]) -> None:
    seconds = seconds_under(values)
    known = known_rows(rows_of(seconds, places), prior())
    before = np.abs(log_seconds(runs(), prior().centre) - np.log(seconds))[places]
    after = np.abs(log_seconds(runs(), known.constants) - np.log(seconds))[places]
    assert known.is_fitted and after.mean() <= before.mean() + 0.01


@pytest.mark.slow
def test_constants_are_fitted_from_three_rows_of_two_layouts_on() -> None:
    seconds = seconds_under([1.0])
    assert not known_rows(rows_of(seconds, [0, 1])).is_fitted
    assert not known_rows(rows_of(seconds, [0, 0, 0])).is_fitted
    assert known_rows(rows_of(seconds, [0, 0, 1])).is_fitted


def known(seconds: Sequence[float], places: Sequence[int]) -> KnownRows:
    return known_rows(rows_of(seconds, places), prior())


@pytest.mark.slow
def test_the_fastest_layout_is_that_of_the_same_question_by_the_median_of_its_rows() -> None:
    samples = rows_of([1.0, 3.0, 2.0, *[9.0] * 5], [0, 1, 2])
    again = [replace(sample, step_time_s=seconds) for sample in samples[:1] for seconds in (5.0, 6.0)]
    larger = replace(runs()[3], workload=replace(runs()[3].workload, global_batch=2048))
    other = replace(samples[0], run=larger, step_time_s=0.1)
    rows = known_rows([*samples, *again, other], prior())
    best = rows.best_of(runs()[7])
    assert best and (best.run, best.step_s) == (runs()[2], 2.0)
    assert rows.best_of(replace(larger, workload=replace(larger.workload, global_batch=4096))) is None


@pytest.mark.slow
def test_the_next_layout_is_new_and_lowers_the_regret() -> None:
    rows = known(seconds_under([0.5, -0.5, 1.0]), [5, 6, 7])
    best = rows.best_of(runs()[0])
    assert best
    to_try = next_layout(rows, runs(), best)
    assert to_try and to_try.run in runs()[:5]
    assert 0 <= to_try.regret_after < to_try.regret < 1 and 0 < to_try.chance < 1
    assert to_try.low_s < to_try.step_s < to_try.high_s
    assert next_layout(rows, runs()[5:], best) is None, "all are measured"


@pytest.mark.slow
def test_a_layout_that_can_only_lose_has_hardly_a_chance() -> None:
    fast = [second * (0.8 if place == 0 else 1.0) for place, second in enumerate(seconds_under([0.0]))]
    rows = known(fast, [0, 6, 7])
    best = rows.best_of(runs()[0])
    assert best and best.run == runs()[0]
    to_try = next_layout(rows, runs()[1:2], best)
    assert to_try and to_try.chance < 0.2


class TestRobustness:
    """A row that is wrong by a unit moves a belief by no more than one that is a little off."""

    @given(st.floats(2.0, 1e4))
    def test_a_wrong_row_counts_as_one_that_is_1345_deviations_off(self, factor: float) -> None:
        belief = Belief(mean=np.zeros(2), covariance=np.array([[0.04, 0.02], [0.02, 0.04]]), noise=np.full(2, 0.02))
        deviation = math.sqrt(0.04 + 0.02**2)
        moved = belief.given_robustly([factor]).mean[1]
        away = math.log(factor)
        noise_of_clipped = (away / HUBER) ** 2
        assert moved == pytest.approx(0.02 * away / noise_of_clipped)
        assert abs(moved) <= 0.02 * HUBER / deviation * 1.01

    def test_rows_that_are_as_expected_count_in_full(self) -> None:
        belief = Belief(mean=np.zeros(2), covariance=np.array([[0.04, 0.02], [0.02, 0.04]]), noise=np.full(2, 0.02))
        plain, robust = belief.given([0], [1.1]), belief.given_robustly([1.1])
        assert robust.mean == pytest.approx(plain.mean) and robust.covariance == pytest.approx(plain.covariance)
        assert robust.noise == pytest.approx(belief.noise), "of rows that are yet to come"

    @pytest.mark.slow
    def test_a_row_in_minutes_does_not_decide_what_is_tried(self) -> None:
        seconds = list(seconds_under([0.0]))
        wrong = [*seconds[:5], seconds[5] * 60, *seconds[6:]]
        rows = known(wrong, [2, 3, 5, 6])
        expected = log_seconds(runs(), prior().centre)
        assert rows.belief_of(runs()).mean[4:] == pytest.approx(expected, abs=0.25)
