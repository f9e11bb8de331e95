"""Run a function on ranks that the real torchrun starts, each an interpreter with its own hash seed."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dill

from autoshard.engine.torch.agreeing import AgreeingEngine
from autoshard.engine.torch.engine import TorchEngine
from autoshard.run.protocol import EngineMode, Run
from autoshard.spec.training import Training, Watching
from tests.ranks.cases import EXACT, StepShare, Task
from tests.ranks.shares import gradients_of, weights_of
from tests.runtime.cases import ROOT, environment

_WORK = "work.pickle"
EVERY = Training(watchdog=Watching(collectives="every"))


def on_torchrun(
    folder: Path, num_ranks: int, body: Callable[..., Any], *args: Any, timeout_s: float = 300.0
) -> list[Any]:
    """Call ``body(*args)`` on every rank, and return the answers by rank; a failure has torchrun's words."""
    (folder / _WORK).write_bytes(dill.dumps((body, args)))
    seeded = f'PYTHONHASHSEED=$((1 + 3 * RANK)) exec "{sys.executable}" -m tests.ranks.torchrun "{folder}"'
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)),
        *("--no-python", "sh", "-c", seeded),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1"), timeout=timeout_s,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"torchrun ended with {done.returncode}\n{done.stderr[-6000:]}"
    return [pickle.loads((folder / f"answer-{rank}.pickle").read_bytes()) for rank in range(num_ranks)]


def be_a_rank(folder: Path) -> None:
    """Do the work of the folder in torch's world, as torchrun's variables say."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    body, args = dill.loads((folder / _WORK).read_bytes())
    answer = body(*args)
    (folder / f"answer-{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def run_agreeing(task: Task, mode: EngineMode = "generated") -> StepShare:
    """Run a step in double, whose collectives are compared with those that were announced."""
    run = Run(folder=Path(), training=EVERY, mode=mode)
    engine = TorchEngine(task.plan, task.weights.__getitem__, EXACT, run)
    report = AgreeingEngine(task.plan, engine).step(task.steps[0], task.learning_rate)
    return StepShare(
        loss=report.loss, norm=report.norm, gradients=gradients_of(engine), weights=weights_of(engine),
        router=report.router,
    )  # fmt: skip


if __name__ == "__main__":
    be_a_rank(Path(sys.argv[1]))
