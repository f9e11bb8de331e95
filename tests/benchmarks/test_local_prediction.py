"""Nothing that is predicted was seen by the fit, the loop closes, and the verdict follows the numbers."""

import pytest

from autoshard.cost.predict import predict
from autoshard.engine.base import WARM_UP
from benchmarks.local_prediction import (
    NEW,
    SEEN,
    PredictedRun,
    fastest_s,
    fitted,
    judge,
    name_of,
    predicted_run,
    run_plan,
)

FASTER = 0.4
FEW = {name_of(case): case[1].plan(case[0]) for case in (SEEN[1], SEEN[5], SEEN[10])}


def times_of(plans, factor):
    return {name: factor * predict(plan).step_time_s for name, plan in plans.items()}


@pytest.fixture(scope="module")
def calibration():
    return fitted(FEW, times_of(FEW, FASTER))


@pytest.mark.slow
def test_other_layouts_of_other_shapes_are_predicted():
    assert len(NEW) == len(dict(NEW)) == 8
    assert {shape for _, shape in SEEN}.isdisjoint(shape for _, shape in NEW)
    assert len({text for text, _ in NEW} - {text for text, _ in SEEN}) == 8
    plans = [shape.plan(text) for text, shape in (*SEEN, *NEW)]
    assert {plan.mesh.num_ranks for plan in plans} == {1, 2}


def test_a_machine_may_be_faster_than_declared(calibration):
    for name, time_s in times_of(FEW, FASTER).items():
        assert abs(predicted_run(name, FEW[name], calibration, time_s).error) < 0.05
    assert calibration.matrix_efficiency > 1
    assert calibration.fit and len(calibration.fit.rows) == 3


@pytest.mark.parametrize(
    ("errors", "median", "holds"), [((0.1, -0.29, 0.5), 0.29, True), ((-0.31, 0.31, 0.0), 0.31, False)]
)
def test_half_of_the_errors_may_be_larger_than_the_bar(calibration, errors, median, holds):
    found = [PredictedRun(name=str(error), predicted_s=1 + error, measured_s=1.0) for error in errors]
    result = judge(found, calibration)
    assert (result.value, result.holds) == (pytest.approx(median), holds)
    assert all(str(error) in result.extras for error in errors)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_plan_is_run_as_by_the_command():
    text, shape = SEEN[10]
    report = run_plan(shape.plan(text), 3)
    assert len(report.steps) == 3 and len(report.ranks) == 2
    assert fastest_s([report]) == report.steps[WARM_UP].time_s > 0
