"""What many tests share: tiny models and configurations that have every option, and plans of models on this machine."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from autoshard.layout.pin import pins_of
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision, Workload

NOTHING: Mapping[str, str] = MappingProxyType({})

# -- tiny models that together have every option of ModelSpec ------------------------------------------

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


# -- configurations in the form of transformers, of every architecture at reduced width ----------------

_CONFIG_SIZES: Mapping[str, Any] = {
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
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 6, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "first_k_dense_replace": 1, "intermediate_size": 40, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
_LINEAR: Mapping[str, Any] = {
    "num_key_value_heads": 2, "head_dim": 8, "partial_rotary_factor": 0.5, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 3},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_inner": 24, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt_neox": {"rotary_pct": 0.5},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "qwen3_moe": {
        "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0], "intermediate_size": 28,
    },
    "qwen3_next": {
        **_LINEAR, "linear_value_head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 40,
    },
    "olmo_hybrid": {
        **{key: size for key, size in _LINEAR.items() if key not in ("head_dim", "partial_rotary_factor")},
        "linear_allow_neg_eigval": True, "linear_key_head_dim": 12,  # transformers writes convolutions of equal thirds
    },
    "qwen3_5_text": {**_LINEAR},
    "qwen3_5_moe_text": {
        **_LINEAR, "num_experts": 4, "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 40,
    },
    "glm4_moe": {
        "num_key_value_heads": 2, "head_dim": 8, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "intermediate_size": 40,
    },
    "gemma3_text": {
        "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 5, "sliding_window": 3,
        "sliding_window_pattern": 2, "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "gemma2": {
        "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 5, "sliding_window": 3,
        "final_logit_softcapping": 0.4, "attn_logit_softcapping": 0.3,
    },
    "olmo2": {"num_key_value_heads": 2},
    "olmo3": {
        "num_key_value_heads": 2, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 500000.0, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "beta_fast": 1.5, "beta_slow": 0.25, "attention_factor": 1.2,
            "original_max_position_embeddings": 16,
        },
    },
    "smollm3": {"num_key_value_heads": 2, "no_rope_layers": [0, 1]},
    "exaone4": {
        "num_key_value_heads": 2, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    },
    "ministral3": {
        "num_key_value_heads": 2, "head_dim": 8, "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "beta_fast": 1.5, "beta_slow": 0.25, "rope_theta": 50.0, "mscale": 1.0,
            "mscale_all_dim": 0.0, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.0,
        },
    },
    "granite": {
        "num_key_value_heads": 2, "attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.22,
        "logits_scaling": 0.5,
    },
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8, "mlp_bias": True},
    "arcee": {"num_key_value_heads": 2},
    "jais2": {"num_key_value_heads": 2},
    "olmoe": {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {
        "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0, "residual_multiplier": 0.22, "logits_scaling": 0.5,
    },
    "ernie4_5_moe": {
        "num_key_value_heads": 2, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1, "intermediate_size": 40,
    },
    "glm4": {"num_key_value_heads": 2, "head_dim": 8},
    "ernie4_5": {"num_key_value_heads": 2, "head_dim": 8, "use_bias": True, "tie_word_embeddings": False},
    "starcoder2": {"num_key_value_heads": 2, "sliding_window": 3},
    "phi3": {"num_key_value_heads": 2, "partial_rotary_factor": 0.5, "sliding_window": 3},
    "seed_oss": {"num_key_value_heads": 2, "head_dim": 8, "attention_out_bias": True, "residual_dropout": 0.0},
    "dots1": {
        "num_key_value_heads": 2, "head_dim": 8, "attention_bias": True, "n_routed_experts": 8, "sliding_window": 3,
        "max_window_layers": 1, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "intermediate_size": 40, "norm_topk_prob": True,
    },
    "minimax_m2": {
        "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 4,
    },
    "gpt_oss": {
        "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3,
        "swiglu_limit": 0.8, "rope_theta": 50.0, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "beta_fast": 1.5, "beta_slow": 0.25, "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    "deepseek_v3": {**_LATENT, "q_lora_rank": 10},
    "glm4_moe_lite": {**_LATENT, "q_lora_rank": 10, "qk_nope_head_dim": 6},
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "qk_nope_head_dim": 6, "topk_method": "group_limited_greedy"},
}  # fmt: skip
# Whose experts have a width of their own.
_MIXTURES = (
    "qwen3_next",
    "qwen3_5_moe_text",
    "ernie4_5_moe",
    "qwen2_moe",
    "qwen3_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "dots1",
    "deepseek_v2",
    "deepseek_v3",
)
SMALL_FAMILIES = tuple(_FAMILIES)
# Models whose layers differ: some attend to a window alone, some have an MLP in the place of experts.
DIFFERENT_LAYERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("qwen3", {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    ("qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [0, 2], "intermediate_size": 40}),
    ("glm4_moe", {"num_hidden_layers": 3, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "no_rope_layers": None}),
    ("exaone4", {"num_hidden_layers": 2, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
    ("deepseek_v3", {"num_hidden_layers": 2, "first_k_dense_replace": 2, "q_lora_rank": None}),
)


def small_config(family: str, **changes: Any) -> dict[str, Any]:
    """Return the small configuration of an architecture; no two of its sizes are alike where they need not be."""
    widths = {"gpt2": (), **dict.fromkeys(_MIXTURES, ("moe_intermediate_size",))}
    inner = dict.fromkeys(widths.get(family, ("intermediate_size",)), 24)
    return {"model_type": family, **_CONFIG_SIZES, **inner, **_FAMILIES[family], **changes}


# -- plans for the torch engine on this machine --------------------------------------------------------


@functools.cache
def _request(candidate: Candidate, model: ModelSpec, workload: Workload) -> Request:
    cluster = load_cluster("local", ranks=candidate.num_ranks)
    return Request(model=model, cluster=cluster, workload=workload, engines=("torch",))


def local_request(candidate: Candidate, model: ModelSpec, **sizes: Any) -> Request:
    """The question whose answer is this candidate on this machine; ``sizes`` are those of the workload."""
    return _request(candidate, model, _workload(**sizes))


def _workload(**sizes: Any) -> Workload:
    usual: dict[str, Any] = {"precision": Precision.named("bf16")}
    return Workload(**(usual | sizes))


def local_plan(text: str, model: ModelSpec, pins: Mapping[str, str] = NOTHING, **sizes: Any) -> Plan:
    """The plan of exactly this candidate on this machine, whatever Rules say; ``sizes`` are those of the workload."""
    return _plan(Candidate.parse(text), model, _workload(**sizes), tuple(pins.items()))


@functools.cache
def _plan(candidate: Candidate, model: ModelSpec, workload: Workload, pins: tuple[tuple[str, str], ...]) -> Plan:
    request = replace(_request(candidate, model, workload), layouts=pins_of(dict(pins), "tests"))
    return plan_at(request, candidate, even_refused=True)


def numbered(next_best: Sequence[Plan]) -> dict[str, Plan]:
    """The next best plans of a search by the numbers under which `plan --choose` writes them."""
    return {str(number): plan for number, plan in enumerate(next_best, 2)}
