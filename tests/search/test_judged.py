"""A plan file is judged with the constants that it carries, or with others that are asked for."""

from dataclasses import replace

import autoshard
from autoshard.cost.calibration import uncalibrated
from autoshard.search.judged import judged

SLOW = replace(uncalibrated(), name="slow", basis="my own runs", matrix_efficiency=0.2, memory_efficiency=0.2)


def test_a_plan_is_judged_with_its_own_constants_or_with_others():
    made = autoshard.plan("tiny-llama", "local", cost=SLOW)
    assert judged(made).plan == made and judged(made).remark == ""
    nominal = judged(made, uncalibrated()).plan
    assert made.prediction and nominal.prediction
    assert nominal.provenance["calibration"] == "uncalibrated"
    assert nominal.prediction.step_time_s < made.prediction.step_time_s
    assert judged(nominal, SLOW).plan.prediction == made.prediction
