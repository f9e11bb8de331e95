"""Make a ModelSpec from a Hugging Face ``config.json``."""

import math
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any, Literal, cast

from autoshard.errors import InputError, inside, nearest
from autoshard.spec.hf_reader import ConfigReader, fp8_block
from autoshard.spec.hf_types import (
    ACTIVATIONS,
    MODEL_TYPES,
    NAMED_FIELDS,
    SAME_CODE,
    SHARED_DEFAULTS,
    UNMODELLED,
    WITH_TEXT_CONFIG,
    ModelType,
)
from autoshard.spec.model import LAYER, MAX_LAYERS, LayerKind, ModelSpec, Router
from autoshard.spec.model_parts import LatentAttention, RotaryScaling
from autoshard.spec.record import decode, show_value
from autoshard.spec.repeats import compress

_BALANCE = (
    "the loss that it asks for belongs to the question: --router-balance-loss, or router_balance_loss in a recipe"
)
_ROTARY_OF_LAYERS = ("full_attention", "sliding_attention")
_ROTARY_KEYS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
)
_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}  # as in transformers
_YARN_KEYS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")


def spec_from_config(config: Mapping[str, object], *, name: str, source: str) -> ModelSpec:
    """Read the data of a ``config.json``, or raise one InputError that names every faulty field.

    >>> sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 128, "vocab_size": 256}
    >>> spec_from_config({"model_type": "gpt2", **sizes}, name="mine", source="me").ffn
    256
    """
    name_of_type = config.get("model_type")
    if isinstance(name_of_type, str) and name_of_type in WITH_TEXT_CONFIG:
        fp8_block(config)
        with inside("text_config"):
            text = decode(dict[str, object], config.get("text_config"))
            return _spec_of_text({"model_type": WITH_TEXT_CONFIG[name_of_type], **text}, name, source)
    return _spec_of_text(config, name, source)


def _spec_of_text(config: Mapping[str, object], name: str, source: str) -> ModelSpec:
    kind = _kind_of(config)
    usual = {name: field.default for name, field in NAMED_FIELDS.items() if field.default is not MISSING}
    reader = ConfigReader(config, {**usual, **SHARED_DEFAULTS, **kind.defaults})
    for name_of_field, off in UNMODELLED.items():
        if name_of_field not in kind.defaults:
            reader.only(name_of_field, off, "autoshard does not model this option")
    reader.made(lambda: fp8_block(config))
    reader.only("output_router_logits", (False, None), _BALANCE)
    reader.only("architectures", ([kind.architecture], [], None), "the architecture of this model_type")
    traits: dict[str, Any] = {"norm": "rms", "gated_mlp": True, "positions": "rotary", "mlp_bias": False, **kind.fixed}
    for option, flags in kind.flags.items():
        if option in reader.defaults:
            traits |= dict.fromkeys(flags, reader.read(bool, option))
        else:
            reader.only(option, (kind.fixed.get(flags[0], False), None), f"{kind.architecture} has no other value")
    traits |= {
        "activation": reader.choice("hidden_act", ACTIVATIONS),
        **{field.name: reader.read(cast(type[Any], field.type), name) for name, field in NAMED_FIELDS.items()},
        **_sizes(reader, kind),
        **_latent(reader, kind),
    }
    traits |= _experts(reader, kind, traits["ffn"])
    if traits["positions"] == "rotary":
        traits |= _rotary(reader, kind, traits["max_positions"], traits["head_dim"])
    traits |= _score_scale(reader, kind, traits["head_dim"])
    traits |= _clamped_glu(reader, kind)
    traits |= _layers_that_differ(reader, kind, traits)
    # A valid value stands in for each field that could not be read, so that all faults are found at once.
    spec = reader.made(lambda: ModelSpec(name=name, source=source, **traits))
    if reader.faults or spec is None:
        raise InputError(dict.fromkeys(reader.faults))  # a field may be read more than once
    return spec


def _kind_of(config: Mapping[str, object]) -> ModelType:
    stated = config.get("model_type")
    if isinstance(stated, str) and (kind := MODEL_TYPES.get(SAME_CODE.get(stated, stated))):
        return kind
    problem = f"{show_value(stated)} is not a known architecture" if "model_type" in config else "missing"
    code = "To plan another, have its code read: autoshard plan --module FILE.py:FUNCTION"
    raise InputError.of(
        "model_type", f"{problem}. Known: {', '.join((*MODEL_TYPES, *SAME_CODE, *WITH_TEXT_CONFIG))}. {code}"
    )


def _sizes(reader: ConfigReader, kind: ModelType) -> dict[str, int]:
    hidden, heads = reader.whole("hidden_size"), reader.whole("num_attention_heads")
    width = "intermediate_size" if _all_dense(reader, kind) else kind.width
    ffn = (reader.whole_or_null if width in reader.defaults else reader.whole)(width)
    stated = _parts_of_head(reader) if "kv_lora_rank" in kind.defaults else reader.whole_or_null("head_dim")
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


def _parts_of_head(reader: ConfigReader) -> int:
    return reader.whole("qk_nope_head_dim") + reader.whole("qk_rope_head_dim")


def _latent(reader: ConfigReader, kind: ModelType) -> dict[str, LatentAttention | None]:
    """Read of which narrow states queries, keys and values are made."""
    if "kv_lora_rank" not in kind.defaults:
        return {}
    reader.only("rope_interleave", (True,), "heads whose halves are turned against each other are not read")
    heads = reader.whole("num_attention_heads")
    message = f"must be num_attention_heads, {heads}: every head has a key of its own"
    keys = reader.whole_or_null("num_key_value_heads") or heads
    reader.check(lambda: keys == heads, ("num_key_value_heads", "num_attention_heads"), message)
    query_rank = reader.whole_or_null("q_lora_rank")
    kv_rank, rotary_dim, value_dim = map(reader.whole, ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"))
    latent = reader.made(
        lambda: LatentAttention(query_rank=query_rank, kv_rank=kv_rank, rotary_dim=rotary_dim, value_dim=value_dim)
    )
    return {"latent": latent}


def _rotary(reader: ConfigReader, kind: ModelType, max_positions: int, head_dim: int) -> dict[str, Any]:
    """Read rotary positions: older flat fields, then ``rope_scaling`` or ``rope_parameters``, which override them."""
    # transformers prefers the flat field, and where neither is stated the context of the model.
    flat = reader.whole_or_null("original_max_position_embeddings")
    older = {name: reader.read(float, name) for name in ("rope_theta", "partial_rotary_factor")}
    if "partial_rotary_factor" not in reader.data and reader.data.get("rotary_dim") and "rotary_dim" in kind.defaults:
        older["partial_rotary_factor"] = reader.whole("rotary_dim") / max(1, head_dim)
    field = "rope_scaling" if reader.data.get("rope_scaling") else "rope_parameters"
    data = _object(reader, field)
    if field == "rope_parameters" and kind.window == "pattern":
        _no_other_keys(reader, data, _ROTARY_OF_LAYERS, f"{field}.")
        field, data = f"{field}.full_attention", _object(reader, field, "full_attention")
    data = data or reader.defaults.get("rope_scaling", {})
    defaults = {**older, "rope_type": "default", "original_max_position_embeddings": max_positions, **_YARN_DEFAULTS}
    group = ConfigReader(data, defaults)
    theta, fraction = group.read(float, "rope_theta"), group.read(float, "partial_rotary_factor")
    scaling = _scaling(group, flat, part="kv_lora_rank" in kind.defaults)
    reader.faults.extend(fault.under(field) for fault in group.faults)
    if reader.defaults["partial_rotary_factor"] == 1 and "rotary_dim" not in kind.defaults:
        message = f"must be 1, not {fraction}: {kind.architecture} rotates whole heads"
        reader.check(lambda: fraction == 1, ("partial_rotary_factor", f"{field}.partial_rotary_factor"), message)
    return {"rotary_theta": theta, "rotary_fraction": fraction, "rotary_scaling": scaling}


def _object(reader: ConfigReader, *path: str) -> Mapping[str, object]:
    """Return the object at a path of names, empty where there is none; refuse what is no object."""
    data = reader.data
    for name in path:
        inner: object = data.get(name) or {}
        if not isinstance(inner, Mapping):
            reader.refuse(".".join(path), f"expected an object, found {show_value(inner)}")
            return {}
        data = cast(Mapping[str, object], inner)
    return data


def _no_other_keys(reader: ConfigReader, data: Mapping[str, object], names: tuple[str, ...], prefix: str = "") -> None:
    for key in data:
        if key not in names:
            reader.refuse(f"{prefix}{key}", f"unknown key. {nearest(key, names)}")


def _local_theta(reader: ConfigReader) -> float:
    """Return the rotary base of layers that attend to a window, where it is one of their own."""
    field, flat = "rope_parameters.sliding_attention", "rope_local_base_freq"
    usual = (
        reader.read(float, flat) if flat in reader.defaults else reader.defaults["rope_theta"]
    )  # not the stated base
    group = ConfigReader(_object(reader, *field.split(".")), {"rope_theta": usual})
    group.only("rope_type", ("default",), "layers that attend to a window have frequencies that are not scaled")
    theta = group.read(float, "rope_theta")
    reader.faults.extend(fault.under(field) for fault in group.faults)
    stated = f"{field}.rope_theta" if "rope_theta" in group.data else "rope_local_base_freq"
    reader.check(lambda: theta >= 1, (stated,), f"must be at least 1, not {theta}")
    return max(theta, 1)


def _scaling(group: ConfigReader, original: int | None, *, part: bool) -> RotaryScaling | None:
    """Read how frequencies are scaled; ``part`` says that the architecture turns a part of each head."""
    names = ("linear", "llama3", "yarn")
    kinds: Mapping[str, Literal["linear", "llama3", "yarn"] | None] = {
        "default": None,
        **{name: name for name in names},
    }
    kind = group.choice("rope_type", kinds)
    _no_other_keys(group, group.data, (*_ROTARY_KEYS, *_YARN_KEYS) if kind == "yarn" else _ROTARY_KEYS)
    if kind is None:
        return None
    stated: dict[str, Any] = {"factor": group.read(float, "factor")}
    if kind != "linear":
        slow, fast = ("beta_slow", "beta_fast") if kind == "yarn" else ("low_freq_factor", "high_freq_factor")
        stated["low_frequency_factor"] = group.read(float, slow)
        stated["high_frequency_factor"] = group.read(float, fast)
        positions = group.whole("original_max_position_embeddings")
        stated["original_positions"] = original or positions
    if kind == "yarn":
        stated |= {"truncate": group.read(bool, "truncate"), "mscale": _mscale(group, stated["factor"], part=part)}
    return group.made(lambda: RotaryScaling(kind=kind, **stated))


def _mscale(group: ConfigReader, factor: float, *, part: bool) -> float:
    """Return how far YaRN makes scores larger, from what queries and keys are multiplied by.

    transformers multiplies what is turned, and for an architecture that turns a ``part`` of each head all scores.
    """
    if factor < 1:
        return 0.0  # refused with the scaling
    per_unit = 0.1 * math.log(factor)
    fields = ("mscale_all_dim", "mscale", "attention_factor")
    of_all, mscale, turned = (group.read(float, name) if group.data.get(name) else None for name in fields)
    if turned is None:
        turned = (1 + per_unit * mscale) / (1 + per_unit * of_all) if mscale and of_all else 1 + per_unit
    if part:
        grown = f"what is turned would grow {turned:.4g} times, and the rest of a head not"
        group.check(lambda: turned == 1, fields, f"{grown}. State mscale_all_dim, and mscale with the same value")
        return of_all or 0.0
    group.check(lambda: factor > 1 or turned == 1, fields, "must be 1 where factor is 1")
    return round((turned - 1) / per_unit, 12) if per_unit else 0.0


def _score_scale(reader: ConfigReader, kind: ModelType, head_dim: int) -> dict[str, float]:
    scalar = reader.read(float, "query_pre_attn_scalar") if "query_pre_attn_scalar" in kind.defaults else head_dim
    return {"query_scalar": scalar} if scalar != head_dim else {}


def _clamped_glu(reader: ConfigReader, kind: ModelType) -> dict[str, float]:
    if "swiglu_limit" not in kind.defaults:
        return {}
    return {"glu_limit": reader.read(float, "swiglu_limit"), "glu_slope": reader.read(float, "swiglu_alpha")}


def _experts(reader: ConfigReader, kind: ModelType, ffn: int) -> dict[str, Any]:
    if kind.router == "chosen" and "num_experts_per_tok" not in reader.defaults:
        for field in ("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok"):
            reader.only(field, (0, 1, None), f"{kind.architecture} has no experts")
        return {}
    if _all_dense(reader, kind):
        return {}
    chosen, shared = reader.whole("num_experts_per_tok"), "n_shared_experts" in kind.defaults
    return {
        "num_experts": reader.whole("num_local_experts"),
        "experts_per_token": chosen,
        "shared_ffn": reader.whole("n_shared_experts") * ffn if shared else 0,
        "router": _router(reader, kind),
    }


def _router(reader: ConfigReader, kind: ModelType) -> Router | None:
    """Read how a token's experts are chosen and weighted; None is the softmax of the chosen logits."""
    if kind.router == "chosen":
        return None
    corrected = kind.router == "corrected"
    method = _method(reader, kind)
    if kind.router == "groups":
        reader.only("norm_topk_prob", (False, None), f"{kind.architecture} does not normalise the weights of experts")
    limits = ("n_group", "topk_group") if method and "n_group" in reader.defaults else ()
    groups, inside_of = [reader.whole_or_null(name) or 1 for name in limits] or (1, 1)
    limited = inside_of != groups  # within all groups is without a limit
    always = "norm_topk_prob" not in reader.defaults
    router = reader.made(
        lambda: Router(
            scores="sigmoid" if corrected else "softmax",
            normalised=kind.router != "groups" and (always or reader.read(bool, "norm_topk_prob")),
            scale=reader.read(float, "routed_scaling_factor") if "routed_scaling_factor" in reader.defaults else 1.0,
            groups=groups if limited else 1,
            chosen_groups=inside_of if limited else 1,
            group_score="best two" if corrected and limited else "best",
            correction=corrected,
        )
    )
    return None if router == Router() else router


def _method(reader: ConfigReader, kind: ModelType) -> bool:
    """Say whether the experts of a token may lie in a few groups alone; refuse methods that are not those of a type."""
    if kind.router == "softmax":
        return False
    corrected = kind.router == "corrected"
    scores = "sigmoid" if corrected else "softmax"
    reader.only("scoring_func", (scores, None), f"{kind.architecture} has no other scores")
    if corrected:
        reader.only("topk_method", ("noaux_tc", None), f"{kind.architecture} has no other method")
        return True
    return reader.choice("topk_method", {"greedy": False, "group_limited_greedy": True})


def _layers_that_differ(reader: ConfigReader, kind: ModelType, traits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attention window of all layers, None without one; or the kinds of layers, and their order."""
    window, num_layers = _stated_window(reader, kind), traits["num_layers"]
    if num_layers > MAX_LAYERS:
        return {}  # refused with the sizes, and too many to list
    local, dense = _local_layers(reader, kind, num_layers, window), _dense_layers(reader, kind, num_layers)
    everywhere = len({*local}) == 1
    theta = _local_theta(reader) if kind.window == "pattern" else None
    if theta == traits.get("rotary_theta") and traits.get("rotary_scaling") is None:
        theta = None  # the same as in the other layers
    names = [
        ("dense",) * is_dense + ("local",) * (is_local and not everywhere)
        for is_dense, is_local in zip(dense, local, strict=True)
    ]
    read_kinds = [
        reader.made(
            lambda name=name: LayerKind(
                name="_".join(name),
                dense_ffn=reader.whole("intermediate_size") if "dense" in name else None,
                window=window if "local" in name else None,
                rotary_theta=theta if "local" in name else None,
            )
        )
        for name in dict.fromkeys(names)
        if name
    ]
    kinds = tuple(layer_kind for layer_kind in read_kinds if layer_kind)
    if len(kinds) < len(read_kinds):
        return {}
    order = compress("_".join(name) or LAYER for name in names) if kinds else ""
    differing = {"window": window if everywhere and local[0] else None, "kinds": kinds, "order": order}
    return differing | ({"rotary_theta": theta, "rotary_scaling": None} if differing["window"] and theta else {})


def _stated_window(reader: ConfigReader, kind: ModelType) -> int | None:
    """Return the attention window that some layers have; None if none has one."""
    if kind.window == "none":
        if reader.data.get("use_sliding_window") is not False:
            reader.only("sliding_window", (None,), f"{kind.architecture} attends to the whole sequence")
        return None
    used = kind.window not in ("all layers if used", "some layers") or reader.read(bool, "use_sliding_window")
    return reader.whole_or_null("sliding_window") if used else None


def _local_layers(reader: ConfigReader, kind: ModelType, num_layers: int, window: int | None) -> list[bool]:
    """Say which layers attend to a window alone."""
    stated, from_one_on = reader.data.get("layer_types"), kind.window in ("some layers", "last layers")
    mixed = from_one_on or kind.window in ("pattern", "by turns")
    if stated is None and kind.window in ("pattern", "by turns"):
        period = reader.whole("sliding_window_pattern") if kind.window == "pattern" else 2
        return [window is not None and (number + 1) % period != 0 for number in range(num_layers)]
    if stated is None or (not mixed and stated == _same_layers(window, num_layers)):
        first = reader.whole("max_window_layers", low=0) if from_one_on and window else 0
        return [window is not None and number >= first for number in range(num_layers)]
    words = {"full_attention": False, **({"sliding_attention": True} if mixed and window else {})}
    if not mixed:
        words = {_same_layers(window, 1)[0]: window is not None}
    layers = (
        [layer for layer in cast(list[object], stated) if isinstance(layer, str)] if isinstance(stated, list) else []
    )
    is_listed = len(layers) == num_layers and words.keys() >= {*layers} and layers == stated
    message = f"must be {num_layers} of {', '.join(map(repr, words))}, as the other fields say"
    reader.check(lambda: is_listed, ("layer_types", "num_hidden_layers"), message)
    return [words[layer] for layer in layers] if is_listed else [window is not None] * num_layers


def _same_layers(window: int | None, num_layers: int) -> list[str]:
    return ["full_attention" if window is None else "sliding_attention"] * num_layers


def _all_dense(reader: ConfigReader, kind: ModelType) -> bool:
    """Say whether so many first layers have an MLP in the place of experts that none has experts."""
    key = "first_k_dense_replace"
    return key in kind.defaults and reader.whole(key, low=0) >= reader.whole("num_hidden_layers")


def _dense_layers(reader: ConfigReader, kind: ModelType, num_layers: int) -> list[bool]:
    """Say which layers have an MLP in the place of experts, where a model has experts."""
    if _all_dense(reader, kind):
        return [False] * num_layers
    if "first_k_dense_replace" in kind.defaults:
        first = reader.whole("first_k_dense_replace", low=0)
        return [number < first for number in range(num_layers)]
    if "mlp_only_layers" not in kind.defaults:
        return [False] * num_layers
    listed, step = reader.whole_numbers("mlp_only_layers"), reader.whole("decoder_sparse_step")
    return [number in listed or (number + 1) % step != 0 for number in range(num_layers)]
