"""The loop: what it measures, and that steps leave nothing behind."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from autoshard.plan.plan import Plan
from autoshard.run.protocol import Engine, Run
from autoshard.run.reports import Measured, RunReport, TimedStep
from autoshard.runtime.machine import builder
from tests.runtime.training_cases import plan_of, trained
from tests.slower import rest_is_slow


def test_the_first_two_steps_are_no_measure() -> None:
    steps = tuple(
        TimedStep(number=number, loss=1, norm=1, time_s=time_s, num_tokens=1)
        for number, time_s in enumerate([9.0, 8.0, 1.0, 3.0, 2.0], 1)
    )
    ranks = (Measured(memory_bytes={}, sent_bytes={}),)
    assert RunReport(steps=steps, ranks=ranks).step_time_s == 2
    assert RunReport(steps=steps[:2], ranks=ranks).step_time_s == 8.5


def without_cycles(plan: Plan, run: Run) -> Engine:
    """Build an engine of which no step may leave tensors that only a look for cycles would free."""
    engine: Any = builder("torch")(plan, run)
    step = engine.step

    def checked(*arguments: Any) -> Any:
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        report = step(*arguments)
        gc.collect()
        gc.set_debug(0)
        left = sum(isinstance(one, torch.Tensor) for one in gc.garbage)
        gc.garbage.clear()
        assert not left, f"{left} tensors are left in cycles"
        return report

    engine.step = checked
    return engine


@pytest.mark.ranks
@pytest.mark.parametrize(
    "text", rest_is_slow(["tp=1,pp=1,dp=1", "tp=2,pp=2,dp=1,recompute=full", "tp=1,pp=1,dp=2,zero=3"], 0, 1)
)
def test_a_step_frees_its_tensors_at_once(text: str, tmp_path: Path) -> None:
    """The command line looks for cycles so rarely that a run would fill its memory before."""
    assert trained(plan_of(text), tmp_path, 3, build=without_cycles, to="none").report
