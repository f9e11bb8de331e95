"""Candidates as columns, so that one predicate answers for one candidate and for a hundred thousand."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autoshard.plan.candidate import Candidate
from autoshard.plan.recompute import stages_text
from autoshard.spec.cluster import Cluster
from autoshard.spec.kernels import kernels_names, load_kernels, table_fault
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload

# %, //, ==, & and | read the same on a single value and on an array of them.
Ints: TypeAlias = int | NDArray[np.int64]
Mask: TypeAlias = bool | NDArray[np.bool_]
Texts: TypeAlias = str | NDArray[np.str_]
Engine = Literal["nxd", "torch"]
COLUMNS = ("tp", "pp", "cp", "ep", "dp", "vp", "mbs", "sp", "zero", "schedule", "cp_kind", "cp_order")


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The candidates' values, one column each, beside the facts and the choices that they share.

    A column may stay a single value when all candidates agree.
    """

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    engine: Engine
    shared: Candidate = field(default_factory=Candidate)  # stages, recompute, place, kernels, boundary and lnc of all
    tp: Ints = 1
    pp: Ints = 1
    cp: Ints = 1
    ep: Ints = 1
    dp: Ints = 1
    vp: Ints = 1
    mbs: Ints = 1
    sp: Mask = False
    zero: Ints = 1
    schedule: Texts = "1f1b"
    cp_kind: Texts = "ring"
    cp_order: Texts = "contiguous"

    @classmethod
    def of(
        cls, candidate: Candidate, model: ModelSpec, cluster: Cluster, workload: Workload, engine: Engine
    ) -> "Columns":
        """Make columns of a single candidate: plain numbers and texts."""
        own: dict[str, Any] = {name: getattr(candidate, name) for name in COLUMNS}
        own["sp"] = candidate.sequence_parallel
        return cls(model=model, cluster=cluster, workload=workload, engine=engine, shared=candidate, **own)

    @classmethod
    def stack(cls, rows: Sequence["Columns"]) -> "Columns":
        """Put single candidates of one question, which differ in nothing but columns, under each other as arrays."""
        return replace(rows[0], **{name: np.array([getattr(row, name) for row in rows]) for name in COLUMNS})

    @property
    def recompute(self) -> str:
        """The recompute of all stages, as text."""
        return stages_text(self.shared.recompute)

    @property
    def kernels(self) -> str:
        """The name of the Kernels table."""
        return self.shared.kernels or self.cluster.kernels

    @property
    def edp(self) -> Ints:
        """Ranks that hold the same experts: dp without its ep part, rounded up if ep does not divide it."""
        return (self.dp + self.ep - 1) // self.ep

    @property
    def num_stages(self) -> Ints:
        """Stages of the pipeline, over all chunks."""
        return self.pp * self.vp

    @property
    def num_micro_batches(self) -> Ints:
        """Micro-batches of one step, rounded down where the batch does not divide."""
        return self.workload.global_batch // (self.dp * self.mbs)


def kernels_fault(kernels: str, engine: str) -> str:
    """Say why an engine cannot run a Kernels table; "" where it can."""
    if fault := table_fault(kernels):
        return fault
    if (load_kernels(kernels).engine == "nxd") != (engine == "nxd"):
        own = [name for name in kernels_names() if (load_kernels(name).engine == "nxd") == (engine == "nxd")]
        return f"the {engine} engine does not run these kernels. Use {', '.join(own)}"
    return ""


def effective_names(kernels: str) -> tuple[str, ...]:
    """List a framework's names of the sets that hold any operation.

    >>> effective_names("nxd")  # flash attention is not NxD's module CoreAttention
    ('ActivationMultiplyMLP', 'LlamaMLP', 'LlamaRMSNorm')
    """
    return tuple(sorted(name for name, ops in load_kernels(kernels).selective.items() if ops))
