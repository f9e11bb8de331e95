"""The columns in which measured rows state an architecture: read as a model, and written from one."""

from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from autoshard.errors import Fault, InputError, require
from autoshard.spec.model import LAYER, LayerKind, ModelSpec
from autoshard.spec.model_parts import MAX_DIM, LatentAttention, LinearAttention
from autoshard.spec.repeats import compress

_FIELDS = {
    "layers": "num_layers", "hidden": "hidden", "ffn": "ffn", "heads": "num_heads", "kv_heads": "num_kv_heads",
    "head_dim": "head_dim", "vocab": "vocab", "gated_mlp": "gated_mlp", "tied_embed": "tied_embeddings",
    "experts": "num_experts", "experts_per_token": "experts_per_token",
}  # fmt: skip
# Of mixtures since DeepSeek-V2: the width of an expert, where ``ffn`` is that of an MLP without experts; how many
# experts all tokens go through; how many layers at the start have such an MLP.
_OF_EXPERTS = ("moe_ffn", "shared_experts", "first_dense_layers")
# Of latent attention: the ranks of queries (none: they are not narrowed) and of keys and values, the numbers of a head
# without and with positions, and those of a value.
_OF_LATENT = ("q_lora", "kv_lora", "qk_nope", "qk_rope", "v_head")
# Of linear attention: how many layers have it, between which the others lie evenly; its sizes; the gates of the others.
_OF_LINEAR = tuple(f"linear_{size}" for size in ("key_heads", "value_heads", "key_dim", "value_dim", "taps"))
_LINEAR_LAYERS, _GATED = "linear_layers", "gated_attention"
ARCH = (*_FIELDS, *_OF_EXPERTS, *_OF_LATENT, _LINEAR_LAYERS, *_OF_LINEAR, _GATED)
_FFN_STEP = 256  # gated models round 8/3 of the hidden size up to a multiple of this: meta-llama/llama model.py
_DENSE, _LINEAR = "dense", "linear"  # names of layers without experts, and of those with linear attention


def stated_model(stated: Mapping[str, Any], name: str, seq_len: int, assumed: MutableMapping[str, str]) -> ModelSpec:
    """Return the model of an architecture; what had to be assumed goes into ``assumed``, by column."""
    foreign = ", ".join(sorted(stated.keys() - {*ARCH}))
    kinds = {True: (bool, "true or false"), False: (int, "a whole number")}
    types = {column: kinds[column in ("gated_mlp", "tied_embed", _GATED)] for column in stated}
    latent = {column for column in _OF_LATENT[1:] if column in stated}
    sizes = ", ".join(column for column in _OF_LINEAR if column not in stated)
    linear = {column for column in (_LINEAR_LAYERS, *_OF_LINEAR) if column in stated}
    missing = ", ".join(column for column in _OF_LATENT[1:] if column not in stated)
    require(
        (not foreign, "arch", f"its architecture has {foreign}, which autoshard does not model"),
        ({"layers", "hidden"} <= stated.keys(), "arch",
         "its architecture is not known: layers and hidden are not stated, and no model card has its name"),
        *((type(stated[column]) is kind, f"arch.{column}", f"expected {what}, found {stated[column]!r}")
          for column, (kind, what) in types.items() if column in ARCH),
        *((stated[column] >= 0, f"arch.{column}", f"must be at least 0, not {stated[column]}")
          for column in _OF_EXPERTS if type(stated.get(column)) is int),
        (not missing or not (latent or "q_lora" in stated), "arch", f"latent attention needs {missing} as well"),
        (not sizes or not linear, "arch", f"linear attention needs {sizes} as well"),
    )  # fmt: skip
    try:
        return _with_linear(_with_experts(_plain(stated, name, seq_len, assumed), stated), stated)
    except InputError as error:  # about a field of ModelSpec, which counts with num_ where rows do not
        faults = (Fault(where=fault.where.removeprefix("num_"), message=fault.message) for fault in error.faults)
        raise InputError(faults).under("arch") from None


def _plain(stated: Mapping[str, Any], name: str, seq_len: int, assumed: MutableMapping[str, str]) -> ModelSpec:
    """Return a model of equal layers, completed where a row leaves something out.

    Gated models are made as Llama, others as GPT; rows do not say more.
    """
    arch, hidden = dict(stated), stated["hidden"]
    gated = arch.setdefault("gated_mlp", True)
    arch.setdefault("heads", max(1, hidden // 128))
    arch.setdefault("kv_heads", arch["heads"])
    if "kv_lora" in arch:
        arch["head_dim"] = arch["qk_nope"] + arch["qk_rope"]
    arch.setdefault("head_dim", max(1, hidden // max(1, arch["heads"])))
    arch.setdefault("ffn", -(-8 * hidden // 3 // _FFN_STEP) * _FFN_STEP if gated else 4 * hidden)
    arch.setdefault("vocab", 32000 if gated else 50304)
    arch.setdefault("tied_embed", not gated)
    arch.setdefault("experts", 0)
    arch.setdefault("experts_per_token", min(2, arch["experts"]))  # as in the first published mixtures
    derived = {"head_dim", "experts", *(() if arch["experts"] else ("experts_per_token",))}  # say nothing new
    for column in sorted(arch.keys() - stated.keys() - derived):
        assumed[f"arch.{column}"] = str(arch[column]).lower()
    llama, gpt = "RMS norms, rotary positions, SiLU, no biases", "layer norms, learned positions, GELU, biases"
    assumed["arch"] = f"as Llama: {llama}" if gated else f"as GPT: {gpt}"
    latent = LatentAttention(
        query_rank=arch.get("q_lora"), kv_rank=arch["kv_lora"], rotary_dim=arch["qk_rope"], value_dim=arch["v_head"]
    ) if "kv_lora" in arch else None  # fmt: skip
    return ModelSpec(
        name=name,
        **{field: arch[column] for column, field in _FIELDS.items()},
        max_positions=min(seq_len, MAX_DIM),
        norm="rms" if gated else "layer",
        norm_eps=1e-5,
        activation="silu" if gated else "gelu",
        positions="rotary" if gated else "learned",
        qkv_bias=not gated,
        out_bias=not gated,
        mlp_bias=not gated,
        latent=latent,
        gated_attention=arch.get(_GATED, False),
        source="a measured row",
    )


def _with_experts(model: ModelSpec, stated: Mapping[str, Any]) -> ModelSpec:
    """Return a model with the width of its experts, with those of all tokens, and with its first layers without."""
    width, shared, dense = (stated.get(column, 0) for column in _OF_EXPERTS)
    width = width or model.ffn
    most = model.num_layers - 1
    require(
        (model.num_experts > 0 or not (stated.get("moe_ffn") or shared or dense), "experts",
         f"missing, though the row states {', '.join(column for column in _OF_EXPERTS if stated.get(column))}"),
        (dense <= most, "first_dense_layers", f"must be at most {most}, one less than the layers, not {dense}"),
    )  # fmt: skip
    if not model.num_experts:
        return model
    kinds = (LayerKind(name=_DENSE, dense_ffn=model.ffn),) if dense else ()
    order = compress([_DENSE] * dense + [LAYER] * (model.num_layers - dense)) if dense else ""
    return replace(model, ffn=width, shared_ffn=shared * width, kinds=kinds, order=order)


def _with_linear(model: ModelSpec, stated: Mapping[str, Any]) -> ModelSpec:
    """Return a model some layers of which have linear attention, the others evenly between them."""
    if _OF_LINEAR[0] not in stated:
        return model
    total = model.num_layers
    count = stated.get(_LINEAR_LAYERS, total)
    require((0 <= count <= total, _LINEAR_LAYERS, f"must be at most {total}, the number of layers, not {count}"))
    sizes = {column.removeprefix("linear_"): stated[column] for column in _OF_LINEAR}
    plain = LayerKind(name=_LINEAR, linear=LinearAttention(**sizes))
    kinds = {kind.name: kind for kind in model.kinds} | {_LINEAR: plain}
    kinds |= {f"{kind.name}_{_LINEAR}": replace(kind, linear=plain.linear, name=f"{kind.name}_{_LINEAR}")
              for kind in model.kinds}  # fmt: skip
    order: list[str] = []
    for number, name in enumerate(model.layer_order):
        attends = (number + 1) * (total - count) // total > number * (total - count) // total
        order.append(name if attends else _LINEAR if name == LAYER else f"{name}_{_LINEAR}")
    return replace(model, kinds=tuple(kinds[name] for name in kinds if name in order), order=compress(order))


def stated_arch(model: ModelSpec) -> dict[str, object]:
    """Return the columns of a model that has no card.

    No column states windows, places of norms, layers without experts behind others, or where layers with linear
    attention are uneven; what is read back lacks these.
    """
    arch: dict[str, object] = {column: getattr(model, field) for column, field in _FIELDS.items()}
    dense = next((kind for kind in model.kinds if kind.dense_ffn), None)
    if model.num_experts and (dense or model.shared_ffn):
        is_dense = [not model.of_kind(kind).num_experts for kind in model.layer_order]
        first = is_dense.index(False) if False in is_dense else 0
        arch |= {"ffn": dense.dense_ffn} if dense else {}
        arch |= {"moe_ffn": model.ffn, "shared_experts": model.shared_ffn // model.ffn, "first_dense_layers": first}
    if model.latent:
        latent = model.latent
        numbers = (latent.query_rank, latent.kv_rank, model.head_dim - latent.rotary_dim, latent.rotary_dim)
        values = dict(zip(_OF_LATENT, (*numbers, latent.value_dim), strict=True))
        arch |= {column: value for column, value in values.items() if value is not None}
    arch |= {_GATED: True} if model.gated_attention else {}
    linear = [model.of_kind(kind).linear for kind in model.layer_order]
    if stated := next((attention for attention in linear if attention), None):
        arch |= {column: getattr(stated, column.removeprefix("linear_")) for column in _OF_LINEAR}
        arch[_LINEAR_LAYERS] = sum(attention is not None for attention in linear)
    return arch
