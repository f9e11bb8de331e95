"""From a measured row to the model, cluster, workload and layout that were run; nothing measured is read."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from autoshard.calibration.architecture import stated_model
from autoshard.calibration.rows import MeasuredRow, precision_of
from autoshard.calibration.words import translated
from autoshard.cost.built_in import built_in
from autoshard.cost.calibration import Calibration
from autoshard.errors import inside, require
from autoshard.plan.candidate import Candidate, balanced_stages, even_stages
from autoshard.plan.folding import expert_mesh, unfolded
from autoshard.plan.recompute import Recompute
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import NodeType, cluster_names, load_cluster, load_node_type
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model, model_names
from autoshard.spec.workload import EXPERT_IMBALANCE, ROUTER_TRAINING, Workload
from autoshard.units import counted

T = TypeVar("T")
_AXES = ("tp", "pp", "vp", "cp", "ep")
_BARE = 2  # stages without layers: at most those at the ends
_GBPS = 1e9 / 8  # bytes per second
_ZERO = {"none": 0, "ZeRO-1": 1, "ZeRO-3": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """What was run, as the planner names it, and what had to be assumed, by column of the row."""

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    candidate: Candidate
    framework: str | None = field(default=None, compare=False)  # as the row names it
    release: tuple[int, ...] = field(default=(), compare=False)  # of the platform's software; () where it is not known
    assumed: Mapping[str, str] = field(hash=False, compare=False)

    @property
    def kernels(self) -> str:
        """The kernels of the program."""
        return self.candidate.kernels or self.cluster.kernels

    @property
    def constants(self) -> Calibration:
        """The constants that come with autoshard for such a run."""
        return built_in(self.cluster.name, self.kernels, self.framework, self.cluster.chip.name)


def run_of(row: MeasuredRow, node_type: NodeType | None = None) -> MeasuredRun:
    """Return what was run; an InputError names all columns that are wrong, contradict each other, or are not known.

    Its platform is a cluster of the catalogue, or the ``node_type`` that has its name.
    """
    is_own = node_type is not None and node_type.name == row.platform and node_type.name not in cluster_names()
    reader = _RowReader(row, node_type if is_own else None)
    model = reader.tried(reader.model)
    workload = reader.tried(reader.workload)
    cluster = None if any(fault.where == "platform" for fault in reader.faults) else reader.tried(reader.cluster)
    candidate = reader.tried(lambda: reader.candidate(cluster, model)) if cluster and model else None
    reader.faults.refuse()
    assert model and cluster and workload and candidate, "what has no fault has a value"
    # A run that did what the schedules here cannot gets the nearest shape that they can, because it ran.
    at_once = candidate.dp * candidate.mbs
    count = -(-workload.global_batch // at_once)
    if count * at_once != workload.global_batch:
        reader.assumed["global_batch_seqs"] = str(count * at_once)
        workload = replace(workload, global_batch=count * at_once)
    if candidate.vp > 1 and count % candidate.pp:
        reader.assumed["vp"] = "1, as 1f1b: micro-batches do not divide by pp"
        candidate = replace(candidate, vp=1, schedule="1f1b")
    return MeasuredRun(
        model=model,
        cluster=cluster,
        workload=workload,
        candidate=candidate,
        framework=row.framework,
        release=tuple(map(int, (reader.row.release or "").split("."))) if reader.row.release else (),
        assumed=reader.assumed,
    )


class _RowReader:
    """Reads one row; collects its faults, all to be reported at once, and what had to be assumed, by column."""

    def __init__(self, row: MeasuredRow, node_type: NodeType | None) -> None:
        self.row, self.assumed, self.faults = translated(row.unmeasured, knows_platform=node_type is not None)
        self.own = node_type

    def tried(self, read: Callable[[], T]) -> T | None:
        """Return what can be read, or note why it cannot."""
        with self.faults.of():
            return read()
        return None

    def workload(self) -> Workload:
        """Read batch, sequence, number formats and optimizer, and how evenly tokens were routed."""
        imbalance = self.row.expert_imbalance
        if imbalance is None and (self.row.arch or {}).get("experts"):
            self.assumed["expert_imbalance"] = f"{EXPERT_IMBALANCE}: a router with an auxiliary loss"
        return Workload(
            seq_len=self.row.seq_len,
            global_batch=self.row.global_batch_seqs,
            precision=precision_of(self._stated("precision", "bf16", "bf16 with FP32 gradients, masters and moments")),
            optimizer=self.row.optimizer or "adamw",
            documents=self.row.documents or "joined",
            expert_imbalance=EXPERT_IMBALANCE if imbalance is None else imbalance,
            **{name: value for name in ROUTER_TRAINING if (value := getattr(self.row, name)) is not None},
        )

    def cluster(self) -> Cluster:
        """Read the nodes of a run, and their network; those that were used in part have only the chips that were."""
        cluster, gbps = self._nodes_of_platform(), self.row.network_gbps
        return cluster if gbps is None else cluster.with_network(gbps * _GBPS)

    def _nodes_of_platform(self) -> Cluster:
        row = self.row
        name = row.platform
        if self.own is not None:
            return self._own_cluster(self.own)
        whole = load_cluster(name, lnc=row.lnc, ranks=load_node_type(name).max_chips_per_node)
        nodes, per_node = self._nodes(whole.name, whole.chips_per_node)
        if load_node_type(name).max_chips_per_node:
            return load_cluster(name, nodes, lnc=row.lnc, ranks=per_node * whole.ranks_per_chip)
        cluster = load_cluster(name, nodes, lnc=row.lnc)
        if per_node == cluster.chips_per_node:
            return cluster
        return replace(cluster, chips_per_node=per_node, placements=())

    def _own_cluster(self, node_type: NodeType) -> Cluster:
        """Read the nodes of a run on a cluster of the user's file."""
        nodes, per_node = self._nodes(node_type.name, node_type.max_chips_per_node or node_type.chips_per_node)
        lncs = [variant.lnc for variant in node_type.variants]
        require((self.row.lnc in (None, *lncs), "lnc", f"{node_type.name} has no lnc {self.row.lnc}"))
        variant = next(variant for variant in node_type.variants if self.row.lnc in (None, variant.lnc))
        cluster = node_type.cluster(variant, nodes)
        return (
            cluster
            if per_node == node_type.chips_per_node
            else replace(cluster, chips_per_node=per_node, placements=())
        )

    def _nodes(self, name: str, most: int) -> tuple[int, int]:
        """Return how many nodes were used, and how many chips of each."""
        row = self.row
        nodes = row.nodes or math.ceil((row.chips or 0) / most)
        chips = row.chips or nodes * most
        fits = chips % nodes == 0 and chips // nodes <= most
        require((fits, "chips", f"{counted(chips, 'chip')} on {counted(nodes, 'node')}; a node of {name} has {most}"))
        return nodes, chips // nodes

    def candidate(self, cluster: Cluster, model: ModelSpec) -> Candidate | None:
        """Read the layout: that of the columns, or one that is stated as a whole; columns may say the same as that."""
        row, has = self.row, f"{cluster.num_nodes} x {cluster.name} has {counted(cluster.num_ranks, 'rank')}"
        if row.candidate is None:
            return self._from_columns(cluster, model, has)
        with inside("candidate"):
            stated = Candidate.parse(row.candidate, cluster.num_ranks)
        columns = {name: (getattr(row, name), getattr(stated, name)) for name in (*_AXES, "dp")}
        columns["ep"] = (row.ep, expert_mesh(stated)[0])
        columns["micro_batch"] = (row.micro_batch, stated.mbs)
        require(
            *((says in (None, size), name, f"is {says}, but candidate says {size}")
              for name, (says, size) in columns.items()),
            (stated.num_ranks == cluster.num_ranks, "candidate",
             f"uses {counted(stated.num_ranks, 'rank')}, but {has}"),
        )  # fmt: skip
        return stated

    def _from_columns(self, cluster: Cluster, model: ModelSpec, has: str) -> Candidate:
        row = self.row
        counts = {name: getattr(row, name) for name in (*_AXES, "micro_batch")}
        self.assumed |= {name: "1" for name, count in counts.items() if count is None}
        sizes: dict[str, Any] = {name: counts[name] or 1 for name in _AXES}
        sizes |= self._experts(sizes, cluster) if model.num_experts else {}
        kernels = row.kernels or cluster.kernels
        if not row.kernels:
            self.assumed["framework"] = f"{kernels}: the usual kernels of the platform"
        recompute = Recompute.parse(self._stated("recompute", "none"))
        zero = _ZERO[self._stated("sharding", "ZeRO-1", "zero=1")]
        schedule = self._stated("pipeline_schedule", "1f1b")
        schedule = "interleaved" if schedule == "1f1b" and sizes["vp"] > 1 else schedule
        if row.pipeline_schedule is None and self.assumed["pipeline_schedule"] == "1f1b":
            self.assumed["pipeline_schedule"] = schedule
        inner = sizes["tp"] * sizes["pp"] * sizes["cp"]
        dp = row.dp or max(1, cluster.num_ranks // inner)
        require((inner * dp == cluster.num_ranks, "dp", f"tp*pp*cp*dp is {inner * dp}, but {has}"))
        self.assumed |= {"dp": str(dp)} if row.dp is None else {}
        if sizes["pp"] == 1:  # there is no order to choose
            self.assumed.pop("vp", None)
            self.assumed.pop("pipeline_schedule", None)
        self.assumed |= {"sp": "true"} if sizes["tp"] > 1 and row.sp is None else {}
        self.assumed |= {"cp_kind": "ring"} if sizes["cp"] > 1 else {}
        return Candidate(
            **sizes,
            stages=self._stages(sizes, model),
            dp=dp,
            mbs=counts["micro_batch"] or 1,
            sp=row.sp if sizes["tp"] > 1 else None,
            zero=cast(Any, zero),
            zero_group=row.zero_group if zero and row.zero_group != dp * sizes["cp"] else None,
            schedule=schedule,
            recompute=(recompute,),
            kernels=None if kernels == cluster.kernels else kernels,
            # Megatron and torch balance the ranks of cp, NxD does not.
            cp_order="contiguous" if kernels.startswith("nxd") or sizes["cp"] == 1 else "zigzag",
        )

    def _experts(self, sizes: Mapping[str, int], cluster: Cluster) -> dict[str, Any]:
        """Read which ranks share experts out; those of tp cut experts unless a row says, or its sizes, that none do."""
        tp, cp, ep, etp = sizes["tp"], sizes["cp"], sizes["ep"], self.row.etp
        if etp is None and tp > 1 and ep * tp * sizes["pp"] > cluster.num_ranks:
            etp, self.assumed["etp"] = 1, f"1: a stage has fewer ranks than {ep} groups of {tp} for cut experts"
        ep, fold = unfolded(ep, etp, tp=tp, cp=cp)
        return {"ep": ep, "fold": fold}

    def _stages(self, sizes: Mapping[str, int], model: ModelSpec) -> tuple[int, ...] | None:
        """Read how many layers each stage has: an even share, or what a program is known to balance."""
        pp, layers, count = sizes["pp"], model.num_layers, sizes["pp"] * sizes["vp"]
        if layers < count <= layers + _BARE:
            self.assumed["stages"] = f"the embedding or the head alone at an end: {layers} layers in {count} stages"
            return even_stages(layers, count)
        if "stages" not in self.assumed or pp == 1 or sizes["vp"] > 1:
            return None
        few = f"{pp} stages for {layers} layers; only the first and the last may be without layers"
        require((pp <= layers, "pp", few))
        weights = model.hidden * (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        weights += model.hidden * model.ffn * (3 if model.gated_mlp else 2) * max(1, model.experts_per_token)
        return balanced_stages(layers, pp, model.vocab * model.hidden / weights)

    def _stated(self, column: str, default: str, says: str = "") -> str:
        """Return what a column states, or its default, which is noted as assumed."""
        text: str | None = getattr(self.row, column)
        if text is None:
            self.assumed.setdefault(column, says or default)
        return text or default

    def model(self) -> ModelSpec:
        """Read the model: of the architecture that is stated, or the card of that name."""
        stated = {column: value for column, value in (self.row.arch or {}).items() if value is not None}
        if not stated and self.row.model in model_names():
            self.assumed["arch"] = f"the model card {self.row.model}"
            return load_model(self.row.model or "")
        return stated_model(stated, self.row.model or self.row.id, self.row.seq_len, self.assumed)
