"""Accelerate: the YAML of ``accelerate config`` (huggingface/accelerate 16cb6eb, examples and tests/test_configs).

Length and micro-batch stand in the training script, and are options of the import.
"""

from typing import Any

from autoshard.errors import nearest, require
from autoshard.imports.programs.deepspeed import DEEPSPEED
from autoshard.imports.programs.shared import FULL, NONE, accumulated, recompute_of, zero_of_stage
from autoshard.imports.table import (
    Facts,
    KeyEntry,
    Keys,
    Limits,
    OtherProgram,
    alias,
    read_only,
    same,
    truth,
    whole_number,
)

_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}  # of ZeRO
_NUMBERED = tuple(_STAGES)  # version 0.11 wrote numbers from 1 on
_DISTRIBUTED = (
    "distributed_type",
    "fsdp_sharding_strategy",
    "fsdp_reshard_after_forward",
    "fsdp_config.sharding_strategy",
    "deepspeed_config.zero_stage",
)
_AUTOCAST = (
    "mixed_precision without FSDP keeps weights in FP32 and casts in each product; priced as weights of its format"
)
_PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "bf16,products=fp8"}


def _zero(keys: Keys) -> Facts:
    kind = str(keys.get("distributed_type", "MULTI_GPU")).upper()
    if kind == "DEEPSPEED":
        stage = whole_number(keys.get("deepspeed_config.zero_stage") or 0)
        return zero_of_stage(stage)
    if kind != "FSDP":
        return {"layout.zero": 0}
    strategy = keys.get("fsdp_sharding_strategy", keys.get("fsdp_config.sharding_strategy"))
    if strategy is not None:
        name = str(strategy)
        name = _NUMBERED[int(name) - 1] if name.isdecimal() and 1 <= int(name) <= len(_NUMBERED) else name
        hybrid = {"layout.shards_in_node": True} if name.startswith("HYBRID") else {}
        require((name in _STAGES, "", f"{name!r} is no sharding strategy. {nearest(name, list(_STAGES))}"))
        return {**zero_of_stage(_STAGES[name]), **hybrid}
    return zero_of_stage(3 if str(keys.get("fsdp_reshard_after_forward", True)).lower() == "true" else 2)


def _written_zero(facts: Facts) -> Keys:
    zero = facts.get("layout.zero", 0)
    if zero == 0 and facts.get("layout.tp", 1) * facts.get("layout.cp", 1) == 1:
        return {"distributed_type": "MULTI_GPU"}
    return {"distributed_type": "FSDP", "fsdp_config.fsdp_version": 2,
            "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_config.fsdp_reshard_after_forward": zero == 3}  # fmt: skip


def _sizes(keys: Keys) -> Facts:
    facts: dict[str, Any] = {}
    for key, fact in (("parallelism_config_dp_replicate_size", "layout.replicas"),
                      ("parallelism_config_dp_shard_size", "layout.shards")):  # fmt: skip
        if keys.get(key) is not None:
            facts[fact] = whole_number(keys[key])
    return facts


def _written_sizes(facts: Facts) -> Keys:
    dp, cp, group = facts.get("layout.dp", 1), facts.get("layout.cp", 1), facts.get("layout.zero_group")
    if facts.get("layout.zero", 0) == 0 and facts.get("layout.tp", 1) * cp == 1:
        return {}
    replicas = dp * cp // group if group else 1
    before = "parallelism_config.parallelism_config_"
    return {f"{before}dp_replicate_size": replicas, f"{before}dp_shard_size": dp // replicas,
            f"{before}tp_size": facts.get("layout.tp", 1), f"{before}cp_size": cp}  # fmt: skip


def _recompute(keys: Keys) -> Facts:
    return {"layout.recompute": FULL if truth(keys["fsdp_activation_checkpointing"]) else NONE}


def _written_recompute(facts: Facts) -> Keys:
    full = recompute_of(facts).kind == "full"
    return {"fsdp_config.fsdp_activation_checkpointing": full}


def _autocast(keys: Keys) -> Facts:
    """Say of what has neither FSDP nor DeepSpeed that its weights stay FP32 (Accelerator.prepare_model)."""
    mixed = str(keys.get("mixed_precision", "no")).lower()
    is_plain = str(keys.get("distributed_type", "MULTI_GPU")).upper() not in ("FSDP", "DEEPSPEED", "MEGATRON_LM")
    return {"remarks": [_AUTOCAST]} if is_plain and mixed in ("bf16", "fp16") else {}


def _compiled(keys: Keys) -> Facts:
    """Read what torch.compile makes of the model, by inductor or by another backend."""
    backend = str(keys.get("dynamo_config.dynamo_backend") or keys.get("dynamo_backend") or "no").lower()
    if backend == "inductor":
        return {"layout.kernels": "torch_compiled"}
    return {"unread": [] if backend == "no" else [f"dynamo_backend = {backend}"]}


def _accumulated(keys: Keys) -> Facts:
    return accumulated({"gradient_accumulation_steps": keys["deepspeed_config.gradient_accumulation_steps"]})


def _written_precision(facts: Facts) -> Keys:
    names = {ours: name for name, ours in _PRECISIONS.items()}
    return {"mixed_precision": names.get(str(facts.get("work.precision", "bf16")), "bf16")}


ACCELERATE = OtherProgram(
    name="accelerate",
    title="Accelerate",
    form="yaml",
    marks=("distributed_type", "compute_environment"),
    files={"deepspeed_config.deepspeed_config_file": DEEPSPEED},
    cluster="h100-80",
    kernels="torch_cuda",
    accumulation=1,
    splits_batch=True,
    source="huggingface/accelerate 16cb6eb",
    entries=(
        same("num_machines", "cluster.nodes"),
        same("num_processes", "cluster.ranks"),
        KeyEntry(keys=_DISTRIBUTED, reads=_zero, writes=_written_zero),
        alias("parallelism_config_tp_size", "layout.tp"),
        alias("parallelism_config_cp_size", "layout.cp"),
        KeyEntry(
            keys=("parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size"),
            reads=_sizes,
            writes=_written_sizes,
        ),
        KeyEntry(keys=("fsdp_activation_checkpointing",), reads=_recompute, writes=_written_recompute),
        KeyEntry(
            keys=("mixed_precision",),
            reads=lambda keys: {"work.precision": _PRECISIONS[str(keys["mixed_precision"]).lower()]}
            if str(keys["mixed_precision"]).lower() in _PRECISIONS
            else {"unread": [f"mixed_precision: {keys['mixed_precision']}"]},
            writes=_written_precision,
        ),
        read_only("distributed_type", "mixed_precision", reads=_autocast),
        read_only("deepspeed_config.gradient_accumulation_steps", reads=_accumulated),
        read_only("dynamo_config.dynamo_backend", "dynamo_backend", reads=_compiled),
        read_only("megatron_lm_tp_degree", reads=same("megatron_lm_tp_degree", "layout.tp").reads),
        alias("megatron_lm_pp_degree", "layout.pp"),
    ),
    harmless=(
        "compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "machine_rank", "main_*", "rdzv_*",
        "same_network", "tpu_*", "use_cpu", "fsdp_config.fsdp_auto_wrap_policy", "fsdp_config.fsdp_state_dict_type",
        "fsdp_config.fsdp_cpu_ram*", "fsdp_config.fsdp_sync*", "fsdp_config.fsdp_use_orig*",
        "fsdp_config.fsdp_version", "fsdp_config.fsdp_transformer*", "fsdp_config.fsdp_backward_prefetch*",
        "fsdp_config.fsdp_forward_prefetch", "fsdp_config.fsdp_ignored*", "command_file", "commands", "dynamo_*",
        "gpu_ids", "main_training_function", "deepspeed_config.zero3_init_flag",
        "deepspeed_config.deepspeed_multinode_launcher", "use_mps_device", "deepspeed_config.zero3_save_16bit_model",
        "*gradient_clipping", "fp8_config.*", "deepspeed_config.deepspeed_config_file", "fsdp_config.min_num_params",
    ),
    matters={"use_cpu": (), "*auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP")},
    defaults={"layout.zero": 0, "layout.kernels": "torch_cuda", "layout.sp": False, "layout.cp_order": "zigzag",
              "layout.cp_kind": "ring", "work.precision": "fp32"},
    limits=Limits(
        axes=("tp", "cp", "dp", "mbs"),
        schedules={"1f1b": ""},
        zero=(0, 1, 3),
        stages="even",
        recompute=("none", "full"),
        zero_group=True,
        shards_with=("tp", "cp"),
        sp=(False,),
        precisions=tuple(_PRECISIONS.values()),
        unsaid={
            "model": "your script",
            "work.seq_len": "your script",
            "work.documents": "your script",
            "work.optimizer": "your script",
            "work.global_batch": "your script",
            "layout.mbs": "the batch size of your loader",
        },
    ),
)  # fmt: skip
