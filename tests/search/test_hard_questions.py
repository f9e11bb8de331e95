"""Questions whose bounds stay far from the best plan: the answer is no slower than what other searches came upon.

The layouts are those of searches with other prices of messages. Their splits of layers are uneven, or their schedule is
not that of the first plans that a search finds.
"""

import pytest

from autoshard.plan.candidate import Candidate
from autoshard.search.ask.api import request_of
from autoshard.search.ask.planner import search
from autoshard.search.bound.request import plan_at
from autoshard.spec.recipe import QuestionOptions
from tests.slower import rest_is_slow

QUESTIONS = {
    "same layout, another schedule": (
        ("mixtral-8x7b", "h100-80", 8), "tp=2,pp=8,dp=4,vp=2,mbs=2,schedule=zb_v,recompute=selective[activation]",
    ),
    "a stage with one layer more near the end": (
        ("llama3-70b", "h100-80", 8),
        "tp=2,pp=8,cp=4,dp=1,vp=2,schedule=zb_v,recompute=selective[activation]*2/none*12/selective[activation]*2,"
        "stages=5*14/6/4,cp_order=zigzag",
    ),
    "many stages, far from the first plans": (
        ("llama3.1-405b", "h100-80", 64),
        "tp=2,pp=32,cp=4,dp=2,vp=2,schedule=interleaved,recompute=selective[activation,norms]+offload,cp_order=zigzag",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", rest_is_slow(sorted(QUESTIONS, key=lambda name: "stage with" not in name), 0))
def test_no_slower_plan_is_the_answer(name: str):
    (model, cluster, nodes), text = QUESTIONS[name]
    request = request_of(QuestionOptions(model=model, cluster=cluster), nodes)
    reference = plan_at(request, Candidate.parse(text))
    assert reference.prediction and reference.prediction.peak_bytes <= reference.prediction.capacity_bytes
    (best,) = search(request).plans
    assert best.prediction and best.prediction.step_time_s <= reference.prediction.step_time_s * (1 + 5e-3)
