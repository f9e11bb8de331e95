"""A plan carries the constants that it was made with, and says where they are stretched."""

from dataclasses import replace

import pytest

from autoshard.cost.calibration import CONSTANTS, built_in, uncalibrated
from autoshard.cost.predict import predict
from autoshard.cost.provenance import calibration_entries, calibration_of
from autoshard.errors import InputError
from autoshard.plan.codec import dump, load
from tests.cost.cases import ask, plan_of

OWN = replace(
    uncalibrated(), name="mine", basis="my runs", matrix_efficiency=0.3, near_link_efficiency=1 / 3, interval=0.1
)


def plan(text="tp=8,pp=4,dp=4", calibration=None, **changes):
    made = plan_of(ask(**changes), text)
    return replace(made, provenance=calibration_entries(calibration)) if calibration else made


@pytest.mark.parametrize("calibration", [OWN, built_in("trn1.32xlarge"), uncalibrated()], ids=lambda one: one.name)
def test_a_plan_read_back_predicts_with_the_same_constants(calibration):
    read = load(dump(plan(calibration=calibration)))
    assert replace(calibration_of(read), fit=None, sources=calibration.sources) == replace(
        calibration, fit=None, sources=calibration.sources
    )
    assert predict(read) == predict(read, calibration)


def test_a_plan_that_carries_none_has_those_of_its_cluster():
    assert calibration_of(plan()) is built_in("trn1.32xlarge")
    assert calibration_of(plan("tp=8,pp=4,dp=8", cluster_name="trn2.48xlarge")) == built_in("trn1.32xlarge"), "nearest"


@pytest.mark.parametrize(
    ("text", "changes", "said"),
    [
        ("tp=8,pp=2,cp=4,dp=2", {}, "cp"),
        ("tp=8,pp=4,vp=2,dp=4,schedule=interleaved", {}, "vp"),
        ("tp=8,pp=4,dp=4", {"cluster_name": "trn1n.32xlarge"}, "trn1n.32xlarge"),
    ],
)
def test_what_no_row_had_is_said_and_widens_the_interval(text, changes, said):
    measured, beyond = predict(plan()), predict(plan(text, built_in("trn1.32xlarge"), **changes))
    assert f"extrapolated to {said}," in beyond.basis and "extrapolated" not in measured.basis
    width = measured.high_s / measured.step_time_s - 1
    assert beyond.high_s / beyond.step_time_s - 1 == pytest.approx(2 * width)
    assert beyond.low_s > 0


def test_nominal_constants_reach_everywhere_and_nowhere():
    assert predict(plan("tp=8,pp=2,cp=4,dp=2", uncalibrated())).basis == uncalibrated().basis


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"calibration.constants": "far_link_efficiency=1"}, "provenance.calibration.constants: must be NAME=NUMBER"),
        ({"calibration.constants": ",".join(f"{name}=x" for name in (*CONSTANTS, "interval"))}, "found 'x'"),
        ({"calibration.constants": ",".join(f"{name}=2" for name in (*CONSTANTS, "interval"))}, "must lie in"),
        ({"calibration.reach": "trn1"}, "write CLUSTER: AXES"),
        ({"calibration.basis": ""}, "provenance.calibration.basis: say what"),
        ({"calibration": " "}, "provenance.calibration.name: must not be empty"),
    ],
)
def test_a_wrong_edit_of_the_constants_is_told(change, fault):
    made = plan(calibration=OWN)
    with pytest.raises(InputError) as caught:
        predict(replace(made, provenance={**made.provenance, **change}))
    assert fault in str(caught.value)
