"""Whole runs with the real NxD, saved and continued: by either engine from the other's checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoshard.plan.plan import Plan
from autoshard.run.protocol import Run
from autoshard.run.reports import TimedStep
from autoshard.runtime.machine import builder
from autoshard.runtime.train import train
from autoshard.spec.training import Checkpointing, Training
from tests.neuron.cases import PATIENCE_S, as_started, nxd_plan
from tests.neuron.nxd_ranks import on_nxd_ranks
from tests.ranks.cases import llama

pytestmark = [pytest.mark.nxd, pytest.mark.usefixtures("nxd")]


def run_on(plan: Plan, engine: Any, folder: Path, steps: int) -> dict[int, float]:
    """What every rank runs: the loop of ``autoshard run`` until so many steps are taken; return their losses."""
    said: list[Any] = []
    with as_started(plan.mesh.size("tp")):
        keeping = Checkpointing(every_steps=2, every_minutes=None)
        run = Run(folder=folder, training=Training(steps=steps, learning_rate=3e-3, checkpoint=keeping))
        train(plan, run, builder(engine), said.append)
    losses = {one.number: one.loss for one in said if isinstance(one, TimedStep) and one.loss is not None}
    assert len(losses) == sum(isinstance(one, TimedStep) for one in said), "every step has answers"
    return losses


def trained(text: str, engine: str, folder: Path, steps: int) -> dict[int, float]:
    plan = nxd_plan(text, llama(vocab=32), seq_len=16)
    return on_nxd_ranks(4, run_on, plan, engine, folder, steps, timeout_s=PATIENCE_S)[0]


@pytest.mark.parametrize(
    ("engines", "text"),
    [
        (("nxd", "nxd"), "tp=2,pp=1,dp=2"),
        (("nxd", "torch"), "tp=2,pp=1,dp=2"),
        (("torch", "nxd"), "tp=2,pp=2,dp=1"),
    ],
)
def test_either_engine_goes_on_from_the_other(engines: tuple[str, str], text: str, tmp_path: Path) -> None:
    first = "tp=2,pp=1,dp=2"
    whole = trained(first, engines[0], tmp_path / "whole", 6)
    parts = trained(first, engines[0], tmp_path / "parts", 4), trained(text, engines[1], tmp_path / "parts", 6)
    assert [list(part) for part in parts] == [[1, 2, 3, 4], [5, 6]] and whole[6] < whole[1]
    losses = {**parts[0], **parts[1]}
    exact = engines[0] == engines[1]
    np.testing.assert_allclose(list(losses.values()), list(whole.values()), rtol=0 if exact else 1e-5)
