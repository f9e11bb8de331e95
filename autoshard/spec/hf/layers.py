"""Read from a ``config.json`` how layers differ: windows, linear attention, MLPs for experts, no rotary positions."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from autoshard.spec.hf.model_type import ModelType
from autoshard.spec.hf.reader import ConfigReader
from autoshard.spec.hf.rotary import local_rotary_theta
from autoshard.spec.model import LAYER, MAX_LAYERS, LayerKind
from autoshard.spec.model_parts import LinearAttention
from autoshard.spec.repeats import compress

_LINEAR_HEADS = "linear_num_key_heads"
_BEYOND, _OLMO_EPS = "linear_allow_neg_eigval", 1e-5  # cited: OlmoHybridGatedDeltaNet of transformers norms with this


def layers_that_differ(reader: ConfigReader, kind: ModelType, traits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attention window of all layers, None without one; or the kinds of layers, and their order."""
    window, num_layers = _stated_window(reader, kind), traits["num_layers"]
    if num_layers > MAX_LAYERS:
        return {}  # refused with the sizes, and too many to list
    local, dense = _local_layers(reader, kind, num_layers, window), _dense_layers(reader, kind, num_layers)
    everywhere = len({*local}) == 1
    theta = local_rotary_theta(reader) if kind.rotary_of_windows else None
    if theta == traits.get("rotary_theta") and traits.get("rotary_scaling") is None:
        theta = None  # the same as in the other layers
    linear, linear_layers = _linear_attention(reader, kind, traits), _linear_layers(reader, kind, num_layers)
    unrotated = _unrotated_layers(reader, kind, [window is None or is_local for is_local in local])
    names = [
        ("dense",) * is_dense
        + ("linear",) * is_linear
        + ("local",) * (is_local and not everywhere)
        + ("unrotated",) * is_unrotated
        for is_dense, is_linear, is_local, is_unrotated in zip(dense, linear_layers, local, unrotated, strict=True)
    ]
    read_kinds = [
        reader.made(
            lambda name=name: LayerKind(
                name="_".join(name),
                dense_ffn=reader.whole("intermediate_size") if "dense" in name else None,
                window=window if "local" in name else None,
                rotary_theta=theta if "local" in name else None,
                positions="none" if "unrotated" in name else None,
                linear=linear if "linear" in name else None,
                norm_place="before" if "linear" in name and traits.get("norm_place") else None,
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


def _linear_attention(reader: ConfigReader, kind: ModelType, traits: Mapping[str, Any]) -> LinearAttention | None:
    """Return the linear attention of a type that has some."""
    if _LINEAR_HEADS not in kind.defaults:
        return None
    names = ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
    heads = traits["num_heads"]
    key_heads, value_heads, key_dim, value_dim, taps = map(reader.whole_or_null, (_LINEAR_HEADS, *names))
    key_heads, value_heads = key_heads or heads, value_heads or heads
    key_dim = key_dim or max(1, int(0.75 * traits["hidden"] / key_heads))  # as OLMo Hybrid leaves them out
    value_dim = value_dim or 2 * key_dim
    message = f"must be linear_value_head_dim, {value_dim}: files with other keys are not read"
    reader.check(lambda: not kind.equal_heads or key_dim == value_dim, names[1:3], message)
    sizes = {"key_heads": key_heads, "value_heads": value_heads, "key_dim": key_dim, "value_dim": value_dim}
    options: dict[str, Any] = {}
    if _BEYOND in kind.defaults:
        options = {"reach": 2.0 if reader.read(bool, _BEYOND) else 1.0, "norm_eps": _OLMO_EPS}
    return reader.made(lambda: LinearAttention(**sizes, taps=taps or 1, **options))


def _linear_layers(reader: ConfigReader, kind: ModelType, num_layers: int) -> list[bool]:
    """Say which layers have linear attention in the place of attention."""
    if _LINEAR_HEADS not in kind.defaults:
        return [False] * num_layers
    fields, of_olmo = ("layer_types", "full_attention_interval", "num_hidden_layers"), _BEYOND in kind.defaults
    if reader.data.get("layer_types") is None:
        period = reader.whole("full_attention_interval")
        linear = [(number + 1) % period != 0 for number in range(num_layers)]
        linear[-1] &= not (of_olmo and all(linear))
    else:
        words = {"full_attention": False, "linear_attention": True}
        linear = _by_words(reader, words, num_layers) or [False, True]
    message = f"{kind.architecture} has layers of both kinds: full_attention and linear_attention"
    reader.check(lambda: not of_olmo or len({*linear}) > 1, fields, message)
    return linear if len(linear) == num_layers else [False] * num_layers


def _by_words(reader: ConfigReader, words: Mapping[str, bool], num_layers: int) -> list[bool]:
    """Return what the words in ``layer_types`` say of each layer; nothing if they are refused."""
    stated = reader.data["layer_types"]
    layers = (
        [layer for layer in cast(list[object], stated) if isinstance(layer, str)] if isinstance(stated, list) else []
    )
    is_listed = len(layers) == num_layers and words.keys() >= {*layers} and layers == stated
    message = f"must be {num_layers} of {', '.join(map(repr, words))}, as the other fields say"
    reader.check(lambda: is_listed, ("layer_types", "num_hidden_layers"), message)
    return [words[layer] for layer in layers] if is_listed else []


def _stated_window(reader: ConfigReader, kind: ModelType) -> int | None:
    """Return the attention window that some layers have; None if none has one."""
    if kind.window == "none":
        if reader.data.get("use_sliding_window") is not False:
            reader.only("sliding_window", (None,), f"{kind.architecture} attends to the whole sequence")
        return None
    used = kind.window not in ("all layers if used", "some layers", "turns if used") or reader.read(
        bool, "use_sliding_window"
    )
    return reader.whole_or_null("sliding_window") if used else None


def _local_layers(reader: ConfigReader, kind: ModelType, num_layers: int, window: int | None) -> list[bool]:
    """Say which layers attend to a window alone."""
    stated, from_one_on = reader.data.get("layer_types"), kind.window in ("some layers", "last layers")
    mixed = from_one_on or kind.window in ("pattern", "by turns", "turns if used")
    if stated is None and window and kind.window == "turns if used":
        last = reader.whole("max_window_layers", low=0)
        return [number % 2 == 0 and number < last for number in range(num_layers)]
    if stated is None and kind.window in ("pattern", "by turns"):
        period = reader.whole("sliding_window_pattern") if kind.window == "pattern" else 2
        return [window is not None and (number + 1) % period != 0 for number in range(num_layers)]
    if _LINEAR_HEADS in kind.defaults:
        return [False] * num_layers
    if stated is None or (not mixed and stated == _same_layers(window, num_layers)):
        first = reader.whole("max_window_layers", low=0) if from_one_on and window else 0
        return [window is not None and number >= first for number in range(num_layers)]
    words = {"full_attention": False, **({"sliding_attention": True} if mixed and window else {})}
    if not mixed:
        words = {_same_layers(window, 1)[0]: window is not None}
    return _by_words(reader, words, num_layers) or [window is not None] * num_layers


def _unrotated_layers(reader: ConfigReader, kind: ModelType, in_window: Sequence[bool]) -> list[bool]:
    """Say which layers turn no queries and keys: those that a config lists, or those that see beyond the window."""
    num_layers = len(in_window)
    if kind.unrotated == "beyond the window":
        return [not is_inside for is_inside in in_window]
    if kind.unrotated in ("none", "without theta"):
        return [False] * num_layers
    turned = reader.whole_numbers("no_rope_layers")  # 1 where layers do turn them
    if not turned:
        period = reader.whole("no_rope_layer_interval")
        return [number % period == 0 for number in range(1, num_layers + 1)]
    fields = "no_rope_layers", "num_hidden_layers"
    reader.check(lambda: len(turned) >= num_layers, fields, f"must have a number for each of {num_layers} layers")
    return [number < len(turned) and not turned[number] for number in range(num_layers)]


def _same_layers(window: int | None, num_layers: int) -> list[str]:
    return ["full_attention" if window is None else "sliding_attention"] * num_layers


def has_no_experts(reader: ConfigReader, kind: ModelType) -> bool:
    """Say whether so many layers have an MLP in the place of experts that none has experts."""
    num_layers = reader.whole("num_hidden_layers")
    if "moe_layer_interval" in kind.defaults and num_layers <= MAX_LAYERS:
        return not _mixtures_between(reader, num_layers)
    return _leading_dense(reader, kind) >= num_layers


def _dense_layers(reader: ConfigReader, kind: ModelType, num_layers: int) -> list[bool]:
    """Say which layers have an MLP in the place of experts, where a model has experts."""
    if has_no_experts(reader, kind):
        return [False] * num_layers
    if "first_k_dense_replace" in kind.defaults:
        first = _leading_dense(reader, kind)
        return [number < first for number in range(num_layers)]
    if "moe_layer_interval" in kind.defaults:
        mixtures = _mixtures_between(reader, num_layers)
        return [number not in mixtures for number in range(num_layers)]
    if "mlp_only_layers" not in kind.defaults:
        return [False] * num_layers
    listed, step = reader.whole_numbers("mlp_only_layers"), reader.whole("decoder_sparse_step")
    return [number in listed or (number + 1) % step != 0 for number in range(num_layers)]


def _mixtures_between(reader: ConfigReader, num_layers: int) -> Sequence[int]:
    """Return which layers have experts: every so many from one layer to another."""
    first, step = reader.whole("moe_layer_start_index", low=0), reader.whole("moe_layer_interval")
    last = reader.whole("moe_layer_end_index", low=-1)
    numbers = range(first, num_layers if last == -1 else min(last + 1, num_layers))
    return [number for number in numbers if (number + 1) % step == 0]


def _leading_dense(reader: ConfigReader, kind: ModelType) -> int:
    """Return how many first layers have an MLP in the place of experts, where a config counts these."""
    if "first_k_dense_replace" not in kind.defaults:
        return 0
    if "mlp_layer_types" not in kind.defaults:
        return reader.whole("first_k_dense_replace", low=0)
    # The class reads these names alone, of which it makes the first "dense" where none is stated.
    num_layers = reader.whole("num_hidden_layers")
    stated: object = reader.data.get("mlp_layer_types") or ["dense", *["sparse"] * (num_layers - 1)]
    first = cast(list[object], stated).count("dense") if isinstance(stated, list) else 0
    same = stated == ["dense"] * first + ["sparse"] * (num_layers - first)
    counted = reader.data.get("first_k_dense_replace") in (None, first)
    fields = "mlp_layer_types", "first_k_dense_replace"
    message = f"must name {num_layers} layers, first those that are dense, and as many as first_k_dense_replace says"
    reader.check(lambda: same and counted, fields, message)
    return first
