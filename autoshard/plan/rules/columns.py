"""Candidates as columns, so that one predicate answers for one candidate and for a hundred thousand."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from autoshard.errors import nearest
from autoshard.plan.candidate import Candidate, boundary_fault
from autoshard.plan.recompute import Recompute, stages_text
from autoshard.spec.cluster import Cluster, Placement
from autoshard.spec.kernels import kernels_names, load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload

if TYPE_CHECKING:  # planning one candidate does not need numpy
    import numpy as np
    from numpy.typing import NDArray

# %, //, ==, & and | read the same on a single value and on an array of them.
Ints: TypeAlias = "int | NDArray[np.int64]"
Mask: TypeAlias = "bool | NDArray[np.bool_]"
Texts: TypeAlias = "str | NDArray[np.str_]"
Engine = Literal["nxd", "torch"]
_NXD_TABLES = ("nxd", "nxd_core")
_PRODUCTS = frozenset(("gate", "up", "act", "product", "down"))  # of experts


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
    lnc: Ints = 0  # 0: the cluster's
    recompute: Texts = "none"
    num_recomputes: Ints = 1
    num_short_stages: Ints = 0  # stages with fewer layers than their full:K
    recompute_fault: Texts = ""
    experts_fault: Texts = ""
    num_stage_entries: Ints = 0  # 0: the even split
    num_stage_layers: Ints = 0  # their sum
    place: Texts = ""
    place_fault: Texts = ""
    kernels: Texts = ""
    kernels_fault: Texts = ""
    boundary: Texts = ""
    boundary_fault: Texts = ""

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
            recompute=stages_text(candidate.recompute),
            num_recomputes=len(candidate.recompute),
            num_short_stages=_num_short_stages(candidate, model),
            recompute_fault=recompute_fault(candidate.recompute, kernels),
            experts_fault=(
                experts_fault(candidate.recompute, kernels, drops=workload.expert_capacity is not None)
                if model.num_experts
                else ""
            ),
            num_stage_entries=len(candidate.stages or ()),
            num_stage_layers=sum(candidate.stages or ()),
            place=str(candidate.place or ""),
            place_fault=place_fault(candidate.place, cluster),
            kernels=kernels,
            kernels_fault=kernels_fault(kernels, engine),
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


_SHARED = ("model", "cluster", "workload", "engine")
_PLAIN = ("tp", "pp", "cp", "ep", "dp", "vp", "mbs", "zero", "schedule", "cp_kind", "cp_order")


def _num_short_stages(candidate: Candidate, model: ModelSpec) -> int:
    if all(recompute.num_layers is None for recompute in candidate.recompute):
        return 0
    if len(candidate.recompute) not in (1, candidate.num_stages) or candidate.num_stages > model.num_layers:
        return 0  # there are Rules of their own about these
    layers = candidate.layers_of_stages(model.num_layers)
    wanted = [candidate.recompute_of(stage).num_layers or 0 for stage in range(candidate.num_stages)]
    return sum(want > have for want, have in zip(wanted, layers, strict=False))


def place_fault(place: Placement | None, cluster: Cluster) -> str:
    """Judge the order of a node's ranks on the mesh."""
    if place is None or len(place.local_ranks) == cluster.ranks_per_node:
        return ""
    return f"places {len(place.local_ranks)} ranks, but a node of {cluster.name} has {cluster.ranks_per_node}"


def kernels_fault(kernels: str, engine: str) -> str:
    """Judge the Kernels table."""
    if kernels not in kernels_names():
        return f"there is no such table. {nearest(kernels, kernels_names())}"
    if (kernels in _NXD_TABLES) != (engine == "nxd"):
        own = [name for name in kernels_names() if (name in _NXD_TABLES) == (engine == "nxd")]
        return f"the {engine} engine does not run these kernels. Use {', '.join(own)}"
    return ""


def recompute_fault(recomputes: tuple[Recompute, ...], kernels: str) -> str:
    """Judge the op names after selective; a framework's own name is right even where it computes nothing again."""
    names = sorted({name for recompute in recomputes for name in recompute.ops})
    if not names or kernels not in kernels_names():
        return ""
    table = load_kernels(kernels)
    known = tuple(dict.fromkeys((*table.selective, *(op for ops in table.selective.values() for op in ops))))
    return " ".join(f"{name} is not known to {kernels}. {nearest(name, known)}" for name in names if name not in known)


def experts_fault(recomputes: tuple[Recompute, ...], kernels: str, *, drops: bool) -> str:
    """Judge which operations of experts NxD computes again: all products and what lies between, if tokens may drop.

    >>> again = Recompute.parse("selective[LlamaMLP]")
    >>> experts_fault((again,), "nxd", drops=True)
    ''
    >>> experts_fault((again,), "nxd", drops=False)
    'the kernel for experts that drop no token keeps what it needs. Use none or full'
    """
    if kernels not in _NXD_TABLES:
        return ""
    found = [_PRODUCTS.intersection(load_kernels(kernels).resolve(one.ops)) for one in recomputes]
    if any(found) and not drops:
        return "the kernel for experts that drop no token keeps what it needs. Use none or full"
    if any(inside and inside != _PRODUCTS for inside in found):
        return "of experts NxD computes all again or nothing. Use selective[LlamaMLP], none or full"
    return ""


def effective_names(kernels: str) -> tuple[str, ...]:
    """List a framework's names of the sets that hold any operation.

    >>> effective_names("nxd")  # flash attention is not NxD's module CoreAttention
    ('ActivationMultiplyMLP', 'LlamaMLP', 'LlamaRMSNorm')
    """
    return tuple(sorted(name for name, ops in load_kernels(kernels).selective.items() if ops))
