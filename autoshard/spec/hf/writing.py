"""Write a ModelSpec as a Hugging Face ``config.json``: the first architecture that computes the same says which.

What a ModelSpec does not have (other token ids, who made the model) is left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.errors import InputError
from autoshard.spec.hf.config import spec_from_config
from autoshard.spec.hf.fields import ACTIVATIONS, ALIASES, NAMED_FIELDS
from autoshard.spec.hf.model_type import SHARED_DEFAULTS, ModelType
from autoshard.spec.hf.types import MODEL_TYPES
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_parts import RotaryScaling, Router

# Which of the ALIASES an architecture has; the others have the first name of every field.
_SPELLED: Mapping[str, Mapping[str, str]] = {
    "gpt2": {name: others[0] for name, others in ALIASES.items()} | {"rms_norm_eps": "layer_norm_epsilon"},
    **{
        name: {"num_local_experts": "num_experts"}
        for name in ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text")
    },
    **{
        name: {"num_local_experts": "n_routed_experts"}
        for name in ("glm4_moe", "glm4_moe_lite", "dots1", "deepseek_v2", "deepseek_v3")
    },
    "gemma2": {"hidden_act": "hidden_activation"},
    "gemma3_text": {"hidden_act": "hidden_activation"},
    "phi3": {"hidden_dropout": "resid_pdrop"},
    "starcoder2": {"rms_norm_eps": "norm_epsilon", "hidden_dropout": "residual_dropout"},
    "seed_oss": {"hidden_dropout": "residual_dropout"},
    "nemotron": {"rms_norm_eps": "norm_eps"},
    "ernie4_5_moe": {
        "num_local_experts": "moe_num_experts", "num_experts_per_tok": "moe_k",
        "n_shared_experts": "moe_num_shared_experts",
    },
    "jais2": {"rms_norm_eps": "layer_norm_eps"},
    "gpt_neox": {
        "rms_norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"
    },
}  # fmt: skip
_ACTIVATION = {"gelu_tanh": "gelu_pytorch_tanh"} | {
    ours: theirs for theirs, ours in ACTIVATIONS.items() if theirs == ours
}


def config_of(model: ModelSpec) -> Mapping[str, Any]:
    """Return the config of a model as transformers reads it, or say that no architecture computes the same.

    >>> from autoshard.spec.model_catalogue import load_model
    >>> config_of(load_model("gpt2-xl"))["n_embd"]
    1600
    """
    for name, kind in MODEL_TYPES.items() if model.traced is None else ():
        config = _written(model, name, kind)
        try:
            read = spec_from_config(config, name=model.name, source=model.source)
        except InputError:
            continue
        if read == model:
            return config
    message = f"no architecture of transformers that is known computes the same: {', '.join(MODEL_TYPES)}"
    raise InputError.of("model", f"{message}. Type --model with the config.json of {model.name}")


def _written(model: ModelSpec, name: str, kind: ModelType) -> Mapping[str, Any]:
    dense = {"first_k_dense_replace", "moe_layer_interval"} & kind.defaults.keys() and not model.num_experts
    nowhere = model.positions == "none" and kind.unrotated == "without theta"
    fields: dict[str, Any] = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden,
        "intermediate_size" if dense else kind.width: model.ffn,
        "num_attention_heads": model.num_heads,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_positions,
        "hidden_act": _ACTIVATION[model.activation],
        "tie_word_embeddings": model.tied_embeddings,
        "pad_token_id": None,  # some classes have one, whose row of the embedding no gradient reaches
    }
    if kind.grouped_heads:
        fields |= {"num_key_value_heads": model.num_kv_heads, **_heads(model)}
    flags = {option: getattr(model, sets[0]) for option, sets in kind.flags.items()}
    fields |= {option: value for option, value in flags.items() if option in kind.defaults}
    # An option that this architecture does not name is not written, so that the check of ``config_of`` refuses it.
    has = {*SHARED_DEFAULTS, *kind.defaults}
    named = {config: getattr(model, field.name) for config, field in NAMED_FIELDS.items() if config in has}
    fields |= {config: number for config, number in named.items() if number or kind.defaults.get(config)}
    if name == "gpt2":  # whose class drops a tenth of all that its config does not name
        fields |= {**named, "embd_pdrop": model.hidden_dropout}
    if name == "starcoder2" and model.hidden_dropout:
        fields["embedding_dropout"] = model.hidden_dropout
    if kind.fixed.get("positions", "rotary") == "rotary":
        fields |= _without_theta() if nowhere else _rotary(model, kind)
    if model.num_experts:
        fields |= {"num_local_experts": model.num_experts, "num_experts_per_tok": model.experts_per_token}
        fields |= {option: stated for option, stated in _router(model, kind).items() if option in kind.defaults}
    if "query_pre_attn_scalar" in kind.defaults:  # a whole number there
        fields["query_pre_attn_scalar"] = round(model.query_scalar or model.head_dim)
    if "attention_multiplier" in kind.defaults:
        fields["attention_multiplier"] = (model.query_scalar or model.head_dim) ** -0.5
    if "swiglu_limit" in kind.defaults and model.glu_limit:
        fields |= {"swiglu_limit": model.glu_limit, "swiglu_alpha": model.glu_slope}
    fields |= {**_layers(model, kind), **_unrotated(model, kind), **_linear(model, kind)}
    spelled = {_SPELLED.get(name, {}).get(field, field): value for field, value in fields.items()}
    return {"model_type": name, "architectures": [kind.architecture], **spelled}


def _router(model: ModelSpec, kind: ModelType) -> Mapping[str, Any]:
    """Write how experts are chosen, and how many stand beside them."""
    router = model.router or Router()
    limits = {"topk_method": "greedy" if router.groups == 1 else "group_limited_greedy"}
    return {
        **(limits if kind.router == "groups" else {}),
        "n_shared_experts": model.shared_ffn // model.ffn,
        "shared_expert_intermediate_size": model.shared_ffn,
        "norm_topk_prob": router.normalised,
        "routed_scaling_factor": router.scale,
        "n_group": router.groups,
        "topk_group": router.chosen_groups,
        "num_nextn_predict_layers": 0,
    }


def _heads(model: ModelSpec) -> Mapping[str, Any]:
    """Write the width of heads, or of their parts."""
    if not (latent := model.latent):
        return {"head_dim": model.head_dim}
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": model.head_dim - latent.rotary_dim,
        "qk_rope_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
    }


def _layers(model: ModelSpec, kind: ModelType) -> Mapping[str, Any]:
    """Write how layers attend, and which have an MLP in the place of experts."""
    each_kind = {name: model.of_kind(name) for name in model.layer_counts}
    windows = [each_kind[name].window for name in model.layer_order]
    dense = [
        number for number, name in enumerate(model.layer_order) if model.num_experts and not each_kind[name].num_experts
    ]
    window, fields = max((size or 0 for size in windows), default=0) or None, dict[str, Any]()
    if kind.window != "none":
        fields["sliding_window"] = window
    if kind.window in ("some layers", "all layers if used", "turns if used"):
        fields["use_sliding_window"] = window is not None
    if kind.window in ("pattern", "by turns"):
        fields |= {"sliding_window": window or 1, "layer_types": _layer_types(windows)}  # of no layer if there is none
    if kind.window == "turns if used" and window:
        fields["layer_types"] = _layer_types(windows)
    if "rope_local_base_freq" in kind.defaults:
        thetas = {spec.rotary_theta for spec in each_kind.values() if spec.window}
        fields |= {"rope_local_base_freq": thetas.pop()} if thetas else {}
    if kind.window in ("some layers", "last layers"):
        fields["max_window_layers"] = 0 if window else model.num_layers
        if len({*windows}) > 1:
            fields["layer_types"] = _layer_types(windows)
    return {**fields, **_dense_layers(model, kind, dense)}


def _dense_layers(model: ModelSpec, kind: ModelType, dense: Sequence[int]) -> Mapping[str, Any]:
    """Write which layers have an MLP in the place of experts."""
    fields: dict[str, Any] = {}
    if dense and {"mlp_only_layers", "first_k_dense_replace", "moe_layer_interval"} & kind.defaults.keys():
        fields["intermediate_size"] = model.of_kind(model.layer_order[dense[0]]).ffn
    if dense and "mlp_only_layers" in kind.defaults:
        fields["mlp_only_layers"] = dense
    if "moe_layer_interval" in kind.defaults:
        fields |= _mixtures([number for number in range(model.num_layers) if number not in dense and model.num_experts])
    if "first_k_dense_replace" in kind.defaults:
        first = fields["first_k_dense_replace"] = len(dense) if model.num_experts else model.num_layers
        if "mlp_layer_types" in kind.defaults:
            fields["mlp_layer_types"] = ["dense"] * first + ["sparse"] * (model.num_layers - first)
    return fields


def _mixtures(layers: Sequence[int]) -> Mapping[str, int]:
    """Write which layers have experts: every so many from the first to the last."""
    if not layers:
        return {"moe_layer_start_index": 1, "moe_layer_end_index": 0}
    step = layers[1] - layers[0] if len(layers) > 1 else layers[0] + 1
    return {"moe_layer_start_index": layers[0], "moe_layer_end_index": layers[-1], "moe_layer_interval": step}


def _unrotated(model: ModelSpec, kind: ModelType) -> Mapping[str, Any]:
    """Write which layers turn no queries and keys."""
    each_kind = [model.of_kind(name) for name in model.layer_order]
    if kind.unrotated == "listed":
        return {"no_rope_layers": [int(spec.positions == "rotary") for spec in each_kind]}
    window = next((spec.window for spec in each_kind if spec.window), None)
    return {"sliding_window": window} if kind.unrotated == "beyond the window" else {}


def _without_theta() -> Mapping[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}


def _linear(model: ModelSpec, kind: ModelType) -> Mapping[str, Any]:
    """Write linear attention, and which layers have it."""
    each_kind = [model.of_kind(name).linear for name in model.layer_order]
    linear = next((attention for attention in each_kind if attention), None)
    if "linear_num_key_heads" not in kind.defaults:
        return {}
    sizes: dict[str, Any] = {
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.taps,
    } if linear else {}  # fmt: skip
    if "linear_allow_neg_eigval" in kind.defaults and linear:
        sizes["linear_allow_neg_eigval"] = linear.reach != 1
    words = ["linear_attention" if attention else "full_attention" for attention in each_kind]
    return {**sizes, "layer_types": words}


def _layer_types(windows: Sequence[int | None]) -> list[str]:
    return ["sliding_attention" if size else "full_attention" for size in windows]


def _rotary(model: ModelSpec, kind: ModelType) -> Mapping[str, Any]:
    fields: dict[str, Any] = {"rope_theta": model.rotary_theta}
    if model.rotary_fraction != 1 or "partial_rotary_factor" in kind.defaults:
        fields["partial_rotary_factor"] = model.rotary_fraction
    if kind.rotary_of_windows and "rope_local_base_freq" not in kind.defaults:
        return _rotary_of_layers(model)
    if "rope_scaling" in kind.defaults:  # where none is stated, it has one
        fields["rope_scaling"] = {"rope_type": "default"}
    return fields | ({"rope_scaling": _scaling(model)} if model.rotary_scaling else {})


def _rotary_of_layers(model: ModelSpec) -> Mapping[str, Any]:
    """Write the rotary positions of layers that attend to all tokens, and of those that attend to a window."""
    local = {spec.rotary_theta for name in model.layer_counts if (spec := model.of_kind(name)).window}
    scaling = _scaling(model) if model.rotary_scaling else {"rope_type": "default"}
    everywhere = {"rope_theta": model.rotary_theta, **scaling}
    in_window = {"rope_theta": local.pop() if local else model.rotary_theta, "rope_type": "default"}
    return {"rope_parameters": {"full_attention": everywhere, "sliding_attention": in_window}}


def _scaling(model: ModelSpec) -> Mapping[str, Any]:
    scaling = model.rotary_scaling
    assert scaling, "only a scaling is written"
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        fields |= {
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    if scaling.kind == "yarn":
        fields |= _yarn(scaling, part=model.latent is not None)
    return fields


def _yarn(scaling: RotaryScaling, *, part: bool) -> Mapping[str, Any]:
    fields: dict[str, Any] = {
        "beta_slow": scaling.low_frequency_factor,
        "beta_fast": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_positions,
        "truncate": scaling.truncate,
    }
    if part and scaling.mscale:
        return fields | dict.fromkeys(("mscale", "mscale_all_dim"), scaling.mscale)
    return fields if scaling.mscale == 1 else fields | {"attention_factor": scaling.growth}
