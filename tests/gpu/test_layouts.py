"""Layouts of several ranks that share one GPU, beside one process."""

import pytest

from tests.gpu.layouts import LAYOUTS, task_of
from tests.gpu.through_host import shares_on
from tests.ranks.cases import compare, near

pytestmark = pytest.mark.gpu
ROUNDED = 0.1  # of the largest gradient, in BF16


def test_there_are_twenty() -> None:
    assert len(LAYOUTS) == 20


@pytest.mark.parametrize("text", LAYOUTS)
def test_ranks_on_one_gpu_make_the_step_of_one_process(text: str) -> None:
    """In double, where every operation of the table but fused attention runs; then in BF16, as it is planned."""
    task = task_of(text)
    expected = task.reference()
    compare(expected, shares_on("cuda", task, exact=True))
    if not task.plan.model.num_experts:  # a token may choose another expert in BF16
        near(expected, shares_on("cuda", task, exact=False), ROUNDED)
