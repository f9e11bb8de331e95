"""Whole runs with the real NxD: saved, killed, continued; and either engine goes on from the other's checkpoint."""

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoshard.engine.base import Run, StepReport
from autoshard.plan.plan import Plan
from autoshard.runtime.machine import builder
from autoshard.runtime.train import train
from autoshard.spec.training import Checkpointing, Training
from tests.neuron.cases import nxd_plan
from tests.ranks.cases import llama
from tests.ranks.spawn import RankFailed, on_ranks

pytestmark = [pytest.mark.nxd, pytest.mark.usefixtures("nxd")]
STEPS, EVERY = 6, 2


def run_on(plan: Plan, engine: Any, folder: Path, dies_in: int) -> tuple[int, dict[int, float]]:
    """What every rank runs: the loop, which may kill rank 1 in a step; return where it began, and its losses."""
    said: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["LOCAL_WORLD_SIZE"] = str(plan.mesh.size("tp"))
        build = builder(engine)
        keeping = Checkpointing(every_steps=EVERY, every_minutes=None)
        run = Run(folder=folder, training=Training(steps=STEPS, learning_rate=3e-3, checkpoint=keeping))

        def built(plan: Plan, run: Run) -> Any:
            made: Any = build(plan, run)
            whole_step, number = made.step, [0]

            def step(*args: Any, **options: Any) -> StepReport:
                number[0] += 1
                if number[0] == dies_in and os.environ.get("RANK_OF_TEST") == "1":
                    os.kill(os.getpid(), signal.SIGKILL)
                return whole_step(*args, **options)

            made.step = step
            return made

        import torch.distributed as dist

        os.environ["RANK_OF_TEST"] = str(dist.get_rank())
        train(plan, run, built, said.append)
    return said[0].step, {one.number: one.loss for one in said if hasattr(one, "loss")}


def trained(plan: Plan, engine: str, folder: Path, dies_in: int = 0) -> tuple[int, dict[int, float]]:
    return on_ranks(4, run_on, plan, engine, folder, dies_in, timeout_s=300.0)[0]


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, Plan]:
    model = llama(vocab=32)
    return nxd_plan("tp=2,pp=1,dp=2", model, seq_len=16), nxd_plan("tp=2,pp=2,dp=1", model, seq_len=16)


@pytest.fixture(scope="module")
def whole(plans: tuple[Plan, Plan], tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run that nothing disturbs."""
    return trained(plans[0], "nxd", tmp_path_factory.mktemp("whole"))[1]


def test_a_killed_run_continues_bit_for_bit(plans: tuple[Plan, Plan], whole: dict[int, float], tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        trained(plans[0], "nxd", tmp_path, dies_in=6)
    began, losses = trained(plans[0], "nxd", tmp_path)
    assert began in (2, 4) and losses == {step: whole[step] for step in range(began + 1, STEPS + 1)}


@pytest.mark.parametrize(
    ("engines", "other"), [(("nxd", "torch"), 0), (("torch", "nxd"), 0), (("nxd", "nxd"), 1), (("torch", "nxd"), 1)]
)
def test_either_engine_goes_on_from_the_other(
    engines: tuple[str, str], other: int, plans: tuple[Plan, Plan], whole: dict[int, float], tmp_path: Path
) -> None:
    with pytest.raises(RankFailed):
        trained(plans[0], engines[0], tmp_path, dies_in=6)
    began, losses = trained(plans[other], engines[1], tmp_path)
    assert began >= 2 and list(losses) == list(range(began + 1, STEPS + 1))
    np.testing.assert_allclose([losses[step] for step in losses], [whole[step] for step in losses], rtol=1e-5)
