"""Measured rows of this machine, of the form that ``calibrate`` and ``validate`` read, and its cluster file."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from autoshard import __version__
from autoshard.calibration.rows import OF_A_RUN, MeasuredRow, Occasion, row_of
from autoshard.files import append_line
from autoshard.plan.plan import Plan
from autoshard.run.protocol import Run
from autoshard.run.reports import RunReport
from autoshard.runtime.here import cluster_here, installed_packages, machine_words
from autoshard.runtime.launch import Placing, launch
from autoshard.runtime.machine import builder
from autoshard.runtime.train import train
from autoshard.spec.cluster import LOCAL
from autoshard.spec.record import encode
from autoshard.spec.training import Checkpointing, Training
from benchmarks.gpu.device import CLUSTER, Device, Item, asked_in_a_fork, measured, result
from benchmarks.gpu.subjects import ROOM, Sizes, model_of, plan_of
from benchmarks.result import Extra, Result

STEPS = 8  # of which two do not count
Words = Mapping[str, str | int]  # what a machine is
KERNELS = "torch_engine_gpu"
_SECONDS = 130.0  # for one GPU; with several there are more plans
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A run whose row is wanted."""

    card: str
    sizes: Sizes
    layout: str
    sequences: int

    def plan(self, device: Device) -> Plan:
        """Return its plan."""
        return plan_of(model_of(self.card, self.sizes, device), device, self.sizes.seq_len, self.layout, self.sequences)


def _asked(card: str, sizes: Sizes, layout: str, sequences: int = 2) -> Asked:
    return Asked(card=card, sizes=sizes, layout=layout, sequences=sequences)


_ONE = "tp=1,pp=1,dp=1"
# Layouts and shapes that differ: a fit wants to predict one from the others. The last ones fit in small memories.
ALONE: Sequence[Asked] = (
    _asked("llama3-8b", Sizes(layers=4), _ONE),
    _asked("llama3-8b", Sizes(layers=4, seq_len=4096), f"{_ONE},mbs=2,recompute=full", 4),
    _asked("llama3-8b", Sizes(layers=2, seq_len=2048), f"{_ONE},mbs=4", 16),
    _asked("mixtral-8x7b", Sizes(layers=1), _ONE),
    _asked("llama3-8b", Sizes(layers=1, vocab=32_000, seq_len=2048), f"{_ONE},mbs=2", 8),
    _asked("llama3-8b", Sizes(layers=1, vocab=32_000, seq_len=4096), f"{_ONE},recompute=full", 4),
)


def together(count: int) -> Sequence[Asked]:
    """Return runs of several GPUs: data, tensors and layers divided, and ZeRO-3."""
    few, sizes = min(count, 8), Sizes(layers=4)
    power = 1 << (few.bit_length() - 1)  # heads are divided by it
    return (
        _asked("llama3-8b", sizes, f"tp=1,pp=1,dp={power}", 2 * power),
        _asked("llama3-8b", sizes, f"tp=1,pp=1,dp={power},zero=3", 2 * power),
        _asked("llama3-8b", sizes, f"tp={power},pp=1,dp=1"),
        _asked("llama3-8b", sizes, "tp=1,pp=2,dp=1", 8),
    )


def run(device: Device) -> Iterator[Result]:
    """Run every plan that fits, as ``autoshard run`` does, and write its row."""
    machine: Words = {}
    if not device.dry:
        machine, cluster = asked_in_a_fork(machine_words), asked_in_a_fork(cluster_here)
        (device.folder / CLUSTER).write_text(json.dumps(cluster, indent=2) + "\n", encoding="utf-8")
    every = [*ALONE, *(together(device.count) if device.count > 1 else ())]
    items: list[Item] = []
    for one in every:
        plan = one.plan(device)
        assert plan.prediction, "a plan that was made has its prediction"
        if plan.prediction.peak_bytes <= ROOM * device.node_type.chip.memory_bytes:
            what = f"{one.sizes.layers} layers of {one.card} at {one.sizes.seq_len} tokens: {one.layout}"
            name = f"row_{len(items) + 1}"
            items.append(Item(name=name, what=what, measure=partial(row_measured, name, plan, device, machine)))
    yield from measured(items, device, _SECONDS * len(every) / len(ALONE))


def row_measured(name: str, plan: Plan, device: Device, machine: Words) -> Iterator[Result]:
    """Run a plan, append its row, and compare it with the prediction."""
    report = run_plan(plan, device)
    row = row_of_run(plan, report, device, machine)
    stated = {column: value for column, value in encode(row).items() if value is not None}
    append_line(device.folder / OF_A_RUN, json.dumps(stated))
    assert plan.prediction, "a plan that was made has its prediction"
    extras: dict[str, Extra] = {
        "predicted_s": plan.prediction.step_time_s,
        "error": plan.prediction.step_time_s / report.step_time_s - 1,
        "peak_gib": row.peak_memory_gib,
        "predicted_gib": plan.prediction.peak_bytes / _GIB,
        "layout": str(plan.candidate),
        "row": json.dumps(stated),
    }
    yield result(name, report.step_time_s, "s a step", extras)


def run_plan(plan: Plan, device: Device) -> RunReport:
    """Run a plan as ``autoshard run`` does; its ranks are forks, and every run begins with an empty device."""
    build = builder()  # imports torch, so that forks need not
    training = Training(steps=3 if device.dry else STEPS, checkpoint=Checkpointing(to="none"))
    with tempfile.TemporaryDirectory() as folder:
        mode = "generated" if device.dry else "compiled"
        run = Run(folder=Path(folder), training=training, device=device.type, mode=mode)
        placing = Placing(folder=run.folder, device=device.type)
        count = plan.mesh.num_ranks
        return launch(None, count, lambda say: train(plan, run, build, say), show=_silent, placing=placing)


def _silent(_: object) -> None:
    """Say nothing of single steps."""


def row_of_run(plan: Plan, report: RunReport, device: Device, machine: Words) -> MeasuredRow:
    """Return the row of a run; that of a dry run is one of a rehearsal on the host, which no fit takes."""
    now = datetime.now(UTC)
    occasion = Occasion(
        name=f"on_gpu {plan.model.name} {plan.candidate} {now:%Y-%m-%dT%H:%M:%S.%fZ}",
        step_time_s=report.step_time_s,
        date=f"{now:%Y-%m-%d}",
        versions=f"autoshard {__version__}, {installed_packages()}",
        platform=LOCAL if device.dry else plan.cluster.name,
        kind="rehearsal" if device.dry else report.kind,
    )
    row = row_of(plan, occasion)
    if device.dry:
        return row
    peaks = [step.memory_bytes for step in report.steps if step.memory_bytes]
    return replace(
        row,
        kernels=KERNELS,
        peak_memory_gib=max(peaks) / _GIB if peaks else None,
        source={**(row.source or {}), "machine": dict(machine)},
    )
