"""Language models that transformers added, most of them in 2025 and 2026, and those of torchtitan."""

import pkgutil
from dataclasses import replace
from typing import Any

import torch

from benchmarks.foreign_modules.registry import ForeignModule, tokens

_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_HEADS: dict[str, Any] = {"head_dim": 8}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GROUPS: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
_FULL = ["sliding_attention", "full_attention"]


def _decoder(name: str, *, single: bool = False, config: str = "", **options: Any) -> ForeignModule:
    """Return ``{name}ForCausalLM`` of ``{name}Config``, or of another one, in small sizes."""

    def make() -> torch.nn.Module:
        sizes = {"use_cache": False, **_SIZES, **options}
        kept = {key: value for key, value in sizes.items() if value is not None}
        made = pkgutil.resolve_name(f"transformers:{config or f'{name}Config'}")(**kept)
        return pkgutil.resolve_name(f"transformers:{name}ForCausalLM")(made)

    dtype = torch.float32 if single else torch.float64
    return ForeignModule(name=name, package="transformers", make=make, inputs=tokens(), dtype=dtype)


def _titan(name: str, model: str, arguments: str, **sizes: int) -> ForeignModule:
    """Return two layers of the model with which torchtitan is debugged. Its mixtures need a GPU."""

    def make() -> torch.nn.Module:
        debugged = pkgutil.resolve_name(f"torchtitan.models.{arguments}")["debugmodel"]
        small = replace(debugged, n_layers=2, vocab_size=64, max_seq_len=32, dim=64, n_heads=4, n_kv_heads=2, **sizes)
        made = pkgutil.resolve_name(f"torchtitan.models.{model}")(small)
        with torch.no_grad():
            made.init_weights()
        return made

    return ForeignModule(name=name, package="torchtitan", make=make, inputs=tokens())


MODULES = (
    _titan("Llama 3", "llama3.model.model:Transformer", "llama3:llama3_args"),
    _titan("Qwen3", "qwen3:Qwen3Model", "qwen3:qwen3_args", head_dim=16, hidden_dim=128),
    _decoder("Gemma3", config="Gemma3TextConfig", **_HEADS, layer_types=_FULL, sliding_window=8),
    _decoder(
        "Gemma3n", config="Gemma3nTextConfig", **_HEADS, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8,
        laurel_rank=4, num_kv_shared_layers=0, layer_types=_FULL, activation_sparsity_pattern=[0.0, 0.0],
        altup_num_inputs=2, sliding_window=8,
    ),
    _decoder("SmolLM3"),
    _decoder("Exaone4", sliding_window=8, sliding_window_pattern=2),
    _decoder("Granite"),
    _decoder("Olmo3", sliding_window=8, layer_types=_FULL),
    _decoder("OPT", ffn_dim=64, word_embed_proj_dim=32),
    _decoder("Mamba2", state_size=4, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    _decoder("Lfm2", layer_types=["conv", "full_attention"], block_multiple_of=8),
    _decoder(
        "Jamba", single=True, mamba_d_state=4, num_experts=2, use_mamba_kernels=False, attn_layer_period=2,
        attn_layer_offset=1, mamba_dt_rank=4,
    ),
    _decoder("Mixtral", single=True, num_local_experts=4),
    _decoder("Qwen3Moe", single=True, **_HEADS, **_EXPERTS),
    _decoder("DeepseekV3", single=True, **_GROUPS, **_LATENT),
    _decoder("GptOss", single=True, **_HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
)  # fmt: skip
