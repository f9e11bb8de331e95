"""Text logs of DeepSpeed, and of the Trainer of Hugging Face, whose bar and losses run under it or under Accelerate.

deepspeedai/DeepSpeed 038beb6 (deepspeed/utils/timer.py ThroughputTimer: samples of all ranks per second of the last
step; runtime/engine.py); huggingface/transformers (trainer.py: a bar, a dict with each loss, a dict at the end).
"""

import re
from dataclasses import dataclass, field
from typing import ClassVar

from autoshard.imports.logs.lightning import bar_seconds
from autoshard.imports.logs.lines import LogLine
from autoshard.imports.logs.log import LogReport, RateUnit, TrainingLog
from autoshard.imports.logs.megatron import value_of_text
from autoshard.imports.logs.steps import StepSeries
from autoshard.imports.logs.text import TextReader, as_number

_STEP = re.compile(r"\bstep=(\d+), skipped=(\d+)")
_TIMER = re.compile(r"(?:global_step=(\d+)|\b\d+/(\d+)), .*?\b(CurrSamplesPerSec|SamplesPerSec)=([\d.]+(?:e[+-]\d+)?),")
_MEMORY = re.compile(r"MaxMemAllocated=([\d.]+)GB")
_PRINTED = re.compile(r"\[config\.py:\d+:print\]\s+(\w+)(?: \.{2,} ?|  )(.*)$")
_STAGE = re.compile(r"stage\W{1,3}(\d)")
_VERSION = re.compile(r"DeepSpeed info: version=([\w.+-]+)")
_NAMES = {
    "train_batch_size": "train_batch_size", "train_micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps", "bfloat16_enabled": "bf16.enabled",
    "fp16_enabled": "fp16.enabled", "float16_enabled": "fp16.enabled",
}  # fmt: skip
_BAR = re.compile(r"^\D{0,4}\d{1,3}%\|[^|]*\|\s*(\d+)/(\d+) \[((?:\d+:)*\d+:\d\d)<[^,\]]+,\s*[\d.]+(?:s/it|it/s)\]")


@dataclass(slots=True)
class DeepSpeedReader(TextReader):
    """Reads lines of DeepSpeed's engine."""

    program: ClassVar[str] = "DeepSpeed"
    configurations: ClassVar[tuple[str, ...]] = ("deepspeed", "accelerate", "megatron")
    marks: ClassVar[tuple[str, ...]] = (", skipped=", "SamplesPerSec=", "[config.py:", "DeepSpeed info: version=")

    number: int | None = None  # of the last line that names a step
    num_skipped: int = 0  # until then

    @property
    def are_means(self) -> bool:
        """Rates are those of the last step."""
        return False

    def take(self, line: LogLine) -> None:
        """Read a report, or a value of the configuration, which the engine prints at its start."""
        text = line.text
        if match := _STEP.search(text):
            self.number, before, self.num_skipped = int(match[1]), self.num_skipped, int(match[2])
            self.add(line, LogReport(number=self.number, skipped=self.num_skipped > before))
        elif match := _TIMER.search(text):
            self._rate(line, match)
        elif match := _PRINTED.search(text):
            name, value = match[1], match[2].strip()
            if name == "zero_config" and (stage := _STAGE.search(value)):
                self.config["zero_optimization.stage"] = int(stage[1])
            elif name in _NAMES and self.config.get(_NAMES[name]) in (None, False):
                self.config[_NAMES[name]] = value_of_text(value)
        elif match := _VERSION.search(text):
            self.version = f"DeepSpeed {match[1]}"

    def _rate(self, line: LogLine, match: re.Match[str]) -> None:
        """Read the line of the timer; older ones count micro-batches, so that the step is that of the line before."""
        number = int(match[1]) if match[1] else self.number
        if number is None:
            return
        is_of_step = match[3] == "CurrSamplesPerSec"  # the other is a mean since the start
        self.rate = RateUnit(what="sequences", per_rank=False)
        self.add(line, LogReport(number=number, rate=as_number(match[4]) if is_of_step else None))
        if memory := _MEMORY.search(line.text):
            self.peak(0, float(memory[1]), "allocated", number)


@dataclass(slots=True)
class TrainerReader(TextReader):
    """Reads the bar of the Trainer; bars of evaluations have other totals, and fewer steps."""

    program: ClassVar[str] = "the Trainer of Hugging Face"
    configurations: ClassVar[tuple[str, ...]] = ("accelerate", "deepspeed")
    marks: ClassVar[tuple[str, ...]] = ("s/it]", "it/s]", "{'loss': ")

    bars: dict[int, StepSeries] = field(default_factory=dict[int, StepSeries])
    has_losses: bool = False

    def take(self, line: LogLine) -> None:
        """Read a bar, which several losses may follow in the same line."""
        self.has_losses = self.has_losses or "{'loss': " in line.text
        match = _BAR.search(line.text)
        if match is None:
            return
        number, total = int(match[1]), int(match[2])
        if number and (total in self.bars or len(self.bars) < 64):
            bar = self.bars.setdefault(total, StepSeries())
            bar.add(line.rank, LogReport(number=number, stamp_s=float(bar_seconds(match[3]))))

    @property
    def has_reports(self) -> bool:
        """Whether there was a bar, and losses that show that it is of a training."""
        return self.has_losses and bool(self.bars)

    def log(self, file: str) -> TrainingLog | None:
        """Return the log of the longest bar."""
        if not self.has_reports:
            return None
        self.num_steps, self.series = max(self.bars.items(), key=lambda bar: len(bar[1].steps))
        return super(TrainerReader, self).log(file)
