"""Runs of the command line on the GPUs of this machine, or, where there are none, on its processors."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoshard.plan.candidate import Candidate
from autoshard.plan.codec import dump
from autoshard.plan.plan import Plan
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload
from tests.runtime.cases import environment


def plan_of_gpus(text: str, precision: str = "fp32", global_batch: int = 8) -> Plan:
    """The plan of a layout of tiny-llama on GPUs, one a rank."""
    candidate = Candidate.parse(text)
    workload = Workload(seq_len=64, global_batch=global_batch, precision=Precision.named(precision))
    cluster = replace(load_cluster("h100-80"), chips_per_node=candidate.num_ranks, placements=())
    model = replace(load_model("tiny-llama"), num_layers=4)
    request = Request(model=model, cluster=cluster, workload=workload, engines=("torch",))
    return plan_at(request, candidate, even_refused=True)


def ran(plan: Plan, folder: Path, *options: str, steps: int = 4) -> subprocess.CompletedProcess[str]:
    """Run a plan to its end as a person would."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(dump(plan), encoding="utf-8")
    words = ["run", "plan.json", "--out", "run", "--steps", str(steps), *options]
    command = [sys.executable, "-m", "autoshard.cli", *words]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=300
    )


def losses(folder: Path) -> list[float]:
    """The losses of the steps of a run."""
    lines = (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    steps: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [step["loss"] for step in steps]
