"""On a GPU: a run is saved from the device while it trains, and goes on bit for bit."""

import functools
from pathlib import Path
from typing import Any

import pytest

from autoshard.plan.plan import Plan
from autoshard.run.protocol import Run
from autoshard.runtime.checkpoint.files import load_index
from autoshard.runtime.launch import Placing, launch
from autoshard.runtime.machine import builder
from autoshard.runtime.meeting import GivenRank
from autoshard.runtime.train import train
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.training import Checkpointing, Training
from autoshard.spec.workload import Precision
from tests.jobs.test_torchrun import free_port
from tests.kit import local_plan
from tests.runtime.training_cases import Trained

pytestmark = pytest.mark.gpu


@functools.cache
def plan_of(precision: str, documents: Any, model: str) -> Plan:
    """One rank; the cluster's name does not matter to an engine."""
    sizes = {"seq_len": 256, "global_batch": 8, "precision": Precision.named(precision), "documents": documents}
    return local_plan("tp=1,pp=1,dp=1,mbs=4", load_model(model), **sizes)


def start(plan: Plan, folder: Path, steps: int) -> Trained:
    found = Trained()
    training = Training(steps=steps, learning_rate=1e-3, deterministic=True, checkpoint=Checkpointing(every_steps=2))
    run = Run(folder=folder, training=training, device="cuda")
    build = builder("torch")
    rank = GivenRank(by="torchrun", rank=0, num_ranks=1, meeting=f"tcp://127.0.0.1:{free_port()}", alone=True)
    placing = Placing(folder=folder, device="cuda")
    found.report = launch(rank, 1, lambda say: train(plan, run, build, say), show=found.said.append, placing=placing)
    return found


@pytest.mark.parametrize(
    ("precision", "documents", "model"),
    [
        *((name, "joined", "tiny-llama") for name in ("bf16", "fp32", "bf16-sr", "bf16,gradients=bf16,moments=bf16")),
        ("bf16", "separate", "tiny-llama"), ("bf16,products=fp8", "joined", "tiny-llama"),
        ("bf16,products=fp8", "joined", "tiny-mixtral"),
    ],
)  # fmt: skip
def test_a_run_goes_on_bit_for_bit(precision: str, documents: str, model: str, tmp_path: Path) -> None:
    plan = plan_of(precision, documents, model)
    whole = start(plan, tmp_path / "whole", 8)
    parts = [start(plan, tmp_path / "parts", steps) for steps in (3, 8)]
    assert parts[0].curve | parts[1].curve == whole.curve
    assert whole.curve[8] < whole.curve[1]
    sums = [
        load_index((tmp_path / name / "checkpoints" / "step-00000008" / "index.json").read_bytes(), "").tensors
        for name in ("whole", "parts")
    ]
    assert sums[0] == sums[1] and any("moment2" in name for name in sums[0])
