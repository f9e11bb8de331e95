"""What the runtime asks of an engine, and nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autoshard.errors import require
from autoshard.graph.op import Array
from autoshard.plan.plan import Plan

HOST = "cpu"
Batch = Mapping[str, Array]  # one micro-batch, whole: tokens, labels, positions, key_positions, token_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One execution of a plan: its output folder, and what the plan leaves open."""

    folder: Path
    num_steps: int
    learning_rate: float = 3e-4
    seed: int = 0
    device: str = HOST  # where tensors lie, as torch names it

    def __post_init__(self) -> None:
        """Refuse a run that does nothing."""
        require(
            (self.num_steps >= 1, "--steps", f"must be at least 1, not {self.num_steps}"),
            (self.learning_rate > 0, "--learning-rate", f"must be positive, not {self.learning_rate}"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step gave, the same on every rank."""

    loss: float
    norm: float  # of the whole gradient, before it was clipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a rank held and sent, counted while it ran."""

    # Weights, gradients, masters, optimizer; saved: the most kept for backward at a time; only what was counted.
    memory_bytes: Mapping[str, int]
    calls: Mapping[tuple[str, str], int]  # of one step, by axis and kind of collective
    sent_bytes: Mapping[str, int]  # of one step, by axis, counted as the prediction does


class Engine(Protocol):
    """One rank of a run, built from its plan."""

    def step(self, micro_batches: Sequence[Batch]) -> StepReport:
        """Run one optimizer step."""
        ...

    def measured(self) -> Measured:
        """Return what was counted in the last step."""
        ...


class Builds(Protocol):
    """How an engine starts on this process, whose place in the world is known to its library."""

    def __call__(self, plan: Plan, run: Run) -> Engine:
        """Build the rank's share of the plan."""
        ...
