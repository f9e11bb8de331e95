"""Candidates as columns, so that one predicate answers for one candidate and for a hundred thousand."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from autoshard.plan.boundary import boundary_fault
from autoshard.plan.candidate import Candidate
from autoshard.plan.recompute import show_stages
from autoshard.plan.rules import names
from autoshard.plan.stages import layers_of
from autoshard.spec.cluster import Cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload

# A number, a truth value or a text; or a numpy array of them: %, //, ==, & and | read the same on both.
Column = Any
Engine = Literal["nxd", "torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The candidates' values, one column each, beside the facts that they share.

    A column may stay a single value when all candidates agree. Columns that name a fault hold "" where there
    is none.
    """

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    engine: Engine
    tp: Column = 1
    pp: Column = 1
    cp: Column = 1
    ep: Column = 1
    dp: Column = 1
    vp: Column = 1
    mbs: Column = 1
    sp: Column = False
    zero: Column = 1
    schedule: Column = "1f1b"
    cp_kind: Column = "ring"
    cp_order: Column = "contiguous"
    lnc: Column = 0  # 0: the cluster's
    recompute: Column = "none"
    num_recomputes: Column = 1
    num_short_stages: Column = 0  # stages with fewer layers than their full:K
    recompute_fault: Column = ""
    experts_fault: Column = ""
    num_stage_entries: Column = 0  # 0: the even split
    num_stage_layers: Column = 0  # their sum
    place: Column = ""
    place_fault: Column = ""
    kernels: Column = ""
    kernels_fault: Column = ""
    boundary: Column = ""
    boundary_fault: Column = ""

    @classmethod
    def of(
        cls, candidate: Candidate, model: ModelSpec, cluster: Cluster, workload: Workload, engine: Engine
    ) -> "Columns":
        """Make columns of a single candidate: plain numbers and texts."""
        plain = {name: getattr(candidate, name) for name in _PLAIN}
        kernels = candidate.kernels or cluster.kernels
        return cls(
            model=model,
            cluster=cluster,
            workload=workload,
            engine=engine,
            **plain,
            sp=candidate.sequence_parallel,
            lnc=candidate.lnc or 0,
            recompute=show_stages(candidate.recompute),
            num_recomputes=len(candidate.recompute),
            num_short_stages=_num_short_stages(candidate, model),
            recompute_fault=names.recompute_fault(candidate.recompute, kernels),
            experts_fault=_experts_fault(candidate, model, workload, kernels),
            num_stage_entries=len(candidate.stages or ()),
            num_stage_layers=sum(candidate.stages or ()),
            place=str(candidate.place or ""),
            place_fault=names.place_fault(candidate.place, cluster),
            kernels=kernels,
            kernels_fault=names.kernels_fault(kernels, engine),
            boundary=candidate.boundary or "",
            boundary_fault=boundary_fault(candidate.boundary),
        )

    @classmethod
    def stack(cls, rows: Sequence["Columns"]) -> "Columns":
        """Put single candidates of one question under each other, as numpy arrays."""
        import numpy as np  # only here: planning one candidate does not need it

        assert rows, "nothing to stack"
        varied = {name: np.array([getattr(row, name) for row in rows]) for name in cls.names()}
        return replace(rows[0], **varied)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """List the columns."""
        return tuple(field.name for field in fields(cls) if field.name not in _SHARED)

    @property
    def edp(self) -> Column:
        """Ranks that hold the same experts: dp without its ep part, rounded up if ep does not divide it."""
        return (self.dp + self.ep - 1) // self.ep

    @property
    def num_stages(self) -> Column:
        """Stages of the pipeline, over all chunks."""
        return self.pp * self.vp

    @property
    def num_micro_batches(self) -> Column:
        """Micro-batches of one step, rounded down where the batch does not divide."""
        return self.workload.global_batch // (self.dp * self.mbs)


_SHARED = ("model", "cluster", "workload", "engine")
_PLAIN = ("tp", "pp", "cp", "ep", "dp", "vp", "mbs", "zero", "schedule", "cp_kind", "cp_order")


def _num_short_stages(candidate: Candidate, model: ModelSpec) -> int:
    if all(recompute.num_layers is None for recompute in candidate.recompute):
        return 0
    if len(candidate.recompute) not in (1, candidate.num_stages) or candidate.num_stages > model.num_layers:
        return 0  # there are Rules of their own about these
    layers = layers_of(candidate, model.num_layers)
    wanted = [candidate.recompute_of(stage).num_layers or 0 for stage in range(candidate.num_stages)]
    return sum(want > have for want, have in zip(wanted, layers, strict=False))


def _experts_fault(candidate: Candidate, model: ModelSpec, workload: Workload, kernels: str) -> str:
    if not model.num_experts:
        return ""
    return names.experts_fault(candidate.recompute, kernels, drops=workload.expert_capacity is not None)
