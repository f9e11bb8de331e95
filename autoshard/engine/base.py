"""What the runtime asks of an engine, and nothing else."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from autoshard.engine.activity import RankActivity
from autoshard.engine.placement import StatePiece
from autoshard.graph.op import Array
from autoshard.plan.plan import Plan
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
    activity: RankActivity = field(default_factory=RankActivity, compare=False)  # read by the watchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step gave, the same on every rank."""

    loss: float
    norm: float  # of the whole gradient, before it was clipped
    updated: bool = True  # whether the weights took the step
    suspects: tuple[str, ...] = ()  # if a number is not finite: which ranks found it, and where

    @property
    def finite(self) -> bool:
        """Whether loss and norm are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


Allows = Callable[[StepReport], bool]


def whenever_finite(report: StepReport) -> bool:
    """Allow an update by numbers."""
    return report.finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a rank held and sent, counted while it ran."""

    # Weights, gradients, masters, optimizer; saved: the most kept for backward at a time; only what was counted.
    memory_bytes: Mapping[str, int]
    sent_bytes: Mapping[str, int]  # of one step, by axis, counted as the prediction does


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


# How an engine starts on this process, whose rank torch's world knows: it builds the rank's share of the plan.
Builds = Callable[[Plan, Run], Engine]


WARM_UP = 2  # steps that allocate, connect and cache; they are no measure of the others
WINDOW = 20  # steps whose median is compared
SLOWER = 1.2  # times the run's own first median, above which it has become slow
Phase = Literal["compile", "warm-up", "steady"]


def phase_of(num_taken: int, *, compiles: bool) -> Phase:
    """Return the phase of the next step, given how many this start of a run has taken; some devices compile first.

    >>> [phase_of(taken, compiles=True) for taken in range(4)]
    ['compile', 'warm-up', 'steady', 'steady']
    """
    if num_taken == 0 and compiles:
        return "compile"
    return "warm-up" if num_taken < WARM_UP else "steady"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One optimizer step as all ranks saw it, and how long the slowest took."""

    number: int  # from 1
    loss: float
    norm: float
    time_s: float
    num_tokens: int
    learning_rate: float | None = None
    waited_s: float = 0.0  # for data, before the step began
    updated: bool = True  # whether the weights took the step
    memory_bytes: int | None = None  # the peak of a device so far; None without a device
    phase: Phase = "steady"

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the whole step consumed, over its time."""
        return self.num_tokens / self.time_s


def with_nulls(record: Mapping[str, Any]) -> dict[str, Any]:
    """Replace numbers that are not finite, which JSON cannot write, by None, and name them in ``nonfinite``.

    >>> with_nulls({"step": 3, "loss": math.nan, "norm": 1.5})
    {'step': 3, 'loss': None, 'norm': 1.5, 'nonfinite': {'loss': 'nan'}}
    """
    strange = {name: str(one) for name, one in record.items() if isinstance(one, float) and not math.isfinite(one)}
    return {**record, **dict.fromkeys(strange), **({"nonfinite": strange} if strange else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What is known when a run begins: after which step, and what the user should know of it."""

    step: int
    notes: tuple[str, ...] = ()
    trackers: tuple[tuple[str, str], ...] = ()  # which know the run, and under which ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """A checkpoint that is complete.

    >>> print(SavedStep(step=40, time_s=2.1, blocked_s=0.02))
    saved step 40 in 2.1 s; updates waited 0.02 s for it
    """

    step: int
    time_s: float
    blocked_s: float = 0.0  # for which updates waited
    remark: str = ""  # what else the user should know

    def __str__(self) -> str:
        """Return the report as one line, and remarks as another."""
        line = f"saved step {self.step} in {self.time_s:.1f} s; updates waited {self.blocked_s:.2f} s for it"
        return "\n".join(filter(None, (line, self.remark)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A run that ended well; without steps if it had taken all of them before."""

    steps: tuple[TimedStep, ...]  # the last ones
    ranks: tuple[Measured, ...]
    signal: int = 0  # that stopped it before its last step
    unsaved: str = ""  # why its state at the end is in no checkpoint

    @property
    def kind(self) -> Literal["run", "short"]:
        """The kind of a measured row: a run of at most two steps is short, its times have not settled."""
        return "run" if len(self.steps) > WARM_UP else "short"

    @property
    def step_time_s(self) -> float:
        """The median of all steps but the first two; of a shorter run, of all."""
        return statistics.median(step.time_s for step in self.steps[WARM_UP:] or self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRank:
    """What one rank would hold and send, found in one process without the others."""

    rank: int
    alike: tuple[int, ...]  # ranks with the same prediction, itself among them
    num_run: int  # micro-batches that were run; what the others send is added
    measured: Measured
