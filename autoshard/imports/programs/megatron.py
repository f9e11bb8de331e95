"""Megatron-LM's arguments, and the same names as fields of recipes of Megatron-Bridge and NeMo.

NVIDIA/Megatron-LM d98e8a6 (megatron/training/arguments.py), NVIDIA-NeMo/Megatron-Bridge 067f987
(src/megatron/bridge/recipes), NVIDIA/NeMo 8cfedd7 (nemo/collections/llm/recipes).
"""

from collections.abc import Mapping
from dataclasses import replace

from autoshard.imports.programs.megatron_kernels import KERNELS, LIBRARIES
from autoshard.imports.programs.megatron_model import (
    EXPERTS,
    FOREIGN,
    MODEL,
    head_facts,
    model,
    name,
    options_of_flags,
    traits_without_flag,
    written_heads,
    written_model,
)
from autoshard.imports.programs.megatron_rotary import ROTATED, says_rotation
from autoshard.imports.programs.megatron_stages import STAGES
from autoshard.imports.programs.shared import (
    ADAPTERS,
    BATCH,
    FULL,
    MESH,
    NONE,
    SIZES,
    launched,
    optimizer,
    part,
    precision_flags,
    recompute_of,
    rope,
    selective,
    zero_of_stage,
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

_OPS_OF_MODULES: Mapping[str, str] = {  # --recompute-modules -> sets of the kernels `te`
    "core_attn": "core_attn", "layernorm": "layernorm", "mlp": "mlp", "moe_act": "mlp_act",
    "mla_up_proj": "mla_up_proj", "moe": "moe", "shared_experts": "shared_experts",
}  # fmt: skip


def _recompute(keys: Keys) -> Facts:
    kind, method = keys.get("recompute_granularity"), keys.get("recompute_method")
    old = keys.get("activations_checkpoint_method")
    if keys.get("recompute_activations") or kind == "selective":
        names = words(keys.get("recompute_modules")) or ("core_attn",)
        unread = [f"recompute_modules: {name}" for name in names if name not in _OPS_OF_MODULES]
        return {
            "layout.recompute": selective(tuple(_OPS_OF_MODULES[name] for name in names if name in _OPS_OF_MODULES)),
            "unread": unread,
        }
    if kind == "full" or old or keys.get("checkpoint_activations"):
        count = keys.get("recompute_num_layers")
        return {
            "layout.recompute": part(whole_number(count)) if "block" in (method, old) and count is not None else FULL
        }
    return {"layout.recompute": NONE}


def _written_recompute(facts: Facts) -> Keys:
    """Return Megatron's keys for recompute of ours."""
    recompute = recompute_of(facts)
    if recompute.kind == "none":
        return {}
    if recompute.kind == "selective":
        theirs = {ours: name for name, ours in _OPS_OF_MODULES.items()}
        names = [theirs[name] for name in recompute.ops]
        return {"recompute_granularity": "selective", "recompute_modules": names}
    count = recompute.num_layers
    method = {"recompute_method": "uniform", "recompute_num_layers": 1}
    if count is not None:
        method = {"recompute_method": "block", "recompute_num_layers": count}
    return {"recompute_granularity": "full", **method}


_RECOMPUTE = (
    "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules", "recompute_activations",
    "activations_checkpoint_method", "checkpoint_activations", "activations_checkpoint_granularity",
    "activations_checkpoint_num_layers",
)  # fmt: skip


def _nemo_recompute(keys: Keys) -> Keys:
    """Give the names of NeMo's YAML those of Megatron-LM."""
    kind = keys.get("activations_checkpoint_granularity")
    layers = keys.get("activations_checkpoint_num_layers")
    return {**keys, **({"recompute_granularity": kind} if kind else {}),
            **({"recompute_num_layers": layers} if layers is not None else {}),
            **({"recompute_method": keys.get("activations_checkpoint_method")} if kind else {})}  # fmt: skip


_STRATEGIES: Mapping[str, int] = {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}  # -> stages of ZeRO


def _sharding(keys: Keys) -> Facts:
    strategy = str(keys.get("data_parallel_sharding_strategy") or "no_shard")  # of DistributedDataParallelConfig
    if truth(keys.get("use_torch_fsdp2")):
        return {"layout.zero": 3}
    if truth(keys.get("use_megatron_fsdp")) or truth(keys.get("use_custom_fsdp")):
        return zero_of_stage(_STRATEGIES.get(strategy, 0))
    if "use_distributed_optimizer" in keys:
        return {"layout.zero": int(truth(keys["use_distributed_optimizer"]))}
    return {}


def _written_sharding(facts: Facts) -> Keys:
    zero = facts.get("layout.zero", 0)
    if zero == 3:
        fsdp = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
        return {
            "use_distributed_optimizer": True,
            **fsdp,
            "ckpt_format": "fsdp_dtensor",
        }  # no other, says validate_args
    return {"use_distributed_optimizer": True} if zero else {}


def _precision(keys: Keys) -> Facts:
    plugin = " ".join(str(keys[key]) for key in _MIXED if key in keys)
    fp16 = truth(keys.get("fp16")) or "fp16" in plugin or str(keys.get("trainer.precision")) == "16"
    bf16 = truth(keys.get("bf16")) or "bf16" in plugin or "bf16" in str(keys.get("trainer.precision"))
    if not (bf16 or fp16):
        return {"work.precision": "fp32"}
    reduces_bf16 = truth(keys.get("grad_reduce_in_bf16")) or (
        "grad_reduce_in_fp32" in keys and not truth(keys["grad_reduce_in_fp32"])
    )
    sums = truth(keys.get("accumulate_allreduce_grads_in_fp32"))
    name = "fp16" if fp16 else "bf16"
    parts = [f"gradients={name}"] if reduces_bf16 or (fp16 and not sums) else []
    eight = keys.get("fp8_format") or keys.get("fp8") or keys.get("fp8_hybrid") or "fp8" in plugin
    return {"work.precision": ",".join([name, *parts, *(["products=fp8"] if eight else [])])}


def _written_precision(facts: Facts) -> Keys:
    text = str(facts.get("work.precision", "bf16"))
    keys = dict(precision_flags(facts))
    if "fp16" in keys and "gradients=fp16" not in text:
        keys["accumulate_allreduce_grads_in_fp32"] = True
    keys |= {"grad_reduce_in_bf16": True} if "gradients=bf16" in text else {}
    return {**keys, **({"fp8_format": "hybrid"} if "products=fp8" in text else {})}


_MIXED = ("mixed_precision", "mixed_precision.call", "mixed_precision.args", "plugins.call")
_PRECISION = (
    "bf16", "fp16", "fp8_format", "fp8", "fp8_hybrid", "grad_reduce_in_bf16", "grad_reduce_in_fp32",
    "accumulate_allreduce_grads_in_fp32", "trainer.precision", *_MIXED,
)  # fmt: skip


_ADAPTERS = ("peft", "peft.call", "peft.dim", "peft_scheme", "lora_rank")


def _split(num_layers: int, num_stages: int, facts: Facts) -> tuple[int, ...] | None:
    """Split layers evenly, where embedding and loss may count as a layer each."""
    first, last = facts.get("layout.first_less", 0), facts.get("layout.last_less", 0)
    size, rest = divmod(num_layers + first + last, num_stages)
    if rest or not (first or last):
        return None
    return (size - first, *([size] * (num_stages - 2)), size - last)


def _cp_kind(keys: Keys) -> Facts:
    kinds = {*(words(keys["cp_comm_type"]) or ("p2p",))}
    unread = [] if kinds in ({"p2p"}, {"a2a"}) else [f"cp_comm_type = {' '.join(sorted(kinds))}, priced as p2p"]
    return {"layout.cp_kind": "all_to_all" if kinds == {"a2a"} else "ring", "unread": unread}


_STATES = (
    "use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "main_params_dtype",
)  # fmt: skip


def _states(keys: Keys) -> Facts:
    """Name the formats of the optimizer's states, where they are others than FP32."""
    if not truth(keys.get("use_precision_aware_optimizer")):
        return {}
    stated = {key: str(value) for key, value in keys.items() if key.endswith("dtype")}
    return {"unread": [f"{key} = {text}" for key, text in stated.items() if text not in ("fp32", "float32")]}


def _instances(keys: Keys) -> Facts:
    count = whole_number(keys["num_distributed_optimizer_instances"] or 1)
    return {"layout.replicas": count} if count > 1 else {}


def _written_instances(facts: Facts) -> Keys:
    group = facts.get("layout.zero_group")
    ranks = facts.get("layout.dp", 1) * facts.get("layout.cp", 1)
    return {"num_distributed_optimizer_instances": ranks // group} if group else {}


# Arguments of NeMo's functions (nemo/collections/llm/recipes): what a recipe assigns to their results goes before.
_ARGUMENTS = (
    alias("num_nodes", "cluster.nodes"),
    alias("num_gpus_per_node", "cluster.per_node"),
    alias("tensor_parallelism", "layout.tp"),
    alias("pipeline_parallelism", "layout.pp"),
    alias("virtual_pipeline_parallelism", "layout.vp"),
    alias("context_parallelism", "layout.cp"),
    alias("expert_parallelism", "layout.ep"),
    alias("sequence_parallelism", "layout.sp", truth),
)
_DEFAULTS = {"layout.zero": 0, "layout.sp": False, "layout.cp_order": "zigzag", "layout.kernels": "te"}
MEGATRON = OtherProgram(
    name="megatron",
    title="Megatron-LM",
    form="arguments",
    marks=("tensor_model_parallel_size", "num_layers", "micro_batch_size", "model.hidden_size"),
    cluster="h100-80",
    kernels="mcore",
    source="NVIDIA/Megatron-LM d98e8a6",
    entries=(
        launched("nnodes", "cluster.nodes"),
        alias("trainer.num_nodes", "cluster.nodes"),
        alias("nodes", "cluster.nodes"),
        launched("nproc_per_node", "cluster.per_node"),
        read_only("trainer.devices", reads=launched("trainer.devices", "cluster.per_node").reads),
        alias("world_size", "cluster.ranks"),
        *_ARGUMENTS,
        *MESH,
        same("expert_tensor_parallel_size", "layout.etp"),
        *STAGES,
        alias("decoder_first_pipeline_num_layers", "layout.first"),
        alias("num_layers_in_first_pipeline_stage", "layout.first"),
        alias("decoder_last_pipeline_num_layers", "layout.last"),
        alias("num_layers_in_last_pipeline_stage", "layout.last"),
        KeyEntry(
            keys=("sequence_parallel",),
            reads=lambda keys: {"layout.sp": truth(keys["sequence_parallel"])},
            writes=lambda facts: {"sequence_parallel": True} if facts.get("layout.sp") else {},
        ),
        KeyEntry(
            keys=("cp_comm_type",),
            reads=_cp_kind,
            writes=lambda facts: {"cp_comm_type": "a2a"} if facts.get("layout.cp_kind") == "all_to_all" else {},
        ),
        KeyEntry(
            keys=(
                "use_distributed_optimizer", "use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2",
                "data_parallel_sharding_strategy",
            ),
            reads=_sharding,
            writes=_written_sharding,
        ),
        read_only("use_flash_attn", reads=lambda keys: {"layout.flash": truth(keys["use_flash_attn"])}),
        KeyEntry(keys=("num_distributed_optimizer_instances",), reads=_instances, writes=_written_instances),
        KERNELS,
        *BATCH,
        same("seq_length", "work.seq_len"),
        alias("encoder_seq_length", "work.seq_len"),
        *SIZES,
        same("ffn_hidden_size", "model.intermediate_size"),
        KeyEntry(keys=("group_query_attention", "num_query_groups"), reads=head_facts, writes=written_heads),
        same("kv_channels", "model.head_dim"),
        same("vocab_size", "model.vocab_size"),
        alias("padded_vocab_size", "model.vocab_size"),
        read_only("tokenizer_type", reads=lambda keys: {"model.tokenizer": str(keys["tokenizer_type"])}),
        *rope(),
        ROTATED,
        same("norm_epsilon", "model.rms_norm_eps", number),
        alias("layernorm_epsilon", "model.rms_norm_eps", number),
        same("hidden_dropout", "model.hidden_dropout", number),
        same("attention_dropout", "model.attention_dropout", number),
        KeyEntry(keys=MODEL, reads=model, writes=written_model),
        *EXPERTS,
        KeyEntry(keys=_RECOMPUTE, reads=lambda keys: _recompute(_nemo_recompute(keys)), writes=_written_recompute),
        KeyEntry(keys=_PRECISION, reads=_precision, writes=_written_precision),
        KeyEntry(keys=("account_for_embedding_in_pipeline_split",), reads=lambda keys: {
            "layout.first_less": int(truth(keys["account_for_embedding_in_pipeline_split"]))
        }),
        KeyEntry(keys=("account_for_loss_in_pipeline_split",), reads=lambda keys: {
            "layout.last_less": int(truth(keys["account_for_loss_in_pipeline_split"]))
        }),
        FOREIGN,
        optimizer("optimizer"),
        optimizer("optim.name"),
        read_only(*_STATES, reads=_states),
        read_only(*_ADAPTERS, reads=lambda keys: {"remarks": [ADAPTERS]} if any(keys.values()) else {}),
        read_only("/model.args", "/model.config.args", "/args", reads=name),
    ),
    harmless=(
        "lr*", "*.lr*", "min_lr", "*_lr", "train_iters", "train_samples", "weight_decay*", "adam_*", "init_method_*",
        "clip_grad", "log_*", "*log_*", "save*", "load*", "eval_*", "tensorboard*", "wandb*", "data_*", "vocab_file",
        "merge_file", "tokenizer_model", "split", "master_*", "node_rank", "*ckpt*", "manual_gc*", "exit_*", "seed",
        "num_workers", "mock_data", "logger.*", "checkpoint.*", "scheduler.*", "optimizer.*", "validation.*", "rng.*",
        "dataset.*", "tokenizer.*", "env_vars.*", "train.*", "log.*", "optim.*", "resume.*", "use_mcore_models",
        "transformer_impl", "*cross_entropy*", "*.call", "call", "*.args", "attention_backend",
        "model.attention_backend", "distributed_*", "timing_*", "no_load_*", "no_save_*",
        "make_vocab_size_divisible_by", "override_*", "bias_*", "no_masked_softmax_fusion", "no_position_embedding",
        "calculate_per_*", "moe_grouped_gemm", "profile*", "loss_scale",
        "overlap_param_gather", "job_name", "export", "*exp_manager*", "trainer.*", "data.*",
        "no_create_attention_mask_in_dataloader", "no_mmap_bin_files", "*nccl*", "dist_ckpt*", "distributed_backend",
        "*check_for_nan*", "*average_in_collective", "ddp.overlap_param_gather", "*.pipeline_dtype", "decoupled_*",
        "*cuda_graph_*", "partition", "dist.*", "comm_overlap.*", "start_weight_decay", "end_weight_decay",
        "tiktoken_pattern", "no_rope_fusion", "ddp.*", "peft.*", "*should_pad_vocab",
        "container_*",
        "model.transformer_impl", "use_checkpoint*", "*gradient_as_bucket*",
        "trainer.strategy.*", "fp8_amax*", "fp8_*gather", "conditions_none", "async_save", "use_persistent*",
        "deterministic_mode", "empty_unused*", "no_gradient_accumulation_fusion", "attention_softmax_in_fp32",
        "enable_*_timing", "*.fine_grained*", "DDP_impl", "*.offload_modules",
    ),
    matters={
        "*attention_backend": ("flash", "fused", "auto"), "*transformer_impl": ("transformer_engine",), "*offload*": (),
        "*fp8_param*": (), "*tp_comm_overlap": (), "*overlap_moe_expert_parallel_comm": (), "*delay_wgrad_compute": (),
        "*outer_dp_sharding_strategy": ("no_shard",), "*rampup_batch_size": (), "*in_batch_packing": (),
        "*keep_fp8_transpose_cache": (), "*_parallelism": (),
    },
    defaults={**_DEFAULTS, "model.hidden_dropout": 0.1, "model.attention_dropout": 0.1},
    implied={"bf16": False, "data_parallel_sharding_strategy": "optim_grads_params"},  # of the command line
    stages=_split,
    accumulation=1,
    limits=Limits(
        axes=("tp", "pp", "cp", "ep", "dp", "vp", "mbs"),
        folds=True,
        schedules={"1f1b": "1f1b", "interleaved": "interleaved"},
        zero=(0, 1, 3),
        stages="free",
        recompute=("none", "selective", "full", "part"),
        selective=tuple((name,) for name in _OPS_OF_MODULES.values()),
        zero_group=True,
        libraries=LIBRARIES,
        router_losses=True,
        workload=("expert_capacity",),
        lacks=traits_without_flag,
        options=options_of_flags,
        says_rotation=says_rotation,
        cp_kinds=("ring", "all_to_all"),
        precisions=("bf16", "bf16,gradients=bf16", "fp16", "fp16,gradients=fp16", "fp32", "bf16,products=fp8",
                    "bf16,gradients=bf16,products=fp8"),
    ),
)  # fmt: skip

# Recipes add to functions of other files, whose values are these: recipes/common.py _pretrain_common of
# Megatron-Bridge, recipes/optim/adam.py of NeMo. Their models have the dropouts of their cards.
BRIDGE = replace(
    MEGATRON,
    name="bridge",
    title="Megatron-Bridge or NeMo",
    marks=("model.tensor_model_parallel_size", "strategy.tensor_model_parallel_size", "train.micro_batch_size",
           "data.micro_batch_size"),
    bases=("_pretrain_common",),
    accumulation=None,
    defaults=_DEFAULTS,
    implied={
        "mixed_precision": "bf16_mixed", "use_distributed_optimizer": True, "overlap_grad_reduce": True,
        "grad_reduce_in_fp32": True,
    },
)  # fmt: skip
