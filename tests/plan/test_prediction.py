import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.plan.prediction import StageMemory, rounded
from tests.plan.cases import ask, plan_of, with_prediction


def predicted(**changes):
    prediction = with_prediction(plan_of(ask(), "tp=32,pp=8"), **changes).prediction
    assert prediction is not None
    return prediction


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"step_time_s": 0.0, "time_parts": {}}, "step_time_s"),
        ({"low_s": 11.0}, "low_s"),
        ({"high_s": 9.0}, "low_s"),
        ({"time_parts": {"compute": 10.1}}, "time_parts"),
        ({"time_parts": {}}, "time_parts"),
        ({"capacity_bytes": 0}, "capacity_bytes"),
        ({"tokens_per_s": 0.0}, "tokens_per_s"),
        ({"mfu": -0.1}, "mfu"),
        ({"basis": ""}, "basis"),
        ({"communication_bytes": {"tp": -1}}, "communication_bytes.tp"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(changes, where):
    with pytest.raises(InputError) as caught:
        predicted(**changes)
    assert where in [fault.where for fault in caught.value.faults]


def test_parts_may_differ_from_the_sum_by_their_rounding():
    parts = {"compute": 6.5 + 4e-6, "bubble": 3.5}
    assert predicted(time_parts=parts).time_parts == parts


def test_memory_adds_up_and_is_never_negative():
    assert StageMemory(num_weights=1, parts={"weights": 3, "activations": 4}).total == 7
    assert predicted().peak_bytes == 4 * 2**30
    with pytest.raises(InputError, match=r"parts\.weights: must not be negative"):
        StageMemory(num_weights=1, parts={"weights": -1})


@given(st.floats(1e-12, 1e15))
def test_rounding_keeps_nine_digits_and_is_done_once(value):
    assert rounded(rounded(value)) == rounded(value) == pytest.approx(value, rel=1e-8)
