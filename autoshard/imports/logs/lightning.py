"""Text logs of programs on Lightning: NeMo (a line for each step, or a bar) and NxD Training (a bar).

NVIDIA-NeMo 8cfedd7 (nemo/lightning/pytorch/callbacks/progress_printer.py, nemo/utils/exp_manager.py TimingCallback);
aws-neuron/neuronx-distributed-training 9169aa0 (utils/utils.py Throughput: sequences of all ranks per second, a mean
over the last steps).
"""

import re
from dataclasses import dataclass
from typing import ClassVar

from autoshard.imports.logs.lines import LogLine
from autoshard.imports.logs.log import LogReport, RateUnit
from autoshard.imports.logs.text import TextReader, as_number, fields_of

_LINE = re.compile(r"Training epoch \d+, iteration (\d+)/(\d+) \|(.*)$")
_BAR = re.compile(r"Epoch \d+:.*?\s(\d+)/(\d+) \[((?:\d+:)*\d+:\d\d)<[^\]]*?\b(reduced_train_loss=[^\]]*)\]")
_MEMORY = {"peak_memory_usage": "allocated", "max_memory_allocated": "allocated", "max_memory_reserved": "reserved"}
_BYTES_OF_GIB = 1 << 30
_FIRST_STEPS = 2


def bar_seconds(clock: str) -> int:
    """Return the seconds of the clock of a bar.

    >>> bar_seconds("59:12"), bar_seconds("1:00:01")
    (3552, 3601)
    """
    total = 0
    for part in clock.split(":"):
        total = total * 60 + int(part)
    return total


@dataclass(slots=True)
class LightningReader(TextReader):
    """Reads lines and bars of Lightning."""

    program: ClassVar[str] = "NeMo or NxD Training"
    configurations: ClassVar[tuple[str, ...]] = ("nxdt", "bridge", "megatron")
    marks: ClassVar[tuple[str, ...]] = ("Training epoch ", "reduced_train_loss=")

    of_steps: bool = True

    @property
    def are_means(self) -> bool:
        """Whether a report is the mean since the one before it: only the clock of a bar says such."""
        return not self.of_steps

    def take(self, line: LogLine) -> None:
        """Read a line of a step, or a bar."""
        if match := _LINE.search(line.text):
            text = match[3] if line.whole else match[3].rpartition("|")[0]
            self._report(line, int(match[1]), int(match[2]), dict(fields_of(text, "|", ":")), None)
        elif match := _BAR.search(line.text):
            fields = dict(fields_of(match[4], ",", "="))
            self._report(line, int(match[1]), int(match[2]), fields, float(bar_seconds(match[3])))

    def _report(self, line: LogLine, number: int, total: int, fields: dict[str, str], bar_s: float | None) -> None:
        time = as_number(fields.get("train_step_timing in s", ""))
        is_nxdt = "throughput_peak" in fields
        rate, unit = None, None
        if is_nxdt:
            rate, unit = as_number(fields.get("throughput", "")), RateUnit(what="sequences", per_rank=False)
        elif "tokens_per_sec_per_gpu" in fields:
            rate, unit = as_number(fields["tokens_per_sec_per_gpu"]), RateUnit(what="tokens", per_rank=True)
        self.rate = unit or self.rate
        if is_nxdt or time is not None:
            self.facts["program"] = "NxD Training" if is_nxdt else "NeMo"
        self.of_steps = time is not None or rate is not None
        batch = as_number(fields.get("global_batch_size", ""))
        self.num_steps = total if total > number else self.num_steps or total
        report = LogReport(number=number, time_s=time, rate=rate, batch=int(batch) if batch else None)
        self.add(line, report, bar_s=bar_s)
        rank = int(line.rank) if line.rank else None
        for name, kind in _MEMORY.items():
            peak = as_number(fields.get(name, ""))
            if peak and number >= _FIRST_STEPS:
                self.peak(rank, peak / _BYTES_OF_GIB, kind, number)
