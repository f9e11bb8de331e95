"""Steps of models with sinks and biases of experts on ranks are those of one process; what ranks forget is caught."""

from collections.abc import Mapping
from typing import Any

import pytest

import autoshard.engine.torch.kernels.sinks as sinks
from tests.kit import NOTHING
from tests.ranks.cases import Task, compare, gpt_oss, hold, plan_of, run_steps
from tests.ranks.spawn import on_ranks
from tests.ranks.test_experts import OWN_TOKENS, in_both_modes, to_one_rank
from tests.slower import rest_is_slow

pytestmark = pytest.mark.ranks

CASES: Mapping[str, tuple[str, Mapping[str, str], Mapping[str, Any]]] = {
    "around a ring, states in pieces": ("tp=1,pp=1,cp=2,dp=1,zero=3,cp_order=zigzag", NOTHING, NOTHING),
    "around a ring, heads cut": ("tp=2,pp=1,cp=2,dp=1", NOTHING, NOTHING),
    "experts over dp and tp, all computed again": ("tp=2,pp=1,dp=2,ep=2,fold=tp,recompute=full", NOTHING, NOTHING),
    "own tokens on each rank of tp, that may be dropped": ("tp=2,pp=1,dp=2,ep=2", OWN_TOKENS, {"expert_capacity": 1.0}),
    "stages, halves of a backward": ("tp=1,pp=2,dp=2,ep=2,schedule=zb_h1", NOTHING, {"router_balance_loss": 0.5}),
    "the same tokens on both ranks of tp": ("tp=2,pp=1,dp=1,sp=false,recompute=selective[attention]", NOTHING, NOTHING),
}


@pytest.mark.parametrize("case", rest_is_slow(CASES, 0))
def test_a_step_is_that_of_one_process(case: str) -> None:
    text, pins, changes = CASES[case]
    hold(Task.of(plan_of(text, gpt_oss(), pins, **changes)))


@pytest.mark.slow
def test_experts_that_nobody_chose_have_biases_that_stay() -> None:
    """In functions as in the interpreter; the rows of a rank are as many as were routed to it, which may be none."""
    task = to_one_rank(Task.of(plan_of("tp=1,pp=1,dp=2,ep=2", gpt_oss())))
    expected = task.reference()
    assert not expected.gradients["layer.0.gate_shift.bias"][2:].any()
    compare(expected, [share for (share,) in on_ranks(2, in_both_modes, task)])


FORGOTTEN = {
    "the share that sinks take from keys": (sinks, "join_sinks", lambda part, sink: tuple(part)),
    "the gradient of sinks": (sinks, "gradient_of_sinks", lambda upstream, result, lse, sink: sink * 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FORGOTTEN)
def test_sinks_that_a_ring_forgets_are_caught(fault: str) -> None:
    task = Task.of(plan_of("tp=1,pp=1,cp=2,dp=1", gpt_oss()))
    answers = on_ranks(2, run_steps, task, replaced=[FORGOTTEN[fault]])
    with pytest.raises(AssertionError):
        compare(task.reference(), [share for (share,) in answers])
