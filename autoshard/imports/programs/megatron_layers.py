"""Keys of Megatron-LM for latent attention, layers that differ, attention sinks and clamped MLPs.

Defaults: megatron/training/arguments.py and megatron/core/transformer/transformer_config.py. Recipes of GPT-OSS
(Megatron-Bridge) state a window of 128 for one of 128 tokens, which is what is read here.
"""

import re
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from autoshard.errors import InputError
from autoshard.imports.table import Facts, KeyEntry, Keys, number, read_only, truth, whole_number, words
from autoshard.spec.model import LAYER, LayerKind
from autoshard.spec.model_parts import LatentAttention
from autoshard.spec.repeats import compress, expand_counts

_QUICK_SLOPE = 1.702  # of the quick GELU
_KINDS = ("model.kinds", "model.order")
_RUN = re.compile(r"\[([01,\s]*)\](?:\*(\d{1,4}))?")
_LATENT = ("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_DENSE = ("moe_layer_freq", "num_layers", "num_experts", "ffn_hidden_size", "moe_ffn_hidden_size")
_WINDOWS = ("window_size", "window_attn_skip_freq", "num_layers")
_UNROTATED = ("no_rope_freq", *_DENSE, *_WINDOWS[:2])
_CLAMPED = (
    "quick_geglu", "glu_linear_offset", "activation_func_clamp_value", "softmax_type", "num_experts",
    "disable_bias_linear", "add_bias_linear",
)  # fmt: skip


def pattern_of(text: str, num_layers: int) -> tuple[bool, ...]:
    """Return which layers a list in Python marks.

    >>> pattern_of("([0]*1+[1]*3)", 4)
    (False, True, True, True)
    """
    runs = _RUN.findall(text.replace(" ", ""))
    marks = [mark == "1" for items, times in runs for mark in items.split(",") * int(times or 1) if mark]
    if len(marks) != num_layers:
        raise InputError.of("", f"{text!r} lists {len(marks)} layers, and there are {num_layers}")
    return tuple(marks)


def _written_pattern(marks: Iterable[bool]) -> str:
    """Write such a list.

    >>> _written_pattern([False, True, True])
    '([0]*1+[1]*2)'
    """
    return "(" + "+".join(f"[{int(mark)}]*{len([*run])}" for mark, run in groupby(marks)) + ")"


def _step(text: str) -> int:
    """Return the number in "one of so many layers"."""
    if int(text) < 1:
        raise InputError.of("", f"{text!r} must be at least 1")
    return int(text)


def _latent(keys: Keys) -> Facts:
    if not truth(keys.get("multi_latent_attention")):
        return {}
    query = keys.get("q_lora_rank")
    kv_rank, size, turned, values = (
        whole_number(keys.get(key) or usual) for key, usual in zip(_LATENT[2:], (32, 128, 64, 128), strict=True)
    )
    rank = None if query is None else whole_number(query)
    latent = LatentAttention(query_rank=rank, kv_rank=kv_rank, rotary_dim=turned, value_dim=values)
    return {"model.latent": latent, "model.head_dim": size + turned}


def _written_latent(facts: Facts) -> Keys:
    latent: LatentAttention | None = facts.get("model.latent")
    if not latent:
        return {}
    sizes = (latent.kv_rank, facts["model.head_dim"] - latent.rotary_dim, latent.rotary_dim, latent.value_dim)
    ranks = {} if latent.query_rank is None else {"q_lora_rank": latent.query_rank}
    return {"multi_latent_attention": True, **ranks, **dict(zip(_LATENT[2:], sizes, strict=True))}


def _kinds_of(kind: LayerKind, is_other: tuple[bool, ...]) -> Facts:
    """Return the facts of layers of which some are of another kind."""
    order = compress(kind.name if other else LAYER for other in is_other)
    return dict(zip(_KINDS, ((kind,), order), strict=True))


def _dense(keys: Keys) -> Facts:
    """Read which layers have experts; the others have an MLP as wide as the dense model's."""
    text, num_layers = str(keys.get("moe_layer_freq") or "1"), whole_number(keys.get("num_layers") or 0)
    if not (keys.get("num_experts") and keys.get("ffn_hidden_size")):
        return {}
    by_step = text.strip().isdigit()
    marks = [layer % _step(text) == 0 for layer in range(num_layers)] if by_step else pattern_of(text, num_layers)
    if all(marks) or not any(marks):
        return {}
    kind = LayerKind(name="dense", dense_ffn=whole_number(keys["ffn_hidden_size"]))
    return _kinds_of(kind, tuple(not has_experts for has_experts in marks))


def _only_kind(facts: Facts, name: str) -> LayerKind | None:
    """Return the only other kind of layers, if it has this name."""
    kinds: tuple[LayerKind, ...] = facts.get("model.kinds") or ()
    return kinds[0] if len(kinds) == 1 and kinds[0].name == name else None


def _written_dense(facts: Facts) -> Keys:
    kind = _only_kind(facts, "dense")
    if not kind:
        return {}
    widths = {"ffn_hidden_size": kind.dense_ffn, "moe_ffn_hidden_size": facts["model.intermediate_size"]}
    has_experts = (name != "dense" for name in expand_counts(facts["model.order"]))
    return {"moe_layer_freq": _written_pattern(has_experts), **widths}


def _windows(keys: Keys) -> Facts:
    """Read how far layers look back; every n-th one may look at all."""
    sizes = words(keys.get("window_size"))
    if not sizes or sizes[0] == "None":
        return {}
    window, skipped = whole_number(sizes[0].strip("()")), str(keys.get("window_attn_skip_freq") or "")
    if not skipped or skipped == "None":
        return {"model.sliding_window": window}
    num_layers, by_step = whole_number(keys.get("num_layers") or 0), skipped.strip().isdigit()
    layers = range(1, num_layers + 1)
    marks = [layer % _step(skipped) != 0 for layer in layers] if by_step else pattern_of(skipped, num_layers)
    if all(marks) or not any(marks):
        return {"model.sliding_window": window if any(marks) else None}
    return _kinds_of(LayerKind(name="local", window=window), tuple(marks))


def _written_windows(facts: Facts) -> Keys:
    kind = _only_kind(facts, "local")
    if not kind and facts.get("model.sliding_window"):
        return {"window_size": f"{facts['model.sliding_window']},0"}
    if not kind or kind.rotary_theta:
        return {}
    is_local = [name == "local" for name in expand_counts(facts["model.order"])]
    step = [*is_local, False].index(False) + 1
    by_step = is_local == [layer % step != 0 for layer in range(1, len(is_local) + 1)]
    return {
        "window_size": f"{kind.window},0",
        "window_attn_skip_freq": step if by_step else _written_pattern(is_local),
    }


def _unrotated(keys: Keys) -> Facts:
    """Read which layers turn no queries and keys: every n-th one, or those of a list."""
    text, num_layers = str(keys.get("no_rope_freq") or ""), whole_number(keys.get("num_layers") or 0)
    if not text or text == "None":
        return {}
    by_step = text.strip().isdigit()
    layers = range(1, num_layers + 1)
    marks = [layer % _step(text) == 0 for layer in layers] if by_step else pattern_of(text, num_layers)
    if not any(marks):
        return {}
    if "model.kinds" in {**_dense(keys), **_windows(keys)}:
        return {"model.unmodelled": ["no_rope_freq beside layers that differ in experts or windows"]}
    return _kinds_of(LayerKind(name="unrotated", positions="none"), tuple(marks))


def _written_unrotated(facts: Facts) -> Keys:
    if not _only_kind(facts, "unrotated"):
        return {}
    marks = [name == "unrotated" for name in expand_counts(facts["model.order"])]
    step = marks.index(True) + 1
    by_step = marks == [layer % step == 0 for layer in range(1, len(marks) + 1)] and len(marks) % step == 0
    return {"no_rope_freq": step if by_step else _written_pattern(marks)}


def _clamped(keys: Keys) -> Facts:
    """Read sinks, and an MLP whose gate is a quick GELU of limited numbers."""
    facts: dict[str, Any] = {"model.sinks": True} if str(keys.get("softmax_type")) == "learnable" else {}
    limit, offset = keys.get("activation_func_clamp_value"), number(keys.get("glu_linear_offset") or 0)
    if not truth(keys.get("quick_geglu")):
        return {**facts, **({"model.unmodelled": ["activation_func_clamp_value"]} if limit else {})}
    if limit is None or offset != 1:
        return {**facts, "model.unmodelled": ["quick_geglu without limit and offset 1"]}
    biased = not truth(keys.get("disable_bias_linear")) and truth(keys.get("add_bias_linear", True))
    if keys.get("num_experts") and biased:
        facts["model.router_bias"] = True  # megatron/core/transformer/moe/router.py
    return {**facts, "model.glu_limit": number(limit), "model.glu_slope": _QUICK_SLOPE}


def _written_clamped(facts: Facts) -> Keys:
    sinks = {"softmax_type": "learnable"} if facts.get("model.sinks") else {}
    if facts.get("model.glu_slope") != _QUICK_SLOPE:
        return sinks
    limit = {"activation_func_clamp_value": facts["model.glu_limit"]}
    return {**sinks, "quick_geglu": True, "glu_linear_offset": 1.0, **limit}


_WITHOUT_MTP = "layers that predict further tokens (mtp_num_layers) are left out"
LAYERS = (
    KeyEntry(keys=_LATENT, reads=_latent, writes=_written_latent),
    KeyEntry(keys=_DENSE, reads=_dense, writes=_written_dense),
    KeyEntry(keys=_WINDOWS, reads=_windows, writes=_written_windows),
    KeyEntry(keys=_UNROTATED, reads=_unrotated, writes=_written_unrotated),
    KeyEntry(keys=_CLAMPED, reads=_clamped, writes=_written_clamped),
    read_only("mtp_num_layers", reads=lambda keys: {"remarks": [_WITHOUT_MTP]} if keys["mtp_num_layers"] else {}),
)


def said_options(facts: Facts) -> tuple[str, ...]:
    """Return the options of a model, beside its router, that these keys say: those that are read as written."""
    written = {key: value for entry in LAYERS for key, value in entry.writes(facts).items()}
    written |= {"num_layers": facts["model.num_hidden_layers"], "num_experts": facts.get("model.num_local_experts")}
    written.setdefault("ffn_hidden_size", facts["model.intermediate_size"])
    again: dict[str, Any] = {}
    for entry in LAYERS:
        present = {key: written[key] for key in entry.keys if key in written}
        again |= entry.reads(present) if present else {}
    names = ("router_bias", "latent", "sinks", "glu_limit", "glu_slope", "kinds", "order")
    return tuple(
        name for name in names if facts.get(f"model.{name}") and again.get(f"model.{name}") == facts[f"model.{name}"]
    )
