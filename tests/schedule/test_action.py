import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.schedule.action import Action


@given(st.sampled_from("FBIW"), st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_text_form_round_trips(kind, stage, micro_batch):
    action = Action(kind=kind, stage=stage, micro_batch=micro_batch)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F", "F1", "F1.", "f1.2", "X1.2", "F-1.2", "F1.2 ", "F1.2.3"])
def test_text_that_is_no_action_is_refused(text):
    with pytest.raises(InputError, match="is not an action"):
        Action.parse(text)


def test_negative_numbers_are_all_named():
    with pytest.raises(InputError) as caught:
        Action(kind="F", stage=-1, micro_batch=-2)
    assert [fault.where for fault in caught.value.faults] == ["stage", "micro_batch"]
