"""Make a ModelSpec from a Hugging Face ``config.json``."""

from collections.abc import Mapping
from typing import Any, cast

from autoshard.errors import InputError, inside
from autoshard.spec.hf.fields import ACTIVATIONS, NAMED_FIELDS, UNMODELLED
from autoshard.spec.hf.layers import has_no_experts, layers_that_differ
from autoshard.spec.hf.model_type import SHARED_DEFAULTS, ModelType
from autoshard.spec.hf.reader import ConfigReader, fp8_block
from autoshard.spec.hf.rotary import rotary_positions, turns_nothing
from autoshard.spec.hf.types import MODEL_TYPES, SAME_CODE, WITH_TEXT_CONFIG
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_parts import LatentAttention, Router
from autoshard.spec.record import decode, show_value

_BALANCE = (
    "the loss that it asks for belongs to the question: --router-balance-loss, or router_balance_loss in a recipe"
)


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
    reader = ConfigReader(config, {**SHARED_DEFAULTS, **kind.defaults})
    for name_of_field, off in UNMODELLED.items():
        if name_of_field not in kind.defaults:
            reader.only(name_of_field, off, "autoshard does not model this option")
    reader.made(lambda: fp8_block(config))
    reader.only("output_router_logits", (False, None), _BALANCE)
    named = ([name] for name in (kind.architecture, *kind.former))
    reader.only("architectures", (*named, [], None), "the architecture of this model_type")
    traits: dict[str, Any] = {"norm": "rms", "gated_mlp": True, "positions": "rotary", "mlp_bias": False, **kind.fixed}
    for option, flags in kind.flags.items():
        if option in reader.defaults:
            traits |= dict.fromkeys(flags, reader.read(bool, option))
        else:
            reader.only(option, (kind.fixed.get(flags[0], False), None), f"{kind.architecture} has no other value")
    traits |= {
        "activation": reader.choice("hidden_act", ACTIVATIONS),
        **{
            field.name: reader.read(cast(type[Any], field.type), name)
            for name, field in NAMED_FIELDS.items()
            if name in reader.defaults
        },
        **_sizes(reader, kind),
        **_latent(reader, kind),
    }
    traits |= {} if traits["hidden_dropout"] else {"drops_embeddings": True}  # where nothing is dropped
    traits |= _experts(reader, kind, traits["ffn"])
    if turns_nothing(reader, kind):
        traits["positions"] = "none"
    if traits["positions"] == "rotary":
        traits |= rotary_positions(reader, kind, traits["max_positions"], traits["head_dim"])
    traits |= _score_scale(reader, kind, traits["head_dim"])
    traits |= _clamped_glu(reader, kind)
    traits |= layers_that_differ(reader, kind, traits)
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
    width = "intermediate_size" if has_no_experts(reader, kind) else kind.width
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


def _score_scale(reader: ConfigReader, kind: ModelType, head_dim: int) -> dict[str, float]:
    scalar = reader.read(float, "query_pre_attn_scalar") if "query_pre_attn_scalar" in kind.defaults else head_dim
    if "attention_multiplier" in kind.defaults:
        factor = reader.read(float, "attention_multiplier")
        scalar = factor**-2 if factor > 0 else factor
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
    if has_no_experts(reader, kind):
        return {}
    chosen, shared = reader.whole("num_experts_per_tok"), "n_shared_experts" in kind.defaults
    stated = "shared_expert_intermediate_size"
    width = reader.whole(stated) if stated in kind.defaults else 0
    return {
        "num_experts": reader.whole("num_local_experts"),
        "experts_per_token": chosen,
        "shared_ffn": reader.whole("n_shared_experts") * ffn if shared else width,
        "router": _router(reader, kind),
    }


def _router(reader: ConfigReader, kind: ModelType) -> Router | None:
    """Read how a token's experts are chosen and weighted; None is the softmax of the chosen logits."""
    if kind.router == "chosen":
        return None
    corrected, by_softmax = "corrected" in kind.router, kind.router == "corrected softmax"
    method = _method(reader, kind)
    if kind.router == "groups":
        reader.only("norm_topk_prob", (False, None), f"{kind.architecture} does not normalise the weights of experts")
    limits = ("n_group", "topk_group") if method and "n_group" in reader.defaults else ()
    groups, inside_of = [reader.whole_or_null(name) or 1 for name in limits] or (1, 1)
    limited = inside_of != groups  # within all groups is without a limit
    always = "norm_topk_prob" not in reader.defaults
    router = reader.made(
        lambda: Router(
            scores="sigmoid" if corrected and not by_softmax else "softmax",
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
    if kind.router in ("softmax", "corrected softmax"):
        return False
    corrected = kind.router == "corrected"
    scores = "sigmoid" if corrected else "softmax"
    reader.only("scoring_func", (scores, None), f"{kind.architecture} has no other scores")
    if corrected:
        reader.only("topk_method", ("noaux_tc", None), f"{kind.architecture} has no other method")
        return True
    return reader.choice("topk_method", {"greedy": False, "group_limited_greedy": True})
