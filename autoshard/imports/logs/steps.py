"""The reports of steps, in the order of a file: of one rank, and of the last run, where a file holds several."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from autoshard.imports.logs.log import LogReport

_MOST = 50_000  # reports that are held; of longer runs the last ones
_MOST_STREAMS = 512
_FIELDS = ("time_s", "rate", "stamp_s", "batch")


@dataclass(slots=True)
class _Stream:
    """The reports of one rank."""

    steps: deque[LogReport] = field(default_factory=lambda: deque[LogReport](maxlen=_MOST))
    runs: int = 1
    before: int = -1  # the number before the last one

    def add(self, step: LogReport) -> bool:
        """Take a report; return whether another run begins with it."""
        if not self.steps:
            self.steps.append(step)
            return False
        last = self.steps[-1]
        if step.number == last.number:  # another rank, or another report of the same step
            self.steps[-1] = _joined(last, step)
        elif step.number > last.number:
            self.before = last.number
            self.steps.append(step)
        elif step.number != self.before:  # that one came late from another rank
            self.restart()
            self.steps.append(step)
            return True
        return False

    def restart(self) -> None:
        """Begin another run."""
        if self.steps:
            self.steps.clear()
            self.runs, self.before = self.runs + 1, -1


def _joined(first: LogReport, second: LogReport) -> LogReport:
    missing = {name: getattr(second, name) for name in _FIELDS if getattr(first, name) is None}
    return replace(first, **missing) if missing else first


@dataclass(slots=True)
class StepSeries:
    """Collects reports by the rank that wrote them."""

    streams: dict[str, _Stream] = field(default_factory=dict[str, _Stream])

    def add(self, rank: str, step: LogReport) -> bool:
        """Take one report, of which the first holds for a step; return whether another run begins with it."""
        if rank not in self.streams and len(self.streams) >= _MOST_STREAMS:
            return False
        return self.streams.setdefault(rank, _Stream()).add(step)

    def restart(self) -> None:
        """Begin another run, on all ranks."""
        for stream in self.streams.values():
            stream.restart()

    @property
    def steps(self) -> tuple[LogReport, ...]:
        """The reports of the last run, by the rank with the most."""
        return tuple(max((stream.steps for stream in self.streams.values()), key=len, default=()))

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is to be said of the choice."""
        runs, steps = max((stream.runs for stream in self.streams.values()), default=1), self.steps
        if runs == 1 or not steps:
            return ()
        return (f"{runs} runs in the file; the last is read, which begins at step {steps[0].number}",)


def comparable(steps: Sequence[LogReport]) -> Sequence[LogReport]:
    """Return the reports with the batch of the last one, and without steps that the optimizer left out, if it took any.

    >>> [step.number for step in comparable([LogReport(number=1, skipped=True), LogReport(number=2)])]
    [2]
    """
    last = next((step.batch for step in reversed(steps) if step.batch is not None), None)
    same = [step for step in steps if last is None or step.batch in (None, last)]
    return [step for step in same if not step.skipped] or same


def step_range(steps: Iterable[LogReport]) -> str:
    """Return the range of the steps.

    >>> step_range([LogReport(number=20), LogReport(number=30)])
    '20..30'
    """
    numbers = [step.number for step in steps]
    return f"{numbers[0]}..{numbers[-1]}" if numbers else "none"
