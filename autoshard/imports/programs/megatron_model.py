"""The keys of Megatron-LM that say which model is trained: flags, heads and names."""

import re
from collections.abc import Mapping
from typing import Any

from autoshard.imports.table import Facts, KeyEntry, Keys, alias, number, read_only, same, truth, whole_number, words
from autoshard.spec.workload import BalancedOver


def model(keys: Keys) -> Facts:
    """Read the flags that decide the architecture, with Megatron-LM's defaults: layer norms, learned positions, GELU.

    They mean something only where the sizes of a model are written out.
    """
    if not {"swiglu", "normalization", "num_layers", "position_embedding_type"} & keys.keys():
        return {}
    gated = truth(keys.get("swiglu"))
    positions = str(keys.get("position_embedding_type", "learned_absolute"))
    rotary = positions in ("rope", "yarn", "mrope") or truth(keys.get("use_rotary_position_embeddings"))
    bias = not truth(keys.get("disable_bias_linear")) and not (
        "add_bias_linear" in keys and not keys["add_bias_linear"]
    )
    act = "silu" if gated else "relu" if truth(keys.get("squared_relu")) else "gelu"
    facts = {
        "model.norm": "rms" if str(keys.get("normalization", "")).lower() == "rmsnorm" else "layer",
        "model.positions": "rotary" if rotary else "learned",
        "model.gated": gated,
        "model.hidden_act": act,
        "model.bias": bias,
        "model.tie_word_embeddings": not truth(keys.get("untie_embeddings_and_output_weights")),
    }
    if truth(keys.get("add_qkv_bias")):
        facts["model.qkv_bias"] = True
    if truth(keys.get("qk_layernorm")):
        facts["model.qk_norm"] = True
    return facts


def written_model(facts: Facts) -> Keys:
    """Write these flags."""
    keys: dict[str, Any] = {}
    keys |= {"normalization": "RMSNorm"} if facts.get("model.norm") == "rms" else {}
    keys |= {"position_embedding_type": "rope"} if facts.get("model.positions") == "rotary" else {}
    keys |= {"swiglu": True} if facts.get("model.gated") else {}
    keys |= {} if facts.get("model.bias") else {"disable_bias_linear": True}
    keys |= {} if facts.get("model.tie_word_embeddings") else {"untie_embeddings_and_output_weights": True}
    keys |= {"add_qkv_bias": True} if facts.get("model.qkv_bias") and not facts.get("model.bias") else {}
    return {**keys, **({"qk_layernorm": True} if facts.get("model.qk_norm") else {})}


MODEL = (
    "swiglu", "normalization", "position_embedding_type", "use_rotary_position_embeddings", "disable_bias_linear",
    "add_bias_linear", "untie_embeddings_and_output_weights", "add_qkv_bias", "qk_layernorm", "squared_relu",
    "num_layers",
)  # fmt: skip


# What makes of a decoder another one than autoshard models: latent attention, shared experts, layers of other kinds.
_OTHER_MODELS = (
    "multi_latent_attention", "moe_shared_expert_intermediate_size", "hybrid_layer_pattern", "hybrid_override_pattern",
    "moe_layer_freq", "mtp_num_layers", "spec",
)  # fmt: skip
_EVERY_LAYER = "moe_layer_freq", "1"  # has experts, which autoshard models; a log prints this default


def _unmodelled(keys: Keys) -> Facts:
    """Name the keys of another decoder."""
    return {"model.unmodelled": [key for key, value in keys.items() if value and (key, str(value)) != _EVERY_LAYER]}


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


def _capacity(keys: Keys) -> Facts:
    factor = keys["moe_expert_capacity_factor"]
    return {} if factor is None else {"work.expert_capacity": number(factor)}


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


EXPERTS = (
    same("num_experts", "model.num_local_experts"),
    same("moe_router_topk", "model.num_experts_per_tok"),
    alias("moe_ffn_hidden_size", "model.intermediate_size"),
    read_only("moe_expert_capacity_factor", reads=_capacity),
    KeyEntry(keys=_ROUTER, reads=_router_losses, writes=_written_router_losses),
    same("moe_z_loss_coeff", "work.router_z_loss", number),
)
