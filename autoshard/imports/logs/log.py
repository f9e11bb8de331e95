"""What the log of a training run says: the values between reading a file and measuring it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MemoryKind = Literal["allocated", "reserved", "in use"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """One report of a step; a mean over the steps since the report before, or of this step alone."""

    number: int
    time_s: float | None = None  # as the program measured it
    rate: float | None = None  # tokens or sequences in a second: RateUnit
    stamp_s: float | None = None  # of the clock beside the report
    batch: int | None = None  # sequences in the step
    skipped: bool = False  # whether the optimizer left a step out, since a gradient was not finite


@dataclass(frozen=True, slots=True, kw_only=True)
class RateUnit:
    """What the rates of a log count."""

    what: Literal["tokens", "sequences"]
    per_rank: bool

    def step_time_s(self, rate: float, sequences: int, seq_len: int, ranks: int) -> float:
        """Return the seconds of a step that has so many sequences.

        >>> RateUnit(what="tokens", per_rank=True).step_time_s(1000.0, 16, 2048, 8)
        4.096
        """
        per_step = sequences * (seq_len if self.what == "tokens" else 1)
        return per_step / (rate * (ranks if self.per_rank else 1))

    def __str__(self) -> str:
        return f"{self.what} per second {'of a rank' if self.per_rank else 'of all ranks together'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The most memory that a rank held until a step."""

    rank: int | None  # None where the log does not say
    gib: float
    kind: MemoryKind
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog:
    """A log of a run: the last one, where a file holds several."""

    program: str
    file: str
    configurations: tuple[str, ...]  # names of the programs whose configurations such a run may have
    steps: tuple[LogReport, ...]
    are_means: bool  # whether a report is the mean since the one before it
    rate: RateUnit | None = None
    memory: tuple[PeakMemory, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)  # what the log prints of it
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)  # what only a log says
    version: str | None = None
    clock_s: float = 1.0  # the resolution of the stamps
    date: str | None = None  # YYYY-MM-DD of the first report
    num_steps: int | None = None  # of the whole run, as it was planned
    remarks: tuple[str, ...] = ()
