"""What a search says about plans: its certificate, the answers to a question, and why another plan is not the best."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoshard.plan.plan import Plan, Prediction, rounded
from autoshard.units import counted, format_at_most, format_bytes


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

    num_points: int = 0
    refusals: tuple[Refusal, ...] = ()
    num_legal: int = 0
    num_near_even: int = 0  # of these: layers differ, and the schedule is such that near-even splits alone are tried
    num_too_large: int = 0  # for memory, whatever layers and recompute their stages have, by a bound
    num_bounded: int = 0  # whose bound was no better than what had been found
    num_solved: int = 0  # whose best layers and recompute of the stages were found, or that there are none
    num_fitting: int = 0  # of the solved ones, that fit in memory
    num_open: int = 0  # that may be better by their bound, and were left when the search ended
    num_left: int = 0  # of which nothing is known, because the search was stopped before
    num_tables: int = 0
    num_changes: int = 0  # of the best plans, which a local search has priced without any bounds
    gained: float = 0.0  # by how much the best of them was faster, as a share; it is the best plan then
    value: float = math.inf  # of the answer, in units of the objective; infinite where there is none
    bound: float = math.inf  # nothing that was left open can be less
    ended: str = "complete"  # or why the search stopped before
    objective: str = "time"
    # Seconds of the answer's outer point with less headroom, its stages filled again; another point may gain more.
    by_headroom: Mapping[float, float] = field(default_factory=dict[float, float])

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

    def about(self, plan: Plan) -> "Certificate":
        """Return the certificate with another plan of the question in the place of the best, unless it is as good."""
        assert plan.prediction, "an answer has its prediction"
        value = plan.prediction.peak_bytes if self.objective == "memory" else plan.prediction.step_time_s
        if value <= self.value * (1 + 1e-8):
            return self
        # What headroom costs is known of the best: as many percent.
        by_headroom = {headroom: time_s * value / self.value for headroom, time_s in self.by_headroom.items()}
        return replace(self, value=value, by_headroom=by_headroom)

    @property
    def changes(self) -> str:
        """Say what a local search around the best plan has found; nothing where there was none."""
        if not self.num_changes:
            return ""
        gain = f"gained {format_at_most(self.gained)}" if self.gained > 0 else "gained nothing"
        return f"{counted(self.num_changes, 'change', form=',')} of the best plans {gain}"

    @property
    def changes_in_short(self) -> str:
        """Say the same on a line that has more to say."""
        gain = f"{format_at_most(self.gained)} gained" if self.gained > 0 else "no gain"
        return f"{counted(self.num_changes, 'change', form=',')}: {gain}"

    @property
    def statement(self) -> str:
        """Say in words what was proven."""
        within = "" if self.gap < 1e-9 else f", or within {format_at_most(self.gap)} of it"
        if not self.bound:
            within = " that was found, how far from the best is not known"
        return self._said(f"the {self._best} by this cost model{within}")

    def statement_of(self, plan: Plan) -> str:
        """Say what was proven of a plan of the question; of one that is not the best, how far it may be from that."""
        certificate = self.about(plan)
        if certificate is self or not self.bound:
            return self.statement
        return certificate._said(f"within {format_at_most(certificate.gap)} of the {self._best} by this cost model")

    @property
    def _best(self) -> str:
        return {"time": "fastest", "memory": "smallest", "dollars": "cheapest"}[self.objective]

    def _said(self, promise: str) -> str:
        stopped = f" ({self.stopped})" if self.stopped else ""
        return (
            f"{promise}{stopped}, of {counted(self.num_legal, 'legal layout')} with {self._splits} "
            "of the layers over their stages and recompute of each rank (its stages alike), among plans with one table "
            "per block kind and recompute kind"
        )

    @property
    def _splits(self) -> str:
        if not self.num_near_even:
            return "all splits"
        near = "near-even splits"
        return near if self.num_near_even == self.num_legal else f"all splits (of {self.num_near_even} {near} alone)"

    @property
    def accounting(self) -> str:
        """Say what became of the legal points."""
        bound = format_bytes(round(self.bound)) if self.objective == "memory" else f"{self.bound:.6g} s"
        rest = f", {self.num_open} left open" if self.num_open else ""
        rest += f", {self.num_left} not looked at" if self.num_left else ""
        gap = format_at_most(self.gap) if self.bound else "unknown"
        solved, tables = counted(self.num_solved, "point"), counted(self.num_tables, "table")
        changes = f"; {self.changes}" if self.changes else ""
        return (
            f"{solved} solved ({self.num_fitting} fit), {self.num_bounded} pruned by their bound, "
            f"{self.num_too_large} too large for memory{rest}; {tables} solved; bound {bound}, gap {gap}{changes}"
        )

    def plus(self, more: "Certificate") -> "Certificate":
        """Return the certificate of both spaces together."""
        both: dict[str, Refusal] = {}
        for refusal in (*self.refusals, *more.refusals):  # the example of a Rule stays that of the first
            first = both.get(refusal.rule_id)
            count = refusal.num_points + (first.num_points if first else 0)
            both[refusal.rule_id] = replace(first or refusal, num_points=count)
        names = (name for name in self.__slots__ if name.startswith("num_"))
        return replace(
            more,
            **{name: getattr(self, name) + getattr(more, name) for name in names},
            refusals=tuple(both.values()),
            gained=max(self.gained, more.gained),
            value=min(self.value, more.value),
            bound=min(self.bound, more.bound),
            ended=self.stopped or more.ended,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How long a step of one plan takes as a multiple of another's; what both are off by together cancels."""

    value: float
    low: float  # to ``high`` holds 80% of it
    high: float
    faster: float  # the chance that the one takes less

    @property
    def inverse(self) -> "Ratio":
        """The same with the plans exchanged.

        >>> Ratio(value=0.5, low=0.4, high=0.8, faster=0.9).inverse
        Ratio(value=2.0, low=1.25, high=2.5, faster=0.1)
        """
        return Ratio(
            value=rounded(1 / self.value),
            low=rounded(1 / self.high),
            high=rounded(1 / self.low),
            faster=rounded(1 - self.faster),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestRun:
    """Published runs of one layout, those nearest to a question, and what the cost model says of the same layout."""

    run: str  # the model, nodes, sequence, batch and layout that were measured
    num_runs: int
    low_s: float  # the fastest of them
    high_s: float
    predicted_s: float
    source: str
    unsettled: str = ""  # why their times say less than those of whole runs; "" where they do not


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One of the plans with which a question is answered, by the name under which it can be written.

    Names are ``fastest`` (``smallest`` where memory is minimised), ``simple``, ``vendor``, and ``2``, ``3``, ... of the
    next best layouts. The same plan may have two names.
    """

    name: str
    plan: Plan
    why: str  # what is promised of it, or where it comes from
    slower: float  # than the fastest, as a share of its time; negative where the fastest must leave it out
    ratio: Ratio | None = None  # of its step to that of the fastest; None of the fastest itself
    against: tuple[str, ...] = ()  # why it may not run: a vendor's layout that Rules refuse, or that does not fit
    source: str = ""  # of a vendor's layout
    nearest_run: NearestRun | None = None
    unsettled_run: NearestRun | None = None  # of this very layout, whose times had not settled

    @property
    def prediction(self) -> Prediction:
        """What the cost model says of the plan."""
        assert self.plan.prediction, "every answer is predicted"
        return self.plan.prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """The answer to a plan's question: other layouts, fastest first, its own without a limit of memory, the proof.

    A rival's name is the one that `plan --choose` knows; a letter where the question that the plan answers lacks it.
    """

    rivals: Mapping[str, Plan]
    unlimited_s: float
    certificate: Certificate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A change after which the other plan is the faster: at ``then`` it is, one unit before it is not."""

    name: str
    now: float
    then: float

    @property
    def factor(self) -> float:
        """By how much the number changes."""
        return self.then / self.now


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """The best plan with some keys pinned, or why there is none, and the changes after which it would be the better."""

    pins: str  # keys and values, as given after --why-not
    rival: Plan | None  # the fastest legal plan with these pins; where none fits, the one of least memory
    fits: bool
    against: tuple[str, ...]  # why these pins are refused
    flips: tuple[Flip, ...]
    unmoved: tuple[str, ...]  # numbers that change nothing between a 16th and 16 times their value
