"""The difference of two plans' predictions, term by term, and what they state and choose otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.plan.changes import Change, LineChange, asked_changes, chosen_changes, line_changes
from autoshard.plan.dollars import Dollars, dollars_of
from autoshard.plan.plan import Plan
from autoshard.plan.prediction import Prediction

MILLION = 1_000_000
_DIGITS = 9  # of shares: predictions are rounded to as many
_LEAST_SHARED = 0.01  # a total that is less of what goes up and down has no parts worth a share


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A named number of both plans: seconds or bytes."""

    name: str
    a: float
    b: float

    @property
    def difference(self) -> float:
        """What b has more than a."""
        return self.b - self.a


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """A total of both plans and its parts; what differs most comes first."""

    total: Term
    parts: tuple[Term, ...]

    def share(self, part: Term) -> float | None:
        """Return how much of the total difference one part makes; None where parts cancel out."""
        moved = sum(abs(part.difference) for part in self.parts)
        if abs(self.total.difference) <= _LEAST_SHARED * moved:
            return None
        return part.difference / self.total.difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of two plans that are compared: what is predicted of it."""

    candidate: str
    num_ranks: int
    tokens_per_step: int
    step_time_s: float
    low_s: float
    high_s: float
    tokens_per_s: float
    mfu: float
    peak_bytes: int
    capacity_bytes: int
    fullest_rank: int  # pipeline rank
    compile_s: float | None  # None: nothing is compiled ahead
    dollars: Dollars | None
    basis: str

    @property
    def fits(self) -> bool:
        """Whether the fullest pipeline rank has memory enough."""
        return self.peak_bytes <= self.capacity_bytes

    @property
    def half_width(self) -> float:
        """Half of the prediction's interval, as a share of the step time."""
        return (self.high_s - self.low_s) / 2 / self.step_time_s

    def holds(self, other: "Side") -> bool:
        """Whether the interval holds another plan's time for as many tokens."""
        time_s = other.step_time_s / other.tokens_per_step * self.tokens_per_step
        return self.low_s <= time_s <= self.high_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """Plan b against plan a. Where their steps have different numbers of tokens, seconds are those of a million."""

    a: Side
    b: Side
    asked: tuple[Change, ...]  # in model, workload, cluster
    chosen: tuple[Change, ...]
    time: Breakdown  # seconds
    memory: Breakdown  # bytes of the fullest pipeline rank
    sent: tuple[Term, ...]  # bytes that the busiest rank sends in a step, per axis
    lines: tuple[LineChange, ...]  # of the tables of Strategies
    blocks: tuple[Change, ...]  # whose tables only one of the plans has: how many lines

    @property
    def is_nothing(self) -> bool:
        """Whether the plans are the same, and the same is predicted of them."""
        return self.a == self.b and not (self.asked or self.chosen or self.lines or self.blocks)

    @property
    def same_tokens(self) -> bool:
        """Whether a step of either plan has as many tokens, so that steps can be compared."""
        return self.a.tokens_per_step == self.b.tokens_per_step

    @property
    def slower_by(self) -> float:
        """How much longer b takes for a token, as a share of what a takes; negative where b is faster."""
        longer = self.b.step_time_s / self.a.step_time_s * (self.a.tokens_per_step / self.b.tokens_per_step)
        return round(longer - 1, _DIGITS)

    @property
    def is_within_intervals(self) -> bool:
        """Whether each plan lies in the interval of the other, so that nobody knows which is faster."""
        return self.a.holds(self.b) and self.b.holds(self.a)


def diff(a: Plan, b: Plan) -> Diff:
    """Compare two predicted plans."""
    assert a.prediction and b.prediction, "only predicted plans are compared"
    one, other = _side(a, a.prediction), _side(b, b.prediction)
    return Diff(
        a=one,
        b=other,
        asked=asked_changes(a, b),
        chosen=chosen_changes(a, b),
        time=_time(a.prediction, b.prediction, one, other),
        memory=_memory(a.prediction, b.prediction),
        sent=_terms(a.prediction.communication_bytes, b.prediction.communication_bytes),
        lines=line_changes(a, b),
        blocks=_blocks(a, b),
    )


def _side(plan: Plan, prediction: Prediction) -> Side:
    totals = [memory.total for memory in prediction.stage_memory]
    return Side(
        candidate=str(plan.candidate),
        num_ranks=plan.cluster.num_ranks,
        tokens_per_step=plan.workload.tokens_per_step,
        step_time_s=prediction.step_time_s,
        low_s=prediction.low_s,
        high_s=prediction.high_s,
        tokens_per_s=prediction.tokens_per_s,
        mfu=prediction.mfu,
        peak_bytes=prediction.peak_bytes,
        capacity_bytes=prediction.capacity_bytes,
        fullest_rank=totals.index(max(totals)),
        compile_s=prediction.compiling.compile_s if prediction.compiling else None,
        dollars=dollars_of(plan),
        basis=prediction.basis,
    )


def _time(a: Prediction, b: Prediction, one: Side, other: Side) -> Breakdown:
    """Return the seconds of a step, or of a million tokens."""
    alike = one.tokens_per_step == other.tokens_per_step
    scales = [1.0 if alike else MILLION / side.tokens_per_step for side in (one, other)]
    parts = [
        {name: time_s * scale for name, time_s in prediction.time_parts.items()}
        for prediction, scale in zip((a, b), scales, strict=True)
    ]
    total = Term(name="total", a=a.step_time_s * scales[0], b=b.step_time_s * scales[1])
    return Breakdown(total=total, parts=_terms(*parts))


def _memory(a: Prediction, b: Prediction) -> Breakdown:
    """Return the parts of the fullest pipeline rank of each plan, which may be different ranks."""
    fullest = [max(prediction.stage_memory, key=lambda memory: memory.total) for prediction in (a, b)]
    total = Term(name="total", a=a.peak_bytes, b=b.peak_bytes)
    return Breakdown(total=total, parts=_terms(*(memory.parts for memory in fullest)))


def _terms(a: Mapping[str, float], b: Mapping[str, float]) -> tuple[Term, ...]:
    """Return the parts that at least one of the plans has, what differs most first."""
    terms = (Term(name=name, a=a.get(name, 0), b=b.get(name, 0)) for name in sorted({*a, *b}))
    return tuple(sorted((term for term in terms if term.a or term.b), key=lambda term: -abs(term.difference)))


def _blocks(a: Plan, b: Plan) -> tuple[Change, ...]:
    tables = a.strategies, b.strategies
    counts = [{name: str(len(table)) for name, table in sorted(blocks.items())} for blocks in tables]
    names = sorted(counts[0].keys() ^ counts[1].keys())
    return tuple(Change(name=name, a=counts[0].get(name), b=counts[1].get(name)) for name in names)
