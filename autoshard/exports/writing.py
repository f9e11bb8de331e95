"""A plan's facts, and the text of a program's file with the keys that its table writes."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, cast

from autoshard.exports.limits import Expressed
from autoshard.imports.programs.torchtitan import defaults_of
from autoshard.imports.table import Facts, OtherProgram
from autoshard.plan.candidate import even_stages
from autoshard.plan.folding import expert_mesh
from autoshard.plan.plan import Plan
from autoshard.spec.files import yaml_of
from autoshard.spec.record import options_on
from autoshard.version import __version__

SUFFIXES: Mapping[str, str] = {"yaml": "yaml", "arguments": "sh", "python": "py", "json": "json"}
_SIZES = ("tp", "pp", "cp", "ep", "dp", "vp", "mbs")
_LAUNCHER = ("nnodes", "nproc_per_node")
# Of several nodes each starts the script, as examples of Megatron-LM do; its validate_args asks for one queue to a GPU
# before Blackwell beside tensor or context parallelism, and for more beside FSDP.
_MEETING = (
    '--node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}"'
)


def facts_of(plan: Plan, expressed: Expressed) -> Facts:
    """Return a plan as facts, with the layout that a program can express."""
    model, work, cluster, layout = plan.model, plan.workload, plan.cluster, expressed.candidate
    facts: dict[str, Any] = _model_facts(plan) | {
        f"layout.{key}": getattr(layout, key)
        for key in (*_SIZES, "zero", "zero_group", "weight_group", "schedule", "cp_kind", "cp_order")
    }
    count = layout.num_stages
    kinds = max(layout.recompute, key=lambda kind: kind.num_layers or 0)
    facts |= {
        "layout.sp": layout.sequence_parallel and layout.tp > 1,
        "layout.stages": layout.stages or even_stages(model.num_layers, count),
        "layout.recompute": (kinds,),
        "layout.kernels": layout.kernels or cluster.kernels,
        "cluster.nodes": cluster.num_nodes,
        "cluster.per_node": cluster.ranks_per_node,
        "cluster.ranks": cluster.num_ranks,
        "cluster.lnc": cluster.lnc,
        "cluster.kv_replicas": max(1, layout.tp // model.num_kv_heads),
        "work.seq_len": work.seq_len,
        "work.global_batch": work.global_batch,
        "work.precision": expressed.workload.precision.name,
        "model.label": model.name,
    }
    if model.num_experts:  # other programs count all ranks with other experts, of whichever axis
        facts["layout.ep"], facts["layout.etp"] = expert_mesh(layout)
        capacity = expressed.workload.expert_capacity
        facts |= {"work.expert_capacity": capacity} if capacity else {}
    facts |= {f"work.{name}": value for name, value in work.router_training.items()}
    return facts


def _model_facts(plan: Plan) -> dict[str, Any]:
    model = plan.model
    facts = {
        "num_hidden_layers": model.num_layers, "hidden_size": model.hidden, "intermediate_size": model.ffn,
        "num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim,
        "vocab_size": model.vocab, "max_position_embeddings": model.max_positions, "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings, "hidden_act": model.activation, "norm": model.norm,
        "positions": model.positions, "gated": model.gated_mlp, "bias": model.mlp_bias, "qkv_bias": model.qkv_bias,
        "qk_norm": model.qk_norm, "hidden_dropout": model.hidden_dropout, "attention_dropout": model.attention_dropout,
        "name": model.name,
    }  # fmt: skip
    rotary = {"rope_theta": model.rotary_theta, "rotary_fraction": model.rotary_fraction}
    facts |= {**rotary, "rope_scaling": model.rotary_scaling} if model.positions == "rotary" else {}
    facts |= {"sliding_window": model.window} if model.window else {}
    experts = {"num_local_experts": model.num_experts, "num_experts_per_tok": model.experts_per_token}
    stated: dict[str, Any] = {**facts, **(experts if model.num_experts else {}), **options_on(model)}
    return {f"model.{key}": value for key, value in stated.items()}


def keys_of(program: OtherProgram, facts: Facts) -> dict[str, Any]:
    """Return the keys that a program's table writes for facts, by their whole paths."""
    keys: dict[str, Any] = {}
    for entry in program.entries:
        keys |= {program.place(key): value for key, value in entry.writes(facts).items()}
    return keys


def text_of(program: OtherProgram, plan: Plan, expressed: Expressed) -> str:
    """Return the text of the file."""
    keys = keys_of(program, facts_of(plan, expressed))
    about = f"Written by autoshard {__version__} export for {program.title} ({program.source}): {plan.model.name} on "
    about += f"{plan.cluster.num_nodes} x {plan.cluster.name}"
    unsaid = [f"{what.rpartition('.')[2]}: {where}" for what, where in program.limits.unsaid.items()]
    notes = [about, str(expressed.candidate), *([f"Not in this file: {'; '.join(unsaid)}"] if unsaid else [])]
    if program.form == "json":
        return json.dumps(_nested(keys), indent=2) + "\n"
    comments = "".join(f"# {note}\n" for note in notes)
    if program.form == "yaml":
        return comments + yaml_of(_nested(keys))
    if program.form == "python":
        return comments + _python(keys, plan)
    return f"#!/bin/bash\n{comments}{_script(keys)}"


def _nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for path, value in keys.items():
        *sections, name = path.split(".")
        section = data
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return data


def _script(keys: Mapping[str, Any]) -> str:
    """Write arguments as a list of a shell script, and the line that starts them."""
    stated = {key: value for key, value in keys.items() if key not in _LAUNCHER and value is not None}
    lines = [f"    {_argument(key, value)}" for key, value in stated.items()]
    launch = " ".join(_argument(key, keys[key]).replace("_", "-") for key in _LAUNCHER if key in keys)
    meeting = f" {_MEETING}" if keys.get("nnodes", 1) > 1 else ""
    start = f'torchrun {launch}{meeting} pretrain_gpt.py "${{ARGUMENTS[@]}}" "$@"'
    is_split = any(keys.get(f"{axis}_parallel_size", 1) > 1 for axis in ("tensor_model", "context"))
    queues = ["export CUDA_DEVICE_MAX_CONNECTIONS=1"] if is_split and not keys.get("use_megatron_fsdp") else []
    return "\n".join([*queues, "ARGUMENTS=(", *lines, ")", start, ""])


def _argument(key: str, value: Any) -> str:
    flag = f"--{key.replace('_', '-')}"
    if value is True:
        return flag
    items = cast(Sequence[object], value) if isinstance(value, list | tuple) else [value]
    return " ".join([flag, *(shlex.quote(str(item)) for item in items)])


def _python(keys: Mapping[str, Any], plan: Plan) -> str:
    """Write a function of torchtitan that changes the configuration of a model."""
    module, base = defaults_of(plan.model)
    kinds = sorted({str(value).partition(".")[0] for key, value in keys.items() if key == "activation_checkpoint.call"})
    imports = [f"from torchtitan.distributed.activation_checkpoint import {kind}" for kind in kinds]
    fp8 = "model_spec.converters" in keys
    lines: list[str] = [
        "from torchtitan.config import CompileConfig, ParallelismConfig", *imports,
        f"from {module} import {base}", "from torchtitan.trainer import Trainer", "", "",
        f"def {base}_planned() -> Trainer.Config:", f"    config = {base}()",
    ]  # fmt: skip
    for section, kind in (("parallelism", "ParallelismConfig"), ("compile", "CompileConfig")):
        inner = {key.partition(".")[2]: value for key, value in keys.items() if key.startswith(f"{section}.")}
        lines.append(f"    config.{section} = {kind}(")
        lines += [f"        {key}={value!r}," for key, value in inner.items()]
        lines.append("    )")
    lines += [f"    config.{key} = {value!r}" for key, value in keys.items() if key.startswith("training.")]
    kind = keys.get("activation_checkpoint.call")
    lines.append(f"    config.activation_checkpoint = {f'{kind}()' if kind else None}")
    if fp8:
        lines.append("    # an option of model_registry(...)")
        lines.append('    config.model_spec.converters = ["Float8LinearConverter"]')
    return "\n".join([*lines, "    return config", ""])
