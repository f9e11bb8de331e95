"""What is said about a plan: its blocks, operation by operation, runners-up, and why it is not another."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autoshard.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class SentCollective:
    """One Collective: in which pass, what a rank sends, over which link, in a group of how many, for how long."""

    pass_: str
    collective: str
    sent_bytes: float
    link: str
    num_ranks: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherCut:
    """Another cut of an operation, and how much longer the block takes with it, all other operations solved again.

    Negative where the plan's cuts are not those that the solver prefers, or where a Rule refuses the other cut:
    ``refused`` holds its id.
    """

    cut: str
    more_s: float
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedOp:
    """One line of a table: layouts of what it gives, its kernels by pass, what it sends, its second-best cut.

    A fused kernel's time stands with its first operation, waiting for its start included. ``other`` is None for
    delivers, and where there is no other.
    """

    name: str
    gives: str
    seconds: Mapping[str, float]
    sent: tuple[SentCollective, ...]
    other: OtherCut | None

    @property
    def time_s(self) -> float:
        """Kernels and sending together, in all passes."""
        return sum(self.seconds.values()) + sum(one.time_s for one in self.sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedBlock:
    """One block: the name of its table, how many times the model has it, and its steps, once for a micro-batch."""

    name: str
    count: int
    steps: tuple[ExplainedOp, ...]
    waiting_s: float  # of the time of its kernels: until hosts have started them
    hidden_s: float  # of what it sends: while it computes

    @property
    def compute_s(self) -> float:
        """The time of all kernels, at work."""
        return sum(sum(step.seconds.values()) for step in self.steps) - self.waiting_s

    @property
    def sending_s(self) -> float:
        """The time of all Collectives."""
        return sum(one.time_s for one in self.sent())

    @property
    def time_s(self) -> float:
        """The time of the block."""
        return self.compute_s + self.waiting_s + self.sending_s - self.hidden_s

    def sent(self) -> Iterator[SentCollective]:
        """Yield all Collectives."""
        yield from (one for step in self.steps for one in step.sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All blocks of a plan."""

    candidate: str
    blocks: tuple[ExplainedBlock, ...]
    rules: Mapping[str, str]  # those that refuse another cut: id -> what it says
    basis: str  # what the seconds rest on


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """The best plans of other layouts, fastest first; and the plan's own outer point if memory had no end."""

    others: tuple[Plan, ...]
    unlimited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A change that turns the order: at ``then`` the other is faster, a unit before it is not."""

    name: str
    now: float
    then: float

    @property
    def factor(self) -> float:
        """By how much the number changes."""
        return self.then / self.now


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """The best plan with some keys, or why there is none; and for each circumstance the change that turns the order."""

    asked: str
    other: Plan | None  # a legal plan with these keys, the one of least memory where none fits
    fits: bool
    against: tuple[str, ...]  # why it cannot be
    flips: tuple[Flip, ...]
    unmoved: tuple[str, ...]  # circumstances that turn nothing within 16 times as much or as little
