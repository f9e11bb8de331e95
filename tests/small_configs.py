"""Configurations in the form of transformers, of every architecture at reduced width."""

from collections.abc import Mapping
from typing import Any

_SIZES: Mapping[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 19,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "attention_dropout": 0.0,
}
_OWN: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 3},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_inner": 24, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt_neox": {"rotary_pct": 0.5},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
}
SMALL_FAMILIES = tuple(_OWN)


def small_config(family: str, **changes: Any) -> dict[str, Any]:
    """Return the small configuration of an architecture; no two of its sizes are alike where they need not be."""
    inner = {} if family == "gpt2" else {"intermediate_size": 24}
    return {"model_type": family, **_SIZES, **inner, **_OWN[family], **changes}
