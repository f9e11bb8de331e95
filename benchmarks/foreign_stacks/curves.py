"""What becomes of a stack: plans for two clusters, and a run that is killed and goes on in another pipeline."""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from autoshard.plan.code import data_key
from autoshard.plan.codec import load
from autoshard.plan.plan import Plan
from autoshard.runtime.data.batches import StepShape, batches
from autoshard.runtime.data.opened import source_of
from autoshard.spec.training import Training
from benchmarks.foreign_stacks import catalogue
from benchmarks.foreign_stacks.catalogue import LENGTH, ForeignStack

CLUSTERS: Mapping[str, str] = {"64 H100": "--cluster h100-80 --nodes 8", "4 trn2": "--cluster trn2.48xlarge --nodes 4"}
BEFORE = "--ranks 4 --fix pp=2,dp=2,mbs=2,schedule=1f1b,vp=1"
AFTER = "--ranks 8 --fix pp=2,dp=4,mbs=2,schedule=interleaved,vp=2"
BAR = 1e-4  # of the relative difference of a loss, in FP32
_BATCH, _RATE = 16, 3e-3
_SAVED_EVERY, _KILLED_AT, _GOES_ON_FOR = 3, 5, 4  # steps
_RUN = (
    f"--learning-rate {_RATE} --schedule.shape constant --schedule.warm-up-steps 0 "
    f"--checkpoint.every-steps {_SAVED_EVERY}"
)
_TIMEOUT_S = 300.0
EQUAL, WRONG, REFUSED, FAILED = "equal", "wrong", "refused", "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a stack: what was chosen for clusters, and how far its losses were from the plain module's."""

    kind: str
    words: str = ""
    layouts: Mapping[str, str] | None = None
    killed_at: int = 0  # the step from which it went on
    losses: float = 0.0
    back: float = 0.0  # of the module that the run was converted to


def tried(stack: ForeignStack) -> Outcome:
    """Plan a stack, train it in both pipelines, and train the plain module beside it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        module = f"--module {Path(catalogue.__file__)}:{stack.function}"
        asked = f"plan {module} --global-batch {_BATCH} --precision fp32 --cluster local"
        try:
            length = [] if _brings_data(stack) else ["--seq-len", str(LENGTH)]
            for number, options in enumerate(CLUSTERS.values()):
                _answer(folder, f"plan {module} --global-batch 512 {options} --out {number}.json", *length)
            layouts = {name: str(load(folder / f"{n}.json").candidate) for n, name in enumerate(CLUSTERS)}
            _answer(folder, f"{asked} {BEFORE} --out before.json", *length)
            _answer(folder, f"{asked} {AFTER} --out after.json", *length)
            saved = _killed(folder)
            _answer(folder, f"run after.json --out run --steps {saved + _GOES_ON_FOR} {_RUN}")
            _answer(folder, "convert run ended.pt")
        except subprocess.CalledProcessError as error:
            words = " ".join(str(error.stderr).split()[-60:])
            return Outcome(kind=REFUSED if error.returncode == 2 else FAILED, words=words)
        losses, back = _differences(stack, folder)
        kind = EQUAL if max(losses, back) <= BAR else WRONG
        return Outcome(kind=kind, layouts=layouts, killed_at=saved, losses=losses, back=back)


def _brings_data(stack: ForeignStack) -> bool:
    return isinstance(getattr(catalogue, stack.function)(), tuple)


def _command(text: str, *more: str) -> Sequence[str]:
    return [sys.executable, "-m", "autoshard.cli", *text.split(), *more]


def _environment() -> Mapping[str, str]:
    return {**os.environ, "AUTOSHARD_CACHE": "", "OMP_NUM_THREADS": "1"}


def _answer(folder: Path, text: str, *more: str) -> str:
    """Return what a command prints; raise CalledProcessError where it fails."""
    done = subprocess.run(
        _command(text, *more), cwd=folder, env=_environment(), capture_output=True, text=True, check=True,
        timeout=_TIMEOUT_S,
    )  # fmt: skip
    return done.stdout


def _killed(folder: Path) -> int:
    """Train until some steps are done, kill all ranks at once, and return the step of the newest checkpoint."""
    run = subprocess.Popen(
        _command(f"run before.json --out run --steps 100000 {_RUN}"), cwd=folder, env=_environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, text=True,
    )  # fmt: skip
    ends = time.monotonic() + _TIMEOUT_S
    while run.poll() is None and time.monotonic() < ends and not _is_due(folder):
        time.sleep(0.01)
    if run.poll() is not None:
        raise subprocess.CalledProcessError(run.returncode, "run", stderr=run.communicate()[1])
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    return max(_saved(folder))


def _is_due(folder: Path) -> bool:
    return bool(_saved(folder)) and max(_losses(folder), default=0) >= _KILLED_AT


def _saved(folder: Path) -> list[int]:
    """Return the steps of complete checkpoints."""
    names = (path.name for path in (folder / "run" / "checkpoints").glob("step-*"))
    return [int(number) for name in names if (number := name.removeprefix("step-")).isdigit()]


def _losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step; of steps that were done twice the last."""
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def _differences(stack: ForeignStack, folder: Path) -> tuple[float, float]:
    """Return how far losses are from the plain module's, and on the next batch that of the module that came back."""
    plan, losses = load(folder / "after.json"), _losses(folder)
    module, source = _module(stack), source_of(plan, Training().data, Training().seed)
    optimizer, num_steps, worst = _adamw(module), max(losses), 0.0

    def parts(step: int) -> Sequence[Mapping[str, Any]]:
        return batches(source, plan.workload.global_batch * (step - 1), StepShape.of(plan))

    for step in range(1, num_steps + 1):
        loss = _loss(module, parts(step), plan)
        worst = max(worst, _far(losses[step], loss.item())) if step in losses else worst
        optimizer.zero_grad()
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        nn.utils.clip_grad_norm_(module.parameters(), plan.workload.clip_norm)
        optimizer.step()
    back = _module(stack)
    back.load_state_dict(torch.load(folder / "ended.pt"))
    after = [_loss(trained, parts(num_steps + 1), plan).item() for trained in (back, module)]
    return worst, _far(*after)


def _module(stack: ForeignStack) -> nn.Module:
    made: Any = getattr(importlib.import_module(catalogue.__name__), stack.function)()
    return (made[0] if isinstance(made, tuple) else made).train()  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]


def _far(loss: float, plain: float) -> float:
    return abs(loss - plain) / abs(plain)


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of runs: weights of two and more dims decay."""
    constants = Training().adamw
    groups = [
        {"params": [weight for weight in module.parameters() if (weight.dim() > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, constants.weight_decay), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=_RATE, betas=(constants.beta1, constants.beta2), eps=constants.eps)


def _loss(module: nn.Module, parts: Sequence[Mapping[str, Any]], plan: Plan) -> torch.Tensor:
    """Return the loss of the plain module on a whole batch."""

    def whole(name: str) -> torch.Tensor:
        tensor = torch.tensor(np.ascontiguousarray(np.concatenate([part[name] for part in parts])))
        return tensor.float() if tensor.is_floating_point() else tensor

    code = plan.code
    assert code, "the plan is of a module's code"
    if code.data:
        return module(**{argument.name: whole(data_key(argument.name)) for argument in code.data})
    if code.own_loss:
        return module(whole("tokens"), whole("labels"))
    logits, labels = module(whole("tokens")).flatten(0, 1).float(), whole("labels").flatten()
    return (functional.cross_entropy(logits, labels, reduction="none") * whole("token_weight").flatten()).sum()
