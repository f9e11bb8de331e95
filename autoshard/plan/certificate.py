"""What a search looked at before it answered, so that the answer can be judged."""

import math
from dataclasses import dataclass, replace

from autoshard.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """How many outer points a Rule refused, and what it says about one of them."""

    rule_id: str
    num_points: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A finite space, what became of each outer point of it, and how far the answer may be from the best.

    An outer point is everything but layers and recompute of the stages; it counts for every Rule that refuses it.
    ``num_tables`` tables of Strategies were solved for meshes of its kind; a plan that is shown has its own.
    """

    num_points: int
    refusals: tuple[Refusal, ...]
    num_legal: int
    num_too_large: int  # that no filling of the stages fits in memory, by a bound
    num_bounded: int  # whose bound was no better than what had been found
    num_solved: int  # whose stages were filled in the best way, or found to fit in none
    num_fitting: int  # of these
    num_tables: int
    value: float  # of the answer, in units of the objective; infinite where there is none
    bound: float  # nothing that was left open can be less
    ended: str = "complete"  # or why the search stopped before
    objective: str = "time"

    @property
    def stopped(self) -> str:
        """Why the search stopped before it was complete, if it did."""
        return "" if self.ended == "complete" else self.ended

    @property
    def gap(self) -> float:
        """By which share of it the answer may be worse than the best."""
        if math.isinf(self.value):
            return 0.0 if math.isinf(self.bound) else 1.0
        return max(0.0, 1.0 - self.bound / self.value)

    @property
    def claim(self) -> str:
        """Say in words what was proven."""
        best = {"time": "fastest", "memory": "smallest", "dollars": "cheapest"}[self.objective]
        within = "" if self.gap < 1e-9 else f", or within {self.gap:.2%} of it"
        stopped = f" ({self.stopped})" if self.stopped else ""
        return (
            f"the {best} by this cost model{within}{stopped}, of {self.num_legal} legal outer points with all layer "
            "ranges (gpipe, 1f1b; near-even ones of other schedules) and recompute of their stages, among plans with "
            "one table per block kind and recompute kind"
        )

    @property
    def accounting(self) -> str:
        """Say what became of the legal points."""
        return (
            f"{self.num_solved} points solved ({self.num_fitting} fit), {self.num_bounded} pruned by their bound, "
            f"{self.num_too_large} too large for memory; {_counted(self.num_tables, 'table')} solved; "
            f"bound {self._bound}, gap {self.gap:.3%}"
        )

    @property
    def _bound(self) -> str:
        return format_bytes(round(self.bound)) if self.objective == "memory" else f"{self.bound:.6g} s"

    def plus(self, other: "Certificate") -> "Certificate":
        """Return the certificate of both spaces together."""
        return Certificate(
            num_points=self.num_points + other.num_points,
            refusals=_merged(self.refusals, other.refusals),
            num_legal=self.num_legal + other.num_legal,
            num_too_large=self.num_too_large + other.num_too_large,
            num_bounded=self.num_bounded + other.num_bounded,
            num_solved=self.num_solved + other.num_solved,
            num_fitting=self.num_fitting + other.num_fitting,
            num_tables=self.num_tables + other.num_tables,
            value=min(self.value, other.value),
            bound=min(self.bound, other.bound),
            ended=self.stopped or other.ended,
            objective=other.objective,
        )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _merged(first: tuple[Refusal, ...], second: tuple[Refusal, ...]) -> tuple[Refusal, ...]:
    """Add up what the same Rule refused in both spaces; its example stays that of the first."""
    both: dict[str, Refusal] = {}
    for refusal in (*first, *second):
        known = both.get(refusal.rule_id)
        count = refusal.num_points + (known.num_points if known else 0)
        both[refusal.rule_id] = replace(known or refusal, num_points=count)
    return tuple(both.values())


NOTHING_LOOKED_AT = Certificate(
    num_points=0, refusals=(), num_legal=0, num_too_large=0, num_bounded=0, num_solved=0, num_fitting=0,
    num_tables=0, value=math.inf, bound=math.inf,
)  # fmt: skip
