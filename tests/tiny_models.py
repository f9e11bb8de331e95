"""Tiny models that together have every option of ModelSpec."""

from collections.abc import Mapping
from typing import Any

from autoshard.spec.model import ModelSpec

_SIZES: Mapping[str, Any] = {
    "name": "tiny", "source": "made for this test", "num_layers": 2, "hidden": 16, "ffn": 24, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 4, "vocab": 32, "max_positions": 64, "norm": "rms", "norm_eps": 1e-5,
    "activation": "silu", "gated_mlp": True, "positions": "rotary",
}  # fmt: skip
_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "norm": "layer", "gated_mlp": False}
TINY: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mixtral": {"num_experts": 4, "experts_per_token": 2},
    "gpt": {**_BIASES, "activation": "gelu_tanh", "positions": "learned", "tied_embeddings": True, "num_kv_heads": 4},
    "neox": {**_BIASES, "activation": "gelu", "parallel_residual": True, "rotary_fraction": 0.5, "num_kv_heads": 1},
    "qwen": {"qk_norm": True, "qkv_bias": True, "window": 3},
}


def tiny(name: str = "llama", **changes: Any) -> ModelSpec:
    """Return a tiny model; a number of heads that is changed counts for keys as well where they are not shared."""
    own = {**_SIZES, **TINY[name], **changes}
    if name == "gpt":
        own["num_kv_heads"] = own["num_heads"]
    elif name == "neox":
        own["num_kv_heads"] = 1
    return ModelSpec(**own)
