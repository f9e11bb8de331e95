"""Whole runs with the real NxD: killed and continued bit for bit, and by either engine from the other's checkpoint."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from autoshard.engine.base import Run, StepReport, TimedStep
from autoshard.plan.plan import Plan
from autoshard.runtime.train import train
from autoshard.spec.training import Checkpointing, Training
from tests.neuron.cases import PATIENCE_S, as_started, nxd_plan
from tests.ranks.cases import llama
from tests.ranks.spawn import RankFailed, on_ranks

pytestmark = [pytest.mark.nxd, pytest.mark.usefixtures("nxd")]
STEPS, EVERY = 6, 2
TEXTS = ("tp=2,pp=1,dp=2", "tp=2,pp=2,dp=1")


def run_on(plan: Plan, engine: str, folder: Path, dies: bool) -> tuple[int, dict[int, float]]:
    """What every rank runs: the loop, which may kill rank 1 in the last step; return where it began, and its losses."""
    said: list[Any] = []
    with as_started(plan.mesh.size("tp")):
        if engine == "nxd":
            from autoshard.engine.nxd.engine import build
        else:
            from autoshard.engine.torch.engine import build
        keeping = Checkpointing(every_steps=EVERY, every_minutes=None)
        run = Run(folder=folder, training=Training(steps=STEPS, learning_rate=3e-3, checkpoint=keeping))

        def built(plan: Plan, run: Run) -> Any:
            made: Any = build(plan, run)
            whole_step, number = made.step, [0]

            def step(*args: Any, **options: Any) -> StepReport:
                number[0] += 1
                if dies and number[0] == STEPS and dist.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return whole_step(*args, **options)

            made.step = step
            return made

        train(plan, run, built, said.append)
    return said[0].step, {one.number: one.loss for one in said if isinstance(one, TimedStep)}


def trained(text: str, engine: str, folder: Path, *, dies: bool = False) -> tuple[int, dict[int, float]]:
    plan = nxd_plan(text, llama(vocab=32), seq_len=16)
    return on_ranks(4, run_on, plan, engine, folder, dies, timeout_s=PATIENCE_S)[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run that nothing disturbs."""
    losses = trained(TEXTS[0], "nxd", tmp_path_factory.mktemp("whole"))[1]
    assert losses[STEPS] < losses[1]
    return losses


@pytest.mark.parametrize(
    ("engines", "other"),
    [(("nxd", "nxd"), 0), (("nxd", "torch"), 0), (("torch", "nxd"), 0), (("nxd", "nxd"), 1), (("torch", "nxd"), 1)],
)
def test_a_killed_run_goes_on_with_either_engine(
    engines: tuple[str, str], other: int, whole: dict[int, float], tmp_path: Path
) -> None:
    with pytest.raises(RankFailed):
        trained(TEXTS[0], engines[0], tmp_path, dies=True)
    began, losses = trained(TEXTS[other], engines[1], tmp_path)
    assert began in (2, 4) and list(losses) == list(range(began + 1, STEPS + 1))
    if (engines, other) == (("nxd", "nxd"), 0):
        assert all(losses[step] == whole[step] for step in losses)
    np.testing.assert_allclose([losses[step] for step in losses], [whole[step] for step in losses], rtol=1e-5)
