"""How far step times of layouts and shapes that no fit has seen are off, once autoshard is calibrated on this machine.

The loop that a user goes through: plans are run, ``calibrate`` fits their rows, other plans are predicted and then run.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.calibration.calibrate import fit, samples_in
from autoshard.calibration.rows import Occasion, row_of
from autoshard.cost.calibration import Calibration
from autoshard.cost.predict import predict
from autoshard.errors import InputError
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.run.protocol import Run
from autoshard.run.reports import WARM_UP, RunReport
from autoshard.runtime.launch import Placing, launch
from autoshard.runtime.machine import builder
from autoshard.runtime.train import train
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.record import encode
from autoshard.spec.training import Checkpointing, Training
from autoshard.spec.workload import Precision, Workload
from benchmarks.measure import yardstick_s
from benchmarks.result import Extra, Result

BAR, BAR_OF_ANY = 0.12, 0.30  # of the median, and of every single plan
ROUNDS, STEPS = 2, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A small Llama and its work."""

    hidden: int
    layers: int
    seq_len: int
    sequences: int

    def __str__(self) -> str:
        """Name it by its numbers."""
        return f"h{self.hidden}-l{self.layers}-s{self.seq_len}-b{self.sequences}"

    def plan(self, text: str) -> Plan:
        """Return the plan of exactly this layout on this machine."""
        heads = self.hidden // 32
        sizes: dict[str, Any] = {"hidden": self.hidden, "ffn": 3 * self.hidden, "num_heads": heads, "head_dim": 32}
        model = replace(
            load_model("tiny-llama"),
            name=str(self),
            num_layers=self.layers,
            num_kv_heads=2 if heads % 4 else heads // 2,  # which two ranks of tp divide
            vocab=1024,
            **sizes,
        )
        candidate = Candidate.parse(text)
        workload = Workload(seq_len=self.seq_len, global_batch=self.sequences, precision=Precision.named("bf16"))
        cluster = load_cluster("local", ranks=candidate.num_ranks)
        return plan_at(Request(model=model, cluster=cluster, workload=workload, engines=("torch",)), candidate)


def _shape(hidden: int, layers: int, seq_len: int, sequences: int) -> Shape:
    return Shape(hidden=hidden, layers=layers, seq_len=seq_len, sequences=sequences)


Case = tuple[str, Shape]
SEEN: Sequence[Case] = (
    ("tp=1,pp=1,dp=1", _shape(256, 4, 256, 8)),
    ("tp=1,pp=1,dp=1", _shape(128, 4, 64, 8)),
    ("tp=1,pp=1,dp=1,mbs=2", _shape(384, 2, 256, 4)),
    ("tp=1,pp=1,dp=1,recompute=full", _shape(128, 6, 512, 4)),
    ("tp=2,pp=1,dp=1", _shape(256, 4, 128, 8)),
    ("tp=2,pp=1,dp=1", _shape(128, 2, 512, 4)),
    ("tp=2,pp=1,dp=1,mbs=2", _shape(384, 2, 256, 8)),
    ("tp=2,pp=1,dp=1", _shape(128, 4, 32, 8)),
    ("tp=1,pp=2,dp=1", _shape(256, 4, 128, 8)),
    ("tp=1,pp=1,dp=2", _shape(256, 4, 256, 8)),
    ("tp=1,pp=1,dp=2,zero=0", _shape(128, 4, 128, 8)),
    ("tp=1,pp=1,cp=2,dp=1", _shape(256, 2, 512, 4)),
    ("tp=1,pp=1,cp=2,dp=1", _shape(128, 4, 128, 8)),
)
NEW: Sequence[Case] = (
    ("tp=1,pp=1,dp=1,mbs=4", _shape(192, 6, 128, 8)),
    ("tp=1,pp=1,dp=1,recompute=selective[mlp]", _shape(320, 3, 256, 8)),
    ("tp=2,pp=1,dp=1,sp=false", _shape(192, 3, 256, 8)),
    ("tp=2,pp=1,dp=1,mbs=2,recompute=full", _shape(320, 2, 128, 8)),
    ("tp=1,pp=2,dp=1,mbs=2,schedule=gpipe", _shape(192, 6, 256, 8)),
    ("tp=1,pp=2,dp=1,schedule=zb_h1", _shape(320, 4, 128, 8)),
    ("tp=1,pp=1,dp=2,zero=3,mbs=2", _shape(192, 4, 128, 8)),
    ("tp=1,pp=1,cp=2,dp=1,cp_order=zigzag", _shape(192, 4, 256, 8)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun:
    """What was predicted of a plan, and what it took."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1


def name_of(case: Case) -> str:
    """Name a case by its layout and shape."""
    return f"{case[0]} {case[1]}"


def run_plan(plan: Plan, num_steps: int = STEPS) -> RunReport:
    """Run a plan as ``autoshard run`` does."""
    build = builder()  # imports torch, so that forks need not
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder=Path(folder), training=Training(steps=num_steps, checkpoint=Checkpointing(to="none")))
        placing = Placing(folder=run.folder)
        return launch(
            None, plan.mesh.num_ranks, lambda say: train(plan, run, build, say), show=_silent, placing=placing
        )


def _silent(_: object) -> None:
    """Say nothing of single steps."""


def fastest_s(reports: Sequence[RunReport]) -> float:
    """Return the fastest step of several runs: what else a machine does can only make steps longer."""
    return min(step.time_s for report in reports for step in report.steps[WARM_UP:] or report.steps)


def fitted(plans: Mapping[str, Plan], times_s: Mapping[str, float]) -> Calibration:
    """Return what ``autoshard calibrate`` makes of the rows of these runs."""
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        rows = (
            row_of(plan, Occasion(name=name, step_time_s=times_s[name], date=today, versions="this checkout"))
            for name, plan in plans.items()
        )
        path.write_text("\n".join(json.dumps(encode(row)) for row in rows), encoding="utf-8")
        return fit(samples_in(path, "local"), "this machine")


def run() -> Result:
    """Run all plans turn by turn, fit to the first of them, and predict the others."""
    cores = os.cpu_count() or 1
    if cores < 2:
        raise InputError.of("local_prediction", "needs two cores: its plans have up to two ranks")
    seen, new = ({name_of(case): case[1].plan(case[0]) for case in cases} for cases in (SEEN, NEW))
    reports: dict[str, list[RunReport]] = {name: [] for name in (*seen, *new)}
    for _ in range(ROUNDS):
        for name, plan in (*seen.items(), *new.items()):
            reports[name].append(run_plan(plan))
    times_s = {name: fastest_s(found) for name, found in reports.items()}
    calibration = fitted(seen, times_s)
    return judge([predicted_run(name, plan, calibration, times_s[name]) for name, plan in new.items()], calibration)


def predicted_run(name: str, plan: Plan, calibration: Calibration, measured_s: float) -> PredictedRun:
    """Predict a plan with these constants."""
    return PredictedRun(name=name, predicted_s=predict(plan, calibration).step_time_s, measured_s=measured_s)


def judge(found: Sequence[PredictedRun], calibration: Calibration) -> Result:
    """The median error must be small, and none large; every row is told."""
    error, largest = (float(of([abs(one.error) for one in found])) for of in (np.median, np.max))
    extras: dict[str, Extra] = {
        one.name: f"{one.predicted_s:.4f} s predicted, {one.measured_s:.4f} s measured, {one.error:+.1%}"
        for one in found
    }
    assert calibration.fit, "what was fitted says to what"
    extras |= {
        "largest": round(largest, 4), "bar_of_any": BAR_OF_ANY, "fitted": calibration.basis,
        "left_out_mape": calibration.fit.left_out_mape, "cores": os.cpu_count(), "yardstick_s": yardstick_s(),
    }  # fmt: skip
    return Result(
        name="local_prediction",
        value=round(error, 4),
        unit="median error of the step time",
        bar=BAR,
        holds=error <= BAR and largest <= BAR_OF_ANY,
        extras=extras,
    )
