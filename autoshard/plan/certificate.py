"""What a search looked at before it answered, so that the answer can be judged."""

import math
from dataclasses import dataclass, fields, replace

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
    num_too_large: int  # for memory, whatever layers and recompute their stages have, by a bound
    num_bounded: int  # whose bound was no better than what had been found
    num_solved: int  # whose best layers and recompute of the stages were found, or that there are none
    num_fitting: int  # of the solved ones, that fit in memory
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
        bound = format_bytes(round(self.bound)) if self.objective == "memory" else f"{self.bound:.6g} s"
        tables = f"{self.num_tables} table{'' if self.num_tables == 1 else 's'}"
        return (
            f"{self.num_solved} points solved ({self.num_fitting} fit), {self.num_bounded} pruned by their bound, "
            f"{self.num_too_large} too large for memory; {tables} solved; bound {bound}, gap {self.gap:.3%}"
        )

    def plus(self, other: "Certificate") -> "Certificate":
        """Return the certificate of both spaces together."""
        both: dict[str, Refusal] = {}
        for refusal in (*self.refusals, *other.refusals):  # the example of a Rule stays that of the first
            known = both.get(refusal.rule_id)
            count = refusal.num_points + (known.num_points if known else 0)
            both[refusal.rule_id] = replace(known or refusal, num_points=count)
        numbers = (field.name for field in fields(self) if field.name.startswith("num_"))
        return replace(
            other,
            **{name: getattr(self, name) + getattr(other, name) for name in numbers},
            refusals=tuple(both.values()),
            value=min(self.value, other.value),
            bound=min(self.bound, other.bound),
            ended=self.stopped or other.ended,
        )


NOTHING_LOOKED_AT = Certificate(
    num_points=0, refusals=(), num_legal=0, num_too_large=0, num_bounded=0, num_solved=0, num_fitting=0,
    num_tables=0, value=math.inf, bound=math.inf,
)  # fmt: skip
