"""What it costs the loop of a run to keep and track a step: the calling thread's time, not that of the writers."""

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import numpy as np

from autoshard.commands.running.steps import StepDisplay
from autoshard.plan.candidate import Candidate
from autoshard.plan.codec import dump
from autoshard.plan.plan import Plan
from autoshard.run.reports import TimedStep
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.training import Tracking, Training
from autoshard.spec.workload import Precision, Workload
from benchmarks.measure import yardstick_s
from benchmarks.result import Extra, Result

STEPS, WARM_UP = 1000, 100
PAUSE_S = 0.004  # a step that is far shorter than any real one
BAR_MS = 0.1
CASES: Mapping[str, Tracking] = {
    "file": Tracking(),
    "tensorboard": Tracking(tensorboard=True),
    "wandb_offline": Tracking(wandb="metrics_cost"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Milliseconds of the calling thread: what passed in every step, and what it computed in one on average."""

    passed_ms: tuple[float, ...]
    cpu_ms: float

    @property
    def median_ms(self) -> float:
        """Of what passed."""
        return float(np.median(self.passed_ms))


def step_times(track: Tracking, num_steps: int = STEPS) -> StepTimes:
    """Show so many steps in silence, and time each call."""
    plan = _plan()
    passed_s: list[float] = []
    computed_s = 0.0
    with tempfile.TemporaryDirectory() as name, patch.dict(os.environ, {"WANDB_MODE": "offline"}):
        folder = Path(name)
        (folder / "plan.json").write_text(dump(plan), encoding="utf-8")
        training = Training(steps=num_steps, track=track)
        with StepDisplay(plan, training, folder, platform=plan.cluster.name, silent=True, run_id="1") as show:
            for number in range(1, num_steps + 1):
                step = _step(number, plan)
                before_s, cpu_s = time.perf_counter(), time.thread_time()
                show(step)
                if number > WARM_UP:
                    passed_s.append(time.perf_counter() - before_s)
                    computed_s += time.thread_time() - cpu_s
                time.sleep(PAUSE_S)
    return StepTimes(passed_ms=tuple(one * 1e3 for one in passed_s), cpu_ms=computed_s * 1e3 / len(passed_s))


def run() -> Result:
    """Time every case whose package is here."""
    packages = {"file": "json", "tensorboard": "tensorboard", "wandb_offline": "wandb"}
    return judge({name: step_times(track) if find_spec(packages[name]) else None for name, track in CASES.items()})


def judge(found: Mapping[str, StepTimes | None]) -> Result:
    """The file with TensorBoard must cost less than a tenth of a millisecond, as the median of all steps."""
    extras: dict[str, Extra] = {}
    for name, one in found.items():
        extras[f"{name}_median_ms"] = round(one.median_ms, 4) if one else None
        extras[f"{name}_p99_ms"] = round(float(np.quantile(one.passed_ms, 0.99)), 4) if one else None
        extras[f"{name}_cpu_ms"] = round(one.cpu_ms, 4) if one else None
    main_case = found["tensorboard"] or found["file"]
    assert main_case, "the file needs no package"
    return Result(
        name="metrics_cost",
        value=round(main_case.median_ms, 4),
        unit="ms a step in the calling thread",
        bar=BAR_MS,
        holds=main_case.median_ms < BAR_MS,
        extras={**extras, "steps": len(main_case.passed_ms), "yardstick_s": yardstick_s()},
    )


def _plan() -> Plan:
    workload = Workload(seq_len=256, global_batch=8, precision=Precision.named("bf16"))
    request = Request(
        model=load_model("tiny-llama"), cluster=load_cluster("local", ranks=1), workload=workload, engines=("torch",)
    )
    return plan_at(request, Candidate.parse("tp=1,pp=1,dp=1"))


def _step(number: int, plan: Plan) -> TimedStep:
    assert plan.prediction
    return TimedStep(
        number=number,
        loss=6 / number,
        norm=1.5,
        time_s=plan.prediction.step_time_s,
        num_tokens=plan.workload.tokens_per_step,
        learning_rate=3e-4,
        waited_s=1e-4,
        memory_bytes=2**30,
    )
