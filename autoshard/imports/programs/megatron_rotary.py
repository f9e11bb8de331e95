"""Which part of a head rotates and how frequencies are scaled, as flags of Megatron-LM.

Sources: megatron/training/arguments.py and argument_utils.py (_apply_yarn_config_from_args),
megatron/core/models/common/embeddings, and MLATransformerConfig for latent attention.
"""

import math
from collections.abc import Mapping
from typing import Any

from autoshard.imports.table import Facts, KeyEntry, Keys, number, truth
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_parts import LatentAttention, RotaryScaling

ROTARY = ("rope", "yarn", "mrope")  # types of positions
_LLAMA3 = (1.0, 4.0, 8192)  # of rotary_pos_embedding.py _apply_scaling
_LATENT_YARN = (1.0, 32.0, 4096)  # of MLATransformerConfig, for which there are no flags
_LLAMA3_FACTOR = 8.0
_YARN_SHAPE = ("yarn_beta_slow", "yarn_beta_fast", "yarn_original_max_position_embeddings")
_KEYS = (
    "position_embedding_type", "use_rotary_position_embeddings", "multi_latent_attention", "rotary_percent",
    "rotary_percentage", "use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor",
    "rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim", *_YARN_SHAPE,
    "no_yarn_correction_range_round_to_int", "yarn_correction_range_round_to_int",
)  # fmt: skip


def says_rotation(model: ModelSpec) -> bool:
    """Say whether there are flags for how a model scales its rotary frequencies.

    >>> from autoshard.spec.model_catalogue import load_model
    >>> [says_rotation(load_model(name)) for name in ("deepseek-v3", "gpt-oss-20b", "kimi-k2")]
    [True, True, False]
    """
    return model.positions != "rotary" or _flags(model.rotary_scaling, model.latent, model.rotary_fraction) is not None


def position_type(facts: Facts) -> Keys:
    """Write how positions are said, where they rotate."""
    if facts.get("model.positions") != "rotary":
        return {}
    return {"position_embedding_type": "yarn" if _YARN_SHAPE[0] in _written_rotation(facts) else "rope"}


def _flags(scaling: RotaryScaling | None, latent: LatentAttention | None, fraction: float) -> Keys | None:
    """Return the flags of a scaling, or None where there are none for it."""
    if scaling is None:
        return {}
    shape = (scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_positions)
    if scaling.kind == "linear":
        factor = {"rotary_seq_len_interpolation_factor": int(scaling.factor)}
        return factor if scaling.factor.is_integer() and not latent else None
    if scaling.kind == "llama3":
        llama = {"use_rope_scaling": True, "rope_scaling_factor": scaling.factor}
        return llama if shape == _LLAMA3 and not latent else None
    yarn: dict[str, Any] = {"rotary_scaling_factor": scaling.factor, "mscale": scaling.mscale}
    if latent:  # whose scores grow by mscale_all_dim, and what is turned by the quotient of both
        return {**yarn, "mscale_all_dim": scaling.mscale} if shape == _LATENT_YARN and scaling.truncate else None
    rounds = {} if scaling.truncate else {"no_yarn_correction_range_round_to_int": True}
    return {**yarn, **dict(zip(_YARN_SHAPE, shape, strict=True)), **rounds} if fraction == 1 else None


def _written_rotation(facts: Facts) -> Keys:
    """Write which part of a head rotates, and how frequencies are scaled."""
    latent, fraction = facts.get("model.latent"), facts.get("model.rotary_fraction", 1.0)
    part = {"rotary_percent": fraction} if fraction != 1 and not latent else {}
    return {**part, **(_flags(facts.get("model.rope_scaling"), latent, fraction) or {})}


def _rotation(keys: Keys) -> Facts:
    """Read them; what a file does not state is as in the program."""
    stated = {key: value for key, value in keys.items() if str(value) not in ("None", "")}
    is_latent, positions = truth(stated.get("multi_latent_attention")), str(stated.get("position_embedding_type"))
    if positions not in ROTARY and not truth(stated.get("use_rotary_position_embeddings")):
        return {}
    fraction = stated.get("rotary_percent", stated.get("rotary_percentage"))
    part = {} if fraction is None else {"model.rotary_fraction": number(fraction)}
    if is_latent:
        return _latent_yarn(stated)
    if positions == "yarn":
        return {**part, **_scaled(_yarn(stated))}
    if truth(stated.get("use_rope_scaling")):
        slow, fast, positions_before = _LLAMA3
        factor = number(stated.get("rope_scaling_factor", _LLAMA3_FACTOR))
        return {**part, **_scaled({
            "kind": "llama3", "factor": factor, "low_frequency_factor": slow, "high_frequency_factor": fast,
            "original_positions": positions_before,
        })}  # fmt: skip
    longer = number(stated.get("rotary_seq_len_interpolation_factor", 1.0))
    return {**part, **_scaled({"kind": "linear", "factor": longer})}


def _scaled(values: Mapping[str, Any]) -> Facts:
    """Return a scaling as a fact; by a factor of 1 it is none."""
    return {"model.rope_scaling": RotaryScaling(**values)} if values["factor"] > 1 else {}


def _yarn(stated: Keys) -> Mapping[str, Any]:
    """Return what YaRN is in layers without latent attention."""
    rounds = truth(stated.get("yarn_correction_range_round_to_int", True))
    grown = (number(stated.get(key, usual)) for key, usual in (("mscale", 1.0), ("mscale_all_dim", 0.0)))
    factor = number(stated.get("rotary_scaling_factor", 1.0))
    turned, all_scores = (1 + 0.1 * scale * math.log(max(factor, 1.0)) for scale in grown)
    slow, fast, positions = (
        number(stated.get(key, usual)) for key, usual in zip(_YARN_SHAPE, _LATENT_YARN, strict=True)
    )
    return {
        "kind": "yarn", "factor": factor, "low_frequency_factor": slow, "high_frequency_factor": fast,
        "original_positions": int(positions),
        "truncate": rounds and not truth(stated.get("no_yarn_correction_range_round_to_int")),
        "mscale": round((turned / all_scores - 1) / (0.1 * math.log(factor)), 12) if factor > 1 else 0.0,
    }  # fmt: skip


def _latent_yarn(stated: Keys) -> Facts:
    """Read YaRN of latent attention; a part of a head that grows by another factor than the rest is not modelled."""
    factor, turned, all_scores = (
        number(stated.get(key, usual))
        for key, usual in (("rotary_scaling_factor", 1.0), ("mscale", 1.0), ("mscale_all_dim", 0.0))
    )
    if factor <= 1 or str(stated.get("rope_type")) == "rope":
        return {}
    slow, fast, positions = _LATENT_YARN
    differs = f"mscale {turned:g} is read as mscale_all_dim, {all_scores:g}: all numbers of a head grow alike"
    remarks = {} if turned == all_scores else {"remarks": [differs]}
    return {**remarks, **_scaled({
        "kind": "yarn", "factor": factor, "low_frequency_factor": slow, "high_frequency_factor": fast,
        "original_positions": positions, "mscale": all_scores,
    })}  # fmt: skip


ROTATED = KeyEntry(keys=_KEYS, reads=_rotation, writes=_written_rotation)
