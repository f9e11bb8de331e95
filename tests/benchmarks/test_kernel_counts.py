"""The kernels that the table of the torch engine on GPUs counts, against those that its compiled functions start."""

import pytest

from autoshard.cost.calibration import uncalibrated
from autoshard.cost.predict import question_of
from autoshard.cost.setting import setting_of, work_of
from autoshard.cost.sharded import ListedBlocks
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from benchmarks.kernel_counts import CASES, Count, counts, plan_of
from tests.slower import rest_is_slow

OFF = 0.15  # of the table at most: Inductor joins some of what it counts apart, and parts some sums


def tabled(plan: Plan, kind: str) -> Count:
    """Add up what the table says of a block: kernels, and the bytes of those that multiply nothing."""
    question = question_of(plan, uncalibrated())
    work = work_of(question, setting_of(question, plan.candidate, ListedBlocks.of(plan)), kind, Recompute())
    found = Count()
    for _, one in work.kernels:
        multiplies = one.matrix_flops + one.products_flops + one.attention_flops > 0
        found += Count(kernels=one.launches, elementwise_bytes=0 if multiplies else round(float(one.moved_bytes)))
    return found


@pytest.mark.parametrize(
    ("name", "kind"), rest_is_slow([(name, kind) for name in CASES for kind in ("layer", "head")], 0, 2)
)
def test_the_table_counts_what_compiled_functions_start(name: str, kind: str):
    model, text = CASES[name]
    plan = plan_of(model, text)
    own, (_, compiled) = tabled(plan, kind), counts(plan, kind)
    assert own.elementwise_bytes == pytest.approx(compiled.elementwise_bytes, rel=OFF)
    if kind == "layer" or "tp=1" in text:  # a head runs a few rows at a time, fewer times where tp cuts the vocabulary
        assert own.kernels == pytest.approx(compiled.kernels, rel=OFF)
