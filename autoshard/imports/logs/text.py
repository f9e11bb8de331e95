"""What the readers of text logs share: each takes lines that hold its marks, and returns the log in the end."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from autoshard.imports.logs.lines import LogLine
from autoshard.imports.logs.log import LogReport, PeakMemory, RateUnit, TrainingLog
from autoshard.imports.logs.steps import StepSeries

GIB_OF_MIB = 1 / 1024


@dataclass(slots=True)
class TextReader(ABC):
    """Collects what the lines of one program say."""

    program: ClassVar[str]
    configurations: ClassVar[tuple[str, ...]]
    marks: ClassVar[tuple[str, ...]]  # texts, of which every line that the reader takes holds one

    series: StepSeries = field(default_factory=StepSeries)
    memory: dict[tuple[int | None, str], PeakMemory] = field(default_factory=dict[tuple[int | None, str], PeakMemory])
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    rate: RateUnit | None = None
    version: str | None = None
    clock_s: float = 0.0
    date: str | None = None  # of the first report
    num_steps: int | None = None
    remarks: dict[str, None] = field(default_factory=dict[str, None])

    @abstractmethod
    def take(self, line: LogLine) -> None:
        """Read one line."""

    def add(self, line: LogLine, step: LogReport, *, bar_s: float | None = None) -> None:
        """Keep a report with the clock of its line, or of a bar of progress where lines have none."""
        stamp = line.stamp
        seconds = stamp[0] if stamp else bar_s
        if self.series.add(line.rank, step if seconds is None else replace(step, stamp_s=seconds)):
            self.memory.clear()
            self.date = None
        if stamp is not None:
            self.clock_s = max(self.clock_s, stamp[1])
            self.date = self.date or stamp[2]

    def peak(self, rank: int | None, gib: float, kind: Any, step: int) -> None:
        """Keep the most memory that a rank reports."""
        before = self.memory.get((rank, kind))
        if gib > 0 and (before is None or gib >= before.gib):
            self.memory[rank, kind] = PeakMemory(rank=rank, gib=gib, kind=kind, step=step)

    def restart(self) -> None:
        """Begin another run: what was said before is of a run that is over."""
        self.series.restart()
        self.memory.clear()
        self.date = None

    @property
    def are_means(self) -> bool:
        """Whether a report is the mean since the one before it."""
        return True

    @property
    def has_reports(self) -> bool:
        """Whether a line was a report of a step."""
        return bool(self.series.streams)

    def log(self, file: str) -> TrainingLog | None:
        """Return the log; None where no line was a report of a step."""
        steps = self.series.steps
        if not steps:
            return None
        return TrainingLog(
            program=self.facts.get("program", self.program),
            file=file,
            configurations=self.configurations,
            steps=steps,
            are_means=self.are_means,
            rate=self.rate if any(step.rate for step in steps) else None,
            memory=tuple(self.memory.values()),
            config=self.config,
            facts=self.facts,
            version=self.version,
            clock_s=self.clock_s or 1.0,
            date=self.date,
            num_steps=self.num_steps,
            remarks=(*self.series.remarks, *self.remarks),
        )


def as_number(text: str) -> float | None:
    """Read a number that a line holds; None where it is no finite, positive one.

    >>> as_number("7,012"), as_number("1e+04"), as_number("nan"), as_number("-1")
    (7012.0, 10000.0, None, None)
    """
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def fields_of(text: str, pairs: str, joint: str) -> Mapping[str, str]:
    """Return the fields of a line; one at its end counts only if the line does.

    >>> fields_of("lr: 1e-4 | step time: 2.5 |", "|", ":")
    {'lr': '1e-4', 'step time': '2.5'}
    """
    parts = (part.partition(joint) for part in text.split(pairs))
    return {name.strip(): value.strip() for name, middle, value in parts if middle}
