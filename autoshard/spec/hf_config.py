"""Hugging Face ``config.json`` data -> ModelSpec, one row of MODEL_TYPES per ``model_type``.

Defaults are those of the configuration classes of transformers 5.23; only the sizes must be stated. A field
without a name in this module is ignored, as transformers does. Ignored on purpose: dropouts (training here is
free of them, and many GPT-2 configs carry 0.1), initializer_range, token ids, use_cache, torch_dtype (the
workload decides), pretraining_tp and reorder_and_upcast_attn (the same mathematics in another order).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

from autoshard.errors import Fault, InputError, nearest
from autoshard.spec.model import Activation, ModelSpec, RotaryScaling
from autoshard.spec.record import decode, shown

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """What one ``model_type`` leaves to a default, and what is fixed by its code.

    Where ``positions_default`` is None they must be stated; where ``theta_default`` is, they are learned.
    """

    architecture: str
    ffn_is_4_hidden: bool = False
    positions_default: int | None
    norm: Literal["rms", "layer"] = "rms"
    norm_eps_default: float = 1e-6
    activation_default: str = "silu"
    gated_mlp: bool = True
    theta_default: float | None = 10000.0
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
MODEL_TYPES: Mapping[str, ModelType] = {
    "llama": ModelType(
        architecture="LlamaForCausalLM", positions_default=2048, attention_bias=False, mlp_bias_is_read=True
    ),
    "mistral": _MISTRAL,
    "mixtral": replace(
        _MISTRAL,
        architecture="MixtralForCausalLM",
        norm_eps_default=1e-5,
        theta_default=1e6,
        experts=True,
        window_default=None,
    ),
    "gpt2": ModelType(
        architecture="GPT2LMHeadModel",
        ffn_is_4_hidden=True,
        positions_default=None,
        norm="layer",
        norm_eps_default=1e-5,
        activation_default="gelu_new",
        gated_mlp=False,
        theta_default=None,
        grouped_heads=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=True,
    ),
    "gpt_neox": ModelType(
        architecture="GPTNeoXForCausalLM",
        positions_default=2048,
        norm="layer",
        norm_eps_default=1e-5,
        activation_default="gelu",
        gated_mlp=False,
        fraction_default=0.25,
        grouped_heads=False,
        attention_bias=True,
        mlp_bias=True,
        parallel_residual=True,
    ),
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
# How GPT-2, GPT-NeoX and older Mixtral cards spell fields that all others call alike.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer",),
    "hidden_size": ("n_embd",),
    "num_attention_heads": ("n_head",),
    "intermediate_size": ("n_inner",),
    "max_position_embeddings": ("n_positions",),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon"),
    "hidden_act": ("activation_function",),
    "rope_theta": ("rotary_emb_base",),
    "partial_rotary_factor": ("rotary_pct",),
    "num_local_experts": ("num_experts",),
    "rope_type": ("type",),
}
# The fields that a check of ModelSpec or RotaryScaling depends on, the one to blame first.
_BLAMED: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "ffn": ("intermediate_size", "hidden_size"),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads", "num_attention_heads"),
    "head_dim": ("head_dim", "partial_rotary_factor", "hidden_size", "num_attention_heads"),
    "vocab": ("vocab_size",),
    "max_positions": ("max_position_embeddings",),
    "norm_eps": ("rms_norm_eps",),
    "rotary_theta": ("rope_theta", "rope_scaling", "rope_parameters"),
    "rotary_fraction": ("partial_rotary_factor", "rope_scaling", "rope_parameters"),
    "num_experts": ("num_local_experts",),
    "experts_per_token": ("num_experts_per_tok", "num_local_experts"),
    "window": ("sliding_window",),
    "low_frequency_factor": ("low_freq_factor",),
    "high_frequency_factor": ("high_freq_factor", "low_freq_factor"),
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
    **dict.fromkeys(("add_cross_attention", "is_encoder_decoder", "output_router_logits"), (False, None)),
    "scale_attn_weights": (True, None),
    "scale_attn_by_inverse_layer_idx": (False, None),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv", "quantization_config"), (None,)),
    "norm_topk_prob": (True, None),
    "router_jitter_noise": (0, None),
    **dict.fromkeys(("moe_frequency", "decoder_sparse_step"), (1, None)),
    "mlp_only_layers": ([], None),
    **dict.fromkeys(("first_k_dense_replace", "n_shared_experts", "shared_expert_intermediate_size"), (0, None)),
    "num_nextn_predict_layers": (0, None),
}
_ROTARY_KEYS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
)


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
    reader, attention = _ConfigReader(config), kind.attention_bias
    for field, off in UNMODELLED.items():
        reader.only(field, off, "what it asks for is not modelled")
    reader.only("architectures", ([kind.architecture], [], None), "what model_type stands for")
    if attention is None:
        reader.only("attention_bias", (kind.qkv_bias, None), f"{kind.architecture} leaves no choice")
    else:
        attention = reader.read(bool, "attention_bias", attention)
    if not kind.mlp_bias_is_read:
        reader.only("mlp_bias", (kind.mlp_bias, None), f"{kind.architecture} leaves no choice")
    sizes = _sizes(reader, kind)
    traits: dict[str, Any] = {
        "norm": kind.norm,
        "norm_eps": reader.read(float, "rms_norm_eps", kind.norm_eps_default),
        "activation": reader.choice("hidden_act", kind.activation_default, ACTIVATIONS),
        "gated_mlp": kind.gated_mlp,
        "qk_norm": kind.qk_norm,
        "parallel_residual": kind.parallel_residual and reader.read(bool, "use_parallel_residual", True),
        "tied_embeddings": reader.read(bool, "tie_word_embeddings", kind.tied),
        "qkv_bias": kind.qkv_bias if attention is None else attention,
        "out_bias": kind.out_bias if attention is None else attention,
        "mlp_bias": reader.read(bool, "mlp_bias", False) if kind.mlp_bias_is_read else kind.mlp_bias,
        **_experts(reader, kind),
        "window": _window(reader, kind, sizes["num_layers"]),
    }
    rotary = _rotary(reader, kind, sizes["max_positions"])
    # Where a field could not be read a harmless value stands, so that all that is wrong is named at once.
    found = reader.made(lambda: ModelSpec(name=name, source=source, **sizes, **traits, **rotary))
    if reader.faults or found is None:
        raise InputError(reader.faults)
    return found


class _ConfigReader:
    """Reads fields one by one; after a fault it goes on with a harmless value, so that all faults are found at once.

    A field is read under any of its ALIASES; messages name the one that is in the data.
    """

    def __init__(self, data: Mapping[str, object]) -> None:
        self.data = data
        self.faults: list[Fault] = []

    def refuse(self, field: str, message: str) -> None:
        self.faults.append(Fault(where=field, message=message))

    def check(self, holds: Callable[[], bool], fields: tuple[str, ...], message: str) -> None:
        """Refuse the first field that is there unless the rule holds; not asked where one is faulty."""
        spelled = [self._spelled(field) for field in fields]
        if not {fault.where for fault in self.faults}.intersection(spelled) and not holds():
            self.refuse(next((field for field in spelled if field in self.data), spelled[0]), message)

    def made(self, build: Callable[[], T]) -> T | None:
        """Build a value of what was read, and refuse the fields that its class blames."""
        try:
            return build()
        except InputError as error:
            for fault in error.faults:
                self.check(lambda: False, _BLAMED.get(fault.where, (fault.where,)), fault.message)
        return None

    def only(self, field: str, allowed: tuple[object, ...], reason: str) -> None:
        """Refuse a field that is there and has another value than those allowed."""
        if field in self.data and self.data[field] not in allowed:
            known = " or ".join(shown(value) for value in allowed)
            self.refuse(field, f"must be {known}, not {shown(self.data[field])}: {reason}")

    def read(self, kind: type[T], name: str, default: T | None = None) -> T:
        """Read a value of a type; without a default it must be there."""
        field, harmless = self._spelled(name), cast(T, 1) if default is None else default
        if field not in self.data:
            if default is None:
                self.refuse(field, "missing, and it has no default")
            return harmless
        for other in ALIASES.get(name, ()):
            if other in self.data and self.data[other] != self.data[field]:
                self.refuse(other, f"{shown(self.data[other])} contradicts {field}, {shown(self.data[field])}")
        try:
            return decode(kind, self.data[field], field)
        except InputError as error:
            self.faults.extend(error.faults)
            return harmless

    def whole(self, name: str, default: int | None = None, low: int = 1) -> int:
        """Read a whole number; without a default it must be there."""
        found = self.read(int, name, default)
        if found < low:
            self.refuse(self._spelled(name), f"must be at least {low}, not {found}")
        return max(found, low)

    def whole_or_null(self, name: str, default: int | None = None) -> int | None:
        """Read a whole number of at least 1 that may also be null."""
        field = self._spelled(name)
        if field not in self.data:
            return default
        return None if self.data[field] is None else self.whole(name)

    def choice(self, name: str, default: str, known: Mapping[str, T]) -> T:
        """Read one of the words that are known, and return what it stands for."""
        found = self.read(str, name, default)
        if found not in known:
            self.refuse(self._spelled(name), f"{shown(found)} is not known. {nearest(found, sorted(known))}")
        return known.get(found, known[default])

    def _spelled(self, name: str) -> str:
        return next((field for field in (name, *ALIASES.get(name, ())) if field in self.data), name)


def _sizes(reader: _ConfigReader, kind: ModelType) -> dict[str, int]:
    hidden, heads = reader.whole("hidden_size"), reader.whole("num_attention_heads")
    stated = reader.whole_or_null("head_dim", kind.head_dim_default)
    head_dim = max(1, hidden // heads) if stated is None else stated
    kv_heads = reader.whole_or_null("num_key_value_heads", kind.kv_heads_default) or heads
    ffn = (reader.whole_or_null if kind.ffn_is_4_hidden else reader.whole)("intermediate_size")
    if stated is None or not kind.grouped_heads:
        message = f"{heads} heads cannot share a hidden size of {hidden} evenly"
        reader.check(lambda: hidden % heads == 0, ("num_attention_heads", "hidden_size"), message)
    if not kind.grouped_heads:
        message = f"{kind.architecture} has one key/value head per query head, of hidden size / heads numbers"
        fields = ("head_dim", "num_key_value_heads", "num_attention_heads", "hidden_size")
        reader.check(lambda: (kv_heads, head_dim) == (heads, hidden // heads), fields, message)
    return {
        "num_layers": reader.whole("num_hidden_layers"),
        "hidden": hidden,
        "ffn": ffn or 4 * hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab": reader.whole("vocab_size"),
        "max_positions": reader.whole("max_position_embeddings", kind.positions_default),
    }


def _rotary(reader: _ConfigReader, kind: ModelType, max_positions: int) -> dict[str, Any]:
    """Read positions: the older flat fields, then ``rope_scaling`` or ``rope_parameters``, which win."""
    if kind.theta_default is None:
        return {"positions": "learned"}
    theta = reader.read(float, "rope_theta", kind.theta_default)
    fraction = reader.read(float, "partial_rotary_factor", kind.fraction_default)
    field = "rope_scaling" if reader.data.get("rope_scaling") else "rope_parameters"
    data: object = reader.data.get(field) or {}
    if not isinstance(data, Mapping):
        reader.refuse(field, f"expected an object, found {shown(data)}")
    group = _ConfigReader(cast(Mapping[str, object], data) if isinstance(data, Mapping) else {})
    theta = group.read(float, "rope_theta", theta)
    fraction = group.read(float, "partial_rotary_factor", fraction)
    # transformers prefers the flat field, and where neither is stated the context of the model.
    flat = reader.whole_or_null("original_max_position_embeddings")
    scaling = _scaling(group, flat, max_positions)
    reader.faults.extend(fault.under(field) for fault in group.faults)
    if kind.fraction_default == 1:
        message = f"must be 1, not {fraction}: {kind.architecture} rotates whole heads"
        reader.check(lambda: fraction == 1, ("partial_rotary_factor", f"{field}.partial_rotary_factor"), message)
    return {"positions": "rotary", "rotary_theta": theta, "rotary_fraction": fraction, "rotary_scaling": scaling}


def _scaling(group: _ConfigReader, original: int | None, max_positions: int) -> RotaryScaling | None:
    for key in group.data:
        if key not in _ROTARY_KEYS:
            group.refuse(key, f"unknown key. {nearest(key, _ROTARY_KEYS)}")
    kinds: Mapping[str, Literal["linear", "llama3"] | None] = {"default": None, "linear": "linear", "llama3": "llama3"}
    kind = group.choice("rope_type", "default", kinds)
    if kind is None:
        return None
    stated: dict[str, Any] = {"factor": group.read(float, "factor")}
    if kind == "llama3":
        stated["low_frequency_factor"] = group.read(float, "low_freq_factor")
        stated["high_frequency_factor"] = group.read(float, "high_freq_factor")
        positions = group.whole("original_max_position_embeddings", max_positions)
        stated["original_positions"] = original or positions
    return group.made(lambda: RotaryScaling(kind=kind, **stated))


def _experts(reader: _ConfigReader, kind: ModelType) -> dict[str, int]:
    if not kind.experts:
        for field in ("num_local_experts", "num_experts", "num_experts_per_tok"):
            reader.only(field, (0, 1, None), f"{kind.architecture} has no experts")
        return {}
    chosen = reader.whole("num_experts_per_tok", 2)
    return {"num_experts": reader.whole("num_local_experts"), "experts_per_token": chosen}


def _window(reader: _ConfigReader, kind: ModelType, num_layers: int) -> int | None:
    """Return how many positions back every layer looks; layers that differ are refused."""
    if kind.window == "none":
        if reader.data.get("use_sliding_window") is not False:
            reader.only("sliding_window", (None,), f"{kind.architecture} looks at the whole sequence")
        window = None
    elif kind.window == "all layers" or reader.read(bool, "use_sliding_window", False):
        window = reader.whole_or_null("sliding_window", kind.window_default)
    else:
        window = None
    layers = reader.data.get("layer_types")
    if kind.window == "some layers" and window is not None:
        first = reader.whole("max_window_layers", 28, low=0)
        if layers is not None:
            first = 0 if "sliding_attention" in str(layers) else num_layers
        message = f"layers from {first} on have a window, those before do not; layers that differ are not modelled"
        reader.check(lambda: first == 0 or first >= num_layers, ("max_window_layers", "num_hidden_layers"), message)
        window = window if first < num_layers else None
    if layers is not None:
        layer = "full_attention" if window is None else "sliding_attention"
        message = f"must be {num_layers} x {layer!r}, as the other fields say; layers that differ are not modelled"
        reader.check(lambda: layers == [layer] * num_layers, ("layer_types", "num_hidden_layers"), message)
    return window
