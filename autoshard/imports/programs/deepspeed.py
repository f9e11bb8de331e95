"""DeepSpeed: its JSON (deepspeedai/DeepSpeed docs/_pages/config-json.md; deepspeedai/DeepSpeedExamples 45b4b71).

The model, the length of its sequences and the stages of a pipeline stand in the training script.
"""

from typing import Any

from autoshard.imports.programs.shared import (
    FULL,
    NONE,
    accumulated,
    accumulation,
    optimizer,
    recompute_of,
    zero_of_stage,
)
from autoshard.imports.table import Facts, KeyEntry, Keys, Limits, OtherProgram, read_only, truth, whole_number

_AUTO = "auto"
_STAGE = "zero_optimization.stage"
# A group gathers weights whole once after an update, and keeps its own pieces until the next one:
# deepspeedai/DeepSpeed deepspeed/runtime/zero/stage3.py _post_step, invalidate_secondary_tensor.
_GROUP = "zero_optimization.zero_hpz_partition_size"


def _zero(keys: Keys) -> Facts:
    stage, group = (whole_number(keys.get(key) or default) for key, default in ((_STAGE, 0), (_GROUP, 1)))
    weights = {"layout.weight_group": group} if stage == 3 and group > 1 else {}
    return {**zero_of_stage(stage), **weights}


def _written_zero(facts: Facts) -> Keys:
    group = facts.get("layout.weight_group")
    return {_STAGE: facts.get("layout.zero", 0), **({_GROUP: group} if group else {})}


def _count(key: str, fact: str) -> KeyEntry:
    return KeyEntry(
        keys=(key,),
        reads=lambda keys: {} if keys[key] in (None, _AUTO) else {fact: whole_number(keys[key])},
        writes=lambda facts: {key: facts[fact]} if fact in facts else {},
    )


def _enabled(keys: Keys, key: str) -> bool:
    return str(keys.get(f"{key}.enabled", False)).lower() == "true"


def _precision(keys: Keys) -> Facts:
    sums = str(keys.get("data_types.grad_accum_dtype") or "")
    if _enabled(keys, "bf16"):
        if truth(keys.get("bf16.bf16_optimizer_states")):
            return {"work.precision": "bf16,gradients=bf16,masters=none,moments=bf16"}
        if truth(keys.get("bf16.bf16_master_weights_and_grads")):
            return {"work.precision": "bf16,gradients=bf16,masters=none"}
        return {"work.precision": "bf16" if sums == "fp32" else "bf16,gradients=bf16"}
    if _enabled(keys, "fp16"):
        return {"work.precision": "fp16,gradients=fp32" if sums == "fp32" else "fp16,gradients=fp16"}
    if _enabled(keys, "torch_autocast"):
        is_bf16 = str(keys.get("torch_autocast.dtype") or "bfloat16").rpartition(".")[2] in ("bfloat16", "bf16")
        unread = [] if is_bf16 else [f"torch_autocast.dtype = {keys['torch_autocast.dtype']}, priced as bfloat16"]
        return {"work.precision": "fp32,products=bf16", "unread": unread}
    if {str(keys.get("bf16.enabled")), str(keys.get("fp16.enabled"))} & {_AUTO}:
        return {}
    return {"work.precision": "fp32"}


_PRECISION = ("bf16.enabled", "fp16.enabled", "data_types.grad_accum_dtype", "bf16.bf16_optimizer_states",
              "bf16.bf16_master_weights_and_grads", "torch_autocast.enabled", "torch_autocast.dtype")  # fmt: skip


def _written_precision(facts: Facts) -> Keys:
    text = str(facts.get("work.precision", "bf16"))
    if text.startswith("fp32"):
        return {}
    name = "fp16" if text.startswith("fp16") else "bf16"
    keys: dict[str, Any] = {f"{name}.enabled": True}
    if "moments=bf16" in text:
        return {**keys, "bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True}
    return keys if "gradients=" in text and "fp32" not in text else {**keys, "data_types.grad_accum_dtype": "fp32"}


def _written_recompute(facts: Facts) -> Keys:
    full = recompute_of(facts).kind == "full"
    return {"activation_checkpointing.partition_activations": False} if full else {}


_RECOMPUTE = ("activation_checkpointing.partition_activations", "activation_checkpointing.cpu_checkpointing",
              "activation_checkpointing.contiguous_memory_optimization",
              "activation_checkpointing.number_checkpoints")  # fmt: skip
DEEPSPEED = OtherProgram(
    name="deepspeed",
    title="DeepSpeed",
    form="json",
    marks=(_STAGE, "train_batch_size", "train_micro_batch_size_per_gpu"),
    cluster="h100-80",
    kernels="torch_cuda",
    accumulation=1,
    splits_batch=True,
    source="deepspeedai/DeepSpeed docs/_pages/config-json.md",
    entries=(
        _count("train_batch_size", "work.global_batch"),
        _count("train_micro_batch_size_per_gpu", "layout.mbs"),
        KeyEntry(keys=("gradient_accumulation_steps",), reads=accumulated, writes=accumulation),
        KeyEntry(keys=(_STAGE, _GROUP), reads=_zero, writes=_written_zero),
        _count("tensor_parallel.autotp_size", "layout.tp"),
        KeyEntry(keys=_PRECISION, reads=_precision, writes=_written_precision),
        KeyEntry(keys=_RECOMPUTE, reads=lambda keys: {
            "layout.recompute": FULL,
            "remarks": ["activation_checkpointing says how; that your script does it for all layers is assumed"],
        }, writes=_written_recompute),
        optimizer("optimizer.type"),
        read_only("pipeline.stages", reads=lambda keys: {} if keys["pipeline.stages"] == _AUTO
                  else {"layout.pp": whole_number(keys["pipeline.stages"])}),
    ),
    harmless=(
        "optimizer.*", "scheduler.*", "steps_per_print", "wall_clock_breakdown", "gradient_clipping", "dump_state",
        "prescale_gradients", "tensorboard.*", "wandb.*", "csv_monitor.*", "fp16.*", "bf16.*", "memory_breakdown",
        "zero_allow_untested_optimizer", "flops_profiler.*", "comms_logger.*", "*overlap_comm", "*_bucket_size",
        "*contiguous_gradients", "*reduce_scatter", "*allgather_partitions", "zero_optimization.stage3_*",
        "zero_optimization.sub_group_size", "zero_optimization.round_robin_gradients", "communication_data_type",
        "autotuning.*", "torch_autocast.*", "checkpoint.*", "disable_allgather", "gradient_predivide_factor",
    ),
    matters={"fp16.fp16_master_weights_and_grads": (), "communication_data_type": ()},
    defaults={"layout.zero": 0, "layout.kernels": "torch_cuda", "layout.sp": False, "layout.recompute": NONE,
              "work.precision": "fp32", "layout.cp_order": "contiguous"},
    limits=Limits(
        axes=("tp", "dp", "mbs"),
        schedules={"1f1b": ""},
        zero=(0, 1, 3),
        stages="even",
        recompute=("none", "full"),
        weight_group=True,
        sp=(False,),
        precisions=("bf16", "bf16,gradients=bf16", "fp16,gradients=fp16", "fp16,gradients=fp32", "fp32",
                    "bf16,gradients=bf16,masters=none,moments=bf16"),
        unsaid={"model": "your script", "work.seq_len": "your script", "work.documents": "your script",
                "work.optimizer": "your script",
                "layout.recompute": "torch.utils.checkpoint in your model"},
    ),
)  # fmt: skip
