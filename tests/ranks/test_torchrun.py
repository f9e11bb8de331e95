"""Every kind of layout on ranks that torchrun starts, with other hash seeds: gradients are those of one process."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.engine.torch.agreeing import AgreeingEngine
from autoshard.engine.torch.engine import TorchEngine
from autoshard.run.protocol import EngineMode, Run
from autoshard.spec.model import ModelSpec
from autoshard.spec.training import Training, Watching
from tests.ranks.cases import EXACT, MIXTRAL, StepShare, Task, compare, gpt, llama, plan_of
from tests.ranks.shares import gradients_of, weights_of
from tests.ranks.torchrun import on_torchrun
from tests.slower import rest_is_slow

EVERY = Training(watchdog=Watching(collectives="every"))
KINDS: dict[str, tuple[str, ModelSpec]] = {
    "buckets that one block ends": ("tp=2,pp=2,dp=2,mbs=2,zero=1", llama()),
    "tp": ("tp=4,pp=1,dp=1", llama()),
    "pp": ("tp=1,pp=4,dp=1", gpt(num_layers=4)),
    "cp": ("tp=1,pp=1,cp=2,dp=2,cp_order=zigzag", llama()),
    "ep": ("tp=1,pp=1,dp=4,ep=2", llama(**MIXTRAL)),
    "ZeRO-0": ("tp=2,pp=1,dp=2,zero=0", gpt()),
    "ZeRO-3": ("tp=2,pp=1,dp=2,zero=3", llama()),
    "interleaved": ("tp=1,pp=2,dp=2,vp=2,schedule=interleaved", llama(num_layers=4)),
    "zero-bubble": ("tp=1,pp=2,dp=2,schedule=zb_h1,zero=1", gpt(num_layers=4)),
    "zb_v": ("tp=2,pp=2,dp=1,vp=2,schedule=zb_v", llama(num_layers=4)),
    "host memory": ("tp=1,pp=2,dp=2,schedule=zb_h1,zero=3,recompute=none+offload/full+offload", gpt(num_layers=4)),
    "host memory, experts": ("tp=1,pp=1,dp=4,ep=2,recompute=selective[norms]+offload", llama(**MIXTRAL)),
}


def run_agreeing(task: Task, mode: EngineMode = "generated") -> StepShare:
    """Run a step in double, whose collectives are compared with those that were announced."""
    run = Run(folder=Path(), training=EVERY, mode=mode)
    engine = TorchEngine(task.plan, task.weights.__getitem__, EXACT, run)
    report = AgreeingEngine(task.plan, engine).step(task.steps[0], task.learning_rate)
    return StepShare(
        loss=report.loss, norm=report.norm, gradients=gradients_of(engine), weights=weights_of(engine),
        router=report.router,
    )  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("kind", rest_is_slow(sorted(KINDS, key=lambda kind: kind != "zero-bubble"), 0))
def test_ranks_of_torchrun_compute_what_one_process_computes(kind: str, tmp_path: Path) -> None:
    text, model = KINDS[kind]
    task = Task.of(plan_of(text, model))
    compare(task.reference(), on_torchrun(tmp_path, task.plan.mesh.num_ranks, run_agreeing, replace(task)))
