"""torchtitan: configurations as Python functions (b5bcd76), and the TOML files that it read until 9810191 (2026-02).

Meanings are those of torchtitan/config/configs.py, job_config.py and distributed/pipeline_parallel.py there.
"""

import re
from collections.abc import Mapping
from typing import Any, cast

from autoshard.errors import InputError
from autoshard.imports.programs.shared import FULL, NONE, optimizer, recompute_of, selective, zero_of_stage
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
    words,
)
from autoshard.spec.model import ModelSpec
from autoshard.spec.record import show_value

# What SelectiveAC computes again: all but the costly products, as autoshard's rows of torchtitan read it
# (calibration/words.json).
_AGAIN = ("act", "attn_add", "attn_norm", "k", "k_rotary", "mlp_norm", "o", "product", "q_rotary", "up")
_SCHEDULES: Mapping[str, str] = {
    "1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved", "ZBVZeroBubble": "zb_v",
}  # fmt: skip
_NO_ONE, _RESHARD = (None, -1), "fsdp_reshard_after_forward"
_EMBED, _HEAD, _LAYER = "tok_embeddings", ("norm", "lm_head"), "layers."


def layers_by_part(num_layers: int, num_stages: int, facts: Facts) -> tuple[int, ...] | None:
    """Split layers as torchtitan does: embedding and head count as a layer each, what is left goes to the first stages.

    >>> layers_by_part(32, 4, {})
    (8, 9, 8, 7)
    """
    first, last = facts.get("layout.first_less", 1), facts.get("layout.last_less", 1)
    least, rest = divmod(num_layers + first + last, num_stages)
    if num_stages == 1 or least < max(1, first, last):
        return None
    sizes = [least + (stage < rest) for stage in range(num_stages)]
    sizes[0] -= first
    sizes[-1] -= last
    return tuple(sizes) if min(sizes) >= 1 else None


def _data_parallel(keys: Keys) -> Facts:
    replicas = whole_number(keys.get("data_parallel_replicate_degree") or 1)
    shards = keys.get("data_parallel_shard_degree")
    facts: dict[str, Any] = {"layout.replicas": replicas} if replicas > 1 else {}
    return facts if shards in _NO_ONE else {**facts, "layout.shards": whole_number(shards)}


def _written_data_parallel(facts: Facts) -> Keys:
    dp, cp, group = facts.get("layout.dp", 1), facts.get("layout.cp", 1), facts.get("layout.zero_group")
    if not facts.get("layout.zero"):
        return {"data_parallel_replicate_degree": dp, "data_parallel_shard_degree": 1}
    replicas = dp * cp // group if group else 1
    return {"data_parallel_replicate_degree": replicas, "data_parallel_shard_degree": dp // replicas}


def _resharded(keys: Keys) -> Facts:
    """Read whether weights stay gathered after a forward pass; beside a pipeline they do unless it is "always".

    A pipeline's weights are gathered once a step by the kernels of this program (``Kernels.keeps_units``).
    """
    when, is_piped = keys.get(_RESHARD), whole_number(keys.get("pipeline_parallel_degree") or 1) > 1
    if when == "never" and not is_piped:
        return zero_of_stage(2)
    is_priced = when in (None, "default", "never") or (when == "always" and not is_piped)
    return {} if is_priced else {"unread": [f"{_RESHARD} = {when}{', priced as default' if when == 'always' else ''}"]}


def _schedule(keys: Keys) -> Facts:
    name = str(keys["pipeline_parallel_schedule"])
    by_name = {theirs.lower(): ours for theirs, ours in _SCHEDULES.items()}
    if name.lower() not in by_name:
        return {"unread": [f"pipeline_parallel_schedule: {name}"]}
    ours = by_name[name.lower()]
    return {"layout.schedule": ours, **({"layout.vp_of_schedule": 2} if ours in ("interleaved", "zb_v") else {})}


def _written_schedule(facts: Facts) -> Keys:
    if facts.get("layout.pp", 1) == 1:
        return {}
    names = {ours: name for name, ours in _SCHEDULES.items()}
    return {"pipeline_parallel_schedule": names[str(facts.get("layout.schedule", "1f1b"))]}


def _parts(keys: Keys) -> Facts:
    parts = keys["module_fqns_per_model_part"]
    if not parts:
        return {}
    listed = cast(list[object], parts) if isinstance(parts, list) else []
    if not listed or not all(isinstance(names, list) for names in listed):
        raise InputError.of("", f"expected a list of lists of names, found {show_value(cast(object, parts))}")
    rows = [words(names) for names in listed]
    stages = tuple(sum(name.startswith(_LAYER) for name in names) for names in rows)
    return {"layout.stages": stages, "layout.num_stages": len(stages)}


def _written_parts(facts: Facts) -> Keys:
    stages = facts["layout.stages"]
    if len(stages) == 1:
        return {}
    parts: list[list[str]] = []
    for number, size in enumerate(stages):
        first = sum(stages[:number])
        parts.append([f"{_LAYER}{layer}" for layer in range(first, first + size)])
    parts[0].insert(0, _EMBED)
    parts[-1].extend(_HEAD)
    return {"module_fqns_per_model_part": parts}


def _tokens(keys: Keys) -> Facts:
    """Read the token budget of the Python form: slots of a micro-batch of one replica, and of a step."""
    length = whole_number(keys.get("max_context_length") or 2048)
    slots = whole_number(keys.get("num_tokens_per_microbatch_per_dp_rank") or 16384)
    facts: dict[str, Any] = {"work.seq_len": length, "layout.mbs": max(1, slots // length)}
    step = keys.get("num_tokens_per_train_step")
    if step not in _NO_ONE:
        return {**facts, "work.global_batch": max(1, whole_number(step) // length)}
    return {**facts, "work.accumulation": whole_number(keys.get("num_pp_microbatches") or 1)}


def _written_tokens(facts: Facts) -> Keys:
    length, batch = facts["work.seq_len"], facts["work.global_batch"]
    mbs, replicas, pp = facts.get("layout.mbs", 1), facts.get("layout.dp", 1), facts.get("layout.pp", 1)
    pipelined = {"num_pp_microbatches": batch // (mbs * replicas)} if pp > 1 else {}
    return {
        "num_tokens_per_microbatch_per_dp_rank": mbs * length,
        "num_tokens_per_train_step": batch * length,
        "max_context_length": length,
        **pipelined,
    }


def _batch(keys: Keys) -> Facts:
    """Read the batch of the TOML form: without a pipeline, a micro-batch is the local batch."""
    local = whole_number(keys.get("local_batch_size") or keys.get("training.batch_size") or 8)
    pp = whole_number(keys.get("pipeline_parallel_degree") or 1)
    size = whole_number(keys.get("pipeline_parallel_microbatch_size") or 1) if pp > 1 else local
    facts: dict[str, Any] = {"layout.mbs": size}
    total = keys.get("training.global_batch_size")
    if total not in _NO_ONE:
        return {**facts, "work.global_batch": whole_number(total)}
    return {**facts, "work.accumulation": max(1, local // size)}


def _recompute(keys: Keys) -> Facts:
    call = str(keys.get("activation_checkpoint.call") or "")
    mode = str(keys.get("activation_checkpoint.mode") or call.partition(".")[0].removesuffix("AC")).lower()
    mode = mode or ("selective" if "selective_ac_option" in keys else "")
    option = str(keys.get("selective_ac_option") or "op")
    if mode == "selective" and option != "op":
        return {"layout.recompute": FULL, "layout.every": whole_number(option)}
    if mode in ("selective", "full", "none", ""):
        return {"layout.recompute": {"selective": selective(_AGAIN), "full": FULL}.get(mode, NONE)}
    return {"unread": [f"activation_checkpoint: {mode}"]}


def _written_recompute(facts: Facts) -> Keys:
    kind = {"none": None, "selective": "SelectiveAC.Config", "full": "FullAC.Config"}[recompute_of(facts).kind]
    return {"activation_checkpoint.call": kind} if kind else {}


def _compiled(keys: Keys) -> Facts:
    tensor = "enable_async_tensor_parallel"
    compiles = truth(keys.get("compile.enable")) or truth(keys.get("training.compile"))
    asynchronous = truth(keys.get(tensor)) and compiles
    return {"layout.kernels": "torch_async_tp" if asynchronous else "torch_compiled" if compiles else "torch_cuda"}


def _written_compiled(facts: Facts) -> Keys:
    names = {"torch_async_tp": (True, True), "torch_cuda": (False, False)}
    compiles, asynchronous = names.get(str(facts.get("layout.kernels")), (True, False))
    return {"compile.enable": compiles, **({"compile.enable_async_tensor_parallel": True} if asynchronous else {})}


def _precision(keys: Keys) -> Facts:
    text = f"{keys.get('converters')} {keys.get('model_spec.converters')}"
    eight = any(word in text.lower() for word in ("float8", "mxfp8")) or truth(keys.get("enable_float8_linear"))
    unread = ["converters: NVFP4"] if "nvfp4" in text.lower() else []
    kept = "bf16,gradients=bf16,masters=none,moments=bf16" if keys.get("training.dtype") == "bfloat16" else "bf16"
    kept = "fp32" if keys.get("mixed_precision_param") == "float32" else kept
    return {"work.precision": f"{kept},products=fp8" if eight else kept, "unread": unread}


def _written_precision(facts: Facts) -> Keys:
    text = str(facts.get("work.precision", "bf16"))
    fp8 = [{"call": "Float8LinearConverter.Config"}]
    keys: dict[str, Any] = {"model_spec.converters": fp8} if "products=fp8" in text else {}
    keys |= {"mixed_precision_param": "float32"} if text.startswith("fp32") else {}
    return {**keys, **({"training.dtype": "bfloat16"} if "moments=bf16" in text else {})}


def _model(keys: Keys) -> Facts:
    """Read which model: its family and flavor, or the folder of its tokenizer."""
    path = str(keys.get("hf_assets_path") or "")
    stated = keys.get("model_spec.args")
    listed = [item for item in cast(list[object], stated) if isinstance(item, str)] if isinstance(stated, list) else ()
    arguments = (*listed, *words(keys.get("model.flavor")))
    flavor, family = arguments[0] if arguments else "", str(keys.get("model.name") or "")
    facts: dict[str, Any] = {"model.flavor": f"{family}:{flavor}"} if flavor else {}
    return {**facts, "model.name": path.rpartition("/")[2]} if "assets/hf/" in path else facts


def _load_balancer(keys: Keys) -> Facts:
    balances = keys.get("context_parallel_load_balancer", keys.get("load_balance", True))
    return {"layout.cp_order": "zigzag" if balances else "contiguous"}


def _written_balancer(facts: Facts) -> Keys:
    balances = facts.get("layout.cp_order", "contiguous") == "zigzag"
    return {"context_parallel_load_balancer": "headtail" if balances else None} if facts.get("layout.cp", 1) > 1 else {}


_SIZES = ("local_batch_size", "training.global_batch_size", "pipeline_parallel_microbatch_size",
          "training.batch_size", "training.seq_len", "pipeline_parallel_degree")  # fmt: skip
TORCHTITAN = OtherProgram(
    name="torchtitan",
    title="torchtitan",
    form="python",
    marks=("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree", "expert_parallel_degree",
           "data_parallel_shard_degree", "data_parallel_replicate_degree", "training.seq_len",
           "training.max_context_length", "model_spec.call"),
    cluster="h100-80",
    kernels="torch_compiled",
    source="pytorch/torchtitan b5bcd76",
    entries=(
        same("tensor_parallel_degree", "layout.tp"),
        same("pipeline_parallel_degree", "layout.pp"),
        same("context_parallel_degree", "layout.cp"),
        same("expert_parallel_degree", "layout.ep"),
        same("expert_tensor_parallel_degree", "layout.etp"),
        KeyEntry(keys=("data_parallel_replicate_degree", "data_parallel_shard_degree"), reads=_data_parallel,
              writes=_written_data_parallel),
        read_only(_RESHARD, "pipeline_parallel_degree", reads=_resharded),
        same("enable_sequence_parallel", "layout.sp", truth),
        KeyEntry(keys=("pipeline_parallel_schedule",), reads=_schedule, writes=_written_schedule),
        KeyEntry(keys=("module_fqns_per_model_part",), reads=_parts, writes=_written_parts),
        alias("pipeline_parallel_layers_per_stage", "layout.layers_per_stage"),
        alias("pipeline_parallel_first_stage_less_layers", "layout.first_less"),
        alias("pipeline_parallel_last_stage_less_layers", "layout.last_less"),
        KeyEntry(
            keys=("context_parallel_load_balancer", "load_balance"), reads=_load_balancer, writes=_written_balancer
        ),
        KeyEntry(
            keys=("num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step", "max_context_length",
                  "num_pp_microbatches"),
            reads=_tokens,
            writes=_written_tokens,
        ),
        alias("training.seq_len", "work.seq_len"),
        read_only(*_SIZES, reads=lambda keys: _batch(keys) if keys.keys() - {"pipeline_parallel_degree"} else {}),
        KeyEntry(keys=("activation_checkpoint.call", "activation_checkpoint.mode", "selective_ac_option",
                       "/activation_checkpoint"), reads=_recompute, writes=_written_recompute),
        KeyEntry(keys=("compile.enable", "training.compile", "enable_async_tensor_parallel"), reads=_compiled,
              writes=_written_compiled),
        KeyEntry(keys=("converters", "model_spec.converters", "enable_float8_linear", "training.dtype",
                    "mixed_precision_param"), reads=_precision, writes=_written_precision),
        optimizer("optimizer.name"),
        read_only("model_spec.args", "model.name", "model.flavor", "hf_assets_path", reads=_model),
    ),
    harmless=(
        "job.*", "profiling.*", "profiler.*", "metrics.*", "optimizer.*", "lr_scheduler.*", "checkpoint.*", "comm.*",
        "validation.*", "validator.*", "loss.*", "dataloader.*", "*.call", "call", "training.steps",
        "training.dataset*", "training.max_norm", "training.warmup_steps", "training.gc_*", "compile.components",
        "quantize.*", "float8.*", "model.tokenizer_path", "model.norm_type", "debug.*", "fault_tolerance.*",
        "*.per_op_sac*", "activation_checkp*", "experimental.custom_import", "training.seed", "training.deterministic",
        "*.spmd_backend", "compile.backend", "memory_estimation.*", "training.mixed_precision_reduce",
    ),
    matters={
        "optimizer.call": ("default_adamw", "OptimizersContainer"), "optimizer.early_step_in_backward": (),
        "optimizer.optimizer_factory_kwargs*": (), "*mixed_precision_reduce": ("float32",),
        "compile.components": ("model",), "*float8_all_gather": (),
    },
    sections={
        "parallelism": (
            "tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree", "expert_parallel_degree",
            "expert_tensor_parallel_degree",
            "data_parallel_replicate_degree", "data_parallel_shard_degree", "enable_sequence_parallel",
            "pipeline_parallel_schedule", "module_fqns_per_model_part", "context_parallel_load_balancer",
            "num_pp_microbatches",
        ),
        "training": (
            "num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step", "max_context_length",
            "mixed_precision_param",
        ),
    },
    defaults={"layout.cp_order": "zigzag", "layout.kernels": "torch_cuda", "layout.etp": 1, "layout.sp": True,
              "layout.zero": 3, "layout.recompute": selective(_AGAIN), "layout.first_less": 1, "layout.last_less": 1},
    stages=layers_by_part,
    limits=Limits(
        axes=("tp", "pp", "cp", "ep", "dp", "vp", "mbs"),
        folds=True,
        schedules={ours: name for name, ours in _SCHEDULES.items()},
        zero=(0, 3),
        stages="free",
        recompute=("none", "selective", "full"),
        selective=(_AGAIN,),
        zero_group=True,
        shards_with=("cp",),
        cp_orders=("zigzag", "contiguous"),
        precisions=("bf16", "bf16,products=fp8", "fp32", "bf16,gradients=bf16,masters=none,moments=bf16"),
        unsaid={"model": "the flavor of model_registry(...)"},
    ),
)  # fmt: skip

_BASES = {  # card -> the function of config_registry.py that has a model of this size
    "llama3-8b": "llama3_8b", "llama3.1-8b": "llama3_8b", "llama3-70b": "llama3_70b", "llama3.1-70b": "llama3_70b",
    "llama3.1-405b": "llama3_405b", "qwen3-8b": "qwen3_8b",
}  # fmt: skip


def defaults_of(model: ModelSpec) -> tuple[str, str]:
    """Return the module and the function of the configuration that a plan's changes; of other models, a name for it."""
    base = _BASES.get(model.name)
    if base is None:
        return "your_models", re.sub(r"[^a-z0-9]", "_", model.name.lower())
    return f"torchtitan.models.{base.partition('_')[0]}.config_registry", base
