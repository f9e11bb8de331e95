"""What autoshard knows of ``config.json``: a row for each ``model_type``, with the defaults of its fields.

Defaults are those of the configuration classes of transformers 5.23; sizes have none. A field that no table here names
is ignored, as transformers does. Ignored on purpose: initializer_range, token ids, use_cache, torch_dtype (the workload
states it), pretraining_tp and reorder_and_upcast_attn (the same mathematics in another order), and head_dim of DeepSeek
(which follows from its parts). Modules that predict further tokens (num_nextn_predict_layers of DeepSeek) are left out,
as transformers leaves them out in training. Dropouts that a config
does not state are 0, also for GPT-2, whose class has 0.1: few train with them today.
"""

from collections.abc import Mapping

from autoshard.spec.hf.model_type import FLAGS, ModelType

_MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}
_DEEPSEEK = {
    "max_position_embeddings": 2048, "attention_bias": False, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 0,
    "n_shared_experts": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "n_group": None, "topk_group": None, "scoring_func": None, "topk_method": "greedy",
    "num_nextn_predict_layers": None,  # not read: modules that predict further tokens are no part of these classes
}  # fmt: skip
# The scaling of GPT-OSS where a config states none.
_LONG_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_GRANITE = {
    "max_position_embeddings": 2048, "attention_bias": False, "attention_multiplier": 1.0, "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0, "logits_scaling": 1.0,
}  # fmt: skip
_LINEAR = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "max_position_embeddings": 32768, "head_dim": 256,
    "partial_rotary_factor": 0.25,
}  # fmt: skip
_GATED_ATTENTION = {"qk_norm": True, "norm_offset": 1.0, "gated_attention": True}
# Positions of pictures; those of text are three times the same, so that these say nothing of it.
_OF_PICTURES = {"mrope_section": None, "mrope_interleaved": None}
_ALL_BIASES = ("qkv_bias", "out_bias", "mlp_bias")
_PLAIN_MLP = {"norm": "layer", "gated_mlp": False, "mlp_bias": True}
MODEL_TYPES: Mapping[str, ModelType] = {
    "llama": ModelType(
        architecture="LlamaForCausalLM",
        defaults={"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    ),
    "mistral": ModelType(
        architecture="MistralForCausalLM", defaults={**_MISTRAL, "sliding_window": 4096}, window="all layers"
    ),
    "ministral3": ModelType(
        architecture="Ministral3ForCausalLM",
        defaults={
            "max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
            "llama_4_scaling_beta": 0.0,  # stated in rope_parameters
        },
        window="all layers",
    ),
    "mixtral": ModelType(
        architecture="MixtralForCausalLM",
        defaults={**_MISTRAL, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2},
        window="all layers",
    ),
    "gpt2": ModelType(
        architecture="GPT2LMHeadModel",
        fixed={**_PLAIN_MLP, "positions": "learned", "qkv_bias": True, "out_bias": True},
        defaults={
            "intermediate_size": None, "rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "tie_word_embeddings": True
        },
        grouped_heads=False,
    ),
    "gpt_neox": ModelType(
        architecture="GPTNeoXForCausalLM",
        fixed=_PLAIN_MLP,
        defaults={
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "gelu", "partial_rotary_factor": 0.25,
            "attention_bias": True, "use_parallel_residual": True,
        },
        grouped_heads=False,
    ),
    "qwen2": ModelType(
        architecture="Qwen2ForCausalLM", fixed={"qkv_bias": True}, defaults=_QWEN, window="some layers"
    ),
    "qwen3": ModelType(
        architecture="Qwen3ForCausalLM",
        fixed={"qk_norm": True},
        defaults={**_QWEN, "head_dim": 128, "attention_bias": False},
        window="some layers",
    ),
    "qwen3_moe": ModelType(
        architecture="Qwen3MoeForCausalLM",
        fixed={"qk_norm": True},
        defaults={
            "max_position_embeddings": 32768, "num_key_value_heads": 4, "attention_bias": False,
            "num_experts_per_tok": 8, "sliding_window": 4096, "intermediate_size": 6144, "mlp_only_layers": (),
            "decoder_sparse_step": 1, "norm_topk_prob": False,
        },
        window="all layers if used",
        width="moe_intermediate_size",
        router="softmax",
    ),
    "qwen2_moe": ModelType(
        architecture="Qwen2MoeForCausalLM",
        fixed={"shared_gated": True},
        defaults={
            "max_position_embeddings": 32768, "num_key_value_heads": 16, "qkv_bias": True, "num_experts_per_tok": 4,
            "shared_expert_intermediate_size": 5632, "sliding_window": 4096, "intermediate_size": 5632,
            "mlp_only_layers": (), "decoder_sparse_step": 1, "norm_topk_prob": False,
        },
        window="turns if used",
        width="moe_intermediate_size",
        router="softmax",
        flags={**FLAGS, "qkv_bias": ("qkv_bias",)},
    ),
    "qwen3_next": ModelType(
        architecture="Qwen3NextForCausalLM",
        fixed={**_GATED_ATTENTION, "shared_gated": True},
        defaults={
            **_LINEAR, "num_key_value_heads": 2, "num_experts_per_tok": 10, "shared_expert_intermediate_size": 512,
            "intermediate_size": 5632, "mlp_only_layers": (), "decoder_sparse_step": 1, "norm_topk_prob": True,
        },
        width="moe_intermediate_size",
        router="softmax",
        equal_heads=True,
    ),
    "olmo_hybrid": ModelType(
        architecture="OlmoHybridForCausalLM",
        fixed={"qk_norm": True, "qk_norm_over": "all heads", "norm_place": "after"},
        defaults={
            "linear_num_key_heads": None, "linear_num_value_heads": None, "linear_key_head_dim": None,
            "linear_value_head_dim": None, "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True,
            "full_attention_interval": 4, "max_position_embeddings": 65536, "attention_bias": False,
        },
        unrotated="without theta",
    ),
    "qwen3_5_text": ModelType(
        architecture="Qwen3_5ForCausalLM",
        fixed=_GATED_ATTENTION,
        defaults={**_LINEAR, **_OF_PICTURES, "num_key_value_heads": 4},
    ),
    "qwen3_5_moe_text": ModelType(
        architecture="Qwen3_5MoeForCausalLM",
        fixed={**_GATED_ATTENTION, "shared_gated": True},
        defaults={
            **_LINEAR, **_OF_PICTURES, "num_key_value_heads": 2, "num_experts_per_tok": 8,
            "shared_expert_intermediate_size": 512,
        },
        width="moe_intermediate_size",
        router="softmax",
    ),
    "glm4_moe": ModelType(
        architecture="Glm4MoeForCausalLM",
        defaults={
            "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5, "attention_bias": False, "use_qk_norm": False, "num_experts_per_tok": 8,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
            "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
            "intermediate_size": 10944,
            "num_nextn_predict_layers": 1,  # not read: layers that predict further tokens are no part of this class
        },
        width="moe_intermediate_size",
        router="corrected",
        flags={**FLAGS, "attention_bias": ("qkv_bias",)},
    ),
    "dots1": ModelType(
        architecture="Dots1ForCausalLM",
        fixed={"qk_norm": True},
        defaults={
            "max_position_embeddings": 2048, "num_key_value_heads": 32, "attention_bias": False, "n_shared_experts": 1,
            "first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1,
            "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "intermediate_size": 10944,
            "sliding_window": 4096, "max_window_layers": 62,
        },
        window="last layers",
        width="moe_intermediate_size",
        router="corrected",
    ),
    "minimax_m2": ModelType(
        architecture="MiniMaxM2ForCausalLM",
        fixed={"qk_norm": True, "qk_norm_over": "all heads"},
        defaults={
            "max_position_embeddings": 196608, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6,
            "rotary_dim": None, "num_experts_per_tok": 8, "scoring_func": "sigmoid",
        },
        router="corrected",
    ),
    "gemma3_text": ModelType(
        architecture="Gemma3ForCausalLM",
        fixed={"qk_norm": True, "norm_place": "both", "norm_offset": 1.0, "scaled_embeddings": True},
        defaults={  # published configs leave out these sizes where they are the defaults of the class
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
            "max_position_embeddings": 131072, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
            "attention_bias": False, "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
            "sliding_window": 4096, "sliding_window_pattern": 6, "final_logit_softcapping": None,
        },
        window="pattern",
    ),
    "gemma2": ModelType(
        architecture="Gemma2ForCausalLM",
        fixed={"norm_place": "both", "norm_offset": 1.0, "scaled_embeddings": True},
        defaults={
            "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
            "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "attention_bias": False,
            "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        window="by turns",
    ),
    "gpt_oss": ModelType(
        architecture="GptOssForCausalLM",
        fixed={"mlp_bias": True, "sinks": True, "router_bias": True},
        defaults={
            "head_dim": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0, "attention_bias": True, "num_experts_per_tok": 4, "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0, "sliding_window": 128, "rope_scaling": _LONG_YARN,
        },
        window="by turns",
    ),
    "deepseek_v3": ModelType(
        architecture="DeepseekV3ForCausalLM",
        defaults={
            **_DEEPSEEK, "max_position_embeddings": 4096, "num_key_value_heads": 128, "first_k_dense_replace": 3,
            "num_experts_per_tok": 8, "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
            "n_group": 8, "topk_group": 4, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        },
        width="moe_intermediate_size",
        router="corrected",
    ),
    "glm4_moe_lite": ModelType(
        architecture="Glm4MoeLiteForCausalLM",
        defaults={
            **_DEEPSEEK, "max_position_embeddings": 202752, "num_key_value_heads": 20, "rms_norm_eps": 1e-5,
            "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "first_k_dense_replace": 1,
            "mlp_layer_types": None, "num_experts_per_tok": 4, "n_shared_experts": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        width="moe_intermediate_size",
        router="corrected",
    ),
    "deepseek_v2": ModelType(
        architecture="DeepseekV2ForCausalLM", defaults=_DEEPSEEK, width="moe_intermediate_size", router="groups"
    ),
    "olmo2": ModelType(
        architecture="Olmo2ForCausalLM",
        fixed={"qk_norm": True, "qk_norm_over": "all heads", "norm_place": "after"},
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": False},
    ),
    "olmo3": ModelType(
        architecture="Olmo3ForCausalLM",
        fixed={"qk_norm": True, "qk_norm_over": "all heads", "norm_place": "after"},
        defaults={
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": False, "rope_theta": 500000.0,
            "sliding_window": 4096, "sliding_window_pattern": 4,
        },
        window="pattern",
    ),
    "olmoe": ModelType(
        architecture="OlmoeForCausalLM",
        fixed={"qk_norm": True, "qk_norm_over": "all heads"},
        defaults={
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "attention_bias": False, "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        router="softmax",
    ),
    "smollm3": ModelType(
        architecture="SmolLM3ForCausalLM",
        defaults={
            "max_position_embeddings": 32768, "num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True,
            "attention_bias": False, "mlp_bias": False, "no_rope_layers": None, "no_rope_layer_interval": 4,
        },
        unrotated="listed",
    ),
    "exaone4": ModelType(
        architecture="Exaone4ForCausalLM",
        fixed={"qk_norm": True, "norm_place": "after"},
        defaults={
            "max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        window="pattern",
        unrotated="beyond the window",
    ),
    "glm4": ModelType(
        architecture="Glm4ForCausalLM",
        fixed={"norm_place": "both"},
        defaults={
            "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7,
            "partial_rotary_factor": 0.5, "attention_bias": True,
        },
        flags={**FLAGS, "attention_bias": ("qkv_bias",)},
    ),
    "ernie4_5": ModelType(
        architecture="Ernie4_5ForCausalLM",
        former=("Ernie4_5_ForCausalLM",),
        defaults={
            "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False,
        },
        flags={**FLAGS, "use_bias": _ALL_BIASES},
    ),
    "ernie4_5_moe": ModelType(
        architecture="Ernie4_5_MoeForCausalLM",
        defaults={
            "max_position_embeddings": 131072, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "tie_word_embeddings": True, "num_experts_per_tok": 6, "n_shared_experts": 2,
            "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "intermediate_size": 12288,
        },
        width="moe_intermediate_size",
        router="corrected softmax",
        flags={**FLAGS, "use_bias": _ALL_BIASES},  # with which its head has one, too
    ),
    "starcoder2": ModelType(
        architecture="Starcoder2ForCausalLM",
        fixed={"norm": "layer", "gated_mlp": False},
        defaults={
            "max_position_embeddings": 4096, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
            "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "use_bias": True,
        },
        window="all layers",
        flags={**FLAGS, "use_bias": _ALL_BIASES},
    ),
    "nemotron": ModelType(
        architecture="NemotronForCausalLM",
        fixed={"norm": "layer", "norm_offset": 1.0, "gated_mlp": False},
        defaults={
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5,
            "attention_bias": False, "mlp_bias": False,
        },
    ),
    "arcee": ModelType(
        architecture="ArceeForCausalLM",
        fixed={"gated_mlp": False},
        defaults={
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2", "attention_bias": False,
            "mlp_bias": False,
        },
    ),
    "jais2": ModelType(
        architecture="Jais2ForCausalLM",
        fixed={"norm": "layer", "gated_mlp": False},
        defaults={
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "relu2", "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "granite": ModelType(
        architecture="GraniteForCausalLM",
        defaults={**_GRANITE, "mlp_bias": False},
    ),
    "granitemoe": ModelType(
        architecture="GraniteMoeForCausalLM",
        defaults={**_GRANITE, "num_experts_per_tok": 2},
    ),
    "phi3": ModelType(
        architecture="Phi3ForCausalLM",
        fixed={"drops_embeddings": False},
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
        window="all layers",
        rope_types=("default",),
    ),
    "seed_oss": ModelType(
        architecture="SeedOssForCausalLM",
        fixed={"drops_embeddings": False},
        defaults={
            "max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True,
            "attention_out_bias": False, "mlp_bias": False,
        },
        flags={**FLAGS, "attention_bias": ("qkv_bias",), "attention_out_bias": ("out_bias",)},
    ),
}  # fmt: skip
# Types whose config holds that of a model that reads text alone in its field ``text_config``.
WITH_TEXT_CONFIG: Mapping[str, str] = {
    "gemma3": "gemma3_text", "mistral3": "mistral", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
# Types whose code is that of another: config.json of moonshotai/Kimi-K2 names DeepseekV3ForCausalLM.
SAME_CODE: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
