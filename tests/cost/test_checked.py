"""A plan file is checked with the constants that it carries, or with others that are asked for."""

from dataclasses import replace

import autoshard
from autoshard.cost.calibration import uncalibrated
from autoshard.cost.checked import check_plan
from autoshard.cost.terms import CostTerm
from autoshard.search.api import Cost

SLOW = replace(uncalibrated(), name="slow", basis="my own runs", matrix_efficiency=0.2, memory_efficiency=0.2)


def test_a_plan_is_checked_with_its_own_constants_or_with_others():
    made = autoshard.plan("tiny-llama", "local", cost=SLOW)
    assert check_plan(made).plan == made and check_plan(made).remark == ""
    nominal = check_plan(made, uncalibrated()).plan
    assert made.prediction and nominal.prediction
    assert nominal.provenance["calibration"] == "uncalibrated"
    assert nominal.prediction.step_time_s < made.prediction.step_time_s
    assert check_plan(nominal, SLOW).plan.prediction == made.prediction


def test_terms_that_nobody_here_knows_are_named_and_keep_their_seconds():
    stall = CostTerm(name="stall", seconds=lambda c: 0.25 * c.dp, source="this test")
    made = autoshard.plan("tiny-llama", "local", cost=Cost(calibration=SLOW, terms=(stall,)))
    found = check_plan(made)
    assert found.plan == made and found.remark.startswith("cost.stall: not known here")
    nominal = check_plan(made, uncalibrated())
    assert made.prediction and nominal.plan.prediction
    stated = made.prediction.time_parts["cost.stall"]
    assert nominal.plan.prediction.time_parts["cost.stall"] == stated
    edited = check_plan(replace(made, provenance={**made.provenance, "cost.stall": "9.0 s, x"}))
    assert edited.remark.startswith("prediction: the plan was edited") and "cost.stall: not known" in edited.remark
    assert edited.plan.prediction and edited.plan.prediction.time_parts["cost.stall"] == 9.0
