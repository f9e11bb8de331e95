"""Stages without layers: the embedding alone at the start of a pipeline, or the head alone at its end."""

import pytest

from tests.ranks.cases import Task, hold, llama, plan_of
from tests.slower import rest_is_slow

SPLITS = [
    "tp=1,pp=2,dp=1,vp=2,schedule=zb_v,stages=0/2/1/0",
    "tp=1,pp=2,dp=1,stages=0/3",
    "tp=2,pp=2,dp=1,vp=2,schedule=interleaved,stages=0/2/1/0",
    "tp=1,pp=4,dp=2,stages=0/1/2/0,recompute=full,zero=3",
    "tp=1,pp=2,dp=1,schedule=zb_h1,stages=3/0",
]


@pytest.mark.parametrize(
    ("text", "tied"), rest_is_slow([(text, tied) for tied in (True, False) for text in SPLITS], 0, 2)
)
def test_two_steps_are_those_of_one_process_and_hold_and_send_what_was_promised(text: str, tied: bool):
    plan = plan_of(text, llama(num_layers=3, tied_embeddings=tied), global_batch=8)
    assert min(plan.candidate.stages or (1,)) == 0
    hold(Task.of(plan, num_steps=2), joins=True)
