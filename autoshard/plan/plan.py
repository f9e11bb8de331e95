"""The plan: the only thing that crosses from the planner to the runtime."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from autoshard.errors import in_range, require
from autoshard.plan.candidate import Candidate, CpKind, CpOrder, Fold, Zero, even_stages
from autoshard.plan.code import PlannedCode
from autoshard.plan.recompute import Recompute
from autoshard.schedule.schedule import Schedule
from autoshard.spec.cluster import MAX_RANKS_PER_NODE, Cluster
from autoshard.spec.mesh import Mesh
from autoshard.spec.model import ModelSpec
from autoshard.spec.recipe import headroom_check
from autoshard.spec.record import option
from autoshard.spec.workload import Workload
from autoshard.units import format_seconds

SUM_TOLERANCE = 1e-6  # parts are rounded to nine digits one by one


def rounded(value: float) -> float:
    """Round to nine significant digits, so that a plan is the same file on every machine.

    >>> rounded(1 / 3), rounded(123456789012.0)
    (0.333333333, 123456789000.0)
    """
    return float(f"{value:.9g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Predicted peak memory of one pipeline rank (all its chunks), in named parts of bytes."""

    num_weights: int  # that one rank of the stage holds, replicas included
    parts: Mapping[str, int] = field(hash=False)
    host_bytes: int = option(0)  # what it keeps in host memory for the backward pass

    def __post_init__(self) -> None:
        sizes = ((size >= 0, f"parts.{name}", "must not be negative") for name, size in self.parts.items())
        require(*in_range(self, "num_weights", "host_bytes"), *sizes)

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return sum(self.parts.values())

    def without(self, parts: Collection[str]) -> int:
        """Bytes of all but some parts.

        >>> StageMemory(num_weights=1, parts={"weights": 2, "runtime": 5}).without(("runtime",))
        2
        """
        return sum(size for name, size in self.parts.items() if name not in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiling:
    """What has to be compiled before the first step, if no cache holds it."""

    num_graphs: int  # distinct ones
    compile_s: float
    basis: str  # what the estimate rests on

    def __post_init__(self) -> None:
        positive = in_range(self, "num_graphs", "compile_s", positive=True)
        require(*positive, (bool(self.basis), "basis", "say what the estimate rests on"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dollars:
    """What a run costs on demand: all nodes of the cluster, for as long as the prediction says.

    Prices change, and most who rent many nodes pay another one: ``price_date`` says how old this one is.
    """

    usd_per_step: float
    usd_per_billion_tokens: float
    price_usd_per_node_hour: float
    price_date: str | None  # None where the source of the price carries none


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Time, memory and traffic of one optimizer step, with an interval and what it is worth."""

    step_time_s: float
    low_s: float
    high_s: float
    time_parts: Mapping[str, float] = field(hash=False)  # seconds; they add up to step_time_s
    stage_memory: tuple[StageMemory, ...]  # one per pipeline rank
    peak_interval_bytes: tuple[int, int] | None = None  # of the fullest rank, where an allocator's share is estimated
    capacity_bytes: int  # memory of a rank that the plan may fill (Kernels.capacity_bytes)
    tokens_per_s: float
    mfu: float  # share of the peak that the model's own FLOPs use, with all (query, key) pairs of attention
    mfu_causal: float | None = None  # with those pairs alone that the mask leaves
    outside: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)  # feature -> its distance from rows
    communication_bytes: Mapping[str, int] = field(hash=False)  # per axis: sent by one rank in one step
    basis: str  # what the numbers are worth: "uncalibrated", or the calibration they come from
    of: str  # fingerprint of the rest of the plan
    compiling: Compiling | None = None  # None: nothing is compiled ahead

    def __post_init__(self) -> None:
        total, sent = math.fsum(self.time_parts.values()), self.communication_bytes.items()
        interval = f"the interval {self.low_s} to {self.high_s} does not hold step_time_s {self.step_time_s}"
        endless = (
            f"{self.step_time_s:g} s is not {SHORTEST_S:g} to {LONGEST_STEP_S:g} s. Look for a typing error in the "
            "sequence, the batch, the model or the rates of the cluster"
        )
        parts = f"the parts add up to {total}, not to step_time_s {self.step_time_s}"
        require(
            (SHORTEST_S <= self.step_time_s <= LONGEST_STEP_S, "step_time_s", endless),
            *in_range(self, "tokens_per_s", "capacity_bytes", positive=True),
            *in_range(self, "mfu", "mfu_causal"),
            (self.low_s <= self.step_time_s <= self.high_s, "low_s", interval),
            (math.isclose(total, self.step_time_s, rel_tol=SUM_TOLERANCE), "time_parts", parts),
            (bool(self.basis), "basis", "say what the numbers are worth"),
            *((size >= 0, f"communication_bytes.{axis}", "must not be negative") for axis, size in sent),
        )

    @property
    def peak_bytes(self) -> int:
        """Memory of the fullest pipeline rank."""
        return max((memory.total for memory in self.stage_memory), default=0)


SCHEMA = 6
SEARCH = "search"  # the entry of provenance in which a plan keeps what its search has found beside it
SHORTEST_S, LONGEST_STEP_S = 1e-12, 1e12  # of a step: beyond, its cluster or its model has a typing error
_SECONDS_PER_HOUR, _BILLION = 3600, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Contiguous layers run as one unit; the first stage also holds the embedding, the last the head."""

    rank: int  # pipeline rank
    chunk: int  # its index among the stages of that rank
    first_layer: int
    num_layers: int
    recompute: Recompute

    def __post_init__(self) -> None:
        require(*in_range(self, "rank", "chunk", "first_layer"), *in_range(self, "num_layers", low=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """How much a data-parallel collective sends at a time."""

    reduce_scatter_bytes: int
    all_gather_bytes: int

    def __post_init__(self) -> None:
        require(*in_range(self, "reduce_scatter_bytes", "all_gather_bytes", low=1))

    @property
    def total_bytes(self) -> int:
        """Memory of one bucket of each kind."""
        return self.reduce_scatter_bytes + self.all_gather_bytes


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """One training run, decided: what lies where, in which order it runs, and what that will cost."""

    schema: int
    model: ModelSpec
    cluster: Cluster
    workload: Workload
    headroom: float  # share of a rank's memory that the plan leaves free
    engine: Literal["nxd", "torch"]
    kernels: str
    mesh: Mesh
    micro_batch: int  # sequences
    sp: bool
    zero: Zero
    zero_group: int | None
    weight_group: int | None = option(None)
    cp_kind: CpKind
    cp_order: CpOrder
    stages: tuple[Stage, ...]
    schedule: Schedule
    strategies: Mapping[str, Mapping[str, str]] = field(hash=False)  # block kind -> op -> Strategy in text
    units: Mapping[str, str] = field(hash=False, default_factory=dict[str, str])  # block kind -> sent under ZeRO-3
    boundary: str | None
    fold: Fold | None = option(None)  # where it is pinned; else the tables say it
    buckets: Buckets
    padding: Mapping[str, int] = field(hash=False)  # dim -> size after padding
    prediction: Prediction | None
    code: PlannedCode | None = option(None)  # of a model that was read off it
    provenance: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        require(
            (self.schema == SCHEMA, "schema", f"must be {SCHEMA}, not {self.schema}"),
            *in_range(self, "micro_batch", low=1),
            headroom_check(self.headroom),
            (bool(self.stages), "stages", "must hold at least one stage"),
            *((size >= 1, f"padding.{dim}", f"must be at least 1, not {size}") for dim, size in self.padding.items()),
        )

    def __repr__(self) -> str:
        seconds = f", {format_seconds(self.prediction.step_time_s)} a step" if self.prediction else ""
        return f"<Plan: {self.model.name} on {self.cluster.num_nodes} x {self.cluster.name}, {self.candidate}{seconds}>"

    @property
    def num_copies(self) -> int:
        """How many copies of the states that ZeRO divides the ranks of dp and cp hold together."""
        return self.mesh.num_copies(self.zero_group)

    @property
    def num_parts(self) -> int:
        """Into how many pieces of the states a rank's piece of the weights falls."""
        return self.mesh.num_parts(self.zero_group, self.weight_group)

    @property
    def candidate(self) -> Candidate:
        """The plan's choices as one line of text; pasted after ``--at`` it gives this plan again."""
        tp, layers = self.mesh.size("tp"), tuple(stage.num_layers for stage in self.stages)
        is_placed = self.cluster.ranks_per_node <= MAX_RANKS_PER_NODE  # larger nodes have no order of their own
        default_place = self.cluster.default_placement(tp) if is_placed else None
        return Candidate(
            **{axis: self.mesh.size(axis) for axis in ("tp", "pp", "cp", "ep", "dp")},
            vp=self.schedule.num_chunks,
            mbs=self.micro_batch,
            sp=self.sp,
            zero=self.zero,
            zero_group=self.zero_group,
            weight_group=self.weight_group,
            schedule=self.schedule.builder,
            recompute=tuple(stage.recompute for stage in self.stages),
            stages=None if min(layers) and layers == even_stages(self.model.num_layers, len(layers)) else layers,
            place=None if self.mesh.placement == default_place else self.mesh.placement,
            kernels=None if self.kernels == self.cluster.kernels else self.kernels,
            cp_kind=self.cp_kind,
            cp_order=self.cp_order,
            boundary=self.boundary,
            fold=self.fold,
            lnc=self.cluster.lnc,
        )

    @property
    def layers(self) -> tuple[tuple[str, Recompute], ...]:
        """The kind of every layer, and what is computed again there."""
        drops = (stage.recompute.of_layer(number) for stage in self.stages for number in range(stage.num_layers))
        return tuple(zip(self.model.layer_order, drops, strict=False))

    @property
    def dollars(self) -> Dollars | None:
        """What a step costs; None where no price of the nodes is known, or nothing is predicted."""
        price, prediction = self.cluster.price_usd_per_node_hour, self.prediction
        if price is None or prediction is None:
            return None
        usd_per_s = price * self.cluster.num_nodes / _SECONDS_PER_HOUR
        return Dollars(
            usd_per_step=rounded(usd_per_s * prediction.step_time_s),
            usd_per_billion_tokens=rounded(usd_per_s * _BILLION / prediction.tokens_per_s),
            price_usd_per_node_hour=price,
            price_date=self.cluster.price_date,
        )
