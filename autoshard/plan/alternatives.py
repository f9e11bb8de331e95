"""What stands beside a plan: runners-up, another of the user's choice, and what would turn the order."""

from dataclasses import dataclass

from autoshard.plan.plan import Plan


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
