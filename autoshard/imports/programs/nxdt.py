"""NxD Training: the YAML of aws-neuron/neuronx-distributed-training ``examples/conf`` at 9169aa0 (release 2.26).

Meanings are those of docs/general/config_overview.rst there.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoshard.imports.programs.shared import (
    ADAPTERS,
    BATCH,
    FULL,
    MESH,
    NONE,
    SIZES,
    module_names,
    optimizer,
    recompute_of,
    selective,
)
from autoshard.imports.table import (
    Facts,
    KeyEntry,
    Keys,
    Limits,
    OtherProgram,
    alias,
    number,
    read_only,
    same,
    truth,
    whole_number,
    words,
)
from autoshard.spec.kernels import load_kernels

PRECISIONS: Mapping[str, str] = {
    "mixed_precision": "bf16",
    "mixed_precisionSR": "bf16",
    "bf16SR": "bf16-sr,gradients=bf16,moments=bf16",
    "fp32": "fp32",
    "autocast": "fp32,products=bf16",
}
_LAYER = "model.layers."
_ACTIVATIONS = {"swiglu": "silu", "gelu": "gelu"}


def _precision(keys: Keys) -> Facts:
    kind = str(keys.get("precision.type", "mixed_precision"))
    if kind == "manual":
        masters, sums = truth(keys.get("master_weights")), truth(keys.get("fp32_grad_acc"))
        parts = [*([] if masters else ["masters=none"]), *([] if sums else ["gradients=bf16"])]
        return {"work.precision": ",".join(["bf16", *parts])}
    return {"work.precision": PRECISIONS[kind]} if kind in PRECISIONS else {"unread": [f"precision.type: {kind}"]}


def _written_precision(facts: Facts) -> Keys:
    text = str(facts.get("work.precision", "bf16"))
    kind = next((kind for kind, precision in PRECISIONS.items() if precision == text), "mixed_precision")
    return {"precision.type": kind}


def _recompute(keys: Keys) -> Facts:
    kind = keys.get("activations_checkpoint_granularity")
    names = module_names(keys.get("activations_checkpoint_recompute")) or ("CoreAttention",)
    if kind == "selective":
        unread = [f"activations_checkpoint_recompute: {name}" for name in names if name not in _SETS]
        return {"layout.recompute": selective(tuple(name for name in names if name in _SETS)), "unread": unread}
    return {"layout.recompute": FULL if kind == "full" else NONE}


_SETS = (*load_kernels("nxd").selective,)


def _written_recompute(facts: Facts) -> Keys:
    recompute = recompute_of(facts)
    kind = None if recompute.kind == "none" else recompute.kind
    names = [*recompute.ops] if recompute.ops else None
    return {"activations_checkpoint_granularity": kind, "activations_checkpoint_recompute": names}


def _cuts(keys: Keys) -> Facts:
    cuts = keys["pipeline_cuts"]
    if not cuts:
        return {}
    return {"layout.cuts": tuple(whole_number(name.rpartition(".")[2]) for name in words(cuts))}


def _written_cuts(facts: Facts) -> Keys:
    stages, pp = facts.get("layout.stages"), facts.get("layout.pp", 1)
    if not stages or pp == 1 or stages == even_at_the_end(sum(stages), len(stages), facts):
        return {}
    ends = [sum(stages[: number + 1]) for number in range(len(stages) - 1)]
    return {"pipeline_cuts": [f"{_LAYER}{end - 1}" for end in ends]}


def even_at_the_end(num_layers: int, num_stages: int, facts: Facts) -> tuple[int, ...]:
    """Split layers as NxD's create_partitions does: what is left over goes to the last stages.

    >>> even_at_the_end(126, 32, {})[:3]
    (3, 3, 4)
    """
    least, rest = divmod(num_layers, num_stages)
    return tuple(least + (stage >= num_stages - rest) for stage in range(num_stages))


def _length(keys: Keys) -> Facts:
    lengths = [whole_number(keys[key]) for key in ("encoder_seq_length", "seq_length") if keys.get(key) is not None]
    unread = [f"seq_length = {lengths[-1]}, beside encoder_seq_length = {lengths[0]}"] if len(set(lengths)) > 1 else []
    return {**({"work.seq_len": lengths[0]} if lengths else {}), "unread": unread}


def _attention(keys: Keys) -> Facts:
    ring = truth(keys.get("fusions.ring_attention"))
    return {"layout.kernels": "nxd" if ring or truth(keys.get("fusions.flash_attention")) else "nxd_core"}


def _written_attention(facts: Facts) -> Keys:
    ring, flash = facts.get("layout.cp", 1) > 1, facts.get("layout.kernels") != "nxd_core"
    return {"fusions.flash_attention": flash and not ring, **({"fusions.ring_attention": True} if ring else {})}


def _devices(keys: Keys) -> Facts:
    lnc = keys.get("trainer.lnc")
    if keys.get("trainer.devices") in (None, "auto", -1):  # all of a node
        return {} if lnc is None else {"cluster.lnc": whole_number(lnc)}
    devices = whole_number(keys["trainer.devices"])
    facts: dict[str, Any] = {"cluster.per_node": devices}
    if lnc is not None or devices in (64, 128):
        return {**facts, "cluster.name": "trn2.48xlarge", "cluster.lnc": whole_number(lnc or 128 // max(1, devices))}
    return {**facts, "cluster.name": "trn1.32xlarge"} if devices == 32 else facts


def _written_devices(facts: Facts) -> Keys:
    lnc = facts.get("cluster.lnc")
    return {"trainer.devices": facts["cluster.per_node"], **({"trainer.lnc": lnc} if lnc else {})}


def _zero(keys: Keys) -> Facts:
    return {"layout.zero": int(truth(keys["zero1"]))}


def _model(keys: Keys) -> Facts:
    """Read what decides the architecture of a model that is written out, as those of model_source: megatron are."""
    facts: dict[str, Any] = {}
    if "normalization" in keys:
        facts["model.norm"] = "rms" if keys["normalization"] == "rmsnorm" else "layer"
    if "position_embedding_type" in keys:
        facts["model.positions"] = "rotary" if keys["position_embedding_type"] == "rope" else "learned"
    if "activation" in keys:
        name = str(keys["activation"])
        facts |= {"model.gated": name == "swiglu", "model.hidden_act": _ACTIVATIONS.get(name, name)}
    if "has_bias" in keys:
        facts["model.bias"] = truth(keys["has_bias"])
    return facts


def _dropped(keys: Keys) -> Facts:
    """Name a dropout, which the nxd engine here does not have."""
    return {"remarks": [f"{key}: {_NO_DROPOUT}" for key, rate in keys.items() if number(rate or 0)]}


_DROPOUTS = tuple(
    replace(same(key, f"model.{key}", number), reads=_dropped) for key in ("hidden_dropout", "attention_dropout")
)
_NO_DROPOUT = "NxD Training drops numbers; the nxd engine here drops none (Rule nxd-dropout), and they are not priced"
_ATTENTION = ("fusions.flash_attention", "fusions.ring_attention")
_MODEL = ("normalization", "position_embedding_type", "activation", "has_bias")
_BALANCE = (
    "moe.router_aux_loss_coef: NxD Training adds a loss that keeps experts equally busy; the nxd engine here adds none "
    "(Rule nxd-router-losses)"
)
NXDT = OtherProgram(
    name="nxdt",
    title="NxD Training",
    form="yaml",
    engine="nxd",
    marks=("zero1", "distributed_strategy.tensor_model_parallel_size"),
    cluster="trn1.32xlarge",
    kernels="nxd",
    source="aws-neuron/neuronx-distributed-training 9169aa0",
    entries=(
        KeyEntry(keys=("trainer.devices", "trainer.lnc"), reads=_devices, writes=_written_devices),
        same("trainer.num_nodes", "cluster.nodes"),
        *MESH,
        KeyEntry(
            keys=("virtual_pipeline_model_parallel_size",),
            reads=lambda keys: {"layout.vp": whole_number(keys["virtual_pipeline_model_parallel_size"] or 1)},
            writes=lambda facts: {"virtual_pipeline_model_parallel_size": facts.get("layout.vp", 1)},
        ),
        KeyEntry(keys=("zero1",), reads=_zero, writes=lambda facts: {"zero1": facts.get("layout.zero", 1) == 1}),
        same("sequence_parallel", "layout.sp", truth),
        same("kv_replicator", "cluster.kv_replicas"),
        *BATCH,
        KeyEntry(
            keys=("encoder_seq_length", "seq_length"),
            reads=_length,
            writes=lambda facts: {"encoder_seq_length": facts["work.seq_len"]},
        ),
        *SIZES,
        same("ffn_hidden_size", "model.intermediate_size"),
        same("num_kv_heads", "model.num_key_value_heads"),
        alias("kv_channels", "model.head_dim"),
        same("rope_theta", "model.rope_theta", number),
        same("layernorm_epsilon", "model.rms_norm_eps", number),
        same("share_embeddings_and_output_weights", "model.tie_word_embeddings", truth),
        alias("sliding_window_size", "model.sliding_window"),
        *_DROPOUTS,
        read_only(*_MODEL, reads=_model),
        alias("moe.num_experts", "model.num_local_experts"),
        alias("moe.top_k", "model.num_experts_per_tok"),
        read_only("moe.output_router_logits", "moe.router_aux_loss_coef", reads=lambda keys: {"remarks": [_BALANCE]}
        if truth(keys.get("moe.output_router_logits")) and number(keys.get("moe.router_aux_loss_coef") or 0) else {}),
        KeyEntry(keys=("moe.capacity_factor", "moe.dropless"), reads=lambda keys: {
            "work.expert_capacity": None if truth(keys.get("moe.dropless")) else number(keys["moe.capacity_factor"])
        } if keys.get("moe.capacity_factor") is not None else {}, writes=lambda facts: {
            "moe.capacity_factor": facts["work.expert_capacity"], "moe.dropless": False
        } if "work.expert_capacity" in facts else {}),
        KeyEntry(
            keys=("activations_checkpoint_granularity", "activations_checkpoint_recompute"),
            reads=_recompute,
            writes=_written_recompute,
        ),
        KeyEntry(keys=("pipeline_cuts",), reads=_cuts, writes=_written_cuts),
        KeyEntry(keys=_ATTENTION, reads=_attention, writes=_written_attention),
        KeyEntry(
            keys=("precision.type", "master_weights", "fp32_grad_acc"), reads=_precision, writes=_written_precision
        ),
        optimizer("optim.name"),
        read_only("peft.lora_rank", reads=lambda keys: {"remarks": [ADAPTERS]}),
        KeyEntry(
            keys=("qkv_linear",),
            reads=lambda keys: {},
            writes=lambda facts: {"qkv_linear": True} if facts.get("layout.tp", 1) > 1 else {},
        ),
        read_only("model_config", reads=lambda keys: {"model.path": str(keys["model_config"])}),
        KeyEntry(keys=("/name",), reads=lambda keys: {"model.label": str(keys["/name"])}),
    ),
    harmless=(
        "seed", "model_source", "exp_manager.*", "trainer.*", "*.optim.*", "compiler_*", "aync_exec_*", "neuron_*",
        "bucket_size_collectives", "data.*", "*.init_method_std", "*.use_scaled_init_method", "*.peft.*", "*.fuse_qkv",
        "*.use_cpu_initialization", "*.do_layer_norm_weight_decay", "*.fusions.softmax", "*.persist_layer_norm",
        "*.make_vocab_size_divisible_by", "*.weight_init_only", "*.moe.normalize_top_k_affinities",
        "*.moe.routing_algorithm", "precision.xla_*",
        "precision.neuron_*", "*.apply_query_key_layer_scaling", "*.transformer_block_type", "*.rotary_percentage",
        "*.transpose_nki_inputs", "precision.parallel_layers_reduce_dtype", "*.moe.frequency", "*.moe.dropout",
        "*.ffn_dropout", "precision.fp32_grads_cc",
    ),
    matters={"*.moe.frequency": ("1",)},
    sections={
        "distributed_strategy": (
            "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
            "context_parallel_size", "expert_model_parallel_size", "zero1", "sequence_parallel", "kv_replicator",
        ),
        "data": ("micro_batch_size", "global_batch_size"),
        "model": (
            "encoder_seq_length", "num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings",
            "ffn_hidden_size", "num_kv_heads", "rope_theta", "rotary_base", "layernorm_epsilon", "pipeline_cuts",
            "share_embeddings_and_output_weights", "activations_checkpoint_granularity",
            "activations_checkpoint_recompute", "fusions.flash_attention", "fusions.ring_attention",
            "hidden_dropout", "attention_dropout", "qkv_linear",
        ),
    },
    defaults={"layout.zero": 1, "layout.kernels": "nxd_core", "layout.cp_order": "contiguous"},
    stages=even_at_the_end,
    limits=Limits(
        axes=("tp", "pp", "cp", "ep", "dp", "vp", "mbs"),
        schedules={"1f1b": "1f1b", "interleaved": "interleaved"},
        zero=(0, 1),
        stages="one a rank",
        recompute=("none", "selective", "full"),
        cp_orders=("contiguous",),
        precisions=tuple(dict.fromkeys(PRECISIONS.values())),
        workload=("expert_capacity",),
        unsaid={"model_config": "model.model_config, the path of the model's config.json",
                "data": "data.train_dir and the rest of your recipe"},
    ),
)  # fmt: skip
