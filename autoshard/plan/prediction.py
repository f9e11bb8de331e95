"""What a plan promises: time with its parts, memory per pipeline rank, bytes sent, dollars."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autoshard.errors import require

SUM_TOLERANCE = 1e-6  # parts are rounded to nine digits one by one


def rounded(value: float) -> float:
    """Round to nine significant digits, so that a plan is the same file on every machine.

    >>> rounded(1 / 3), rounded(123456789012.0)
    (0.333333333, 123456789000.0)
    """
    return float(f"{value:.9g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Predicted peak memory of one pipeline rank (all its chunks), in named parts of bytes."""

    num_weights: int  # that one rank of the stage holds, replicas included
    parts: Mapping[str, int] = field(hash=False)

    def __post_init__(self) -> None:
        """Refuse negative parts."""
        require(
            (self.num_weights >= 0, "num_weights", "must not be negative"),
            *((size >= 0, f"parts.{name}", "must not be negative") for name, size in self.parts.items()),
        )

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return sum(self.parts.values())

    def without(self, parts: Collection[str]) -> int:
        """Bytes of all but some parts.

        >>> StageMemory(num_weights=1, parts={"weights": 2, "runtime": 5}).without(("runtime",))
        2
        """
        return sum(size for name, size in self.parts.items() if name not in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiling:
    """What has to be compiled before the first step, if no cache holds it."""

    num_graphs: int  # distinct ones
    compile_s: float
    basis: str  # what the estimate rests on

    def __post_init__(self) -> None:
        """Refuse nothing to compile, and an estimate without a basis."""
        require(
            (self.num_graphs >= 1, "num_graphs", f"must be at least 1, not {self.num_graphs}"),
            (self.compile_s > 0, "compile_s", f"must be positive, not {self.compile_s}"),
            (bool(self.basis), "basis", "say what the estimate rests on"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dollars:
    """What a run costs on demand: all nodes of the cluster, for as long as the prediction says.

    Prices change, and most who rent many nodes pay another one: ``price_date`` says how old this one is.
    """

    usd_per_step: float
    usd_per_billion_tokens: float
    price_usd_per_node_hour: float
    price_date: str | None  # None where the source of the price carries none


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Time, memory and traffic of one optimizer step, with an interval and what it is worth."""

    step_time_s: float
    low_s: float
    high_s: float
    time_parts: Mapping[str, float] = field(hash=False)  # seconds; they add up to step_time_s
    stage_memory: tuple[StageMemory, ...]  # one per pipeline rank
    capacity_bytes: int  # memory of a rank that the plan may fill
    tokens_per_s: float
    mfu: float  # share of the peak that the model's own FLOPs use
    communication_bytes: Mapping[str, int] = field(hash=False)  # per axis: sent by one rank in one step
    basis: str  # what the numbers are worth: "uncalibrated", or the calibration they come from
    of: str  # fingerprint of the rest of the plan
    compiling: Compiling | None = None  # None: nothing is compiled ahead

    def __post_init__(self) -> None:
        """Refuse numbers that contradict each other."""
        total, sent = math.fsum(self.time_parts.values()), self.communication_bytes.items()
        interval = f"the interval {self.low_s} to {self.high_s} does not hold step_time_s {self.step_time_s}"
        parts = f"the parts add up to {total}, not to step_time_s {self.step_time_s}"
        require(
            (self.step_time_s > 0, "step_time_s", f"must be positive, not {self.step_time_s}"),
            (self.low_s <= self.step_time_s <= self.high_s, "low_s", interval),
            (math.isclose(total, self.step_time_s, rel_tol=SUM_TOLERANCE), "time_parts", parts),
            (self.capacity_bytes >= 1, "capacity_bytes", f"must be at least 1, not {self.capacity_bytes}"),
            (self.tokens_per_s > 0, "tokens_per_s", f"must be positive, not {self.tokens_per_s}"),
            (self.mfu >= 0, "mfu", f"must not be negative, not {self.mfu}"),
            (bool(self.basis), "basis", "say what the numbers are worth"),
            *((size >= 0, f"communication_bytes.{axis}", "must not be negative") for axis, size in sent),
        )

    @property
    def peak_bytes(self) -> int:
        """Memory of the fullest pipeline rank."""
        return max((memory.total for memory in self.stage_memory), default=0)
