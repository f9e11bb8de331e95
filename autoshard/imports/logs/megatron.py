"""Text logs of Megatron-LM and what is built on it: Megatron-DeepSpeed, GPT-NeoX, Megatron-Bridge.

NVIDIA/Megatron-LM 001b00c (megatron/training/training.py training_log, utils.py report_memory); the forks add samples
and tokens per second, and some write seconds in the place of milliseconds.
"""

import ast
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from autoshard.imports.logs.lines import LogLine
from autoshard.imports.logs.log import LogReport, RateUnit
from autoshard.imports.logs.text import GIB_OF_MIB, TextReader, as_number

_STEP = re.compile(r"iteration\s+(\d+)/\s*(\d+) \|")
_TIME = re.compile(r"elapsed time per iteration \((ms|s)\):\s*([\d.]+)\s*\|")
_BATCH = re.compile(r"global batch size:\s*(\d+)\s*\|")
_TOKENS = re.compile(
    r"(?:tokens per gpu per second \(tgs\)|tokens/sec/gpu|tokens per GPU \(tokens/s/GPU\)):\s*([\d.]+)\s*\|"
)
_SAMPLES = re.compile(r"(?:samples per second|samples/sec):\s*([\d.]+)\s*\|")
_SKIPPED = re.compile(r"number of skipped iterations:\s*(\d+)\s*\|")
_MEMORY = re.compile(
    r"(?:\[Rank (\d+)\] \()?after (\d+) iterations\)? memory \(MB\) \| allocated: [\d.]+ \| max allocated: ([\d.]+) \|"
    r" reserved: [\d.]+ \| max reserved: ([\d.]+)"
)
_BEGIN, _END = re.compile(r"-{8,} arguments -{8,}"), re.compile(r"-{8,} end of (?:arguments|Arguments) -{8,}")
_ARGUMENT = re.compile(r"(?:^|[\s:])([A-Za-z_]\w*) \.{2,} ?(.*)$")
_GIT = re.compile(r"git_hash=(\w+)")
FORK = "Megatron-DeepSpeed"
_SETTLED = 2  # iterations after which the states of the optimizer are there: training_log says so
_MOST_ARGUMENTS = 4096


@dataclass(slots=True)
class MegatronReader(TextReader):
    """Reads lines of Megatron-LM."""

    program: ClassVar[str] = "Megatron-LM"
    configurations: ClassVar[tuple[str, ...]] = ("megatron", "bridge")
    marks: ClassVar[tuple[str, ...]] = (
        "elapsed time per iteration", " memory (MB) |", " ..", "-------- arguments", "-------- end of arg", "git_hash=",
    )  # fmt: skip

    in_arguments: bool = False

    def take(self, line: LogLine) -> None:
        """Read a report, the memory of ranks, or one of the arguments that rank 0 prints first."""
        text = line.text
        if _BEGIN.search(text):
            self.restart()
            self.config.clear()
            self.in_arguments = True
        elif _END.search(text):
            self.in_arguments = False
        elif match := _STEP.search(text):
            self._step(line, int(match[1]), int(match[2]))
        elif "memory (MB)" in text:
            for match in _MEMORY.finditer(text):
                self._memory(*match.groups())
        elif git := _GIT.search(text):
            self.version = f"git {git[1][:12]}"
        elif self.in_arguments and (match := _ARGUMENT.search(text)) and len(self.config) < _MOST_ARGUMENTS:
            self.config[match[1]] = value_of_text(match[2].strip())

    def _step(self, line: LogLine, number: int, total: int) -> None:
        time, batch = _TIME.search(line.text), _BATCH.search(line.text)
        skipped = _SKIPPED.search(line.text)
        tokens, samples = _TOKENS.search(line.text), _SAMPLES.search(line.text)
        if time is None:
            return
        seconds, rate = as_number(time[2]), tokens or samples
        unit = rate and RateUnit(what="tokens" if tokens else "sequences", per_rank=bool(tokens))
        self.rate = self.rate or unit
        rate = rate if unit == self.rate else None  # a line that was cut has the first of both only
        self.num_steps = total
        if "consumed tokens:" in line.text:
            self.facts["program"] = FORK
        report = LogReport(
            number=number,
            time_s=seconds and seconds * (1e-3 if time[1] == "ms" else 1.0),
            rate=as_number(rate[1]) if rate else None,
            batch=int(batch[1]) if batch else None,
            skipped=bool(skipped and int(skipped[1])),
        )
        self.add(line, report)

    def _memory(self, named: str | None, after: str, allocated: str, reserved: str) -> None:
        if int(after) < _SETTLED:
            self.remarks["memory after 1 iteration lacks states of the optimizer, and is left out"] = None
            return
        rank = int(named) if named else None
        self.peak(rank, float(allocated) * GIB_OF_MIB, "allocated", int(after))
        self.peak(rank, float(reserved) * GIB_OF_MIB, "reserved", int(after))


def value_of_text(text: str) -> Any:
    """Return what an argument is whose text Python has printed.

    >>> [value_of_text(text) for text in ("None", "True", "8", "['attend']", "torch.bfloat16")]
    [None, True, 8, ['attend'], 'torch.bfloat16']
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
