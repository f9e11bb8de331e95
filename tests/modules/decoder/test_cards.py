"""Modules of Hugging Face against the cards of their configs: each card is found, and each changed fact is named."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.errors import InputError
from autoshard.modules.decoder.agreeing import differing_frequencies, differing_numbers, twin_graph
from autoshard.modules.decoder.calls import taped
from autoshard.modules.decoder.cards import card_match, card_of_config
from autoshard.modules.decoder.reading import read_decoder
from autoshard.modules.decoder.twins import NUM_DRAWS, Twin
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_config, load_model, model_names
from autoshard.spec.model_parts import Router
from tests.modules.decoder.decoders import EXPERTS
from tests.slower import rest_is_slow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
OF_EACH_KIND = (
    "tiny-glm4-moe",
    "tiny-gpt-oss",
    "tiny-gemma3",
    "tiny-olmo2",
    "tiny-deepseek",
    "gpt-neox-20b",
    "gpt2-xl",
)
LAYERS = "model.layers"


def of_card(name: str, device: str = "meta", **changes: Any) -> Any:
    import transformers

    data: Any = {**load_config(name), **changes}
    config: Any = transformers.AutoConfig.for_model(**data)
    config.use_cache = False
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    "name", rest_is_slow([*OF_EACH_KIND, *(name for name in model_names() if name not in OF_EACH_KIND)], 2, 4)
)
def test_each_card_is_found_in_the_code_of_transformers(name: str):
    model, card = read_decoder(of_card(name), name=name, source="its code"), load_model(name)
    rate = 0.1 if load_config(name)["model_type"] == "gpt2" else 0.0  # as the class of this config has it
    assert model == replace(card, name=name, source="its code", hidden_dropout=rate, attention_dropout=rate)


# -- a module that differs from what its class makes of its config -----------------------------------


def set_in(path: str, name: str, value: Any) -> Callable[[Any], None]:
    return lambda module: setattr(module.get_submodule(path), name, value)


def hide_no_token(module: Any) -> None:
    def without_mask(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": None}

    module.model.layers[1].register_forward_pre_hook(without_mask, with_kwargs=True)


def swap_masks(module: Any) -> None:
    """Give one layer the mask of another kind."""
    seen: dict[int, Any] = {}

    def note(number: int) -> Any:
        def hook(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            seen[number] = kwargs["attention_mask"]
            return args, {**kwargs, "attention_mask": seen[0]}

        return hook

    for number in (0, 1):
        module.model.layers[number].register_forward_pre_hook(note(number), with_kwargs=True)


def share_attention(module: Any) -> None:
    module.model.layers[1].self_attn = module.model.layers[0].self_attn


def drop(module: Any) -> None:
    mlp = module.model.layers[1].mlp
    mlp.act_fn = nn.Sequential(mlp.act_fn, nn.Dropout(0.25))


ONE, TWO = "model.layers.1", "model.layers.2"
FAULTS: Mapping[str, tuple[str, Callable[[Any], None], str]] = {
    "a scale": ("tiny-gpt-oss", set_in(f"{ONE}.self_attn", "scaling", 0.1), "layer 1: mul .* has 0.1 in the code, and"),
    "a scale of one function": (
        "tiny-deepseek", set_in(f"{TWO}.self_attn", "scaling", 0.1), "layer 2: scaled_dot.* scale: has 0.1 in the code"
    ),
    "a window": ("tiny-gpt-oss", swap_masks, "layer 1: .* has the result of another call in the code"),
    "no mask": ("tiny-gpt-oss", hide_no_token, "layer 1: "),
    "an activation behind a convolution": (
        "tiny-qwen3-next", set_in(f"{ONE}.linear_attn", "activation", "gelu"), "layer 1: ",
    ),
    "an eps behind linear attention": (
        "tiny-qwen3-next", set_in(f"{ONE}.linear_attn.norm", "variance_epsilon", 0.1), "add .* has 0.1 in the code"
    ),
    "no bias": ("tiny-gpt-oss", set_in(f"{ONE}.self_attn.q_proj", "bias", None), r"q_proj.bias is missing in the code"),
    "a bias more": (
        "tiny-olmo2", set_in(f"{ONE}.self_attn.o_proj", "bias", nn.Parameter(torch.zeros(128, device="meta"))),
        r"o_proj.bias is \(128,\) in the code, and missing",
    ),
    "a limit": ("tiny-gpt-oss", set_in(f"{ONE}.mlp.experts", "limit", 5.0), "clamp .* has 5.0 in the code, and 7.0"),
    "a slope": ("tiny-gpt-oss", set_in(f"{ONE}.mlp.experts", "alpha", 1.5), "mul .* has 1.5 in the code, and 1.702"),
    "a choice more": ("tiny-gpt-oss", set_in(f"{ONE}.mlp.router", "top_k", 3), "topk .* has 3 in the code, and 2"),
    "groups": ("tiny-deepseek", set_in(f"{TWO}.mlp.gate", "topk_group", 1), "topk .* k: has 1 in the code, and 2"),
    "no sum to one": ("tiny-deepseek", set_in(f"{TWO}.mlp.gate", "norm_topk_prob", False), "the code calls mul"),
    "a scale of experts": (
        "tiny-glm4-moe", set_in(f"{TWO}.mlp.gate", "routed_scaling_factor", 1.25), "layer 2: mul .* has 1.25 in"
    ),
    "an epsilon": (
        "tiny-llama", set_in(f"{ONE}.input_layernorm", "variance_epsilon", 1e-3), "layer 1: add .* has 0.001 in the"
    ),
    "weights of two layers": ("tiny-llama", share_attention, "self_attn.k_proj.weight is missing in the code"),
    "dropout": ("tiny-llama", drop, "layer 1: the code calls dropout"),
}  # fmt: skip


@pytest.mark.parametrize("name", rest_is_slow(FAULTS, 4))
def test_a_module_that_was_changed_is_not_the_card_of_its_config(name: str):
    card, change, told = FAULTS[name]
    module = of_card(card)
    change(module)
    differences = card_match(module, "mine", "its code").differences
    assert any(re.search(told, difference) for difference in differences), differences


# -- a card that differs from its module ---------------------------------------------------------------


def with_kind(card: ModelSpec, **changes: Any) -> ModelSpec:
    return replace(card, kinds=tuple(replace(kind, **changes) for kind in card.kinds))


def with_router(card: ModelSpec, **changes: Any) -> ModelSpec:
    return replace(card, router=replace(card.router or Router(), **changes))


CHANGED: Mapping[str, tuple[str, Callable[[ModelSpec], ModelSpec], str]] = {
    "a window": ("tiny-gpt-oss", lambda card: with_kind(card, window=6), "local: .* attend"),
    "a window less": ("tiny-gemma3", lambda card: with_kind(card, window=None), "local: .* attend"),
    "a slope": ("tiny-gpt-oss", lambda card: replace(card, glu_slope=1.6), ": .* act"),
    "a limit": ("tiny-gpt-oss", lambda card: replace(card, glu_limit=7.5), ": .* act"),
    "a softmax of all": ("tiny-gpt-oss", lambda card: replace(card, router=Router(normalised=False)), "choose"),
    "a scale": ("tiny-gemma3", lambda card: replace(card, query_scalar=25.0), ": .* attend"),
    "no scaled embeddings": ("tiny-gemma3", lambda card: replace(card, scaled_embeddings=False), "embed: from embed"),
    "no offset": ("tiny-gemma3", lambda card: replace(card, norm_offset=0.0), ": .* attn_norm"),
    "a base": ("tiny-llama", lambda card: replace(card, rotary_theta=2 * card.rotary_theta), ": .* q_rotary"),
    "an epsilon": ("tiny-llama", lambda card: replace(card, norm_eps=0.001), ": .* attn_norm"),
    "a router's scale": ("tiny-deepseek", lambda card: with_router(card, scale=2.4), "from combine on"),
    "a router's groups": ("tiny-deepseek", lambda card: with_router(card, chosen_groups=3), ": .* choose"),
    "a group's score": ("tiny-deepseek", lambda card: with_router(card, group_score="best"), ": .* choose"),
    "sums of one": ("tiny-deepseek", lambda card: with_router(card, normalised=False), "from combine on"),
    "another activation": ("tiny-glm4-moe", lambda card: replace(card, activation="gelu"), ": .* (shared_)?act"),
}  # fmt: skip


def numbers_of(name: str, change: Callable[[ModelSpec], ModelSpec]) -> list[str]:
    module = of_card(name)
    card = card_of_config(module.config, "mine", "its config")
    assert card
    twin = Twin.of(module, card)
    small = card_of_config(twin.module.config, "twin", "its config")
    assert small
    differences = list[str]()
    for draw in range(NUM_DRAWS):
        twin.draw(draw)
        tape = taped(twin.module, LAYERS, twin.tokens())
        differences += differing_numbers(change(small), module.config.model_type, twin, tape, twin.tokens())
    return differences


@pytest.mark.parametrize("name", rest_is_slow(CHANGED, 4))
def test_a_changed_fact_of_a_card_is_named_by_the_operation_that_it_changes(name: str):
    card, change, told = CHANGED[name]
    differences = numbers_of(card, change)
    assert any(re.search(told, difference) for difference in differences), differences


def test_slow_frequencies_that_no_short_sequence_shows_are_compared():
    module = of_card("tiny-deepseek")
    card = card_of_config(module.config, "mine", "its config")
    assert card and card.rotary_scaling
    twin = Twin.of(module, card)
    slower = replace(card.rotary_scaling, factor=card.rotary_scaling.factor * 2)
    tables = dict(twin.module.named_buffers())
    assert not [*differing_frequencies(twin_graph(card), tables)]
    assert [*differing_frequencies(twin_graph(replace(card, rotary_scaling=slower)), tables)]


# -- code of a class that does something else ----------------------------------------------------------


def all_see_all(**keywords: Any) -> Any:
    from transformers import masking_utils

    return masking_utils.create_causal_mask(**keywords)


def test_a_class_whose_window_is_none_is_not_its_card(monkeypatch: pytest.MonkeyPatch):
    from transformers.models.gemma3 import modeling_gemma3

    monkeypatch.setattr(modeling_gemma3, "create_sliding_window_causal_mask", all_see_all)
    (difference,) = card_match(of_card("tiny-gemma3"), "mine", "its code").differences
    assert difference.startswith("local: from attend on, the code computes other numbers")


def capped(_: nn.Module, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> tuple[torch.Tensor, None]:
    """Attention of which the scores are capped, which no config of Llama says."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (heads.repeat_interleave(groups, 1) for heads in (key, value))
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = torch.tanh(query @ key.transpose(2, 3)).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


@pytest.mark.slow
def test_code_that_does_more_than_its_config_says_is_planned_by_its_operations():
    import transformers

    transformers.AttentionInterface.register("capped", capped)
    module: Any = of_card("tiny-llama")
    module.config._attn_implementation = "capped"
    traced = read_decoder(module, 24).traced
    assert traced and "layer: tanh of the scores of attention is not in the plan" in traced.unlifted
    said = "it is not the card of its config: layer: from attend on, the code computes other numbers"
    assert any(note.startswith(said) for note in traced.unlifted)


@pytest.mark.slow
def test_code_that_is_refused_says_how_it_differs_from_its_card():
    module: Any = of_card("tiny-llama", num_hidden_layers=3)
    module.model.layers[2].mlp = module.model.layers[1].mlp
    with pytest.raises(InputError, match=r"config: it is not the card of its config: model\.layers\.2\.mlp\."):
        read_decoder(module, 24)


@pytest.mark.slow
def test_code_that_differs_from_its_card_is_read_with_the_experts_that_its_scores_choose():
    module = of_card("tiny-deepseek", num_hidden_layers=3)
    set_in(f"{TWO}.self_attn", "scaling", 0.1)(module)
    model = read_decoder(module, 24)
    assert model.traced and (model.num_experts, model.experts_per_token) == (8, 2)
    assert re.search(r"it is not the card of its config: layer 2: .* scale: has 0\.1", str(model.traced.unlifted))


# -- modules with numbers, inputs and progress ---------------------------------------------------------


def test_a_module_with_numbers_is_compared_with_its_constants_and_stays_as_it_is():
    module = of_card("tiny-gemma3", "cpu")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert card_match(module, "mine", "its code").differences == ()
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    module.model.embed_tokens.embed_scale.mul_(2)
    module.model.rotary_emb.sliding_attention_inv_freq.mul_(1.5)
    assert card_match(module, "mine", "its code").differences == (
        "model.rotary_emb.sliding_attention_inv_freq has other frequencies than its card",
        "model.embed_tokens.embed_scale has other numbers in the code than by its config",
    )


@pytest.mark.slow
def test_inputs_beside_tokens_are_not_taken_for_those_of_a_card():
    module, tokens = of_card("tiny-llama", "cpu"), torch.zeros(2, 24, dtype=torch.int64)
    assert read_decoder(module, inputs={"input_ids": tokens}).traced is None
    traced = read_decoder(module, inputs={"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}).traced
    assert traced and any("it was given inputs of its own" in note for note in traced.unlifted)


def test_progress_is_told_layer_by_layer():
    told: list[str] = []
    read_decoder(of_card("tiny-gpt-oss"), show=told.append)
    assert [text for text in told if text.startswith("reading")] == [f"reading layer {n} of 4" for n in range(1, 5)]
    assert "comparing the numbers of its twin with its card" in told


@pytest.mark.parametrize("name", ["Mixtral", "Mixtral, every expert apart", "Qwen3-MoE", "gpt-oss"])
def test_experts_of_a_card_are_found_however_they_are_computed(name: str):
    with torch.device("meta"):
        module = EXPERTS[name]()
    assert read_decoder(module).traced is None
