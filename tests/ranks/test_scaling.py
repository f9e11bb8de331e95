"""Gradients in FP16 of a batch so large that a token weighs less than FP16 holds are those of one process."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision
from tests.ranks.cases import AS_PLANNED, MIXTRAL, Task, glm, gpt, llama, near, plan_of, run_steps
from tests.ranks.spawn import on_ranks
from tests.slower import rest_is_slow

pytestmark = pytest.mark.ranks

TINY = 2.0**-22  # of 4 million tokens
ROUTERS: Mapping[str, Any] = {"router_balance_loss": TINY, "router_z_loss": TINY}
CASES: Mapping[str, tuple[str, ModelSpec, Mapping[str, Any]]] = {
    "dp, ZeRO-1": ("tp=1,pp=1,dp=2", llama(), {}),
    "halves of a backward, tied": ("tp=1,pp=2,dp=1,schedule=zb_h1", gpt(), {}),
    "losses of routers, weights in pieces": ("tp=1,pp=1,dp=2,zero=3", llama(**MIXTRAL), ROUTERS),
    "corrections of routers, recompute": ("tp=2,pp=1,dp=2,recompute=full", glm(), {"router_bias_speed": 0.01}),
}


@pytest.mark.parametrize("mode", rest_is_slow(["generated", "literal"]))
@pytest.mark.parametrize("case", rest_is_slow(CASES))
def test_gradients_in_fp16_do_not_vanish_with_the_weight_of_a_token(case: str, mode: Any) -> None:
    text, model, work = CASES[case]
    task = Task.of(plan_of(text, model, precision=Precision.named("fp16"), **work))
    light = [{**batch, "token_weight": batch["token_weight"] * TINY} for batch in task.steps[0]]
    task = replace(task, steps=(tuple(light),))
    shares = [share for (share,) in on_ranks(task.plan.mesh.num_ranks, run_steps, task, AS_PLANNED, mode)]
    near(task.reference(), shares, 0.02)
