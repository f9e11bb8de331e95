"""The outer space of the search: every way to divide ranks and batch over the axes, as columns of numbers."""

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.cost.setting import PerCandidate
from autoshard.plan.candidate import Candidate
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.columns import Columns, Engine, effective_names, kernels_fault
from autoshard.schedule.waves import Ints
from autoshard.spec.cluster import Cluster
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload

KEYS = ("tp", "pp", "cp", "ep", "dp", "mbs", "vp")
SIZES = KEYS[:-1]
Pins = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space(PerCandidate):
    """The sizes of every layout, one column per key, and what all of them share."""

    rows: Mapping[str, Ints]  # one per key of KEYS
    base: Candidate  # holds what is pinned beside the sizes
    engine: Engine
    sp: bool | None  # pinned; a Candidate forgets a value that is the default of its own tp
    recomputes: tuple[tuple[Recompute, ...], ...]

    @property
    def num_layouts(self) -> int:
        """Layouts, whatever they recompute."""
        return len(self.rows["tp"])

    @property
    def num_candidates(self) -> int:
        """Layouts times kinds of recompute."""
        return self.num_layouts * len(self.recomputes)

    def candidate(self, index: int, recompute: int) -> Candidate:
        """Return one candidate."""
        sizes = {key: int(self.rows[key][index]) for key in KEYS}
        return replace(self.base, **sizes, sp=self.sp, recompute=self.recomputes[recompute])

    def columns(self, model: ModelSpec, cluster: Cluster, workload: Workload, recompute: int) -> Columns:
        """Return the layouts with one kind of recompute as the Rules read them."""
        base = replace(self.base, recompute=self.recomputes[recompute])
        shared = Columns.of(base, model, cluster, workload, self.engine)
        # whether each layout cuts the sequence over tp between the products
        sp = self.rows["tp"] > 1 if self.sp is None else np.full(self.num_layouts, self.sp)
        return replace(shared, **self.rows, sp=sp)


def whole_space(model: ModelSpec, cluster: Cluster, workload: Workload, engine: Engine, pins: Pins) -> Space:
    """Enumerate all divisors of the ranks for tp, pp, cp and ep, and of the batch for mbs; what is pinned stays.

    Sizes that no layout of this model can use (more stages than layers, more tp than heads) are not enumerated.
    """
    num_ranks, batch = cluster.num_ranks, workload.global_batch
    most = {"tp": model.num_heads, "pp": model.num_layers, "cp": workload.seq_len, "ep": max(1, model.num_experts)}
    sizes = {
        key: [pins[key]] if key in pins else [size for size in divisors(num_ranks) if size <= largest]
        for key, largest in most.items()
    }
    rows: list[tuple[int, ...]] = []
    for tp, pp, cp in itertools.product(sizes["tp"], sizes["pp"], sizes["cp"]):
        if "dp" in pins or num_ranks % (tp * pp * cp) == 0:
            dp = pins.get("dp", num_ranks // (tp * pp * cp))
            mbs_choices = [pins["mbs"]] if "mbs" in pins else divisors(batch // dp) if batch % dp == 0 else ()
            rows += [(tp, pp, cp, ep, dp, mbs, pins.get("vp", 1)) for ep in sizes["ep"] for mbs in mbs_choices]
    table = np.array(rows, dtype=np.int64).reshape(-1, len(KEYS))
    kernels = pins.get("kernels") or default_kernels(cluster, engine)
    shared = {key: value for key, value in pins.items() if key not in (*KEYS, "sp", "recompute")}
    base = replace(Candidate(), **{**shared, "kernels": None if kernels == cluster.kernels else kernels})
    recomputes = (pins["recompute"],) if "recompute" in pins else recompute_choices(kernels, cluster)
    return Space(
        rows=dict(zip(KEYS, table.T, strict=True)),
        base=base,
        engine=engine,
        sp=pins.get("sp"),
        recomputes=recomputes,
    )


def default_kernels(cluster: Cluster, engine: Engine) -> str:
    """Return the Kernels that an engine runs on a cluster when nobody says otherwise."""
    if not kernels_fault(cluster.kernels, engine):
        return cluster.kernels
    return {"nxd": "nxd", "torch": "neuron_native"}[engine]  # the kernels of Trainium's clusters are those of NxD


def recompute_choices(kernels: str, cluster: Cluster) -> tuple[tuple[Recompute, ...], ...]:
    """Return the kinds of recompute that are tried, each for all stages: none, sets of operations, full.

    Behind these stand some with host memory, where a program can use it and a node has any beside that of its chips.

    >>> from autoshard.spec.cluster_catalogue import load_cluster
    >>> [str(entry) for (entry,) in recompute_choices("te", load_cluster("h100-80"))][:3]
    ['none', 'selective[core_attn]', 'selective[layernorm]']
    """
    table, names = load_kernels(kernels), effective_names(kernels)
    kinds = [Recompute()]
    for count in range(1, len(names) + 1):
        for subset in itertools.combinations(names, count):
            ops = [op for name in subset for op in table.selective[name]]
            if len(ops) == len(set(ops)):
                kinds.append(Recompute(kind="selective", ops=subset))
    kinds.append(Recompute(kind="full"))
    if cluster.host_memory_bytes and not table.host_computes:
        kinds += [Recompute.parse(text).offloaded for text in table.offloads]
    return tuple((entry,) for entry in kinds)


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors in order.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))
