"""Read rotary positions from a ``config.json``: of all layers, and of those that attend to a window."""

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

from autoshard.errors import nearest
from autoshard.spec.hf.model_type import ModelType
from autoshard.spec.hf.reader import ConfigReader
from autoshard.spec.model_parts import RotaryScaling
from autoshard.spec.record import show_value

_ROTARY_OF_LAYERS = ("full_attention", "sliding_attention")
_ROTARY_KEYS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
)
_Scaling = Literal["linear", "llama3", "yarn"]
_SCALINGS: Mapping[str, _Scaling | None] = {
    "default": None, "linear": "linear", "llama3": "llama3", "yarn": "yarn"
}  # fmt: skip
_LONG_ROPE = ("longrope", "su", "yarn")  # as Phi-3 names it; yarn is another scaling elsewhere
_NO_LONG_ROPE = (
    "each frequency has a factor of its own, and another one in long sequences. Write null to plan alone: times and "
    "memory are the same, but what would be trained is another model"
)
_GROWTH = "llama_4_scaling_beta"  # of queries: 1 + it * log(1 + position // original context)
_OF_PICTURES = "mrope_section", "mrope_interleaved"
_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}  # as in transformers
_YARN_KEYS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")


def rotary_positions(reader: ConfigReader, kind: ModelType, max_positions: int, head_dim: int) -> dict[str, Any]:
    """Read rotary positions: older flat fields, then ``rope_scaling`` or ``rope_parameters``, which override them."""
    # transformers prefers the flat field, and where neither is stated the context of the model.
    flat = reader.whole_or_null("original_max_position_embeddings")
    older = {name: reader.read(float, name) for name in ("rope_theta", "partial_rotary_factor")}
    if "partial_rotary_factor" not in reader.data and reader.data.get("rotary_dim") and "rotary_dim" in kind.defaults:
        older["partial_rotary_factor"] = reader.whole("rotary_dim") / max(1, head_dim)
    field = "rope_scaling" if reader.data.get("rope_scaling") else "rope_parameters"
    data = _object(reader, field)
    if field == "rope_parameters" and kind.rotary_of_windows:
        _no_other_keys(reader, data, _ROTARY_OF_LAYERS, f"{field}.")
        field, data = f"{field}.full_attention", _object(reader, field, "full_attention")
    data = data or reader.defaults.get("rope_scaling", {})
    defaults = {**older, "rope_type": "default", "original_max_position_embeddings": max_positions, **_YARN_DEFAULTS}
    group = ConfigReader(data, defaults)
    theta, fraction = group.read(float, "rope_theta"), group.read(float, "partial_rotary_factor")
    if _GROWTH in kind.defaults:
        _check_growth(reader, group, field)
    scaling = _scaling(group, flat, kind)
    reader.faults.extend(fault.under(field) for fault in group.faults)
    if not {"partial_rotary_factor", "rotary_dim"} & kind.defaults.keys():
        message = f"must be 1, not {fraction}: {kind.architecture} rotates whole heads"
        reader.check(lambda: fraction == 1, ("partial_rotary_factor", f"{field}.partial_rotary_factor"), message)
    return {"rotary_theta": theta, "rotary_fraction": fraction, "rotary_scaling": scaling}


def turns_nothing(reader: ConfigReader, kind: ModelType) -> bool:
    """Say whether a config turns no queries and keys at all: it states the base of its angles, and that is null."""
    stated = _object(reader, "rope_parameters")
    return kind.unrotated == "without theta" and "rope_theta" in stated and stated["rope_theta"] is None


def _check_growth(reader: ConfigReader, group: ConfigReader, field: str) -> None:
    """Refuse queries that grow with their position, which those of an original context do not."""
    growth, context = group.data.get(_GROWTH), group.data.get("original_max_position_embeddings", "16384")
    if growth != 0:
        stated = f"must be 0, not {show_value(growth)}" if group.data else f"missing, and must state {_GROWTH} 0"
        same = f"queries behind the first {context} positions would grow. With 0 shorter sequences are computed alike"
        reader.refuse(f"{field}.{_GROWTH}" if group.data else field, f"{stated}: {same}")


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


def local_rotary_theta(reader: ConfigReader) -> float:
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


def _scaling(group: ConfigReader, original: int | None, of_type: ModelType) -> RotaryScaling | None:
    """Read how frequencies are scaled."""
    kinds: Mapping[str, _Scaling | None] = {name: _SCALINGS[name] for name in of_type.rope_types}
    rope_type = group.data.get("rope_type", group.data.get("type"))
    if rope_type in _LONG_ROPE and rope_type not in kinds:
        group.check(lambda: False, ("rope_type",), f"{show_value(rope_type)} is not read: {_NO_LONG_ROPE}")
        return None
    kind = group.choice("rope_type", kinds)
    more = (_GROWTH, "max_position_embeddings") if _GROWTH in of_type.defaults else ()
    more += tuple(name for name in _OF_PICTURES if name in of_type.defaults)
    _no_other_keys(group, group.data, (*_ROTARY_KEYS, *more, *(_YARN_KEYS if kind == "yarn" else ())))
    if kind is None:
        return None
    fields: dict[str, Any] = {"factor": group.read(float, "factor")}
    if kind != "linear":
        slow, fast = ("beta_slow", "beta_fast") if kind == "yarn" else ("low_freq_factor", "high_freq_factor")
        fields["low_frequency_factor"] = group.read(float, slow)
        fields["high_frequency_factor"] = group.read(float, fast)
        positions = group.whole("original_max_position_embeddings")
        fields["original_positions"] = original or positions
    if kind == "yarn":
        mscale = _mscale(group, fields["factor"], part="kv_lora_rank" in of_type.defaults)
        fields |= {"truncate": group.read(bool, "truncate"), "mscale": mscale}
    return group.made(lambda: RotaryScaling(kind=kind, **fields))


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
