"""The keys of Megatron-LM that say which model is trained: flags, heads and names."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from autoshard.imports.programs.megatron_layers import LAYERS, said_options
from autoshard.imports.programs.megatron_rotary import ROTARY, position_type
from autoshard.imports.table import Facts, KeyEntry, Keys, alias, number, read_only, same, truth, whole_number, words
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_parts import Router
from autoshard.spec.record import options_on
from autoshard.spec.workload import BalancedOver


def model(keys: Keys) -> Facts:
    """Read the flags that decide the architecture, with Megatron-LM's defaults: layer norms, learned positions, GELU.

    They mean something only where the sizes of a model are written out.
    """
    if not {"swiglu", "quick_geglu", "normalization", "num_layers", "position_embedding_type"} & keys.keys():
        return {}
    gated = any(truth(keys.get(key)) for key in ("swiglu", "quick_geglu", "gated_linear_unit"))
    positions = str(keys.get("position_embedding_type", "learned_absolute"))
    rotary = positions in ROTARY or truth(keys.get("use_rotary_position_embeddings"))
    bias = not truth(keys.get("disable_bias_linear")) and all(truth(keys.get(key, True)) for key in _BIASES)
    act = "silu" if gated else "relu2" if truth(keys.get("squared_relu")) else "gelu"
    gated, act = _ACTIVATIONS.get(str(keys.get("model.activation")).removeprefix("fast-"), (gated, act))
    tied = truth(keys.get("share_embeddings_and_output_weights", True))
    facts: dict[str, Any] = {
        "model.norm": "rms" if str(keys.get("normalization", "")).lower() == "rmsnorm" else "layer",
        "model.positions": "rotary" if rotary else "learned",
        "model.gated": gated,
        "model.hidden_act": act,
        "model.bias": bias,
        "model.tie_word_embeddings": tied and not truth(keys.get("untie_embeddings_and_output_weights")),
    }
    if truth(keys.get("apply_layernorm_1p")) or str(keys.get("normalization", "")).lower() == "layernorm1p":
        facts["model.norm_offset"] = 1.0
    if truth(keys.get("add_qkv_bias")):
        facts["model.qkv_bias"] = True
    if truth(keys.get("qk_layernorm")) and not truth(keys.get("multi_latent_attention")):
        facts["model.qk_norm"] = True
    return facts


_BIASES = ("add_bias_linear", "model.bias")
# model.activation of NeMo's YAML (examples/nlp/language_modeling/conf): whether it gates an MLP, and by which function
_ACTIVATIONS: Mapping[str, tuple[bool, str]] = {
    "swiglu": (True, "silu"), "geglu": (True, "gelu"), "reglu": (True, "relu"), "squared-relu": (False, "relu2"),
    "gelu": (False, "gelu"),
}  # fmt: skip


def written_model(facts: Facts) -> Keys:
    """Write these flags."""
    keys: dict[str, Any] = {}
    keys |= {"normalization": "RMSNorm"} if facts.get("model.norm") == "rms" else {}
    keys |= {"apply_layernorm_1p": True} if facts.get("model.norm_offset") == 1 else {}
    keys |= (
        {"squared_relu": True} if (facts.get("model.gated"), facts.get("model.hidden_act")) == (False, "relu2") else {}
    )
    keys |= position_type(facts)
    keys |= {"swiglu": True} if facts.get("model.gated") and not facts.get("model.glu_limit") else {}
    keys |= {} if facts.get("model.bias") else {"disable_bias_linear": True}
    keys |= {} if facts.get("model.tie_word_embeddings") else {"untie_embeddings_and_output_weights": True}
    keys |= {"add_qkv_bias": True} if facts.get("model.qkv_bias") and not facts.get("model.bias") else {}
    # Of latent attention the flag norms the narrow states (megatron/core/models/gpt/gpt_layer_specs.py).
    normed = facts.get("model.qk_norm") or facts.get("model.latent")
    return {**keys, **({"qk_layernorm": True} if normed else {})}


MODEL = (
    "swiglu", "normalization", "position_embedding_type", "use_rotary_position_embeddings", "disable_bias_linear",
    "add_bias_linear", "untie_embeddings_and_output_weights", "add_qkv_bias", "qk_layernorm", "squared_relu",
    "apply_layernorm_1p",
    "num_layers", "quick_geglu", "multi_latent_attention", "gated_linear_unit", "model.activation", "model.bias",
    "share_embeddings_and_output_weights",
)  # fmt: skip


# What makes of a decoder another one than these keys say: gates of shared experts or of attention, linear attention,
# layers of another family.
_OTHER_MODELS = (
    "moe_shared_expert_gate", "attention_output_gate", "linear_attention_freq", "experimental_attention_variant",
    "hybrid_layer_pattern", "hybrid_override_pattern", "spec",
)  # fmt: skip


def _unmodelled(keys: Keys) -> Facts:
    """Name the keys of another decoder."""
    return {"model.unmodelled": [key for key, value in keys.items() if value]}


FOREIGN = read_only(*_OTHER_MODELS, reads=_unmodelled)


def head_facts(keys: Keys) -> Facts:
    """Read the key/value heads; there are as many as query heads where they are not grouped."""
    groups = keys.get("num_query_groups")
    is_grouped = truth(keys.get("group_query_attention")) or "group_query_attention" not in keys
    return {"model.num_key_value_heads": whole_number(groups)} if is_grouped and groups is not None else {}


def written_heads(facts: Facts) -> Keys:
    """Write the key/value heads where they are fewer."""
    groups = facts.get("model.num_key_value_heads")
    is_grouped = groups is not None and groups != facts.get("model.num_attention_heads")
    return {"group_query_attention": True, "num_query_groups": groups} if is_grouped else {}


def name(keys: Keys) -> Facts:
    """Read the name of a model: of Hugging Face, or the class of NeMo that holds its sizes."""
    for value in keys.values():
        for item in value if isinstance(value, list) else [value]:  # pyright: ignore[reportUnknownVariableType]
            text = str(getattr(item, "text", item))  # pyright: ignore[reportUnknownArgumentType]
            if match := re.search(r"\b(\w+?)Config(\d\w*)\b", text):
                return {"model.name": f"{match[1]}-{match[2]}"}
            if "/" in text and not text.startswith((".", "/")):
                return {"model.name": text}
    return {}


# Megatron's loss is divided by the number of chosen experts, and is 1 where experts are equally busy.
_ROUTER = ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_router_topk")
_TOP_K = 2  # megatron/training/arguments.py
_BALANCED: Mapping[str, BalancedOver] = {"aux_loss": "batch", "seq_aux_loss": "sequence"}
_BY_RANK = "aux_loss balances the tokens of one data-parallel rank, router_balance_over: batch those of all"


def _router_losses(keys: Keys) -> Facts:
    """Read the loss that keeps experts equally busy: of a micro-batch, or of each sequence."""
    kinds, coefficients = (words(keys.get(key)) for key in _ROUTER[:2])
    stated = dict(zip(kinds or ("aux_loss",), map(number, coefficients), strict=False))
    losses = {kind: coefficient for kind, coefficient in stated.items() if coefficient and kind != "none"}
    if not losses:
        return {}
    kind, coefficient = next(iter(losses.items()))
    if len(losses) > 1 or kind not in _BALANCED:
        return {"unread": [f"{_ROUTER[0]} = {' '.join(losses)}"]}
    count = whole_number(keys.get("moe_router_topk") or _TOP_K)
    facts = {"work.router_balance_loss": coefficient / count, "work.router_balance_over": _BALANCED[kind]}
    return {**facts, **({"remarks": [_BY_RANK]} if kind == "aux_loss" else {})}


def _written_router_losses(facts: Facts) -> Keys:
    """Write it."""
    if "work.router_balance_loss" not in facts:
        return {}
    kind = next(kind for kind, over in _BALANCED.items() if over == facts["work.router_balance_over"])
    coefficient = facts["work.router_balance_loss"] * facts["model.num_experts_per_tok"]
    return {_ROUTER[0]: kind, _ROUTER[1]: coefficient}


# megatron/core/transformer/moe/moe_utils.py topk_routing_with_score_function and group_limited_topk: a group scores as
# its best experts together, as many as a token chooses in each; sigmoids are normalised where more than one is chosen.
_SCORES = (
    "moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups", "moe_router_group_topk",
    "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias", "moe_router_bias_update_rate",
)  # fmt: skip
_BIAS_SPEED = 1e-3  # megatron/training/arguments.py


def _router(keys: Keys) -> Facts:
    """Read how experts are chosen and weighted, and whether biases of experts move."""
    values = {key: value for key, value in keys.items() if str(value) not in ("None", "")}
    scores, *_ = (*words(values.get("moe_router_score_function")), "softmax")
    sigmoid, biased = scores == "sigmoid", truth(values.get("moe_router_enable_expert_bias"))
    top_k = whole_number(values.get("moe_router_topk") or _TOP_K)
    groups, inside_of = (whole_number(values.get(key) or 1) for key in _SCORES[2:4])
    limited = inside_of < groups and "moe_router_group_topk" in values
    of_groups: Mapping[int, Literal["best", "best two"]] = {1: "best", 2: "best two"}
    best = of_groups.get(top_k // inside_of) if limited else "best"
    normalised = top_k > 1 if sigmoid else not truth(values.get("moe_router_pre_softmax"))
    scores_add_up = best == "best two" and scores == "softmax" and normalised  # of logits there, of probabilities here
    if scores not in ("softmax", "sigmoid") or best is None or scores_add_up or (biased and not sigmoid):
        return {"model.unmodelled": [key for key in _SCORES if key in values]}
    router = Router(
        scores=scores, normalised=normalised, scale=number(values.get("moe_router_topk_scaling_factor") or 1),
        groups=groups if limited else 1, chosen_groups=inside_of if limited else 1, group_score=best, correction=biased,
    )  # fmt: skip
    speed = number(values.get("moe_router_bias_update_rate", _BIAS_SPEED))
    return {"model.router": None if router == Router() else router} | (
        {"work.router_bias_speed": speed} if biased else {}
    )


_GATED, _UNGATED = ("silu",), ("gelu", "gelu_tanh", "relu2")  # what MLPs compute with --swiglu, and without
_BIASED = ((False, False, False), (True, False, False), (True, True, True))  # of queries to values, outputs and MLPs


def traits_without_flag(model: ModelSpec) -> tuple[str, ...]:
    """Return the traits of a model, beside its options, that no flag says.

    >>> from autoshard.spec.model_catalogue import load_model
    >>> traits_without_flag(load_model("gpt-neox-20b"))
    ('parallel_residual',)
    """
    functions = _GATED if model.gated_mlp else _UNGATED
    lacking = {
        "parallel_residual": model.parallel_residual,
        "activation": model.activation not in functions,
        "out_bias": (model.qkv_bias, model.out_bias, model.mlp_bias) not in _BIASED,
    }
    return tuple(name for name, is_lacking in lacking.items() if is_lacking)


def options_of_flags(model: ModelSpec) -> tuple[str, ...]:
    """Return the options of a model that flags say: those that are read as they are written, and shared experts.

    >>> from autoshard.spec.model_catalogue import load_model
    >>> options_of_flags(load_model("glm4.5"))
    ('router', 'shared_ffn', 'norm_offset', 'kinds', 'order')
    """
    written = {**_written_router({"model.router": model.router}), "moe_router_topk": model.experts_per_token}
    is_said = model.router is not None and _router(written).get("model.router") == model.router
    sizes = {"num_hidden_layers": model.num_layers, "intermediate_size": model.ffn, "head_dim": model.head_dim}
    sizes |= {"num_local_experts": model.num_experts, **options_on(model)}
    layers = said_options({f"model.{key}": value for key, value in sizes.items()})
    offset = ("norm_offset",) if model.norm_offset in (0, 1) else ()
    return (*(("router",) if is_said else ()), "shared_ffn", *offset, *layers)


def _written_router(facts: Facts) -> Keys:
    """Write it."""
    router = facts.get("model.router")
    if router is None:
        return {}
    keys: dict[str, Any] = {"moe_router_score_function": router.scores}
    keys |= {"moe_router_pre_softmax": True} if router.scores == "softmax" and not router.normalised else {}
    keys |= dict(zip(_SCORES[2:4], (router.groups, router.chosen_groups), strict=True)) if router.groups > 1 else {}
    keys |= {"moe_router_topk_scaling_factor": router.scale} if router.scale != 1 else {}
    if router.correction:
        speed = facts.get("work.router_bias_speed", 0.0)
        keys |= {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": speed}
    return keys


EXPERTS = (
    KeyEntry(keys=(*_SCORES, "moe_router_topk"), reads=_router, writes=_written_router),
    same("moe_shared_expert_intermediate_size", "model.shared_ffn"),
    same("num_experts", "model.num_local_experts"),
    same("moe_router_topk", "model.num_experts_per_tok"),
    alias("moe_ffn_hidden_size", "model.intermediate_size"),
    same("moe_expert_capacity_factor", "work.expert_capacity", number),
    KeyEntry(keys=_ROUTER, reads=_router_losses, writes=_written_router_losses),
    same("moe_z_loss_coeff", "work.router_z_loss", number),
    *LAYERS,
)
