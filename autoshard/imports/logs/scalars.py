"""Named numbers by step, as programs write them to TensorBoard and W&B, read as the reports of their text logs.

Names: NVIDIA/Megatron-LM 001b00c (training_log), pytorch/torchtitan 00fbaaf (components/metrics.py), NVIDIA-NeMo
8cfedd7 (TimingCallback, MemoryMonitor), aws-neuron/neuronx-distributed-training 9169aa0, EleutherAI/gpt-neox
(megatron/logging.py), the Trainer of Hugging Face.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from autoshard.imports.logs.log import LogReport, MemoryKind, PeakMemory, RateUnit, TrainingLog

_MOST = 50_000  # steps that are held, the last ones
_GIB = 1 << 30
_CLOCK_S = 0.1  # stamps are of the call that logs


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarForm:
    """The names under which a program writes its reports."""

    program: str
    configurations: tuple[str, ...]
    marks: tuple[str, ...]  # any of these tells the program
    time: tuple[str, ...] = ()  # seconds of a step
    rate: tuple[str, ...] = ()
    unit: RateUnit | None = None
    batch: tuple[str, ...] = ()
    memory: Mapping[str, tuple[MemoryKind, float]] = field(default_factory=dict[str, tuple[MemoryKind, float]])
    are_means: bool = True


_TOKENS, _SEQUENCES = RateUnit(what="tokens", per_rank=True), RateUnit(what="sequences", per_rank=False)
FORMS = (
    ScalarForm(
        program="Megatron-LM", configurations=("megatron", "bridge"),
        marks=("iteration-time", "iteration-time/iteration-time", "runtime/iteration_time"),
        time=("iteration-time", "iteration-time/iteration-time", "runtime/iteration_time"),
        rate=("runtime/samples_per_sec",), unit=_SEQUENCES, batch=("batch-size", "batch-size/batch-size"),
        memory={"mem-max-allocated-bytes": ("allocated", _GIB)},
    ),
    ScalarForm(
        program="torchtitan", configurations=("torchtitan",),
        marks=("throughput(tps)", "time_metrics/end_to_end(s)", "wps"), time=("time_metrics/end_to_end(s)",),
        rate=("throughput(tps)", "wps"), unit=_TOKENS, memory={"memory/max_reserved(GiB)": ("reserved", 1.0)},
    ),
    ScalarForm(
        program="NxD Training", configurations=("nxdt",), marks=("throughput_peak",),
        rate=("throughput",), unit=_SEQUENCES, are_means=False,
    ),
    ScalarForm(
        program="NeMo", configurations=("bridge", "megatron", "nxdt"),
        marks=("train_step_timing in s", "train_step_timing"), time=("train_step_timing in s", "train_step_timing"),
        batch=("global_batch_size",), are_means=False, memory={
            "peak_memory_usage": ("allocated", _GIB), "max_memory_allocated": ("allocated", _GIB),
            "max_memory_reserved": ("reserved", _GIB),
        },
    ),
    ScalarForm(
        program="the Trainer of Hugging Face", configurations=("accelerate", "deepspeed"), marks=("train/global_step",),
    ),
)  # fmt: skip
_STEP_NAME = "train/global_step"  # of the Trainer, whose W&B steps are counts of calls
NAMES = frozenset(
    name for form in FORMS for name in (*form.marks, *form.time, *form.rate, *form.batch, *form.memory, _STEP_NAME)
)


@dataclass(slots=True)
class ScalarTable:
    """Values by step and name, of the names that say something here."""

    rows: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    stamps: dict[int, float] = field(default_factory=dict[int, float])
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    remarks: list[str] = field(default_factory=list[str])

    def add(self, step: int, name: str, value: float, stamp_s: float) -> None:
        """Take a value; a tag of torchtitan may stand before its name."""
        listed = name if name in NAMES else next((tag for tag in NAMES if name.endswith(f"/{tag}")), None)
        if listed is None or step < 0:
            return
        if listed == _STEP_NAME:
            step = int(value)
        if step not in self.rows and len(self.rows) >= 2 * _MOST:
            for old in [*self.rows][:_MOST]:
                del self.rows[old]
                self.stamps.pop(old, None)
        self.rows.setdefault(step, {})[listed] = value
        if stamp_s > 0:
            self.stamps.setdefault(step, stamp_s)

    def log(self, file: str) -> TrainingLog | None:
        """Return the log of the first program of which a name is there."""
        present = {name for row in self.rows.values() for name in row}
        form = next((form for form in FORMS if present.intersection(form.marks)), None)
        if form is None:
            return None
        numbers = sorted(self.rows)
        steps = [self._step(form, number) for number in numbers]
        steps = [step for step in steps if step.time_s or step.rate or not (form.time or form.rate)]
        first = min(self.stamps.values(), default=None)
        return TrainingLog(
            program=form.program,
            file=file,
            configurations=form.configurations,
            steps=tuple(steps),
            are_means=form.are_means,
            rate=form.unit if any(step.rate for step in steps) else None,
            memory=tuple(self._memory(form, numbers)),
            config=self.config,
            clock_s=_CLOCK_S,
            date=datetime.fromtimestamp(first, UTC).date().isoformat() if first else None,
            remarks=tuple(self.remarks),
        )

    def _step(self, form: ScalarForm, number: int) -> LogReport:
        row = self.rows[number]

        def value(names: tuple[str, ...]) -> float | None:
            return next((row[name] for name in names if row.get(name, 0) > 0), None)

        batch = value(form.batch)
        return LogReport(
            number=number, time_s=value(form.time), rate=value(form.rate), stamp_s=self.stamps.get(number),
            batch=int(batch) if batch else None,
        )  # fmt: skip

    def _memory(self, form: ScalarForm, numbers: list[int]) -> list[PeakMemory]:
        peaks: list[PeakMemory] = []
        for name, (kind, unit) in form.memory.items():
            held = [(self.rows[number][name] / unit, number) for number in numbers[1:] if name in self.rows[number]]
            if held:
                gib, step = max(held)
                peaks.append(PeakMemory(rank=None, gib=gib, kind=kind, step=step))
        return peaks
