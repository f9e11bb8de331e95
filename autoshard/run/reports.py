"""What a run says of itself: its steps and their phases, what each rank held and sent, its checkpoints, its end."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from autoshard.run.other_programs import BusyProcessors
from autoshard.units import counted

WARM_UP = 2  # steps that allocate, connect and cache; they are no measure of the others
WINDOW = 20  # steps whose median is compared
_LARGEST_LOG = 700.0  # of a number that a float holds
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
class RouterReport:
    """How the routers of a step chose experts, over all its tokens; losses are those before their coefficients.

    >>> RouterReport(busiest=1.5, entropy=2.0, dropped=0.0, balance_loss=2.1).figures
    {'busiest': 1.5, 'entropy': 2.0, 'dropped': 0.0, 'balance_loss': 2.1}
    """

    busiest: float  # tokens of the busiest expert over the mean of its layer, in the layer where that is most
    entropy: float  # in nats, of the probabilities of all experts; the mean over tokens and layers
    dropped: float  # the share of choices that found no slot
    balance_loss: float | None = None  # the mean over layers and micro-batches; None where nothing is balanced
    z_loss: float | None = None  # likewise

    @property
    def figures(self) -> Mapping[str, float]:
        """The numbers by name, as far as they are finite."""
        return {name: value for name, value in asdict(self).items() if value is not None and math.isfinite(value)}


@dataclass(frozen=True, slots=True, kw_only=True)
class NormsReport:
    """Norms by group of weights: of the gradient before it was clipped, and of the weights before their update.

    >>> NormsReport(gradient={"layer.up.weight": 0.5}, weights={"layer.up.weight": math.inf}).figures
    {'gradient': {'layer.up.weight': 0.5}, 'weights': {}}
    """

    gradient: Mapping[str, float]
    weights: Mapping[str, float]

    @property
    def figures(self) -> Mapping[str, Mapping[str, float]]:
        """The numbers by name, as far as they are finite."""
        return {
            kind: {group: norm for group, norm in norms.items() if math.isfinite(norm)}
            for kind, norms in asdict(self).items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One optimizer step as all ranks saw it, and how long the slowest took."""

    number: int  # from 1
    loss: float | None  # None where no token of its samples counts, as where none has an answer
    norm: float
    time_s: float
    num_tokens: int
    learning_rate: float | None = None
    waited_s: float = 0.0  # for data, before the step began
    updated: bool = True  # whether the weights took the step
    memory_bytes: int | None = None  # the peak of a device so far; None without a device
    phase: Phase = "steady"
    router: RouterReport | None = None  # None of a model without experts, and of engines that do not look
    norms: NormsReport | None = None  # in every so many steps, as the recipe asks

    @property
    def finite(self) -> bool:
        """Whether its norm is a number, and its loss, if it has one."""
        return math.isfinite(self.loss or 0.0) and math.isfinite(self.norm)

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the whole step consumed, over its time."""
        return self.num_tokens / self.time_s


def with_nulls(record: Mapping[str, Any]) -> dict[str, Any]:
    """Replace numbers that are not finite, which JSON cannot write, by None, and name them in ``nonfinite``.

    >>> with_nulls({"step": 3, "loss": math.nan, "norm": 1.5})
    {'step': 3, 'loss': None, 'norm': 1.5, 'nonfinite': {'loss': 'nan'}}
    """
    strange = {
        name: str(value) for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)
    }
    return {**record, **dict.fromkeys(strange), **({"nonfinite": strange} if strange else {})}


def losses_of(steps: Iterable[Mapping[str, Any]]) -> list[float | None]:
    """Return the losses of records of steps, None of those that are not finite; steps without an answer have none.

    >>> losses_of([{"loss": 2.5}, {"loss": None, "nonfinite": {"loss": "nan"}}, {"loss": None}])
    [2.5, None]
    """
    return [step["loss"] for step in steps if step["loss"] is not None or "loss" in step.get("nonfinite", ())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The start of a run: the step after which it begins, and remarks for the user."""

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
        waited = f"; updates waited {self.blocked_s:.2f} s for it" if self.blocked_s >= 0.01 else ""
        line = f"saved step {self.step} in {self.time_s:.1f} s{waited}"
        return "\n".join(filter(None, (line, self.remark)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedStep:
    """The state after a step, judged by tokens that the run does not train on.

    >>> print(EvaluatedStep(number=40, loss=2.0, num_samples=64, time_s=2.1, best=True))
    step 40: evaluation loss 2.0000, perplexity 7.39, of 64 sequences in 2.1 s; the lowest so far
    """

    number: int
    loss: float
    num_samples: int
    time_s: float
    best: bool  # whether no evaluation of the run before had a loss as low

    @property
    def perplexity(self) -> float:
        """The exponential of the loss: among how many tokens, all as likely, the next one is sought."""
        return math.exp(self.loss) if self.loss < _LARGEST_LOG else math.inf

    @property
    def record(self) -> dict[str, Any]:
        """The fields of a line of a file."""
        figures = {"loss": self.loss, "perplexity": self.perplexity, "samples": self.num_samples}
        return {"step": self.number, **figures, "time_s": self.time_s, "best": self.best}

    def __str__(self) -> str:
        """Return the result as one line."""
        lowest = "; the lowest so far" if self.best else ""
        result = f"evaluation loss {self.loss:.4f}, perplexity {self.perplexity:.2f}"
        return (
            f"step {self.number}: {result}, of {counted(self.num_samples, 'sequence')} in {self.time_s:.1f} s{lowest}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a rank held and sent, counted while it ran."""

    # Weights, gradients, masters, optimizer; saved: the most kept for backward at a time; only what was counted.
    memory_bytes: Mapping[str, int]
    sent_bytes: Mapping[str, int]  # of one step, by axis, counted as the prediction does


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A run that ended well; without steps if it had taken all of them before."""

    steps: tuple[TimedStep, ...]  # the last ones
    ranks: tuple[Measured, ...]
    signal: int = 0  # that stopped it before its last step
    unsaved: str = ""  # why its state at the end is in no checkpoint
    other_programs: BusyProcessors | None = None  # while it took steps, if that was counted

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
