"""Utilisation, what is left, and drift: judged step by step."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from autoshard.engine.programs import graph_of
from autoshard.plan.plan import Prediction
from autoshard.run.reports import Phase, TimedStep
from autoshard.runtime.metrics.log import WINDOW, Pace
from tests.runtime.cases import tiny_plan

PLAN = tiny_plan("tp=2,pp=1,dp=1")
assert PLAN.prediction
PREDICTION = replace(PLAN.prediction, low_s=0.9, high_s=1.1, step_time_s=1.0, time_parts={"compute": 1.0})


def step(number: int, time_s: float, phase: Phase = "steady") -> TimedStep:
    tokens = PLAN.workload.tokens_per_step
    return TimedStep(number=number, loss=1.0, norm=1.0, time_s=time_s, num_tokens=tokens, phase=phase)


def warned(times: list[float], prediction: Prediction | None = PREDICTION) -> list[tuple[int, str]]:
    pace = Pace(10_000, prediction)
    found = ((number, pace(step(number, time_s), float(number))) for number, time_s in enumerate(times, 1))
    return [(number, text) for number, paced in found for text in paced.warnings]


def test_utilisation_is_counted_from_the_model_and_the_peak() -> None:
    flops = graph_of(PLAN).model_flops_per_token() * PLAN.workload.tokens_per_step
    peak = PLAN.cluster.rank_matrix_flops_per_s("bf16") * PLAN.mesh.num_ranks
    paced = Pace(10, PLAN.prediction)(step(1, 0.25), 0.0)
    assert paced.mfu == pytest.approx(flops / 0.25 / peak, rel=1e-5)
    assert PLAN.prediction and paced.ratio == pytest.approx(0.25 / PLAN.prediction.step_time_s)
    paced = Pace(10, None)(step(1, 0.25), 0.0)  # predicted of another machine
    assert paced.mfu is None and paced.ratio is None and paced.left_s == 9 * 0.25


def test_what_is_left_counts_what_lies_between_steps() -> None:
    pace = Pace(100, None)
    assert pace(step(1, 60.0, "compile"), 0.0).left_s is None
    left_s = [pace(step(number, 0.5), 2.0 * number).left_s for number in range(2, 31)]
    assert left_s[-1] == pytest.approx(70 * 2.0)
    assert pace(step(100, 0.5), 200.0).left_s == 0.0


def test_a_median_outside_the_predicted_interval_is_told_once() -> None:
    ((number, text),) = warned([1.0] * 30 + [1.15] * 60)
    assert number == 30 + WINDOW // 2 + 1 and text.endswith(
        "took 1.15 s (median), outside the predicted 900.0 ms to 1.10 s"
    )
    assert len(warned([0.5] * 60)) == 1 and not warned([0.5] * (WINDOW - 1))
    assert not warned([1.15] * 60, None)


def test_a_run_that_becomes_slower_is_told_once_beside_that() -> None:
    times = [2.0] * 40 + [2.3] * 40 + [2.41] * 80
    (first, _), (second, text) = warned(times)
    assert (first, second) == (WINDOW, 80 + WINDOW // 2 + 1)
    assert "% more than the 2.00 s that the first 20 steady steps took" in text
    assert warned(times, None) == [(second, text)]


@given(st.lists(st.floats(0.91, 1.08), min_size=60, max_size=60), st.sets(st.integers(21, 59), max_size=3))
def test_single_slow_steps_are_no_drift(times: list[float], slow: set[int]) -> None:
    assert not warned([9.0 if number in slow else time_s for number, time_s in enumerate(times)])
    pace = Pace(100, PREDICTION)
    assert not any(pace(step(number, 50.0, "warm-up"), float(number)).warnings for number in range(1, 60))
