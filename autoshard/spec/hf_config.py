"""Make a ModelSpec from a Hugging Face ``config.json``; MODEL_TYPES has one row for each ``model_type``.

Defaults are those of the configuration classes of transformers 5.23; sizes have none. A field that this module
does not name is ignored, as transformers does. Ignored on purpose: initializer_range, token ids, use_cache,
torch_dtype (the workload states it), pretraining_tp and reorder_and_upcast_attn (the same mathematics in another
order). Dropouts that a config does not state are 0, also for GPT-2, whose class has 0.1: few train with them today.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal, TypeVar, cast

from autoshard.errors import Fault, Faults, InputError, nearest
from autoshard.spec.model import Activation, ModelSpec, RotaryScaling
from autoshard.spec.record import decode, show_value

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """What the code of one ``model_type`` fixes in ModelSpec, and the defaults of the fields that may be left out.

    Defaults that all types share are in SHARED_DEFAULTS. A field without a default must be stated, or is not read.
    """

    architecture: str
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    defaults: Mapping[str, Any]
    grouped_heads: bool = True
    window: Literal["none", "all layers", "all layers if used", "some layers"] = "none"
    width: str = "intermediate_size"  # the field with the width of an MLP
    stated: Mapping[str, object] = field(default_factory=dict[str, object])  # must be stated, as it has another default


_BALANCE = (
    "the loss that it asks for belongs to the question: --router-balance-loss, or router_balance_loss in a recipe"
)
SHARED_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": None,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}
_PLAIN_MLP = {"norm": "layer", "gated_mlp": False, "mlp_bias": True}
MODEL_TYPES: Mapping[str, ModelType] = {
    "llama": ModelType(
        architecture="LlamaForCausalLM",
        defaults={"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    ),
    "mistral": ModelType(
        architecture="MistralForCausalLM", defaults={**_MISTRAL, "sliding_window": 4096}, window="all layers"
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
            "num_experts_per_tok": 8, "sliding_window": 4096,
        },
        window="all layers if used",
        width="moe_intermediate_size",
        stated={"norm_topk_prob": True},
    ),
}  # fmt: skip
# Other names of fields in GPT-2, GPT-NeoX and older Mixtral cards.
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
    "hidden_dropout": ("resid_pdrop", "embd_pdrop"),
    "attention_dropout": ("attn_pdrop",),
}
# Config fields that ModelSpec names itself, read as the type that they have there.
NAMED_FIELDS: Mapping[str, Field[Any]] = {
    field.metadata["config"]: field for field in fields(ModelSpec) if "config" in field.metadata
}
# By field of ModelSpec or RotaryScaling: the config fields that its check depends on, the most likely cause first.
_BLAMED: Mapping[str, tuple[str, ...]] = {
    **{field.name: (name,) for name, field in NAMED_FIELDS.items()},
    "num_layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "ffn": ("intermediate_size", "moe_intermediate_size", "hidden_size"),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads", "num_attention_heads"),
    "head_dim": ("head_dim", "partial_rotary_factor", "hidden_size", "num_attention_heads"),
    "vocab": ("vocab_size",),
    "max_positions": ("max_position_embeddings",),
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
# Fields of options that no model has until ModelSpec names them, with the values that switch them off. Some belong to
# related models: transformers would ignore them, and compute another model than the one that was meant.
_SWITCHED_OFF: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("add_cross_attention", "is_encoder_decoder"), (False, None)),
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
UNMODELLED = {name: off for name, off in _SWITCHED_OFF.items() if name not in NAMED_FIELDS}
# Config fields that are true or false, and the fields of ModelSpec that they set.
_FLAGS: Mapping[str, tuple[str, ...]] = {
    "attention_bias": ("qkv_bias", "out_bias"),
    "mlp_bias": ("mlp_bias",),
    "use_parallel_residual": ("parallel_residual",),
    "tie_word_embeddings": ("tied_embeddings",),
}
_ROTARY_KEYS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
)


def spec_from_config(config: Mapping[str, object], *, name: str, source: str) -> ModelSpec:
    """Read the data of a ``config.json``, or raise one InputError that names every faulty field.

    >>> sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 128, "vocab_size": 256}
    >>> spec_from_config({"model_type": "gpt2", **sizes}, name="mine", source="me").ffn
    256
    """
    name_of_type = config.get("model_type")
    if not isinstance(name_of_type, str) or name_of_type not in MODEL_TYPES:
        problem = f"{show_value(name_of_type)} is not a known architecture" if "model_type" in config else "missing"
        code = "To plan another, have its code read: autoshard plan --module FILE.py:FUNCTION"
        raise InputError.of("model_type", f"{problem}. Known: {', '.join(MODEL_TYPES)}. {code}")
    kind = MODEL_TYPES[name_of_type]
    usual = {name: field.default for name, field in NAMED_FIELDS.items() if field.default is not MISSING}
    reader = _ConfigReader(config, {**usual, **SHARED_DEFAULTS, **kind.defaults})
    for name_of_field, off in UNMODELLED.items():
        reader.only(name_of_field, off, "autoshard does not model this option")
    reader.only("output_router_logits", (False, None), _BALANCE)
    for name_of_field in kind.stated.keys() - config.keys():
        value = show_value(kind.stated[name_of_field])
        reader.refuse(name_of_field, f"missing. Only {value} is modelled, and {kind.architecture} has another default")
    reader.only("architectures", ([kind.architecture], [], None), "the architecture of this model_type")
    traits: dict[str, Any] = {"norm": "rms", "gated_mlp": True, "positions": "rotary", "mlp_bias": False, **kind.fixed}
    for option, flags in _FLAGS.items():
        if option in reader.defaults:
            traits |= dict.fromkeys(flags, reader.read(bool, option))
        else:
            reader.only(option, (kind.fixed.get(flags[0], False), None), f"{kind.architecture} has no other value")
    traits |= {
        "activation": reader.choice("hidden_act", ACTIVATIONS),
        **{field.name: reader.read(cast(type[Any], field.type), name) for name, field in NAMED_FIELDS.items()},
        **_sizes(reader, kind),
        **_experts(reader, kind),
    }
    if traits["positions"] == "rotary":
        traits |= _rotary(reader, kind, traits["max_positions"])
    traits["window"] = _window(reader, kind, traits["num_layers"])
    # A valid value stands in for each field that could not be read, so that all faults are found at once.
    spec = reader.made(lambda: ModelSpec(name=name, source=source, **traits))
    if reader.faults or spec is None:
        raise InputError(reader.faults)
    return spec


class _ConfigReader:
    """Reads fields one by one; after a fault it continues with a valid value, so that all faults are found at once.

    A field may have any of the names in its ALIASES; messages use the name in the data.
    """

    def __init__(self, data: Mapping[str, object], defaults: Mapping[str, Any]) -> None:
        self.data, self.defaults = data, defaults
        self.faults = Faults()

    def refuse(self, field: str, message: str) -> None:
        self.faults.append(Fault(where=field, message=message))

    def check(self, holds: Callable[[], bool], fields: tuple[str, ...], message: str) -> None:
        """Refuse the first of these fields that is present unless the rule holds; skip it if one is faulty already."""
        spelled = [self._spelled(field) for field in fields]
        if not {fault.where for fault in self.faults}.intersection(spelled) and not holds():
            self.refuse(next((field for field in spelled if field in self.data), spelled[0]), message)

    def made(self, build: Callable[[], T]) -> T | None:
        """Build a value; report each fault that its class finds at the config fields that cause it."""
        try:
            return build()
        except InputError as error:
            for fault in error.faults:
                self.check(lambda: False, _BLAMED.get(fault.where, (fault.where,)), fault.message)
        return None

    def only(self, field: str, allowed: tuple[object, ...], reason: str) -> None:
        """Refuse a field that is present with a value that is not allowed."""
        if field in self.data and self.data[field] not in allowed:
            allowed_text = " or ".join(show_value(value) for value in allowed)
            self.refuse(field, f"must be {allowed_text}, not {show_value(self.data[field])}: {reason}")

    def read(self, kind: type[T], name: str) -> T:
        """Read a field of a type; a field without a default must be present."""
        field, harmless = self._spelled(name), cast(T, self.defaults.get(name) or 1)
        if field not in self.data:
            if name not in self.defaults:
                self.refuse(field, "missing, and it has no default")
            return self.defaults.get(name, harmless)
        for alias in ALIASES.get(name, ()):
            if alias in self.data and self.data[alias] != self.data[field]:
                theirs, ours = show_value(self.data[alias]), show_value(self.data[field])
                self.refuse(alias, f"{theirs} contradicts {field}, {ours}")
        with self.faults.of():
            return decode(kind, self.data[field], field)
        return harmless

    def whole(self, name: str, low: int = 1) -> int:
        """Read a whole number."""
        number = self.read(int, name)
        if number < low:
            self.refuse(self._spelled(name), f"must be at least {low}, not {number}")
        return max(number, low)

    def whole_or_null(self, name: str) -> int | None:
        """Read a whole number of at least 1 that may also be null."""
        is_null = self.data.get(self._spelled(name), self.defaults[name]) is None
        return None if is_null else self.whole(name)

    def choice(self, name: str, words: Mapping[str, T]) -> T:
        """Read a word, and return what it means; refuse unknown words."""
        word = self.read(str, name)
        if word not in words:
            self.refuse(self._spelled(name), f"{show_value(word)} is not known. {nearest(word, sorted(words))}")
        return words.get(word, words[self.defaults[name]])

    def _spelled(self, name: str) -> str:
        return next((field for field in (name, *ALIASES.get(name, ())) if field in self.data), name)


def _sizes(reader: _ConfigReader, kind: ModelType) -> dict[str, int]:
    hidden, heads = reader.whole("hidden_size"), reader.whole("num_attention_heads")
    ffn = (reader.whole_or_null if kind.width in reader.defaults else reader.whole)(kind.width)
    stated = reader.whole_or_null("head_dim")
    head_dim = max(1, hidden // heads) if stated is None else stated
    kv_heads = reader.whole_or_null("num_key_value_heads") or heads
    if stated is None or not kind.grouped_heads:
        message = f"the hidden size {hidden} is not a multiple of {heads} heads"
        reader.check(lambda: hidden % heads == 0, ("num_attention_heads", "hidden_size"), message)
    if not kind.grouped_heads:
        message = f"{kind.architecture} has one key/value head per query head, and head_dim is hidden size / heads"
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
        "max_positions": reader.whole("max_position_embeddings"),
    }


def _rotary(reader: _ConfigReader, kind: ModelType, max_positions: int) -> dict[str, Any]:
    """Read rotary positions: older flat fields, then ``rope_scaling`` or ``rope_parameters``, which override them."""
    # transformers prefers the flat field, and where neither is stated the context of the model.
    flat = reader.whole_or_null("original_max_position_embeddings")
    older = {name: reader.read(float, name) for name in ("rope_theta", "partial_rotary_factor")}
    field = "rope_scaling" if reader.data.get("rope_scaling") else "rope_parameters"
    data: object = reader.data.get(field) or {}
    if not isinstance(data, Mapping):
        reader.refuse(field, f"expected an object, found {show_value(data)}")
    defaults = {**older, "rope_type": "default", "original_max_position_embeddings": max_positions}
    group = _ConfigReader(cast(Mapping[str, object], data) if isinstance(data, Mapping) else {}, defaults)
    theta, fraction = group.read(float, "rope_theta"), group.read(float, "partial_rotary_factor")
    scaling = _scaling(group, flat)
    reader.faults.extend(fault.under(field) for fault in group.faults)
    if reader.defaults["partial_rotary_factor"] == 1:
        message = f"must be 1, not {fraction}: {kind.architecture} rotates whole heads"
        reader.check(lambda: fraction == 1, ("partial_rotary_factor", f"{field}.partial_rotary_factor"), message)
    return {"rotary_theta": theta, "rotary_fraction": fraction, "rotary_scaling": scaling}


def _scaling(group: _ConfigReader, original: int | None) -> RotaryScaling | None:
    for key in group.data:
        if key not in _ROTARY_KEYS:
            group.refuse(key, f"unknown key. {nearest(key, _ROTARY_KEYS)}")
    kinds: Mapping[str, Literal["linear", "llama3"] | None] = {"default": None, "linear": "linear", "llama3": "llama3"}
    kind = group.choice("rope_type", kinds)
    if kind is None:
        return None
    stated: dict[str, Any] = {"factor": group.read(float, "factor")}
    if kind == "llama3":
        stated["low_frequency_factor"] = group.read(float, "low_freq_factor")
        stated["high_frequency_factor"] = group.read(float, "high_freq_factor")
        positions = group.whole("original_max_position_embeddings")
        stated["original_positions"] = original or positions
    return group.made(lambda: RotaryScaling(kind=kind, **stated))


def _experts(reader: _ConfigReader, kind: ModelType) -> dict[str, int]:
    if "num_experts_per_tok" not in reader.defaults:
        for field in ("num_local_experts", "num_experts", "num_experts_per_tok"):
            reader.only(field, (0, 1, None), f"{kind.architecture} has no experts")
        return {}
    chosen = reader.whole("num_experts_per_tok")
    return {"num_experts": reader.whole("num_local_experts"), "experts_per_token": chosen}


def _window(reader: _ConfigReader, kind: ModelType, num_layers: int) -> int | None:
    """Return the attention window that all layers have, None without one; refuse layers that differ."""
    if kind.window == "none":
        if reader.data.get("use_sliding_window") is not False:
            reader.only("sliding_window", (None,), f"{kind.architecture} attends to the whole sequence")
        window = None
    elif kind.window == "all layers" or reader.read(bool, "use_sliding_window"):
        window = reader.whole_or_null("sliding_window")
    else:
        window = None
    layers = reader.data.get("layer_types")
    if kind.window == "some layers" and window is not None:
        first = reader.whole("max_window_layers", low=0)
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
