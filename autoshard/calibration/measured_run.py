"""From a measured row to the question that a planner would be asked about just this run; nothing measured is read."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from autoshard.calibration.measured import MeasuredRow
from autoshard.calibration.readings import (
    Reading,
    read_kernels,
    read_platform,
    read_precision,
    read_recompute,
    read_schedule,
    read_sharding,
)
from autoshard.errors import Fault, InputError, require
from autoshard.plan.candidate import Candidate
from autoshard.spec import record
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import load_cluster, load_node_type
from autoshard.spec.model import MAX_DIM, ModelSpec
from autoshard.spec.model_catalogue import load_model, model_names
from autoshard.spec.workload import Workload

T = TypeVar("T")
_TOPK = 2  # experts per token of the first published mixtures, where a row does not say
_LLAMA = "as Llama: RMS norms, rotary positions, SiLU, no biases"
_GPT = "as GPT: layer norms, learned positions, GELU, biases"
_FFN_STEP = 256  # gated models round 8/3 of the hidden size up to a multiple of this: meta-llama/llama model.py


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """What was run, as the planner names it, and what had to be assumed, by column of the row."""

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    candidate: Candidate
    assumed: Mapping[str, str] = field(hash=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """What a row says about its model."""

    layers: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    gated_mlp: bool | None = None
    tied_embed: bool | None = None
    experts: int | None = None
    experts_per_token: int | None = None


@dataclass(frozen=True, slots=True)
class _Notes:
    """The faults of one row, all to be reported at once, and its assumptions."""

    faults: list[Fault] = field(default_factory=list[Fault])
    assumed: dict[str, str] = field(default_factory=dict[str, str])

    def value(self, column: str, read: Callable[[], Reading[T]], fallback: T) -> T:
        """Read one column."""
        try:
            reading = read()
        except InputError as error:
            self.faults.extend(error.faults)
            return fallback
        if reading.assumed:
            self.assumed[column] = reading.assumed
        return reading.value

    def count(self, column: str, stated: int | None) -> int:
        """Take a count that is 1 unless stated."""
        if stated is None:
            self.assumed[column] = "1"
        return stated or 1


def run_of(row: MeasuredRow) -> MeasuredRun | str:
    """Return what was run, or why its architecture cannot be represented; wrong or contradicting columns are faults."""
    notes = _Notes()
    model = _guarded(notes, lambda: _model(row, notes))
    cluster = _guarded(notes, lambda: _cluster(row, notes))
    workload = _guarded(notes, lambda: _workload(row, notes))
    candidate = _guarded(notes, lambda: _candidate(row, cluster, notes)) if cluster else None
    if notes.faults:
        raise InputError(notes.faults)
    if isinstance(model, str):
        return model
    assert model and cluster and workload and candidate, "what has no fault has a value"
    workload, candidate = _in_whole_batches(workload, candidate, notes)
    return MeasuredRun(model=model, cluster=cluster, workload=workload, candidate=candidate, assumed=notes.assumed)


def _in_whole_batches(workload: Workload, candidate: Candidate, notes: _Notes) -> tuple[Workload, Candidate]:
    """Give a run that did what the schedules here cannot, because it ran, the nearest shape that they can."""
    at_once = candidate.dp * candidate.mbs
    count = -(-workload.global_batch // at_once)
    if count * at_once != workload.global_batch:
        notes.assumed["global_batch_seqs"] = str(count * at_once)
        workload = replace(workload, global_batch=count * at_once)
    if candidate.vp > 1 and count % candidate.pp:
        notes.assumed["vp"] = "1, as 1f1b: micro-batches do not divide by pp"
        candidate = replace(candidate, vp=1, schedule="1f1b")
    return workload, candidate


def _guarded(notes: _Notes, make: Callable[[], T]) -> T | None:
    try:
        return make()
    except InputError as error:
        notes.faults.extend(error.faults)
        return None


def _workload(row: MeasuredRow, notes: _Notes) -> Workload | None:
    nothing = read_precision(None).value
    precision = notes.value("precision", lambda: read_precision(row.precision), nothing)
    return Workload(
        seq_len=row.seq_len,
        global_batch=row.global_batch_seqs,
        precision=precision,
        optimizer=row.optimizer or "adamw",
        documents=row.documents or "joined",
    )


def _cluster(row: MeasuredRow, notes: _Notes) -> Cluster | None:
    """Return the nodes of a row; those that were used in part have only the chips that were."""
    name = notes.value("platform", lambda: read_platform(row.platform, row.framework), "")
    if not name:
        return None
    whole = load_cluster(name, lnc=row.lnc, ranks=load_node_type(name).max_chips_per_node)
    nodes = row.nodes or math.ceil((row.chips or 0) / whole.chips_per_node)
    chips = row.chips or nodes * whole.chips_per_node
    if chips % nodes or chips // nodes > whole.chips_per_node:
        message = f"{chips} chips on {nodes} nodes; a node of {whole.name} has {whole.chips_per_node}"
        raise InputError.of("chips", message)
    cluster = load_cluster(name, nodes, lnc=row.lnc)
    if chips // nodes == cluster.chips_per_node:
        return cluster
    return replace(cluster, chips_per_node=chips // nodes, placements=())


def _candidate(row: MeasuredRow, cluster: Cluster, notes: _Notes) -> Candidate:
    return _from_columns(row, cluster, notes) if row.candidate is None else _stated(row, row.candidate, cluster)


def _stated(row: MeasuredRow, text: str, cluster: Cluster) -> Candidate:
    """Read the layout that a row states as a whole; its columns may say the same, and nothing else."""
    try:
        stated = Candidate.parse(text, cluster.num_ranks)
    except InputError as error:
        raise error.under("candidate") from None
    columns = {
        "micro_batch": stated.mbs,
        **{name: getattr(stated, name) for name in ("tp", "pp", "vp", "cp", "ep", "dp")},
    }
    require(
        *((getattr(row, name) in (None, size), name, f"is {getattr(row, name)}, but candidate says {size}")
          for name, size in columns.items()),
        (stated.num_ranks == cluster.num_ranks, "candidate",
         f"uses {stated.num_ranks} ranks, but {cluster.num_nodes} x {cluster.name} has {cluster.num_ranks}"),
    )  # fmt: skip
    return stated


def _from_columns(row: MeasuredRow, cluster: Cluster, notes: _Notes) -> Candidate:
    sizes = {name: notes.count(name, getattr(row, name)) for name in ("tp", "pp", "cp", "ep", "vp")}
    if sizes["pp"] == 1:
        notes.assumed.pop("vp", None)
    kernels = notes.value("framework", lambda: _kernels(row, cluster.kernels), cluster.kernels)
    nothing = read_recompute(None, None).value
    recompute = notes.value("recompute", lambda: read_recompute(row.recompute, row.framework), nothing)
    schedule = notes.value("pipeline_schedule", lambda: read_schedule(row.pipeline_schedule, sizes["vp"]), "1f1b")
    if sizes["pp"] == 1:
        notes.assumed.pop("pipeline_schedule", None)  # there is no order to choose
    if sizes["tp"] > 1 and row.sp is None:
        notes.assumed["sp"] = "true"
    if sizes["cp"] > 1:
        notes.assumed["cp_kind"] = "ring"
    return Candidate(
        tp=sizes["tp"],
        pp=sizes["pp"],
        cp=sizes["cp"],
        ep=sizes["ep"],
        vp=sizes["vp"],
        dp=_dp(row, sizes, cluster, notes),
        mbs=notes.count("micro_batch", row.micro_batch),
        sp=row.sp if sizes["tp"] > 1 else None,
        zero=notes.value("sharding", lambda: read_sharding(row.sharding), 1),
        schedule=schedule,
        recompute=(recompute,),
        kernels=None if kernels == cluster.kernels else kernels,
        cp_order="contiguous"
        if kernels.startswith("nxd") or sizes["cp"] == 1
        else "zigzag",  # Megatron and torch balance, NxD not
    )


def _kernels(row: MeasuredRow, usual: str) -> Reading[str]:
    return read_kernels(row.framework, usual, precision=row.precision, seq_len=row.seq_len)


def _dp(row: MeasuredRow, sizes: Mapping[str, int], cluster: Cluster, notes: _Notes) -> int:
    inner = sizes["tp"] * sizes["pp"] * sizes["cp"]
    dp = row.dp or max(1, cluster.num_ranks // inner)
    if inner * dp != cluster.num_ranks:
        message = f"tp*pp*cp*dp is {inner * dp}, but {cluster.num_nodes} x {cluster.name} has {cluster.num_ranks} ranks"
        raise InputError.of("dp", message)
    if row.dp is None:
        notes.assumed["dp"] = str(dp)
    return dp


def _model(row: MeasuredRow, notes: _Notes) -> ModelSpec | str:
    """Return the model of a row: of its architecture, or of the card of its name."""
    stated = {key: value for key, value in (row.arch or {}).items() if value is not None}
    if not stated and row.model in model_names():
        notes.assumed["arch"] = f"the model card {row.model}"
        return load_model(row.model or "")
    known = [entry.name for entry in dataclasses.fields(Arch)]
    foreign = sorted(stated.keys() - set(known))
    if foreign:
        return f"its architecture has {', '.join(foreign)}, which autoshard does not model"
    try:
        arch = record.decode(Arch, stated)
    except InputError as error:
        raise error.under("arch") from None
    if arch.layers is None or arch.hidden is None:
        return "its architecture is not known: layers and hidden are not stated, and no model card has its name"
    try:
        completed = _completed(arch, notes)
        notes.assumed["arch"] = _LLAMA if completed["gated_mlp"] else _GPT
        return _spec(row, completed)
    except InputError as error:  # about a field of ModelSpec, which counts with num_ where rows do not
        faults = (Fault(where=fault.where.removeprefix("num_"), message=fault.message) for fault in error.faults)
        raise InputError(faults).under("arch") from None


def _completed(arch: Arch, notes: _Notes) -> Mapping[str, Any]:
    """Fill in what a row leaves out, from what it says."""
    hidden, said = arch.hidden or 1, {key: value for key, value in record.encode(arch).items() if value is not None}
    whole = dict(said)
    whole.setdefault("gated_mlp", True)
    whole.setdefault("heads", max(1, hidden // 128))
    whole.setdefault("kv_heads", whole["heads"])
    whole.setdefault("head_dim", max(1, hidden // max(1, whole["heads"])))
    whole.setdefault("ffn", -(-8 * hidden // 3 // _FFN_STEP) * _FFN_STEP if whole["gated_mlp"] else 4 * hidden)
    whole.setdefault("vocab", 32000 if whole["gated_mlp"] else 50304)
    whole.setdefault("tied_embed", not whole["gated_mlp"])
    whole.setdefault("experts", 0)
    whole.setdefault("experts_per_token", min(_TOPK, whole["experts"]))
    derived = {"head_dim", "experts", *(() if whole["experts"] else ("experts_per_token",))}  # say nothing new
    for name in sorted(whole.keys() - said.keys() - derived):
        notes.assumed[f"arch.{name}"] = str(whole[name]).lower()
    return whole


def _spec(row: MeasuredRow, arch: Mapping[str, Any]) -> ModelSpec:
    """Make the model: gated ones as Llama, others as GPT; rows do not say more."""
    gated = arch["gated_mlp"]
    return ModelSpec(
        name=row.model or row.id,
        num_layers=arch["layers"],
        hidden=arch["hidden"],
        ffn=arch["ffn"],
        num_heads=arch["heads"],
        num_kv_heads=arch["kv_heads"],
        head_dim=arch["head_dim"],
        vocab=arch["vocab"],
        max_positions=min(row.seq_len, MAX_DIM),
        norm="rms" if gated else "layer",
        norm_eps=1e-5,
        activation="silu" if gated else "gelu",
        gated_mlp=gated,
        positions="rotary" if gated else "learned",
        qkv_bias=not gated,
        out_bias=not gated,
        mlp_bias=not gated,
        tied_embeddings=arch["tied_embed"],
        num_experts=arch["experts"],
        experts_per_token=arch["experts_per_token"],
        source="a measured row",
    )
