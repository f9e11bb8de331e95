"""Which model a configuration is about: a card by name, a card by shape, or sizes that are written out."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

from autoshard.errors import InputError
from autoshard.imports.imported import ImportedRun
from autoshard.spec.files import parsed_json
from autoshard.spec.hf.config import spec_from_config
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model, model_names
from autoshard.spec.record import options_on

_FIELDS: Mapping[str, str] = {  # facts -> fields of ModelSpec by which cards are told from each other
    "num_hidden_layers": "num_layers", "hidden_size": "hidden", "intermediate_size": "ffn",
    "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads", "vocab_size": "vocab",
    "num_local_experts": "num_experts", "gated": "gated_mlp", "norm": "norm", "positions": "positions",
    "tie_word_embeddings": "tied_embeddings", "shared_ffn": "shared_ffn", "router": "router",
    "head_dim": "head_dim", "num_experts_per_tok": "experts_per_token", "bias": "mlp_bias", "qkv_bias": "qkv_bias",
    "qk_norm": "qk_norm",
}  # fmt: skip
DROPOUTS = ("hidden_dropout", "attention_dropout")  # of training, so that no card is told by them
_OPTIONS = (  # facts that are options of a ModelSpec
    "router", "shared_ffn", "latent", "sinks", "router_bias", "glu_limit", "glu_slope", "kinds", "order",
)  # fmt: skip
_ENOUGH = ("num_hidden_layers", "hidden_size")
_NOT_SHAPE = ("name", "source", "max_positions", "norm_eps", "norm_offset", "rotary_theta", "rotary_scaling", "window")
_SUFFIX = re.compile(
    r"[-_](hf|instruct|chat|base|v0\.\d+)$"
)  # v0.1 is a release; V2 and V3 of DeepSeek are other models
_SIZE = re.compile(r"(?<![a-z0-9.])(\d{1,3}x)?(\d{1,4}(?:\.\d{1,3})?)b(?![a-z0-9])")  # 16b, 8x7b; not a3b
_SMALL = re.compile(r"(?<![a-z])(debug|tiny|toy|proxy)")  # of a model that is smaller than what it is named after
_EXPERTS_PER_TOKEN = 2  # megatron/training/arguments.py
_FFN_STEP = 64  # of gated models: megatron/training/arguments.py rounds 8/3 of the hidden size down to a multiple
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "Llama3Tokenizer": 128256}
_FLAVORS = {"llama3": "llama3.1"}  # torchtitan trains the models of release 3.1 under the older name


def without_separators(name: str) -> str:
    """Return a name without what people write differently.

    >>> [without_separators(name) for name in ("meta-llama/Meta-Llama-3-70B-Instruct", "Mixtral-8x7B-v0.1")]
    ['llama370b', 'mixtral8x7b']
    >>> without_separators("deepseek-ai/DeepSeek-V3-Base")
    'deepseekv3'
    """
    text = name.rpartition("/")[2].lower().removeprefix("meta-")
    while match := _SUFFIX.search(text):
        text = text[: match.start()]
    return re.sub(r"[^a-z0-9]", "", text)


@cache
def _shapes() -> Mapping[str, Mapping[str, Any]]:
    """Return the configs of models that have no card, by their names on Hugging Face."""
    text = (resources.files("autoshard.imports") / "models.json").read_text("utf-8")
    return cast(dict[str, Any], parsed_json(text, "models.json"))["models"]


def model_of(run: ImportedRun, typed: str | None) -> tuple[ModelSpec, str]:
    """Return the model of a configuration, or the one that is typed, and how it was found."""
    facts = {key.removeprefix("model."): value for key, value in run.facts.items() if key.startswith("model.")}
    spec, said = _model_of(run, facts, typed)
    stated = [key for key in DROPOUTS if f"model.{key}" in run.said]
    dropouts = {key: facts[key] for key in stated if facts[key] not in (None, getattr(spec, key))}
    drops = "".join(f", with {key.replace('_', ' ')} {rate:g}" for key, rate in dropouts.items())
    return replace(spec, **dropouts), said + drops


def _model_of(run: ImportedRun, facts: Mapping[str, Any], typed: str | None) -> tuple[ModelSpec, str]:
    if typed is not None:
        spec = load_model(typed)
        against = _contradictions(facts, spec)
        return spec, f"as typed{f', though the file says {against}' if against else ''}"
    if unmodelled := facts.get("unmodelled"):
        keys = ", ".join(unmodelled)
        raise InputError.of("--model", f"missing: imports do not read {keys} of this file. Type the nearest card")
    names = _names(facts, run)
    for name in names:
        if spec := _named(name):
            against = _contradictions(facts, spec)
            return spec, f"{name} of the file{f', which also says {against}' if against else ''}"
    if not all(key in facts for key in _ENOUGH):
        if spec := _hinted(run, names):
            return spec, f"{spec.name} in the name of the file or the function"
        said = f"{names[0]} has no card" if names else "the file names none"
        raise InputError.of("--model", f"missing: {said}. Type a card (autoshard list models) or a config.json")
    cards = [load_model(name) for name in model_names()]
    # Sizes alone mean a model without further options, which other keys would have to state.
    said = {name: facts[name] for name in _OPTIONS if facts.get(name)}
    fits = [card for card in cards if _of_shape(options_on(card)) == said and not _contradictions(facts, card)]
    if fits:
        card = _chosen(fits, facts, run.hints)
        changes = {"window": facts.get("sliding_window", card.window), **_rotation(facts), **_offset(facts)}
        differs = f", with a window of {changes['window']} tokens" if changes["window"] != card.window else ""
        scaling = changes.get("rotary_scaling", card.rotary_scaling)
        differs += ", with its scaling of rotary frequencies" if scaling != card.rotary_scaling else ""
        return replace(card, **changes), f"the card with these sizes{differs}"
    return _written_out(facts, run)


def _hinted(run: ImportedRun, names: Sequence[str]) -> ModelSpec | None:
    """Return the card whose name is part of that of the file or the function, the longest of several.

    It has to be as large as these names say. If the file itself names a model, that name has to say how large.
    """
    words = without_separators(run.hints.replace("/", "-"))
    cards = [card for card in (*model_names(), *_shapes()) if without_separators(card) in words]
    spec = _named(max(cards, key=len)) if cards else None
    texts = names or (run.hints,)
    sizes = [match.groups() for text in texts for match in _SIZE.finditer(text.lower().replace("_", "-"))]
    stem = Path(run.file).stem
    small = _SMALL.findall(" ".join((stem, run.name, *names)).lower())
    if spec is None or any(word not in spec.name for word in small) or (names and not sizes):
        return None
    return spec if not sizes or any(_is_as_large(spec, *size) for size in sizes) else None


def _is_as_large(spec: ModelSpec, mixture: str | None, billions: str) -> bool:
    """Say whether a card has so many billions of parameters, by its name or about."""
    named = f"{mixture or ''}{billions}b".replace(".", "") in without_separators(spec.name)
    return named or (not mixture and 0.9 < float(billions) * 1e9 / spec.num_parameters < 1.1)


def _names(facts: Mapping[str, Any], run: ImportedRun) -> list[str]:
    """Return the names that a file gives its model; a flavor without a family is of that of the folder."""
    family, _, flavor = str(facts.get("flavor", "")).partition(":")
    family = family or run.hints.partition("/")[0]
    flavored = [f"{_FLAVORS.get(family, family)}-{flavor}"] if family and flavor else []
    named = [str(facts["name"])] if "name" in facts else []
    return [*flavored, *named]


def _named(name: str) -> ModelSpec | None:
    """Return the card, or the config, of a name."""
    key = without_separators(name)
    card = next((card for card in model_names() if without_separators(card) == key), None)
    if card:
        return load_model(card)
    shape = next((shape for shape in _shapes() if without_separators(shape) == key), None)
    return spec_from_config(_shapes()[shape], name=key, source=f"https://huggingface.co/{shape}") if shape else None


def _contradictions(facts: Mapping[str, Any], spec: ModelSpec) -> str:
    told = _completed(facts)
    pairs = [(key, told[key], getattr(spec, name)) for key, name in _FIELDS.items() if key in told]
    return ", ".join(f"{key} {value}" for key, value, card_value in pairs if value != card_value)


def _completed(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add what flags of an architecture mean where they are left out: they are read together, and ``gated`` is one."""
    stated = {key: value for key, value in facts.items() if value is not None or key in _OPTIONS}
    if "gated" not in stated:
        return stated
    usual: dict[str, Any] = {"num_local_experts": 0, "qk_norm": False}
    if "bias" in stated:
        usual["qkv_bias"] = stated["bias"]
    if heads := stated.get("num_attention_heads"):
        usual |= {"num_key_value_heads": heads, "head_dim": stated.get("hidden_size", 0) // heads}
    if stated.get("num_local_experts"):
        usual["num_experts_per_tok"] = _EXPERTS_PER_TOKEN
    return {**usual, **stated}


def _shape(spec: ModelSpec) -> tuple[object, ...]:
    return tuple(getattr(spec, entry.name) for entry in fields(ModelSpec) if entry.name not in _NOT_SHAPE)


def _chosen(fits: list[ModelSpec], facts: Mapping[str, Any], hints: str) -> ModelSpec:
    """Return the card that fits best: by its rotary base and positions, and by the words of the file's name."""
    words = without_separators(hints.replace("/", "-"))

    def distance(card: ModelSpec) -> tuple[bool, bool, bool, bool, int]:
        other_base = facts.get("rope_theta") not in (None, card.rotary_theta)
        other_positions = facts.get("max_position_embeddings") not in (None, card.max_positions)
        family = re.match("[a-z]+", card.name)
        of_family = family is not None and family[0] in words
        return other_base, without_separators(card.name) not in words, not of_family, other_positions, len(card.name)

    best = min(fits, key=distance)
    rivals = [card.name for card in fits if distance(card)[:4] == distance(best)[:4] and _shape(card) != _shape(best)]
    if rivals:
        listed = ", ".join([best.name, *rivals])
        raise InputError.of("--model", f"missing: the sizes in the file are those of {listed}. Type one")
    return best


def _written_out(facts: Mapping[str, Any], run: ImportedRun) -> tuple[ModelSpec, str]:
    """Return the model of the sizes in a file, completed where it leaves some open."""
    if "num_attention_heads" not in facts or "gated" not in facts:
        raise InputError.of("--model", "missing: no card has the sizes in the file, which leaves others open. Type one")
    gated, said = facts["gated"], list[str]()
    ffn = 4 * facts["hidden_size"]
    config = {key: value for key, value in facts.items() if key in _CONFIG and value is not None}
    if "intermediate_size" not in config:
        config["intermediate_size"] = ffn * 2 // 3 // _FFN_STEP * _FFN_STEP if gated else ffn
        said.append(f"MLP width {config['intermediate_size']}, the default of {run.program.title}")
    if "vocab_size" not in config:
        config["vocab_size"] = _VOCABULARIES.get(str(facts.get("tokenizer")), 32000 if gated else 50257)
        said.append(f"vocabulary {config['vocab_size']}, since the tokenizer's size is not in the file")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("max_position_embeddings", run.facts.get("work.seq_len", 4096))
    mixture = bool(facts.get("num_local_experts"))
    config |= {"model_type": "mixtral", "sliding_window": None} if mixture else {"model_type": "llama"}
    spec = spec_from_config(config, name=run.name or _label(run), source=f"the user's {run.file.rpartition('/')[2]}")
    options = {name: facts[name] for name in _OPTIONS if facts.get(name)}
    spec = replace(spec, **_traits(facts), **_rotation(facts), **_offset(facts), **options)
    return spec, "; ".join(["the sizes in the file, of which no card is", *said])


_CONFIG = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "num_local_experts",
    "num_experts_per_tok", "hidden_act",
)  # fmt: skip


def _traits(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model that are no sizes; no family of Hugging Face needs to have them together."""
    norm, gated = facts.get("norm", "rms"), facts["gated"]
    bias = bool(facts.get("bias", norm == "layer" and not gated))
    biases = {"qkv_bias": bias or bool(facts.get("qkv_bias")), "out_bias": bias, "mlp_bias": bias}
    shape = {"norm": norm, "positions": facts.get("positions", "rotary"), "gated_mlp": gated}
    return {**shape, **biases, "qk_norm": bool(facts.get("qk_norm")), "window": facts.get("sliding_window")}


def _rotation(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return which part of a head rotates and how, where a file states it."""
    names = {"rotary_fraction": "rotary_fraction", "rope_scaling": "rotary_scaling"}
    return {name: facts[key] for key, name in names.items() if key in facts}


def _offset(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what norms add to their weights, where a file states it."""
    return {"norm_offset": facts["norm_offset"]} if "norm_offset" in facts else {}


def _of_shape(options: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in options.items() if name not in _NOT_SHAPE}


def _label(run: ImportedRun) -> str:
    return run.file.rpartition("/")[2].partition(".")[0] or "model"
