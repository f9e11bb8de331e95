"""From a plan that was run to the measured row that says so: the way back of ``measured_run``."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoshard.calibration.measured import Kind, MeasuredRow
from autoshard.errors import require
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from autoshard.spec.cluster import LOCAL
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model, model_names

_SHARDINGS = {0: "none", 1: "ZeRO-1", 3: "ZeRO-3"}
_ARCH = {
    "layers": "num_layers", "hidden": "hidden", "ffn": "ffn", "heads": "num_heads", "kv_heads": "num_kv_heads",
    "head_dim": "head_dim", "vocab": "vocab", "gated_mlp": "gated_mlp", "tied_embed": "tied_embeddings",
    "experts": "num_experts", "experts_per_token": "experts_per_token",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Occasion:
    """One run of a plan: what it took, and when which software ran it."""

    name: str
    step_time_s: float
    date: str  # YYYY-MM-DD
    versions: str
    kind: Kind = "run"
    platform: str = LOCAL  # what ran it: the processors here, whatever the plan is for, or the plan's own cluster

    def __post_init__(self) -> None:
        """Refuse a run without a name, and one that took no time."""
        require(
            (bool(self.name.strip()), "name", "must not be empty"),
            (bool(self.platform.strip()), "platform", "must not be empty"),
            (self.step_time_s > 0, "step_time_s", f"must be positive, not {self.step_time_s}"),
        )


def row_of(plan: Plan, ran: Occasion) -> MeasuredRow:
    """Return the row of a run: ``calibrate`` and ``validate`` read it as the same question."""
    model, workload, cluster = plan.model, plan.workload, plan.cluster
    at_home = ran.platform == cluster.name
    layout = plan.candidate if at_home else _layout(plan)
    carded = model.name in model_names() and load_model(model.name) == model
    return MeasuredRow(
        id=ran.name,
        kind=ran.kind,
        group=f"{model.name}-{ran.platform}-{layout.num_ranks}-{workload.seq_len}-{workload.global_batch}",
        platform=ran.platform,
        model=model.name,
        arch=None if carded else _arch(model),
        seq_len=workload.seq_len,
        global_batch_seqs=workload.global_batch,
        micro_batch=layout.mbs,
        nodes=cluster.num_nodes if at_home else 1,
        chips=cluster.num_nodes * cluster.chips_per_node if at_home else layout.num_ranks,
        lnc=layout.lnc,
        tp=layout.tp,
        pp=layout.pp,
        vp=layout.vp,
        cp=layout.cp,
        ep=layout.ep,
        dp=layout.dp,
        sp=layout.sequence_parallel,
        sharding=_SHARDINGS[layout.zero],
        precision=workload.precision.name,
        optimizer=workload.optimizer,
        documents=None if workload.documents == "joined" else workload.documents,
        candidate=str(layout),
        framework=f"autoshard, {plan.engine if at_home else 'torch'} engine",
        framework_version=ran.versions,
        step_time_s=ran.step_time_s,
        source={"plan": str(plan.candidate), "cluster": plan.cluster.name},
        first_seen=ran.date,
    )


def _layout(plan: Plan) -> Candidate:
    """Return the plan's layout without what belongs to the platform that it was made for."""
    layout = plan.candidate
    resolve = load_kernels(plan.kernels).resolve
    recompute = tuple(_in_own_words(one, resolve(one.ops)) for one in layout.recompute)
    return replace(layout, kernels=None, place=None, lnc=None, recompute=recompute)


def _in_own_words(recompute: Recompute, ops: tuple[str, ...]) -> Recompute:
    """Name the operations themselves, because another platform's kernels have other names for sets of them."""
    return replace(recompute, ops=ops) if recompute.ops else recompute


def _arch(model: ModelSpec) -> Mapping[str, object]:
    return {column: getattr(model, name) for column, name in _ARCH.items()}
