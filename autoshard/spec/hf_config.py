"""Hugging Face ``config.json`` data -> ModelSpec, one row of MODEL_TYPES per ``model_type``.

Defaults are those of the configuration classes of transformers 5.23; only the sizes must be stated. A field
without a name in this module is ignored, as transformers does. Ignored on purpose: dropouts (training here is
free of them, and many GPT-2 configs carry 0.1), initializer_range, token ids, use_cache, torch_dtype (the
workload decides), pretraining_tp and reorder_and_upcast_attn (the same mathematics in another order).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from autoshard.errors import InputError, nearest
from autoshard.spec.config_reader import ConfigReader, shown
from autoshard.spec.model import MAX_DIM, MAX_EXPERTS, MAX_LAYERS, Activation, ModelSpec, RotaryScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """How one ``model_type`` spells its fields, what it leaves to a default, and what is fixed by its code.

    A tuple of names is one field and its aliases. Where ``positions_default`` is None they must be stated.
    """

    architecture: str
    layers: tuple[str, ...] = ("num_hidden_layers",)
    hidden: tuple[str, ...] = ("hidden_size",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    ffn: tuple[str, ...] = ("intermediate_size",)
    ffn_is_4_hidden: bool = False
    positions: tuple[str, ...] = ("max_position_embeddings",)
    positions_default: int | None
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: str = "rms_norm_eps"
    norm_eps_default: float = 1e-6
    activation: str = "hidden_act"
    activation_default: str = "silu"
    gated_mlp: bool = True
    theta: tuple[str, ...] = ("rope_theta",)
    theta_default: float | None = 10000.0
    fraction: tuple[str, ...] = ("partial_rotary_factor",)
    fraction_default: float = 1.0
    grouped_heads: bool = True
    kv_heads_default: int | None = None
    head_dim_default: int | None = None
    attention_bias: bool | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    mlp_bias_is_read: bool = False
    qk_norm: bool = False
    parallel_residual: bool = False
    tied: bool = False
    experts: bool = False
    window: Literal["none", "all layers", "some layers"] = "none"
    window_default: int | None = None


_LLAMA = ModelType(architecture="LlamaForCausalLM", positions_default=2048, attention_bias=False, mlp_bias_is_read=True)
_MISTRAL = ModelType(
    architecture="MistralForCausalLM",
    positions_default=131072,
    kv_heads_default=8,
    window="all layers",
    window_default=4096,
)
_QWEN2 = ModelType(
    architecture="Qwen2ForCausalLM",
    positions_default=32768,
    kv_heads_default=32,
    qkv_bias=True,
    window="some layers",
    window_default=4096,
)
_GPT_NEOX = ModelType(
    architecture="GPTNeoXForCausalLM",
    positions_default=2048,
    norm="layer",
    norm_eps="layer_norm_eps",
    norm_eps_default=1e-5,
    activation_default="gelu",
    gated_mlp=False,
    theta=("rotary_emb_base", "rope_theta"),
    fraction=("rotary_pct", "partial_rotary_factor"),
    fraction_default=0.25,
    grouped_heads=False,
    attention_bias=True,
    mlp_bias=True,
    parallel_residual=True,
)
_GPT2 = ModelType(
    architecture="GPT2LMHeadModel",
    layers=("n_layer", "num_hidden_layers"),
    hidden=("n_embd", "hidden_size"),
    heads=("n_head", "num_attention_heads"),
    ffn=("n_inner",),
    ffn_is_4_hidden=True,
    positions=("n_positions", "max_position_embeddings"),
    positions_default=None,
    norm="layer",
    norm_eps="layer_norm_epsilon",
    norm_eps_default=1e-5,
    activation="activation_function",
    activation_default="gelu_new",
    gated_mlp=False,
    theta_default=None,
    grouped_heads=False,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tied=True,
)
MODEL_TYPES: Mapping[str, ModelType] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": replace(
        _MISTRAL,
        architecture="MixtralForCausalLM",
        norm_eps_default=1e-5,
        theta_default=1e6,
        experts=True,
        window_default=None,
    ),
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "qwen2": _QWEN2,
    "qwen3": replace(
        _QWEN2,
        architecture="Qwen3ForCausalLM",
        head_dim_default=128,
        qkv_bias=False,
        attention_bias=False,
        qk_norm=True,
    ),
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
}
# Fields that ask for mathematics which ModelSpec cannot state, with the values that leave them off. Some are
# of relatives of the models above: transformers would ignore them, and compute something not meant.
UNMODELLED: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "scale_attn_weights": (True, None),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "quantization_config": (None,),
    "norm_topk_prob": (True, None),
    "output_router_logits": (False, None),
    "router_jitter_noise": (0, None),
    "moe_frequency": (1, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "first_k_dense_replace": (0, None),
    "n_shared_experts": (0, None),
    "shared_expert_intermediate_size": (0, None),
    "num_nextn_predict_layers": (0, None),
}
_ROTARY_KEYS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
)
# Stands for "positive" where a limit must be a number.
_SMALLEST = 1e-30


def spec_from_config(config: Mapping[str, object], *, name: str, source: str) -> ModelSpec:
    """Read the data of a ``config.json``, or raise one InputError that names every field that cannot be used.

    >>> sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 128, "vocab_size": 256}
    >>> spec_from_config({"model_type": "gpt2", **sizes}, name="mine", source="me").ffn
    256
    """
    name_of_type = config.get("model_type")
    if not isinstance(name_of_type, str) or name_of_type not in MODEL_TYPES:
        found = f"{shown(name_of_type)} is not a known architecture" if "model_type" in config else "missing"
        raise InputError.of("model_type", f"{found}. Known: {', '.join(MODEL_TYPES)}.")
    kind = MODEL_TYPES[name_of_type]
    reader = ConfigReader(config)
    for field, off in UNMODELLED.items():
        reader.only(field, off, "what it asks for is not modelled")
    reader.only("architectures", ([kind.architecture], [], None), "what model_type stands for")
    sizes = _sizes(reader, kind)
    traits: dict[str, Any] = {
        **_biases(reader, kind),
        **_rotary(reader, kind, sizes["head_dim"], sizes["max_positions"]),
        **_experts(reader, kind),
        **_norms_and_head(reader, kind),
        "window": _window(reader, kind, sizes["num_layers"]),
    }
    if reader.faults:
        raise InputError(reader.faults)
    return ModelSpec(name=name, source=source, **sizes, **traits)


def _sizes(reader: ConfigReader, kind: ModelType) -> dict[str, int]:
    hidden, heads = reader.whole(*kind.hidden), reader.whole(*kind.heads)
    kv_heads, head_dim = _heads(reader, kind, hidden, heads)
    return {
        "num_layers": reader.whole(*kind.layers, high=MAX_LAYERS),
        "hidden": hidden,
        "ffn": _ffn(reader, kind, hidden),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab": reader.whole("vocab_size"),
        "max_positions": reader.whole(*kind.positions, default=kind.positions_default),
    }


def _ffn(reader: ConfigReader, kind: ModelType, hidden: int) -> int:
    if not kind.ffn_is_4_hidden:
        return reader.whole(*kind.ffn)
    stated = reader.whole_or_null(*kind.ffn, default=None)
    message = f"4 x {hidden}, the width of the MLP where {kind.ffn[0]} is not stated, is above {MAX_DIM}"
    reader.check(lambda: stated is not None or 4 * hidden <= MAX_DIM, kind.hidden, message)
    return stated or 4 * hidden


def _heads(reader: ConfigReader, kind: ModelType, hidden: int, heads: int) -> tuple[int, int]:
    """Return key/value heads and the size of a head, checked against the other sizes."""
    stated = reader.whole_or_null("head_dim", default=kind.head_dim_default)
    if stated is None or not kind.grouped_heads:
        message = f"{heads} heads cannot share a hidden size of {hidden} evenly"
        reader.check(lambda: hidden % heads == 0, (*kind.heads, *kind.hidden), message)
    head_dim = max(1, hidden // heads) if stated is None else stated
    kv_heads = reader.whole_or_null("num_key_value_heads", default=kind.kv_heads_default) or heads
    if not kind.grouped_heads:
        one_each = f"{kind.architecture} has one key/value head per query head, of hidden size / heads numbers"
        reader.check(lambda: head_dim == hidden // heads, ("head_dim", *kind.heads, *kind.hidden), one_each)
        reader.check(lambda: kv_heads == heads, ("num_key_value_heads", *kind.heads), one_each)
    else:
        message = f"{heads} query heads cannot share {kv_heads} key/value heads evenly"
        reader.check(lambda: heads % kv_heads == 0, ("num_key_value_heads", *kind.heads), message)
    return kv_heads, head_dim


def _biases(reader: ConfigReader, kind: ModelType) -> dict[str, Any]:
    always = f"{kind.architecture} leaves no choice"
    qkv, out, mlp = kind.qkv_bias, kind.out_bias, kind.mlp_bias
    if kind.attention_bias is None:
        reader.only("attention_bias", (qkv, None), always)
    else:
        qkv = out = reader.flag("attention_bias", kind.attention_bias)
    if kind.mlp_bias_is_read:
        mlp = reader.flag("mlp_bias", mlp)
    else:
        reader.only("mlp_bias", (mlp, None), always)
    return {"qkv_bias": qkv, "out_bias": out, "mlp_bias": mlp}


def _rotary(reader: ConfigReader, kind: ModelType, head_dim: int, max_positions: int) -> dict[str, Any]:
    """Read positions: the older flat fields, then ``rope_scaling`` or ``rope_parameters``, which win."""
    if kind.theta_default is None:
        return {"positions": "learned"}
    theta = reader.number(*kind.theta, default=kind.theta_default, low=1.0)
    fraction = reader.number(*kind.fraction, default=kind.fraction_default, low=0.0, high=1.0)
    field = "rope_scaling" if reader.data.get("rope_scaling") else "rope_parameters"
    data: object = reader.data.get(field) or {}
    if not isinstance(data, Mapping):
        reader.refuse(field, f"expected an object, found {shown(data)}")
    group = ConfigReader(cast(Mapping[str, object], data) if isinstance(data, Mapping) else {})
    theta = group.number("rope_theta", default=theta, low=1.0)
    fraction = group.number("partial_rotary_factor", default=fraction, low=0.0, high=1.0)
    # transformers prefers the flat field, and where neither is stated the context of the model.
    flat = reader.whole_or_null("original_max_position_embeddings", default=None)
    scaling = _scaling(group, flat, max_positions)
    reader.faults.extend(fault.under(field) for fault in group.faults)
    if not group.faults:
        if kind.fraction_default == 1 and fraction != 1:
            whole_heads = f"must be 1, not {fraction}: {kind.architecture} rotates whole heads"
            reader.refuse("partial_rotary_factor", whole_heads)
        dims = int(head_dim * fraction)
        fields = ("head_dim", *kind.fraction, *kind.hidden, *kind.heads)
        message = f"rotary positions turn pairs of numbers; {dims} of the {head_dim} of a head cannot be paired"
        reader.check(lambda: dims >= 2 and dims % 2 == 0, fields, message)
    return {"positions": "rotary", "rotary_theta": theta, "rotary_fraction": fraction, "rotary_scaling": scaling}


def _scaling(group: ConfigReader, original: int | None, max_positions: int) -> RotaryScaling | None:
    for key in group.data:
        if key not in _ROTARY_KEYS:
            group.refuse(key, f"unknown key. {nearest(key, _ROTARY_KEYS)}")
    kind = group.choice("rope_type", "type", default="default", known=("default", "linear", "llama3"))
    if kind == "default":
        return None
    factor = group.number("factor", default=None, low=1.0)
    if kind == "linear":
        return RotaryScaling(kind="linear", factor=factor)
    stated = group.whole("original_max_position_embeddings", default=max_positions)
    low = group.number("low_freq_factor", default=None, low=_SMALLEST)
    high = group.number("high_freq_factor", default=None, low=_SMALLEST)
    between = ("high_freq_factor", "low_freq_factor")
    group.check(lambda: high > low, between, f"must be above low_freq_factor, {low}, not {high}")
    if group.faults:
        return None
    return RotaryScaling(
        kind="llama3",
        factor=factor,
        low_frequency_factor=low,
        high_frequency_factor=high,
        original_positions=original or stated,
    )


def _experts(reader: ConfigReader, kind: ModelType) -> dict[str, Any]:
    if not kind.experts:
        for field in ("num_local_experts", "num_experts", "num_experts_per_tok"):
            reader.only(field, (0, 1, None), f"{kind.architecture} has no experts")
        return {}
    experts = reader.whole("num_local_experts", "num_experts", low=2, high=MAX_EXPERTS)
    chosen = reader.whole("num_experts_per_tok", default=2)
    message = f"{chosen} experts per token cannot be chosen among {experts}"
    reader.check(lambda: chosen <= experts, ("num_experts_per_tok", "num_local_experts", "num_experts"), message)
    return {"num_experts": experts, "experts_per_token": chosen}


def _norms_and_head(reader: ConfigReader, kind: ModelType) -> dict[str, Any]:
    activation = reader.choice(kind.activation, default=kind.activation_default, known=ACTIVATIONS)
    parallel = kind.parallel_residual and reader.flag("use_parallel_residual", True)
    return {
        "norm": kind.norm,
        "norm_eps": reader.number(kind.norm_eps, default=kind.norm_eps_default, low=_SMALLEST, high=1.0),
        "activation": ACTIVATIONS[activation],
        "gated_mlp": kind.gated_mlp,
        "qk_norm": kind.qk_norm,
        "parallel_residual": parallel,
        "tied_embeddings": reader.flag("tie_word_embeddings", kind.tied),
    }


def _window(reader: ConfigReader, kind: ModelType, num_layers: int) -> int | None:
    """Return how many positions back every layer looks; layers that differ are refused."""
    if kind.window == "none":
        if reader.data.get("use_sliding_window") is not False:
            reader.only("sliding_window", (None,), f"{kind.architecture} looks at the whole sequence")
        window = None
    elif kind.window == "all layers":
        window = reader.whole_or_null("sliding_window", default=kind.window_default)
    else:
        window = _window_of_some_layers(reader, kind, num_layers)
    stated = reader.data.get("layer_types")
    if stated is not None:
        layer = "full_attention" if window is None else "sliding_attention"
        message = f"must be {num_layers} x {layer!r}, as the other fields say; layers that differ are not modelled"
        reader.check(lambda: stated == [layer] * num_layers, ("layer_types", "num_hidden_layers"), message)
    return window


def _window_of_some_layers(reader: ConfigReader, kind: ModelType, num_layers: int) -> int | None:
    if not reader.flag("use_sliding_window", False):
        return None
    window = reader.whole_or_null("sliding_window", default=kind.window_default)
    first = reader.whole("max_window_layers", default=28, low=0)
    if reader.data.get("layer_types") is not None:
        first = 0 if "sliding_attention" in str(reader.data["layer_types"]) else num_layers
    message = f"layers from {first} on have a window, those before do not; layers that differ are not modelled"
    fields = ("max_window_layers", "num_hidden_layers")
    reader.check(lambda: window is None or first in (0, num_layers) or first > num_layers, fields, message)
    return window if first < num_layers else None
