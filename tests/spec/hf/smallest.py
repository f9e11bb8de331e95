"""The fewest fields of a config of each family, read with changes."""

from collections.abc import Mapping
from typing import Any

import pytest

from autoshard.errors import Fault, InputError
from autoshard.spec.hf.config import spec_from_config
from autoshard.spec.model import ModelSpec

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip
# The fewest fields with which each family is accepted; some families default to 8 or 32 key/value heads.
SMALLEST: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mistral": SIZES | {"num_attention_heads": 8},
    "mixtral": SIZES | {"num_attention_heads": 8, "num_local_experts": 4},
    "gpt2": {"vocab_size": 96, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 32},
    "gpt_neox": SIZES | {"num_attention_heads": 8, "hidden_size": 128},
    "qwen2": SIZES | {"num_attention_heads": 32},
    "qwen3": SIZES | {"num_attention_heads": 32},
    "qwen3_moe": {
        **{key: size for key, size in SIZES.items() if key != "intermediate_size"},
        "moe_intermediate_size": 176,
        "num_experts": 8,
    },
    "qwen2_moe": {
        **{key: size for key, size in SIZES.items() if key != "intermediate_size"},
        "num_attention_heads": 16,
        "moe_intermediate_size": 176,
        "num_experts": 8,
    },
    "qwen3_next": {
        **{key: size for key, size in SIZES.items() if key != "intermediate_size"},
        "moe_intermediate_size": 176,
        "num_experts": 16,
    },
    "qwen3_5_text": SIZES,
    "olmo_hybrid": SIZES,
    "qwen3_5_moe_text": {
        **{key: size for key, size in SIZES.items() if key != "intermediate_size"},
        "moe_intermediate_size": 176,
        "num_experts": 16,
    },
    "glm4_moe": {
        **{key: size for key, size in SIZES.items() if key != "intermediate_size"},
        "num_attention_heads": 8,
        "moe_intermediate_size": 176,
        "n_routed_experts": 8,
    },
    "dots1": {
        **{key: size for key, size in SIZES.items() if key != "intermediate_size"},
        "num_attention_heads": 32,
        "moe_intermediate_size": 176,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    },
    "minimax_m2": SIZES | {"num_attention_heads": 8, "num_local_experts": 8},
    "gemma3_text": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3},
    "gemma2": SIZES,
    "olmo2": SIZES,
    "olmo3": SIZES,
    "smollm3": SIZES,
    "exaone4": SIZES | {"num_attention_heads": 32},
    "ministral3": SIZES
    | {"num_attention_heads": 8, "rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.0}},
    "granite": SIZES,
    "nemotron": SIZES,
    "arcee": SIZES,
    "jais2": SIZES,
    "olmoe": SIZES | {"num_experts": 8},
    "granitemoe": SIZES | {"num_local_experts": 8},
    "ernie4_5_moe": {
        **{key: size for key, size in SIZES.items() if key != "intermediate_size"},
        "moe_intermediate_size": 176,
        "moe_num_experts": 8,
    },
    "glm4": SIZES,
    "ernie4_5": SIZES,
    "starcoder2": SIZES,
    "phi3": SIZES,
    "seed_oss": SIZES | {"num_attention_heads": 8},
    "gpt_oss": SIZES | {"num_attention_heads": 8, "num_local_experts": 8},
    "deepseek_v3": SIZES | {"num_attention_heads": 128},
    "glm4_moe_lite": SIZES | {"num_attention_heads": 20, "moe_intermediate_size": 176, "n_routed_experts": 8},
    "deepseek_v2": {
        **{key: size for key, size in SIZES.items() if key != "intermediate_size"},
        "moe_intermediate_size": 176,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    },
}


def read(family: str, **changes: Any) -> ModelSpec:
    return spec_from_config({"model_type": family, **SMALLEST[family], **changes}, name="m", source="test")


def faults(config: Mapping[str, Any]) -> tuple[Fault, ...]:
    with pytest.raises(InputError) as caught:
        spec_from_config(config, name="m", source="test")
    return caught.value.faults


def refused(family: str, **changes: Any) -> list[str]:
    """Return the fields that are named when these changes are refused."""
    return [fault.where for fault in faults({"model_type": family, **SMALLEST[family], **changes})]
