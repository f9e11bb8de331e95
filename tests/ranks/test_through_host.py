"""How tests of one GPU send through its host, tried where host and device are the same."""

import pytest

from tests.gpu.layouts import LAYOUTS, task_of
from tests.gpu.through_host import shares_on
from tests.ranks.cases import compare, near
from tests.slower import rest_is_slow

FIRST = ("tp=1,pp=1,cp=2,dp=1", "tp=1,pp=2,dp=1,schedule=zb_h1", "tp=1,pp=1,dp=2,zero=3", "tp=1,pp=1,dp=2,ep=2")


@pytest.mark.ranks
@pytest.mark.parametrize("text", rest_is_slow([*FIRST, *(one for one in LAYOUTS if one not in FIRST)], 1, 2))
def test_steps_through_the_host_are_those_of_one_process(text: str) -> None:
    task = task_of(text)
    expected = task.reference()
    compare(expected, shares_on("cpu", task, exact=True))
    if not task.plan.model.num_experts:
        near(expected, shares_on("cpu", task, exact=False), 0.1)
