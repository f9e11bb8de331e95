"""Tables of Hugging Face tensor names and ours, a row for each tensor of ours; ``hf_names`` says how to read them."""

from collections.abc import Mapping
from typing import Literal

# ``published``: as the files on the Hub are named; ``module``: as transformers 5 names them in a module's state dict;
# ``hub``: as files there are named, where transformers writes other names, which are then those that are published.
Form = Literal["published", "module", "hub"]
Names = tuple[tuple[str, str, str], ...]  # their name, its axes, our name; a model has those rows of which it has ours

# What lies together in one tensor, and how many of it.
FUSED: Mapping[str, int] = {"qkv": 3, "gate_up": 2, "one": 1, "two": 2}


def _norm(theirs: str, ours: str, over: str = "hidden") -> Names:
    return (f"{theirs}.weight", over, f"{ours}.weight"), (f"{theirs}.bias", over, f"{ours}.bias")


def _linear(theirs: str, out: str, read: str, *ours: str) -> Names:
    """Return the rows of a product and its bias; in ``out``, ``|`` separates the axes of tensors that lie together."""
    both = tuple(zip(out.split("|"), ours, strict=True))
    weights = tuple((f"{theirs}.weight", f"{axes} {read}", f"{name}.weight") for axes, name in both)
    return (*weights, *((f"{theirs}.bias", axes, f"{name}_shift.bias") for axes, name in both))


def _turned(theirs: str, out: str, read: str, *ours: str) -> Names:
    """Return the rows of a product whose weight is stored transposed, [in, out]."""
    rows = _linear(theirs, out, read, *ours)
    turned = {f"{axes} {read}": f"{read} {axes}" for axes in out.split("|")}
    return tuple((name, turned.get(axes, axes), our) for name, axes, our in rows)


def _under(prefix: str, ours: str, names: Names) -> Names:
    return tuple((f"{prefix}{theirs}", axes, f"{ours}{name}") for theirs, axes, name in names)


_QUERY, _KEY = "(kv_heads q_group head_dim)", "(kv_heads head_dim)"
_LLAMA_OUTSIDE: Names = (
    ("model.embed_tokens.weight", "vocab hidden", "embed.0.embed.weight"),
    *_norm("model.norm", "head.0.final_norm"),
    ("lm_head.weight", "vocab hidden", "head.0.unembed.weight"),
)
_ATTENTION_PRODUCTS: Names = (
    *_linear("self_attn.q_proj", _QUERY, "hidden", "q"),
    *_linear("self_attn.k_proj", _KEY, "hidden", "k"),
    *_linear("self_attn.v_proj", _KEY, "hidden", "v"),
    *_linear("self_attn.o_proj", "hidden", _QUERY, "o"),
)
_HEAD_NORMS = *_norm("self_attn.q_norm", "q_norm", "head_dim"), *_norm("self_attn.k_norm", "k_norm", "head_dim")
_LLAMA_ATTENTION: Names = (
    *_norm("input_layernorm", "attn_norm"),
    *_ATTENTION_PRODUCTS,
    *_HEAD_NORMS,
    *_norm("post_attention_layernorm", "mlp_norm"),
)
_POST_NORMED: Names = (  # norms behind attention and the MLP have other names than those before
    *_norm("post_attention_layernorm", "attn_post_norm"),
    *_norm("post_feedforward_layernorm", "mlp_post_norm"),
)
_GEMMA_ATTENTION: Names = (
    *_norm("input_layernorm", "attn_norm"),
    *_ATTENTION_PRODUCTS,
    *_HEAD_NORMS,
    *_norm("pre_feedforward_layernorm", "mlp_norm"),
    *_POST_NORMED,
)
_OLMO2_ATTENTION: Names = (
    *_ATTENTION_PRODUCTS,
    *_norm("self_attn.q_norm", "q_norm", _QUERY),
    *_norm("self_attn.k_norm", "k_norm", _KEY),
    *_POST_NORMED,
)
_EXAONE4_ATTENTION: Names = (*_ATTENTION_PRODUCTS, *_HEAD_NORMS, *_POST_NORMED)
_ALL_HEADS_NORMED: Names = (
    *_norm("input_layernorm", "attn_norm"),
    *_ATTENTION_PRODUCTS,
    *_norm("self_attn.q_norm", "q_norm", _QUERY),
    *_norm("self_attn.k_norm", "k_norm", _KEY),
    *_norm("post_attention_layernorm", "mlp_norm"),
)
_TURNED_LAST, _NARROW = "(kv_heads q_group plain_dim+first_half*second_half)", "latent_kv+first_half*second_half"
_KEYS_AND_VALUES = "(kv_heads plain_dim+value_dim)"
_LATENT_ATTENTION: Names = (
    *_norm("input_layernorm", "attn_norm"),
    *_linear("self_attn.q_proj", _TURNED_LAST, "hidden", "q"),
    *_linear("self_attn.q_a_proj", "latent_q", "hidden", "q_down"),
    *_norm("self_attn.q_a_layernorm", "q_down_norm", "latent_q"),
    *_linear("self_attn.q_b_proj", _TURNED_LAST, "latent_q", "q_up"),
    *_linear("self_attn.kv_a_proj_with_mqa", f"{_NARROW}|{_NARROW}", "hidden", "kv_down", "k_shared"),
    *_norm("self_attn.kv_a_layernorm", "kv_down_norm", "latent_kv"),
    *_linear("self_attn.kv_b_proj", f"{_KEYS_AND_VALUES}|{_KEYS_AND_VALUES}", "latent_kv", "k_up", "v_up"),
    *_linear("self_attn.o_proj", "hidden", "(kv_heads q_group value_dim)", "o"),
    *_norm("post_attention_layernorm", "mlp_norm"),
)
_STATES = "(delta_heads delta_group)"
_LINEAR_QKV = "(delta_heads delta_key)|>(delta_heads delta_key)|>(delta_heads delta_group delta_value)"
_LINEAR_ATTENTION: Names = (
    *_linear("linear_attn.conv1d", _LINEAR_QKV.replace(")", ") one:0"), "taps", "q_conv", "k_conv", "v_conv"),
    ("linear_attn.A_log", _STATES, "forget.rate"),
    ("linear_attn.dt_bias", _STATES, "forget.shift"),
    *_norm("linear_attn.norm", "delta_norm", "delta_value"),
    *_linear("linear_attn.out_proj", "hidden", "(delta_heads delta_group delta_value)", "o"),
)
_APART: Names = (
    *_linear("linear_attn.in_proj_qkv", _LINEAR_QKV, "hidden", "q", "k", "v"),
    *_linear("linear_attn.in_proj_z", "(delta_heads delta_group delta_value)", "hidden", "o_gate"),
    *_linear("linear_attn.in_proj_b", _STATES, "hidden", "write_logit"),
    *_linear("linear_attn.in_proj_a", _STATES, "hidden", "forget_logit"),
)
_OLMO_LINEAR: Names = (
    *_linear("linear_attn.q_proj", "(delta_heads delta_key)", "hidden", "q"),
    *_linear("linear_attn.k_proj", "(delta_heads delta_key)", "hidden", "k"),
    *_linear("linear_attn.v_proj", "(delta_heads delta_group delta_value)", "hidden", "v"),
    *_linear("linear_attn.g_proj", "(delta_heads delta_group delta_value)", "hidden", "o_gate"),
    *_linear("linear_attn.b_proj", _STATES, "hidden", "write_logit"),
    *_linear("linear_attn.a_proj", _STATES, "hidden", "forget_logit"),
    ("linear_attn.A_log", _STATES, "forget.rate"),
    ("linear_attn.dt_bias", _STATES, "forget.shift"),
    *_norm("linear_attn.o_norm", "delta_norm", "delta_value"),
    *_linear("linear_attn.o_proj", "hidden", "(delta_heads delta_group delta_value)", "o"),
)
_OLMO_MODULE: Names = (
    *_OLMO2_ATTENTION,
    *_norm("input_layernorm", "attn_norm"),
    *_norm("post_attention_layernorm", "mlp_norm"),
    *_linear("linear_attn.conv1d", _LINEAR_QKV.replace(")", ") one:0"), "taps", "q_conv", "k_conv", "v_conv"),
)
_OLMO_APART: Names = (  # transformers joins them when it loads
    *_OLMO2_ATTENTION,
    *_norm("attention_layer_norm", "attn_norm"),
    *_norm("feedforward_layer_norm", "mlp_norm"),
    *_linear("linear_attn.q_conv1d", "(delta_heads delta_key) one:0", "taps", "q_conv"),
    *_linear("linear_attn.k_conv1d", "(delta_heads delta_key) one:0", "taps", "k_conv"),
    *_linear("linear_attn.v_conv1d", "(delta_heads delta_group delta_value) one:0", "taps", "v_conv"),
)
# What transformers 5 writes calls the norm behind attention as that before the MLP of other layers.
_OLMO_WRITTEN: Names = tuple(
    (theirs.replace("post_attention_layernorm", "feedforward_layer_norm"), axes, ours)
    for theirs, axes, ours in _OLMO_APART
)
_OLMO_FORMS: Mapping[Form, Names] = {"published": _OLMO_WRITTEN, "module": _OLMO_MODULE, "hub": _OLMO_APART}
_BY_HEAD: Names = (  # of each head first the query and the key, then values and gates, as many as its states
    *_linear(
        "linear_attn.in_proj_qkvz",
        "(delta_heads two+group+group:0 delta_key)|(delta_heads two+group+group:1 delta_key)"
        "|(delta_heads two+delta_group+group delta_value)|(delta_heads two+group+delta_group delta_value)",
        "hidden", "q", "k", "v", "o_gate",
    ),
    *_linear(
        "linear_attn.in_proj_ba", "(delta_heads delta_group+group)|(delta_heads group+delta_group)",
        "hidden", "write_logit", "forget_logit",
    ),
)  # fmt: skip
_GATED_ATTENTION: Names = (
    *_norm("input_layernorm", "attn_norm"),
    *_linear(
        "self_attn.q_proj", "(kv_heads q_group gate_up:0 head_dim)|(kv_heads q_group gate_up:1 head_dim)",
        "hidden", "q", "o_gate",
    ),
    *_ATTENTION_PRODUCTS[2:],
    *_HEAD_NORMS,
    *_norm("post_attention_layernorm", "mlp_norm"),
    *_LINEAR_ATTENTION,
)  # fmt: skip
_LLAMA_MLP: Names = (
    *_linear("mlp.gate_proj", "ffn", "hidden", "gate"),
    *_linear("mlp.up_proj", "ffn", "hidden", "up"),
    *_linear("mlp.down_proj", "hidden", "ffn", "down"),
)
_EXPERTS_APART: Names = (
    ("block_sparse_moe.gate.weight", "experts hidden", "router.weight"),
    ("block_sparse_moe.experts.{expert}.w1.weight", "ffn hidden", "gate.weight"),
    ("block_sparse_moe.experts.{expert}.w3.weight", "ffn hidden", "up.weight"),
    ("block_sparse_moe.experts.{expert}.w2.weight", "hidden ffn", "down.weight"),
)
_EXPERTS_NAMED: Names = (
    ("mlp.gate.weight", "experts hidden", "router.weight"),
    ("mlp.experts.{expert}.gate_proj.weight", "ffn hidden", "gate.weight"),
    ("mlp.experts.{expert}.up_proj.weight", "ffn hidden", "up.weight"),
    ("mlp.experts.{expert}.down_proj.weight", "hidden ffn", "down.weight"),
)
_EXPERTS_STACKED: Names = (
    ("mlp.gate.weight", "experts hidden", "router.weight"),
    ("mlp.experts.gate_up_proj", "experts (gate_up:0 ffn) hidden", "gate.weight"),
    ("mlp.experts.gate_up_proj", "experts (gate_up:1 ffn) hidden", "up.weight"),
    ("mlp.experts.down_proj", "experts hidden ffn", "down.weight"),
)
_GPT_OSS_LAYER: Names = (  # as in BF16; published files have experts in MXFP4, which are read as these
    *_LLAMA_ATTENTION,
    ("self_attn.sinks", "(kv_heads q_group)", "sink.bias"),
    *_linear("mlp.router", "experts", "hidden", "router"),
    ("mlp.experts.gate_up_proj", "experts hidden (ffn gate_up:0)", "gate.weight"),
    ("mlp.experts.gate_up_proj", "experts hidden (ffn gate_up:1)", "up.weight"),
    ("mlp.experts.gate_up_proj_bias", "experts (ffn gate_up:0)", "gate_shift.bias"),
    ("mlp.experts.gate_up_proj_bias", "experts (ffn gate_up:1)", "up_shift.bias"),
    ("mlp.experts.down_proj", "experts ffn hidden", "down.weight"),
    ("mlp.experts.down_proj_bias", "experts hidden", "down_bias.bias"),
)
_CORRECTED_ROUTER: Names = (
    ("mlp.gate.e_score_correction_bias", "experts", "correction.weight"),
    ("mlp.shared_experts.gate_proj.weight", "ffn_shared hidden", "shared_gate.weight"),
    ("mlp.shared_experts.up_proj.weight", "ffn_shared hidden", "shared_up.weight"),
    ("mlp.shared_experts.down_proj.weight", "hidden ffn_shared", "shared_down.weight"),
)
_SHARED_GATED: Names = (
    ("mlp.shared_expert.gate_proj.weight", "ffn_shared hidden", "shared_gate.weight"),
    ("mlp.shared_expert.up_proj.weight", "ffn_shared hidden", "shared_up.weight"),
    ("mlp.shared_expert.down_proj.weight", "hidden ffn_shared", "shared_down.weight"),
    ("mlp.shared_expert_gate.weight", "one:0 hidden", "shared_logit.weight"),
)
_MINIMAX_BIAS = "e_score_correction_bias", "experts", "correction.weight"
_PHI3_LAYER: Names = (
    *_norm("input_layernorm", "attn_norm"),
    *_linear("self_attn.qkv_proj", f"{_QUERY}|>{_KEY}|>{_KEY}", "hidden", "q", "k", "v"),
    *_linear("self_attn.o_proj", "hidden", _QUERY, "o"),
    *_norm("post_attention_layernorm", "mlp_norm"),
    *_linear("mlp.gate_up_proj", "(gate_up:0 ffn)|(gate_up:1 ffn)", "hidden", "gate", "up"),
    *_linear("mlp.down_proj", "hidden", "ffn", "down"),
)
_NEIGHBOURS = "first_half*second_half+plain_dim"  # of a head that begins with what is turned
_NEIGHBOURS_TURNED: Names = (
    *_norm("input_layernorm", "attn_norm"),
    *_linear("self_attn.q_proj", f"(kv_heads q_group {_NEIGHBOURS})", "hidden", "q"),
    *_linear("self_attn.k_proj", f"(kv_heads {_NEIGHBOURS})", "hidden", "k"),
    *_linear("self_attn.v_proj", _KEY, "hidden", "v"),
    *_linear("self_attn.o_proj", "hidden", _QUERY, "o"),
    *_norm("post_attention_layernorm", "mlp_norm"),
)
_ERNIE_MIXTURE: Names = (*_NEIGHBOURS_TURNED, *_LLAMA_MLP, *_CORRECTED_ROUTER[1:])
_ERNIE_BIAS = "moe_statics.e_score_correction_bias", "one:0 experts", "correction.weight"
_GRANITE_EXPERTS: Names = (
    ("input_linear.weight", "experts (gate_up:0 ffn) hidden", "gate.weight"),
    ("input_linear.weight", "experts (gate_up:1 ffn) hidden", "up.weight"),
    ("output_linear.weight", "experts hidden ffn", "down.weight"),
    ("router.layer.weight", "experts hidden", "router.weight"),
)
_GRANITE_STACKED: Names = (
    ("experts.gate_up_proj", "experts (gate_up:0 ffn) hidden", "gate.weight"),
    ("experts.gate_up_proj", "experts (gate_up:1 ffn) hidden", "up.weight"),
    ("experts.down_proj", "experts hidden ffn", "down.weight"),
    ("router.weight", "experts hidden", "router.weight"),
)
_GLM4_LAYER: Names = (
    *_NEIGHBOURS_TURNED,
    *_norm("post_self_attn_layernorm", "attn_post_norm"),
    *_linear("mlp.gate_up_proj", "(gate_up:0 ffn)|(gate_up:1 ffn)", "hidden", "gate", "up"),
    *_linear("mlp.down_proj", "hidden", "ffn", "down"),
    *_norm("post_mlp_layernorm", "mlp_post_norm"),
)
_STARCODER2_LAYER: Names = (
    *_LLAMA_ATTENTION,
    *_linear("mlp.c_fc", "ffn", "hidden", "up"),
    *_linear("mlp.c_proj", "hidden", "ffn", "down"),
)
_NEOX_QKV = "(kv_heads qkv:0 q_group head_dim)|(kv_heads qkv:1 head_dim)|(kv_heads qkv:2 head_dim)"
_NEOX_LAYER: Names = (
    *_norm("input_layernorm", "attn_norm"),
    *_linear("attention.query_key_value", _NEOX_QKV, "hidden", "q", "k", "v"),
    *_linear("attention.dense", "hidden", _QUERY, "o"),
    *_norm("post_attention_layernorm", "mlp_norm"),
    *_linear("mlp.dense_h_to_4h", "ffn", "hidden", "up"),
    *_linear("mlp.dense_4h_to_h", "hidden", "ffn", "down"),
)
_NEOX: Names = (
    ("gpt_neox.embed_in.weight", "vocab hidden", "embed.0.embed.weight"),
    *_norm("gpt_neox.final_layer_norm", "head.0.final_norm"),
    *_under("gpt_neox.layers.{layer}.", "layer.{layer}.", _NEOX_LAYER),
)
_GPT2_QKV = "(qkv:0 kv_heads q_group head_dim)|(qkv:1 kv_heads head_dim)|(qkv:2 kv_heads head_dim)"
_GPT2_LAYER: Names = (
    *_norm("ln_1", "attn_norm"),
    *_turned("attn.c_attn", _GPT2_QKV, "hidden", "q", "k", "v"),
    *_turned("attn.c_proj", "hidden", _QUERY, "o"),
    *_norm("ln_2", "mlp_norm"),
    *_turned("mlp.c_fc", "ffn", "hidden", "up"),
    *_turned("mlp.c_proj", "hidden", "ffn", "down"),
)
_GPT2: Names = (
    ("wte.weight", "vocab hidden", "embed.0.embed.weight"),
    ("wpe.weight", "positions hidden", "embed.0.place.weight"),
    *_under("h.{layer}.", "layer.{layer}.", _GPT2_LAYER),
    *_norm("ln_f", "head.0.final_norm"),
)
_OLMO = (*_LLAMA_OUTSIDE, *_under("model.layers.{layer}.", "layer.{layer}.", _OLMO2_ATTENTION + _LLAMA_MLP))
_LLAMA_LIKE = (*_LLAMA_OUTSIDE, *_under("model.layers.{layer}.", "layer.{layer}.", _LLAMA_ATTENTION + _LLAMA_MLP))
_AS_LLAMA = (
    "llama", "mistral", "qwen2", "qwen3", "seed_oss", "smollm3", "ministral3", "granite", "nemotron", "arcee", "jais2",
)  # fmt: skip
_HEAD: Names = (("lm_head.weight", "vocab hidden", "head.0.unembed.weight"),)
HF_NAMES: Mapping[str, Mapping[Form, Names]] = {
    **{family: {"published": _LLAMA_LIKE, "module": _LLAMA_LIKE} for family in _AS_LLAMA},
    **{
        family: {
            "published": _LLAMA_OUTSIDE + _under("model.layers.{layer}.", "layer.{layer}.", more + published),
            "module": _LLAMA_OUTSIDE + _under("model.layers.{layer}.", "layer.{layer}.", more + module),
        }
        for family, published, module, more in (
            ("mixtral", _EXPERTS_APART, _EXPERTS_STACKED, _LLAMA_ATTENTION),
            ("qwen3_moe", _EXPERTS_NAMED, _EXPERTS_STACKED, _LLAMA_ATTENTION + _LLAMA_MLP),
            ("qwen2_moe", _EXPERTS_NAMED, _EXPERTS_STACKED, _LLAMA_ATTENTION + _LLAMA_MLP + _SHARED_GATED),
            (
                "qwen3_next",
                _EXPERTS_NAMED,
                _EXPERTS_STACKED,
                _GATED_ATTENTION + _BY_HEAD + _LLAMA_MLP + _SHARED_GATED,
            ),
            ("qwen3_5_moe_text", _EXPERTS_NAMED, _EXPERTS_STACKED, _GATED_ATTENTION + _APART + _SHARED_GATED),
            ("glm4_moe", _EXPERTS_NAMED, _EXPERTS_STACKED, _LLAMA_ATTENTION + _LLAMA_MLP + _CORRECTED_ROUTER),
            ("dots1", _EXPERTS_NAMED, _EXPERTS_STACKED, _LLAMA_ATTENTION + _LLAMA_MLP + _CORRECTED_ROUTER),
            ("deepseek_v2", _EXPERTS_NAMED, _EXPERTS_STACKED, _LATENT_ATTENTION + _LLAMA_MLP + _CORRECTED_ROUTER),
            ("glm4_moe_lite", _EXPERTS_NAMED, _EXPERTS_STACKED, _LATENT_ATTENTION + _LLAMA_MLP + _CORRECTED_ROUTER),
            ("deepseek_v3", _EXPERTS_NAMED, _EXPERTS_STACKED, _LATENT_ATTENTION + _LLAMA_MLP + _CORRECTED_ROUTER),
            ("olmoe", _EXPERTS_NAMED, _EXPERTS_STACKED, _ALL_HEADS_NORMED),
            (
                "granitemoe",
                _under("block_sparse_moe.", "", _GRANITE_EXPERTS),
                _under("block_sparse_moe.", "", _GRANITE_STACKED),
                _LLAMA_ATTENTION,
            ),
            (
                "ernie4_5_moe",
                (*_EXPERTS_NAMED, *_under("mlp.", "", (_ERNIE_BIAS,))),
                (*_EXPERTS_STACKED, *_under("mlp.gate.", "", (_ERNIE_BIAS,))),
                _ERNIE_MIXTURE,
            ),
            (
                "minimax_m2",
                (*_EXPERTS_APART, *_under("block_sparse_moe.", "", (_MINIMAX_BIAS,))),
                (*_EXPERTS_STACKED, *_under("mlp.", "", (_MINIMAX_BIAS,))),
                _ALL_HEADS_NORMED,
            ),
        )
    },
    **{
        family: {"published": names, "module": names}
        for family, names in (
            ("gpt_oss", (*_LLAMA_OUTSIDE, *_under("model.layers.{layer}.", "layer.{layer}.", _GPT_OSS_LAYER))),
            ("olmo2", _OLMO),
            ("olmo3", _OLMO),
            *(
                (family, (*_LLAMA_OUTSIDE, *_under("model.layers.{layer}.", "layer.{layer}.", layer)))
                for family, layer in (
                    ("gemma2", _GEMMA_ATTENTION + _LLAMA_MLP),
                    ("gemma3_text", _GEMMA_ATTENTION + _LLAMA_MLP),
                    ("exaone4", _EXAONE4_ATTENTION + _LLAMA_MLP),
                    ("ernie4_5", _NEIGHBOURS_TURNED + _LLAMA_MLP),
                    ("qwen3_5_text", _GATED_ATTENTION + _APART + _LLAMA_MLP),
                    ("glm4", _GLM4_LAYER),
                    ("phi3", _PHI3_LAYER),
                    ("starcoder2", _STARCODER2_LAYER),
                )
            ),
        )
    },
    "olmo_hybrid": {
        form: (*_LLAMA_OUTSIDE, *_under("model.layers.{layer}.", "layer.{layer}.", names + _OLMO_LINEAR + _LLAMA_MLP))
        for form, names in _OLMO_FORMS.items()
    },
    "gpt2": {"published": _GPT2 + _HEAD, "module": _under("transformer.", "", _GPT2) + _HEAD},
    "gpt_neox": {
        "published": (*_NEOX, ("embed_out.weight", "vocab hidden", "head.0.unembed.weight")),
        "module": _NEOX + _HEAD,
    },
}
