"""What rows state of an architecture: as the card of the same model has it, and back; wrong columns are named."""

from dataclasses import replace
from typing import Any

import pytest

from autoshard.calibration.architecture import stated_arch, stated_model
from autoshard.errors import InputError
from autoshard.spec.model import LayerKind, ModelSpec
from autoshard.spec.model_catalogue import load_model, model_names

DEEPSEEK: dict[str, Any] = {
    "layers": 60, "hidden": 5120, "ffn": 12288, "heads": 128, "kv_heads": 128, "vocab": 102400, "gated_mlp": True,
    "tied_embed": False, "experts": 160, "experts_per_token": 6, "moe_ffn": 1536, "shared_experts": 2,
    "first_dense_layers": 1, "q_lora": 1536, "kv_lora": 512, "qk_nope": 128, "qk_rope": 64, "v_head": 128,
}  # fmt: skip

LINEAR: dict[str, Any] = {
    "linear_layers": 3, "linear_key_heads": 2, "linear_value_heads": 4, "linear_key_dim": 16, "linear_value_dim": 16,
    "linear_taps": 4,
}  # fmt: skip


def model(**stated: object) -> ModelSpec:
    return stated_model(stated, "own", 4096, {})


def test_deepseek_is_as_large_as_published():
    stated, card = model(**DEEPSEEK), load_model("deepseek-v2")
    assert stated.num_parameters == card.num_parameters
    assert (stated.latent, stated.kinds, stated.order) == (card.latent, card.kinds, card.order)
    assert (stated.ffn, stated.shared_ffn, stated.head_dim) == (1536, 3072, 192)
    assert model(**{**DEEPSEEK, "layers": 4}).order == "dense/layer*3"
    whole = model(**{column: value for column, value in DEEPSEEK.items() if column != "q_lora"})
    assert card.latent and whole.latent == replace(card.latent, query_rank=None)


@pytest.mark.parametrize("name", [name for name in model_names() if load_model(name).gated_mlp])
def test_what_is_written_of_a_card_is_read_with_as_many_parameters(name: str):
    card = load_model(name)
    stated = stated_arch(card)
    read = model(**stated)
    assert stated_arch(read) == stated
    extras = card.num_parameters - read.num_parameters  # biases, norms of queries and keys, corrections of routers
    assert 0 <= extras <= 5e-4 * card.num_parameters + 2e5 * (card.num_layers < 8)


@pytest.mark.parametrize("name", [name for name in model_names() if load_model(name).has_linear_layers])
def test_linear_attention_lies_in_the_layers_of_its_card(name: str):
    card = load_model(name)
    read = model(**stated_arch(card))
    assert (read.order, read.kinds, read.gated_attention) == (card.order, card.kinds, True)
    if card.num_experts:
        dense = LayerKind(name="dense_linear", dense_ffn=96, linear=card.kinds[0].linear)
        order = card.order.replace("linear*3", "dense_linear/linear*2", 1)
        assert model(**stated_arch(replace(card, kinds=(*card.kinds, dense), order=order))).order == order


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"moe_ffn": 1024}, "arch.experts: missing, though the row states moe_ffn"),
        ({"experts": 8, "first_dense_layers": 4}, "arch.first_dense_layers: must be at most 3"),
        ({"experts": 8, "shared_experts": -1}, "arch.shared_experts: must be at least 0, not -1"),
        ({"linear_layers": 2}, "arch: linear attention needs linear_key_heads, linear_value_heads, linear_key_dim, "),
        ({**LINEAR, "linear_layers": 5}, "arch.linear_layers: must be at most 4, the number of layers, not 5"),
        ({**LINEAR, "linear_value_heads": 3}, "arch.value_heads: 3 value heads cannot share 2 key heads evenly"),
        ({"kv_lora": 64}, "arch: latent attention needs qk_nope, qk_rope, v_head as well"),
        ({"experts": 8, "moe_ffn": "wide"}, "arch.moe_ffn: expected a whole number, found 'wide'"),
    ],
)
def test_wrong_columns_are_named(change: dict[str, object], says: str):
    with pytest.raises(InputError, match=says):
        model(layers=4, hidden=512, ffn=1024, heads=8, **change)
