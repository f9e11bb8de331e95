"""What the runtime asks of an engine, and nothing else."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from autoshard.errors import require
from autoshard.graph.op import Array
from autoshard.plan.plan import Plan
from autoshard.run.activity import RankActivity
from autoshard.run.placement import StatePiece
from autoshard.run.reports import Measured, NormsReport, RouterReport
from autoshard.spec.training import Training

HOST = "cpu"
# From the newest checkpoint of this run, or of any run that saved where this one does; from the beginning; from a step.
Resume = Literal["auto", "newest", "never"] | int
# How the torch engine executes a plan's table: instruction by instruction, by functions made from it, or by these
# functions compiled.
EngineMode = Literal["literal", "generated", "compiled"]
# One micro-batch, whole, in the order of the sequence: tokens, labels, token_weight, [sequences, positions] each;
# positions, key_positions; samples, [sequences], their numbers among all that the run reads. Where documents are
# separate also document_starts, [sequences, positions]: for every token the position of its document's first token.
# Where samples are no tokens, these count positions alone, and data.NAME is what the argument NAME takes.
Batch = Mapping[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One execution of a plan: its output folder, and what the plan leaves open."""

    folder: Path
    training: Training
    device: str = HOST  # where tensors lie, as torch names it
    resume: Resume = "auto"
    mode: EngineMode = "generated"
    trackers: tuple[tuple[str, str], ...] = ()  # which show the run, and under which ids if it is a new one
    profile: tuple[int, ...] = ()  # steps that every rank records
    activity: RankActivity = field(default_factory=RankActivity, compare=False)  # read by the watchdog

    def __post_init__(self) -> None:
        """Refuse a step before the first."""
        message = f"steps count from 0, so there is no {self.resume}. Type auto, never or a step"
        require((isinstance(self.resume, str) or self.resume >= 0, "--resume", message))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The results of a step, the same on every rank."""

    loss: float
    norm: float  # of the whole gradient, before it was clipped
    updated: bool = True  # whether the weights took the step
    router: RouterReport | None = None  # of a mixture of experts
    norms: NormsReport | None = None  # in every so many steps, as the recipe asks
    suspects: tuple[str, ...] = ()  # if a number is not finite: which ranks found it, and where

    @property
    def finite(self) -> bool:
        """Whether loss and norm are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


Allows = Callable[[StepReport], bool]


def whenever_finite(report: StepReport) -> bool:
    """Allow an update if loss and norm are finite."""
    return report.finite


class Engine(Protocol):
    """One rank of a run, built from its plan."""

    def step(self, micro_batches: Sequence[Batch], learning_rate: float, allows: Allows = ...) -> StepReport:
        """Run one optimizer step.

        When all ranks know loss and norm, and before the state changes, every rank calls ``allows`` with
        the same report; the weights are updated if it says so. Until it returns, pieces may still be read.
        """
        ...

    def pieces(self) -> Sequence[StatePiece]:
        """Return what this rank holds of the state, each box once; loading fills their memory."""
        ...

    def restored(self, num_updates: int) -> None:
        """Take over the values that were loaded into ``pieces``, after so many updates; every rank calls it."""
        ...

    def measured(self) -> Measured:
        """Return what was counted in the last step."""
        ...


@runtime_checkable
class Evaluates(Protocol):
    """An engine that also judges its weights by batches that it does not train on."""

    def evaluate(self, micro_batches: Sequence[Batch]) -> float:
        """Return the loss of a step's batch, the same on every rank; the state stays as it is."""
        ...


# How an engine starts on this process, whose rank torch's world knows: it builds the rank's share of the plan.
Builds = Callable[[Plan, Run], Engine]
