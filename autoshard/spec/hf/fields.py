"""Fields of ``config.json``: their other names, those of ModelSpec, functions by name, and options that are refused."""

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from autoshard.spec.model import Activation, ModelSpec

# Other names of fields in GPT-2, GPT-NeoX, Gemma and older Mixtral cards.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer",),
    "hidden_size": ("n_embd",),
    "num_attention_heads": ("n_head",),
    "intermediate_size": ("n_inner",),
    "max_position_embeddings": ("n_positions",),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "hidden_act": ("activation_function", "hidden_activation"),
    "rope_theta": ("rotary_emb_base",),
    "partial_rotary_factor": ("rotary_pct",),
    "num_local_experts": ("num_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_k",),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts"),
    "rope_type": ("type",),
    "hidden_dropout": ("resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout"),
    "attention_dropout": ("attn_pdrop",),
}
# Config fields that ModelSpec names itself, read as the type that they have there.
NAMED_FIELDS: Mapping[str, Field[Any]] = {
    field.metadata["config"]: field for field in fields(ModelSpec) if "config" in field.metadata
}
# transformers/activations.py: several names there compute the same function.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
# Fields of options, with the values that switch them off, where an architecture does not name them. Some belong to
# related models: transformers would ignore them, and compute another model than the one that was meant.
UNMODELLED: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("add_cross_attention", "is_encoder_decoder", "use_bidirectional_attention"), (False, None)),
    "scale_attn_weights": (True, None),
    "scale_attn_by_inverse_layer_idx": (False, None),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"), (None,)),
    "norm_topk_prob": (True, None),
    "router_jitter_noise": (0, None),
    **dict.fromkeys(("moe_frequency", "moe_layer_freq", "decoder_sparse_step", "routed_scaling_factor"), (1, None)),
    "mlp_only_layers": ([], None),
    **dict.fromkeys(("first_k_dense_replace", "n_shared_experts", "shared_expert_intermediate_size"), (0, None)),
    **dict.fromkeys(("n_group", "topk_group"), (1, None)),
    "scoring_func": ("softmax", None),
    "topk_method": ("greedy", None),
    "num_nextn_predict_layers": (0, None),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), (None,)),
    **dict.fromkeys(("swiglu_limit", "swiglu_alpha"), (None,)),
}
