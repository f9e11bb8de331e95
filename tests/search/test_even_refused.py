"""Layouts that Rules refuse are priced, or refused in words: what a stranger types ends in no traceback."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.plan.candidate import Candidate
from autoshard.search.bound.request import plan_at, rejections_of
from tests.search.brute_force import ask
from tests.slower import covering

SIZES = st.sampled_from([1, 2, 3, 4, 5, 8, 16, 1000])
AXES = [(tp, pp, cp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4) for cp in (1, 2, 4) if tp * pp * cp <= 8]
KEYS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("ep", "vp", "mbs"), SIZES),
    "zero": st.sampled_from([0, 1, 3]),
    **dict.fromkeys(("zero_group", "weight_group"), st.one_of(st.none(), SIZES)),
    "schedule": st.sampled_from(["1f1b", "gpipe", "interleaved", "zb_h1", "zb_v"]),
    "cp_kind": st.sampled_from(["ring", "all_to_all"]),
    "cp_order": st.sampled_from(["contiguous", "zigzag"]),
    "sp": st.sampled_from([None, False, True]),
    "fold": st.sampled_from([None, "none", "tp", "cp", "cp.tp"]),
}


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-mixtral"])
@given(axes=st.sampled_from(AXES), keys=st.fixed_dictionaries({}, optional=KEYS))
def test_a_refused_layout_is_priced_or_refused_in_words(model: str, axes: tuple[int, int, int], keys: dict[str, Any]):
    """All of them have as many ranks as there are, so that most reach the prices."""
    request, (tp, pp, cp) = ask(model, "h100-80", global_batch=16), axes
    try:
        candidate = Candidate(tp=tp, pp=pp, cp=cp, dp=8 // (tp * pp * cp), **keys)
        plan = plan_at(request, candidate, even_refused=True)
    except InputError as error:
        assert error.faults
    else:
        assert plan.prediction and plan.prediction.step_time_s > 0


@pytest.mark.parametrize(
    ("groups", "size"), covering([(1, "zero_group"), (3, "zero_group"), (3, "weight_group")], [3, 16, 1000], fast=3)
)
def test_groups_that_do_not_divide_the_ranks_are_refused_and_priced_as_one_copy(groups: tuple[int, str], size: int):
    zero, key = groups
    request = ask("tiny-llama", "h100-80", global_batch=16)
    whole, refused = (Candidate.parse(f"tp=1,pp=1,dp=8,zero={zero}{more}") for more in ("", f",{key}={size}"))
    assert [reason.rule_id for reason in rejections_of(request, refused, "torch")] == [key.replace("_", "-")]
    prices = [plan_at(request, candidate, even_refused=True).prediction for candidate in (whole, refused)]
    assert prices[0] and prices[1] and prices[0].time_parts == prices[1].time_parts
