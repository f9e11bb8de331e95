"""The difference of two plans: what they state and choose otherwise, and what is predicted of them, term by term."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from autoshard.plan.candidate import value_text
from autoshard.plan.explanation import Ratio
from autoshard.plan.plan import SEARCH, Dollars, Plan, Prediction
from autoshard.spec.record import encode

MILLION = 1_000_000
Value = str | int | float | bool
_DIGITS = 9  # of shares: predictions are rounded to as many
_LEAST_SHARED = 0.01  # a total that is less of what goes up and down has no parts worth a share
# The question is the same: prices cost no time, and lnc cuts the same nodes otherwise.
_PRICES = ("cluster.price_usd_per_node_hour", "cluster.price_date")
# Of clusters with other names or other ranks nearly every number differs; of other models as well.
_NAMING = {"cluster": ("name", "lnc", "num_nodes"), "model": ("name",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """One thing that differs between two plans; None: this plan has none."""

    name: str
    a: Value | None
    b: Value | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChange:
    """One line of the tables of Strategies that differs; None: this plan has none."""

    block: str
    op: str
    a: str | None
    b: str | None


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
class Figures:
    """What is predicted of one of the two plans."""

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
    def width(self) -> float:
        """How much more than the step time the interval holds, as a share of it."""
        return self.high_s / self.step_time_s - 1

    def holds(self, other: "Figures") -> bool:
        """Whether the interval holds another plan's time for as many tokens."""
        time_s = other.step_time_s / other.tokens_per_step * self.tokens_per_step
        return self.low_s <= time_s <= self.high_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """Plan b against plan a. Where their steps have different numbers of tokens, seconds are those of a million."""

    a: Figures
    b: Figures
    question: tuple[PlanChange, ...]  # in model, workload, cluster
    choices: tuple[PlanChange, ...]  # keys of the candidate, engine, sizes, calibration, prices
    time: Breakdown  # seconds
    memory: Breakdown  # bytes of the fullest pipeline rank
    sent: tuple[Term, ...]  # bytes that the busiest rank sends in a step, per axis
    lines: tuple[LineChange, ...]  # of the tables of Strategies
    blocks: tuple[PlanChange, ...]  # whose tables only one of the plans has: how many lines
    ratio: Ratio | None = None  # of b's step to a's, where their question is the same
    evidence: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)  # what each part of time rests on

    @property
    def is_nothing(self) -> bool:
        """Whether the plans are the same, and the same is predicted of them."""
        return self.a == self.b and not (self.question or self.choices or self.lines or self.blocks)

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
    figures_a, figures_b = _figures(a, a.prediction), _figures(b, b.prediction)
    same_tokens = figures_a.tokens_per_step == figures_b.tokens_per_step
    scales = [1.0 if same_tokens else MILLION / figures.tokens_per_step for figures in (figures_a, figures_b)]
    times, fullest = list[Mapping[str, float]](), list[Mapping[str, float]]()
    for prediction, figures, scale in zip((a.prediction, b.prediction), (figures_a, figures_b), scales, strict=True):
        times.append({name: time_s * scale for name, time_s in prediction.time_parts.items()})
        fullest.append(prediction.stage_memory[figures.fullest_rank].parts)
    time = Term(name="total", a=figures_a.step_time_s * scales[0], b=figures_b.step_time_s * scales[1])
    memory = Term(name="total", a=figures_a.peak_bytes, b=figures_b.peak_bytes)
    stated = list(_stated_changes(a, b))
    counts = [{name: len(table) for name, table in plan.strategies.items()} for plan in (a, b)]
    return Diff(
        a=figures_a,
        b=figures_b,
        question=tuple(change for change in stated if change.name not in (*_PRICES, "cluster.lnc")),
        choices=(*_choices(a, b), *(change for change in stated if change.name in _PRICES)),
        time=Breakdown(total=time, parts=_terms(*times)),
        memory=Breakdown(total=memory, parts=_terms(*fullest)),
        sent=_terms(a.prediction.communication_bytes, b.prediction.communication_bytes),
        lines=_line_changes(a, b),
        blocks=tuple(change for change in _changes(*counts) if None in (change.a, change.b)),
    )


def _figures(plan: Plan, prediction: Prediction) -> Figures:
    totals = [memory.total for memory in prediction.stage_memory]
    names = ("step_time_s", "low_s", "high_s", "tokens_per_s", "mfu", "peak_bytes", "capacity_bytes", "basis")
    return Figures(
        **{name: getattr(prediction, name) for name in names},
        candidate=str(plan.candidate),
        num_ranks=plan.cluster.num_ranks,
        tokens_per_step=plan.workload.tokens_per_step,
        fullest_rank=totals.index(max(totals)),
        compile_s=prediction.compiling.compile_s if prediction.compiling else None,
        dollars=plan.dollars,
    )


def _terms(a: Mapping[str, float], b: Mapping[str, float]) -> tuple[Term, ...]:
    """Return the parts that at least one of the plans has, the largest difference first."""
    terms = (Term(name=name, a=a.get(name, 0), b=b.get(name, 0)) for name in sorted({*a, *b}))
    return tuple(sorted((term for term in terms if term.a or term.b), key=lambda term: -abs(term.difference)))


def _changes(a: Mapping[str, Value], b: Mapping[str, Value]) -> list[PlanChange]:
    names = dict.fromkeys((*a, *b))
    return [PlanChange(name=name, a=a.get(name), b=b.get(name)) for name in names if a.get(name) != b.get(name)]


def _stated_changes(a: Plan, b: Plan) -> Iterator[PlanChange]:
    """Yield in what two plans answer different questions, prices included: model, workload, cluster."""
    for part in ("model", "workload", "cluster"):
        changes = _changes(leaf_values(encode(getattr(a, part)), part), leaf_values(encode(getattr(b, part)), part))
        changes = [change for change in changes if "source" not in change.name]  # where a number is from costs nothing
        naming = [f"{part}.{name}" for name in _NAMING.get(part, ())]
        swapped = any(change.name in naming and not change.name.endswith("num_nodes") for change in changes)
        yield from (change for change in changes if not swapped or change.name in naming)


def _choices(a: Plan, b: Plan) -> list[PlanChange]:
    """List what two plans choose otherwise: keys of the candidate first, then engine, lists, sizes, calibration."""

    def keys(plan: Plan) -> dict[str, Value]:
        """Return a plan's choices by name; what has a default elsewhere is given as it is here."""
        candidate, schedule = plan.candidate, encode(plan.schedule)
        values = {name: getattr(candidate, name) for name in candidate.__slots__}
        texts: dict[str, Value] = {
            key: "default" if value is None else value if isinstance(value, int) else value_text(key, value)
            for key, value in values.items()
        }
        texts |= {"sp": plan.sp, "kernels": plan.kernels, "engine": plan.engine}
        for key in ("placement", "actions"):  # of a schedule its builder's name does not say
            texts |= leaf_values(schedule[key], f"schedule.{key}") if schedule[key] is not None else {}
        return {**texts, **leaf_values(encode(plan.buckets), "buckets"), **leaf_values(encode(plan.padding), "padding")}

    notes = [change for change in _changes(a.provenance, b.provenance) if change.name not in ("model", SEARCH)]
    # Of another calibration its name says enough.
    swapped = any(change.name == "calibration" for change in notes)
    notes = [change for change in notes if not (swapped and change.name.startswith("calibration."))]
    return _changes(keys(a), keys(b)) + notes


def _line_changes(a: Plan, b: Plan) -> tuple[LineChange, ...]:
    """List the lines that differ in blocks that both plans have; lines with other collectives come first."""

    def order(line: LineChange) -> tuple[bool, str, str]:
        sent = [(text or "").partition(" | ")[2] for text in (line.a, line.b)]
        return sent[0] == sent[1], line.block, line.op

    changes: list[LineChange] = []
    for block in a.strategies.keys() & b.strategies.keys():
        table_a, table_b = a.strategies[block], b.strategies[block]
        names = (name for name in dict.fromkeys((*table_a, *table_b)) if table_a.get(name) != table_b.get(name))
        changes += (LineChange(block=block, op=name, a=table_a.get(name), b=table_b.get(name)) for name in names)
    return tuple(sorted(changes, key=order))


def leaf_values(data: Any, where: str = "") -> dict[str, Value]:
    """Return every single value of JSON data by its path.

    >>> leaf_values({"lnc": None, "links": [{"ports": 2}]}, "cluster")
    {'cluster.lnc': 'none', 'cluster.links[0].ports': 2}
    """
    if isinstance(data, dict):
        pairs = [(f"{where}.{key}" if where else key, value) for key, value in cast(dict[str, Any], data).items()]
    elif isinstance(data, list):
        pairs = [(f"{where}[{index}]", value) for index, value in enumerate(cast(list[Any], data))]
    else:
        return {where: "none" if data is None else data}
    return {name: text for inner, value in pairs for name, text in leaf_values(value, inner).items()}
