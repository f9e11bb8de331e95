"""The loop: it trains, on two ranks as on one."""

from pathlib import Path

import numpy as np
import pytest

from autoshard.engine.base import Measured, RunReport, TimedStep
from tests.runtime.training_cases import Double, plan_of, trained


def report(text: str, folder: Path, **options) -> RunReport:
    found = trained(plan_of(text), folder, **({"steps": 4, "build": Double, "to": "none"} | options))
    assert found.report is not None and tuple(found.steps) == found.report.steps, "every step is told when it is done"
    return found.report


@pytest.mark.ranks
def test_the_same_seed_gives_the_same_losses_on_two_ranks_as_on_one(tmp_path: Path) -> None:
    one = report("tp=1,pp=1,dp=1", tmp_path / "1")
    for text in ("tp=1,pp=1,dp=2", "tp=1,pp=2,dp=1"):
        two = report(text, tmp_path / text)
        for name in ("loss", "norm"):
            wanted = [getattr(step, name) for step in one.steps]
            np.testing.assert_allclose([getattr(step, name) for step in two.steps], wanted, rtol=1e-9)
        assert len(two.ranks) == 2 and two.ranks[1].memory_bytes == {"weights": 4}
    assert one.steps[0].num_tokens == 32 and all(step.tokens_per_s > 0 for step in one.steps)
    other = report("tp=1,pp=1,dp=1", tmp_path / "other", seed=1, steps=1)
    assert other.steps[0].loss != one.steps[0].loss


def test_the_first_two_steps_are_no_measure() -> None:
    steps = tuple(
        TimedStep(number=number, loss=1, norm=1, time_s=time_s, num_tokens=1)
        for number, time_s in enumerate([9.0, 8.0, 1.0, 3.0, 2.0], 1)
    )
    ranks = (Measured(memory_bytes={}, sent_bytes={}),)
    assert RunReport(steps=steps, ranks=ranks).step_time_s == 2
    assert RunReport(steps=steps[:2], ranks=ranks).step_time_s == 8.5
