"""The plan: the only thing that crosses from the planner to the runtime."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autoshard.errors import require
from autoshard.plan.candidate import Candidate, CpKind, CpOrder, Zero, even_stages
from autoshard.plan.prediction import Dollars, Prediction, rounded
from autoshard.plan.recompute import Recompute
from autoshard.schedule.schedule import Schedule
from autoshard.spec.cluster import MAX_RANKS_PER_NODE, Cluster
from autoshard.spec.mesh import Mesh
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload

SCHEMA = 2
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
        """Refuse impossible numbers."""
        counts = ("rank", "chunk", "first_layer")
        require(
            *((getattr(self, name) >= 0, name, f"must be at least 0, not {getattr(self, name)}") for name in counts),
            (self.num_layers >= 1, "num_layers", f"must be at least 1, not {self.num_layers}"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """How much a data-parallel collective sends at a time."""

    reduce_scatter_bytes: int
    all_gather_bytes: int

    def __post_init__(self) -> None:
        """Refuse empty buckets."""
        require(
            (self.reduce_scatter_bytes >= 1, "reduce_scatter_bytes", "must be at least 1"),
            (self.all_gather_bytes >= 1, "all_gather_bytes", "must be at least 1"),
        )

    @property
    def total_bytes(self) -> int:
        """Memory of one bucket of each kind."""
        return self.reduce_scatter_bytes + self.all_gather_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One training run, decided: what lies where, in which order it runs, and what that will cost."""

    schema: int
    model: ModelSpec
    cluster: Cluster
    workload: Workload
    engine: Literal["nxd", "torch"]
    kernels: str
    mesh: Mesh
    micro_batch: int  # sequences
    sp: bool
    zero: Zero
    cp_kind: CpKind
    cp_order: CpOrder
    stages: tuple[Stage, ...]
    schedule: Schedule
    strategies: Mapping[str, Mapping[str, str]] = field(hash=False)  # block kind -> op -> Strategy in text
    units: Mapping[str, str] = field(hash=False, default_factory=dict[str, str])  # block kind -> sent under ZeRO-3
    boundary: str | None
    buckets: Buckets
    padding: Mapping[str, int] = field(hash=False)  # dim -> size after padding
    prediction: Prediction | None
    provenance: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        """Refuse plans that no edit of another field could make right."""
        require(
            (self.schema == SCHEMA, "schema", f"must be {SCHEMA}, not {self.schema}"),
            (self.micro_batch >= 1, "micro_batch", f"must be at least 1, not {self.micro_batch}"),
            (bool(self.stages), "stages", "must hold at least one stage"),
            *((size >= 1, f"padding.{dim}", f"must be at least 1, not {size}") for dim, size in self.padding.items()),
        )

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
            schedule=self.schedule.builder,
            recompute=tuple(stage.recompute for stage in self.stages),
            stages=None if layers == even_stages(self.model.num_layers, len(layers)) else layers,
            place=None if self.mesh.placement == default_place else self.mesh.placement,
            kernels=None if self.kernels == self.cluster.kernels else self.kernels,
            cp_kind=self.cp_kind,
            cp_order=self.cp_order,
            boundary=self.boundary,
            lnc=self.cluster.lnc,
        )

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
