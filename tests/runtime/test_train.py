"""The loop: what it eats, and that it trains."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from autoshard.engine.base import Measured, Run, RunReport, TimedStep
from autoshard.runtime.data.batches import synthetic_step
from autoshard.runtime.launch import Placing, launch
from autoshard.spec.training import Training
from tests.runtime.cases import tiny_plan
from tests.runtime.training_cases import Double, trained as run


@cache
def plan(text: str):
    return tiny_plan(text, seq_len=8)


def trained(text: str, folder: Path, **options) -> RunReport:
    found = run(plan(text), folder, **({"steps": 4, "build": Double, "to": "none"} | options))
    assert found.report is not None and tuple(found.steps) == found.report.steps, "every step is told when it is done"
    return found.report


def losses(report: RunReport) -> list[float]:
    return [step.loss for step in report.steps]


@pytest.mark.ranks
@pytest.mark.parametrize("text", ["tp=1,pp=1,dp=2", "tp=1,pp=2,dp=1"])
def test_the_same_seed_gives_the_same_losses_on_two_ranks_as_on_one(text: str, tmp_path: Path) -> None:
    one, two = trained("tp=1,pp=1,dp=1", tmp_path / "1"), trained(text, tmp_path / "2")
    np.testing.assert_allclose(losses(two), losses(one), rtol=1e-9)
    assert [step.norm for step in two.steps] == pytest.approx([step.norm for step in one.steps], rel=1e-9)
    assert len(two.ranks) == 2 and two.ranks[1].memory_bytes == {"weights": 4}
    assert one.steps[0].num_tokens == 32 and all(step.tokens_per_s > 0 for step in one.steps)


@pytest.mark.ranks
def test_another_seed_gives_other_losses(tmp_path: Path) -> None:
    first, second = (trained("tp=1,pp=1,dp=1", tmp_path / str(seed), seed=seed, steps=1) for seed in (0, 1))
    assert losses(first) != losses(second)


@pytest.mark.ranks
def test_the_loss_falls_on_a_repeated_batch(tmp_path: Path) -> None:
    def body(_):
        engine = Double(plan("tp=1,pp=1,dp=2"), Run(folder=tmp_path, training=Training(steps=1)))
        batches = synthetic_step(plan("tp=1,pp=1,dp=2"))
        return [engine.step(batches, 1e-2).loss for _ in range(6)]

    found = launch(None, 2, body, show=print, placing=Placing(folder=tmp_path))
    assert found == sorted(found, reverse=True) and found[-1] < found[0] - 0.3


def test_the_first_two_steps_are_no_measure() -> None:
    times = [9.0, 8.0, 1.0, 3.0, 2.0]
    steps = tuple(
        TimedStep(number=number, loss=1, norm=1, time_s=time_s, num_tokens=1) for number, time_s in enumerate(times, 1)
    )
    ranks = (Measured(memory_bytes={}, calls={}, sent_bytes={}),)
    assert RunReport(steps=steps, ranks=ranks).step_time_s == 2
    assert RunReport(steps=steps[:2], ranks=ranks).step_time_s == 8.5
