"""A plan of the same shape on few ranks and a small model, to be tried out in full on one machine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoshard.layout.table import fitted
from autoshard.plan.build import build_plan
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_blocks, with_strategies
from autoshard.spec.cluster import Cluster
from autoshard.spec.model import ModelSpec

MAX_RANKS = 16
_KEPT_FIRST = ("tp", "cp", "ep", "pp", "dp")  # what is given up last when not all axes fit
_HEAD_DIM = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """The small plan, and every feature of the large one that it does not have."""

    plan: Plan
    lost: tuple[str, ...]


def shrink(plan: Plan, max_ranks: int = MAX_RANKS) -> Shrunk:
    """Keep every axis that has more than one rank at two ranks, as far as they fit; scale the model to match.

    Key/value replication, padding of the vocabulary, kinds of recompute, chunks and the rest of the candidate stay.
    """
    large, (sizes, lost) = plan.candidate, _sizes(plan, max_ranks)
    kinds = tuple(dict.fromkeys(large.recompute_of(stage) for stage in range(large.num_stages)))
    if sizes["pp"] == 1:
        if large.schedule != "1f1b":
            lost.append(f"schedule={large.schedule}: there is only one pipeline rank")
        large = replace(large, vp=1, schedule="1f1b", recompute=large.recompute[:1])
    stages = sizes["pp"] * large.vp
    if len(kinds) > stages:
        lost.append(f"{len(kinds) - stages} of {len(kinds)} kinds of recompute: there are only {stages} stages")
    kinds = tuple(replace(kind, num_layers=1) if kind.num_layers else kind for kind in kinds)
    small = replace(
        large,
        **sizes,
        mbs=min(large.mbs, 2),
        sp=None if sizes["tp"] == 1 else large.sp,
        recompute=tuple(kinds[stage % len(kinds)] for stage in range(stages)),
        stages=None,
        place=None,
        cp_kind="ring" if sizes["cp"] == 1 else large.cp_kind,
        cp_order="contiguous" if sizes["cp"] == 1 else large.cp_order,
        lnc=None,
    )
    model = _model(plan.model, sizes, layers=2 * stages, padded="vocab" in plan.padding)
    workload = replace(
        plan.workload,
        seq_len=min(4 * small.cp * small.tp, model.max_positions),
        global_batch=small.dp * small.mbs * max(2, 2 * small.pp),
    )
    cluster = _cluster(plan.cluster, small.num_ranks)
    made = build_plan(small, model, cluster, workload, plan.engine, provenance={"shrunk from": str(plan.candidate)})
    blocks, atoms = plan_blocks(made), dict(made.mesh.axes)
    tables = {name: fitted(table, atoms) for name, table in plan.strategies.items() if name in blocks}
    return Shrunk(plan=with_strategies(made, tables), lost=tuple(lost))


def _sizes(plan: Plan, max_ranks: int) -> tuple[dict[str, int], list[str]]:
    """Give two ranks to every axis in use (four to tp where key/value heads are replicated); name those that lack them.

    Axes come in the order in which they are wanted.
    """
    large, lost = plan.candidate, list[str]()
    sizes: dict[str, int] = dict.fromkeys(_KEPT_FIRST, 1)
    for axis in _KEPT_FIRST:
        before = getattr(large, axis)
        size = 1 if before == 1 else 4 if axis == "tp" and plan.mesh.size("rep") > 1 else 2
        if axis == "dp":
            size = sizes["ep"] * (2 if before > large.ep else 1)
        trial = {**sizes, axis: size}
        trial["dp"] = max(trial["dp"], trial["ep"])
        if trial["tp"] * trial["cp"] * trial["pp"] * trial["dp"] <= max_ranks:
            sizes = trial
        else:
            lost.append(f"{axis}={before}: no room for it on {max_ranks} ranks")
    return sizes, lost


def _model(model: ModelSpec, sizes: Mapping[str, int], *, layers: int, padded: bool) -> ModelSpec:
    """Scale the architecture: at least one head, one block of every cut dim per rank, and options as they are."""
    tp, replicas = sizes["tp"], 2 if sizes["tp"] == 4 else 1
    kv_heads = max(tp // replicas, 1)
    queries_per_head = 2 * replicas if model.queries_per_kv_head > 1 else 1
    return replace(
        model,
        name=f"{model.name} (shrunk)",
        num_layers=layers,
        hidden=16,
        ffn=8 * tp,
        num_heads=kv_heads * queries_per_head,
        num_kv_heads=kv_heads,
        head_dim=_HEAD_DIM,
        vocab=8 * tp - 1 if padded and tp > 1 else 8 * tp,
        max_positions=64 * sizes["cp"] * tp,
        num_experts=max(2 * sizes["ep"], 2 * model.experts_per_token) if model.num_experts else 0,
        window=5 if model.window else None,
    )


def _cluster(cluster: Cluster, num_ranks: int) -> Cluster:
    """Keep the platform, on one node of just so many ranks; a port that more would share is shared by fewer."""
    inside = [link for link in cluster.links if link.domain in ("chip", "node")]
    links = tuple(replace(link, ranks_per_port=math.gcd(link.ranks_per_port, num_ranks)) for link in inside)
    return replace(
        cluster,
        name=f"{cluster.name} (shrunk)",
        num_nodes=1,
        chips_per_node=num_ranks,
        ranks_per_chip=1,
        links=links,
        placements=(),
    )
