"""Hugging Face tensor names and ours: a table that ``hf_weights`` reads in both directions.

A row names one of their tensors, how its axes are made of our dims, and which tensor of ours it holds. ``(a b)`` is
one axis made of two dims, ``qkv:1`` the second of those that lie together along ``qkv``. Our dims are those of the
graph, so a row says by itself what is transposed, split or interleaved. Our names are those of ``graph/evaluate``.

Rotary positions need no permutation: every architecture here turns the halves of a head against each other, as the
graph does. (Meta's own Llama files turn neighbours; those of Hugging Face are permuted already.)
"""

from collections.abc import Mapping
from typing import Literal

# ``published``: as the files on the Hub are named; ``module``: as transformers 5 names them in a module's state dict.
Form = Literal["published", "module"]
Names = tuple[tuple[str, str, str], ...]  # their name, its axes, our name

# What lies together in one tensor, and how many of it.
FUSED: Mapping[str, int] = {"qkv": 3, "gate_up": 2}
# Tensors that old files carry although they follow from the configuration, by the ends of their names; and the heads,
# which files of tied models may repeat.
DERIVED = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
HEADS = ("lm_head.weight", "embed_out.weight")


def _under(prefix: str, ours: str, names: Names) -> Names:
    return tuple((f"{prefix}{theirs}", axes, f"{ours}{name}") for theirs, axes, name in names)


_LLAMA_OUTSIDE: Names = (
    ("model.embed_tokens.weight", "vocab hidden", "embed.0.embed.weight"),
    ("model.norm.weight", "hidden", "head.0.final_norm.weight"),
    ("lm_head.weight", "vocab hidden", "head.0.unembed.weight"),
)
_LLAMA_ATTENTION: Names = (
    ("input_layernorm.weight", "hidden", "attn_norm.weight"),
    ("self_attn.q_proj.weight", "(kv_heads q_group head_dim) hidden", "q.weight"),
    ("self_attn.q_proj.bias", "(kv_heads q_group head_dim)", "q_shift.bias"),
    ("self_attn.k_proj.weight", "(kv_heads head_dim) hidden", "k.weight"),
    ("self_attn.k_proj.bias", "(kv_heads head_dim)", "k_shift.bias"),
    ("self_attn.v_proj.weight", "(kv_heads head_dim) hidden", "v.weight"),
    ("self_attn.v_proj.bias", "(kv_heads head_dim)", "v_shift.bias"),
    ("self_attn.q_norm.weight", "head_dim", "q_norm.weight"),
    ("self_attn.k_norm.weight", "head_dim", "k_norm.weight"),
    ("self_attn.o_proj.weight", "hidden (kv_heads q_group head_dim)", "o.weight"),
    ("self_attn.o_proj.bias", "hidden", "o_shift.bias"),
    ("post_attention_layernorm.weight", "hidden", "mlp_norm.weight"),
)
_LLAMA_MLP: Names = (
    ("mlp.gate_proj.weight", "ffn hidden", "gate.weight"),
    ("mlp.gate_proj.bias", "ffn", "gate_shift.bias"),
    ("mlp.up_proj.weight", "ffn hidden", "up.weight"),
    ("mlp.up_proj.bias", "ffn", "up_shift.bias"),
    ("mlp.down_proj.weight", "hidden ffn", "down.weight"),
    ("mlp.down_proj.bias", "hidden", "down_shift.bias"),
)
_EXPERTS_APART: Names = (
    ("block_sparse_moe.gate.weight", "experts hidden", "router.weight"),
    ("block_sparse_moe.experts.{expert}.w1.weight", "ffn hidden", "gate.weight"),
    ("block_sparse_moe.experts.{expert}.w3.weight", "ffn hidden", "up.weight"),
    ("block_sparse_moe.experts.{expert}.w2.weight", "hidden ffn", "down.weight"),
)
_EXPERTS_STACKED: Names = (
    ("mlp.gate.weight", "experts hidden", "router.weight"),
    ("mlp.experts.gate_up_proj", "experts (gate_up:0 ffn) hidden", "gate.weight"),
    ("mlp.experts.gate_up_proj", "experts (gate_up:1 ffn) hidden", "up.weight"),
    ("mlp.experts.down_proj", "experts hidden ffn", "down.weight"),
)
_NEOX_OUTSIDE: Names = (
    ("gpt_neox.embed_in.weight", "vocab hidden", "embed.0.embed.weight"),
    ("gpt_neox.final_layer_norm.weight", "hidden", "head.0.final_norm.weight"),
    ("gpt_neox.final_layer_norm.bias", "hidden", "head.0.final_norm.bias"),
)
_NEOX_LAYER: Names = (
    ("input_layernorm.weight", "hidden", "attn_norm.weight"),
    ("input_layernorm.bias", "hidden", "attn_norm.bias"),
    ("attention.query_key_value.weight", "(kv_heads qkv:0 q_group head_dim) hidden", "q.weight"),
    ("attention.query_key_value.weight", "(kv_heads qkv:1 head_dim) hidden", "k.weight"),
    ("attention.query_key_value.weight", "(kv_heads qkv:2 head_dim) hidden", "v.weight"),
    ("attention.query_key_value.bias", "(kv_heads qkv:0 q_group head_dim)", "q_shift.bias"),
    ("attention.query_key_value.bias", "(kv_heads qkv:1 head_dim)", "k_shift.bias"),
    ("attention.query_key_value.bias", "(kv_heads qkv:2 head_dim)", "v_shift.bias"),
    ("attention.dense.weight", "hidden (kv_heads q_group head_dim)", "o.weight"),
    ("attention.dense.bias", "hidden", "o_shift.bias"),
    ("post_attention_layernorm.weight", "hidden", "mlp_norm.weight"),
    ("post_attention_layernorm.bias", "hidden", "mlp_norm.bias"),
    ("mlp.dense_h_to_4h.weight", "ffn hidden", "up.weight"),
    ("mlp.dense_h_to_4h.bias", "ffn", "up_shift.bias"),
    ("mlp.dense_4h_to_h.weight", "hidden ffn", "down.weight"),
    ("mlp.dense_4h_to_h.bias", "hidden", "down_shift.bias"),
)
# GPT-2 keeps its products transposed, [in, out].
_GPT2_LAYER: Names = (
    ("ln_1.weight", "hidden", "attn_norm.weight"),
    ("ln_1.bias", "hidden", "attn_norm.bias"),
    ("attn.c_attn.weight", "hidden (qkv:0 kv_heads q_group head_dim)", "q.weight"),
    ("attn.c_attn.weight", "hidden (qkv:1 kv_heads head_dim)", "k.weight"),
    ("attn.c_attn.weight", "hidden (qkv:2 kv_heads head_dim)", "v.weight"),
    ("attn.c_attn.bias", "(qkv:0 kv_heads q_group head_dim)", "q_shift.bias"),
    ("attn.c_attn.bias", "(qkv:1 kv_heads head_dim)", "k_shift.bias"),
    ("attn.c_attn.bias", "(qkv:2 kv_heads head_dim)", "v_shift.bias"),
    ("attn.c_proj.weight", "(kv_heads q_group head_dim) hidden", "o.weight"),
    ("attn.c_proj.bias", "hidden", "o_shift.bias"),
    ("ln_2.weight", "hidden", "mlp_norm.weight"),
    ("ln_2.bias", "hidden", "mlp_norm.bias"),
    ("mlp.c_fc.weight", "hidden ffn", "up.weight"),
    ("mlp.c_fc.bias", "ffn", "up_shift.bias"),
    ("mlp.c_proj.weight", "ffn hidden", "down.weight"),
    ("mlp.c_proj.bias", "hidden", "down_shift.bias"),
)
_GPT2: Names = (
    ("wte.weight", "vocab hidden", "embed.0.embed.weight"),
    ("wpe.weight", "positions hidden", "embed.0.place.weight"),
    *_under("h.{layer}.", "layer.{layer}.", _GPT2_LAYER),
    ("ln_f.weight", "hidden", "head.0.final_norm.weight"),
    ("ln_f.bias", "hidden", "head.0.final_norm.bias"),
)
_LLAMA_LIKE = (*_LLAMA_OUTSIDE, *_under("model.layers.{layer}.", "layer.{layer}.", _LLAMA_ATTENTION + _LLAMA_MLP))
_MIXTRAL = (*_LLAMA_OUTSIDE, *_under("model.layers.{layer}.", "layer.{layer}.", _LLAMA_ATTENTION))
_NEOX = (*_NEOX_OUTSIDE, *_under("gpt_neox.layers.{layer}.", "layer.{layer}.", _NEOX_LAYER))
_HEAD: Names = (("lm_head.weight", "vocab hidden", "head.0.unembed.weight"),)
HF_NAMES: Mapping[str, Mapping[Form, Names]] = {
    **{family: {"published": _LLAMA_LIKE, "module": _LLAMA_LIKE} for family in ("llama", "mistral", "qwen2", "qwen3")},
    "mixtral": {
        "published": _MIXTRAL + _under("model.layers.{layer}.", "layer.{layer}.", _EXPERTS_APART),
        "module": _MIXTRAL + _under("model.layers.{layer}.", "layer.{layer}.", _EXPERTS_STACKED),
    },
    "gpt2": {"published": _GPT2 + _HEAD, "module": _under("transformer.", "", _GPT2) + _HEAD},
    "gpt_neox": {
        "published": (*_NEOX, ("embed_out.weight", "vocab hidden", "head.0.unembed.weight")),
        "module": _NEOX + _HEAD,
    },
}
