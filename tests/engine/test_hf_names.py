"""Hugging Face weights become ours and back: names, shapes and round trips."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import autoshard
from autoshard.engine.hf_names import HfNames
from autoshard.engine.hf_tables import HF_NAMES, Form
from autoshard.errors import InputError
from autoshard.graph.op import Array
from autoshard.spec.hf.config import MODEL_TYPES, spec_from_config
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import HEADER, model_names
from tests.engine.hf_whole import from_hf, to_hf
from tests.engine.small_models import distinct_cards, graph_of
from tests.kit import small_config
from tests.slower import rest_is_slow

CARDS = Path(autoshard.__file__).parents[1] / "models"
FORMS: tuple[Form, ...] = ("published", "module")
FLAGS: Mapping[str, tuple[str, ...]] = {
    "llama": ("attention_bias", "mlp_bias", "tie_word_embeddings"),
    **dict.fromkeys(
        ("qwen3", "glm4_moe", "dots1", "deepseek_v2", "deepseek_v3"), ("attention_bias", "tie_word_embeddings")
    ),
    **dict.fromkeys(("nemotron", "arcee", "jais2"), ("attention_bias", "mlp_bias", "tie_word_embeddings")),
    **dict.fromkeys(("olmoe", "granitemoe", "gpt_oss", "glm4", "seed_oss"), ("attention_bias", "tie_word_embeddings")),
    "qwen2_moe": ("qkv_bias", "tie_word_embeddings"),
    **dict.fromkeys(("ernie4_5", "starcoder2"), ("use_bias", "tie_word_embeddings")),
}


WIDTHS = {**{family: kind.width for family, kind in MODEL_TYPES.items()}, "gpt2": "n_inner"}


@st.composite
def experts(draw: st.DrawFn, family: str, layers: int) -> Mapping[str, Any]:
    """The fields of an architecture about experts."""
    config, small = dict[str, Any](), st.integers(1, 7)
    if family in ("glm4_moe", "glm4_moe_lite", "dots1", "deepseek_v2", "deepseek_v3"):
        config |= {"n_shared_experts": draw(st.integers(1, 3)), "first_k_dense_replace": draw(st.integers(0, 2))}
        config |= {"intermediate_size": draw(small), "n_group": 1, "topk_group": 1}
    if family == "ernie4_5_moe":
        config |= {"n_shared_experts": draw(st.integers(1, 3)), "intermediate_size": draw(small)}
        config |= {"moe_layer_start_index": draw(st.integers(0, 2)), "moe_layer_interval": draw(st.integers(1, 2))}
    if family in ("qwen2_moe", "qwen3_next"):
        config |= {"shared_expert_intermediate_size": draw(small), "intermediate_size": draw(small)}
        config |= {"decoder_sparse_step": draw(st.integers(1, layers))}
    if family == "qwen3_5_moe_text":
        config["shared_expert_intermediate_size"] = draw(small)
    if family == "glm4_moe":
        config |= {"use_qk_norm": draw(st.booleans())}
    if family == "glm4_moe_lite":
        config["first_k_dense_replace"] = first = min(config["first_k_dense_replace"], layers)
        config["mlp_layer_types"] = ["dense"] * first + ["sparse"] * (layers - first)
    if MODEL_TYPES[family].router != "chosen" or family in ("mixtral", "granitemoe", "gpt_oss"):
        config |= {
            "norm_topk_prob": family != "deepseek_v2",
            "num_local_experts": draw(st.integers(2, 4)),
            "num_experts_per_tok": 1,
        }
    return config


@st.composite
def configs(draw: st.DrawFn) -> Mapping[str, Any]:
    """Any small configuration of any architecture; no two of its sizes need be alike."""
    family = draw(st.sampled_from(sorted(MODEL_TYPES)))
    kv_heads, group, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 3))
    single = family in ("gpt2", "gpt_neox")
    heads = kv_heads if single else kv_heads * group
    small = st.integers(1, 7)
    config: dict[str, Any] = {
        "model_type": family,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "vocab_size": draw(small),
        WIDTHS[family]: draw(small),
        "max_position_embeddings": draw(small),
    }
    if not single:
        config |= {"num_key_value_heads": kv_heads, "head_dim": head_dim, "hidden_size": draw(small)}
    if family == "ministral3":
        config["rope_parameters"] = {"rope_type": "default", "llama_4_scaling_beta": 0.0}
    if family == "glm4":  # a half of each head, and pairs of it
        config["head_dim"] = 2 * head_dim
    if family in ("gpt_neox", "glm4_moe", "nemotron"):
        config["partial_rotary_factor"] = 1.0
    if family.startswith("deepseek") or family == "glm4_moe_lite":
        config |= {"num_key_value_heads": heads, "q_lora_rank": draw(st.none() | small)}
        config |= {name: draw(small) for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")}
        config |= {"qk_rope_head_dim": 2 * draw(st.integers(1, 3))}
    if "linear_num_key_heads" in MODEL_TYPES[family].defaults:
        heads, width = draw(st.integers(1, 3)), draw(small)
        config |= {"linear_num_key_heads": heads, "linear_num_value_heads": heads * draw(st.integers(1, 3))}
        config |= {"linear_value_head_dim": width, "linear_conv_kernel_dim": draw(small)}
        config |= {"linear_key_head_dim": width if family == "qwen3_next" else draw(small)}
        config |= {"partial_rotary_factor": 1.0, "full_attention_interval": draw(st.integers(1, 3))}
        if family == "olmo_hybrid":  # which has layers of both kinds
            config |= {"num_hidden_layers": draw(st.integers(2, 4)), "full_attention_interval": draw(st.integers(2, 3))}
            config.pop("partial_rotary_factor")
    config |= draw(experts(family, config["num_hidden_layers"]))
    flags = FLAGS.get(family, ("tie_word_embeddings",))
    return config | {flag: draw(st.booleans()) for flag in flags}


def model_of(config: Mapping[str, Any]) -> ModelSpec:
    return spec_from_config(config, name="drawn", source="made for this test")


def numbered(model: ModelSpec) -> dict[str, Array]:
    """Return our weights with no number twice, but for tied ones: any two that change places are seen."""
    graph, weights, start = graph_of(model), dict[str, Array](), 0
    for name, block in graph.instances():
        for tensor in block.parameters:
            shape = [graph.sizes[dim] for dim in tensor.dims]
            owner = graph.tied.get(f"{block.kind}.{tensor.name}")
            size = int(np.prod(shape))
            drawn = np.arange(start, start + size, dtype=np.float64).reshape(shape)
            weights[f"{name}.{tensor.name}"] = weights[owner.replace(".", ".0.", 1)] if owner else drawn
            start += 0 if owner else size
    return weights


def same(left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


# -- the table -------------------------------------------------------------------------------------


def test_every_architecture_has_a_table():
    assert HF_NAMES.keys() == MODEL_TYPES.keys()


def test_kimi_k2_has_the_table_of_deepseek_v3():
    model = model_of(small_config("deepseek_v3"))
    assert HfNames.of("kimi_k2", model) == HfNames.of("deepseek_v3", model)


@given(config=configs(), form=st.sampled_from(FORMS), data=st.data())
def test_there_and_back_changes_nothing_and_rows_of_theirs_are_boxes_of_ours(
    config: Mapping[str, Any], form: Form, data: st.DataObject
):
    family, model = config["model_type"], model_of(config)
    ours = numbered(model)
    theirs = to_hf(family, model, ours, np.empty, form)
    trained = [tensor.ravel() for name, tensor in theirs.items() if not name.endswith("e_score_correction_bias")]
    assert len(np.concatenate(trained)) == len(np.unique(np.concatenate(trained))) == model.num_parameters
    same(from_hf(family, model, theirs, np.empty), ours)
    name = data.draw(st.sampled_from(sorted(theirs)))
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, len(theirs[name]))] * 2)))
    rows, num_read = theirs[name][low:high], 0
    for patch in (part for one in HfNames.of(family, model, form).patches()[name] for part in one.rows(low, high)):
        view = patch.view(rows)
        assert np.shares_memory(view, theirs[name])
        np.testing.assert_array_equal(view, ours[patch.tensor][patch.place])
        num_read += view.size
    assert num_read == rows.size


def test_a_model_of_another_architecture_and_an_unknown_one_are_refused():
    missing = r"layer\.0\.gate\.weight, layer\.0\.k_norm\.weight, layer\.0\.q_norm\.weight and 3 more of drawn"
    with pytest.raises(InputError, match=f"gpt2 has no tensors for {missing}"):
        HfNames.of("gpt2", model_of(small_config("qwen3")))
    with pytest.raises(InputError, match=r"'lama' has no table of names.*llama"):
        HfNames.of("lama", model_of(small_config("llama")))


# -- against transformers --------------------------------------------------------------------------


def card_of(name: str) -> dict[str, Any]:
    return json.loads((CARDS / f"{name}.json").read_text(encoding="utf-8"))


FIRST_OF_FAMILY = {card_of(name)["model_type"]: name for name in reversed(model_names())}.values()
REST = [name for name in distinct_cards() if name not in FIRST_OF_FAMILY]


@pytest.mark.parametrize("name", rest_is_slow([*FIRST_OF_FAMILY, *REST], len(FIRST_OF_FAMILY), len(REST)))
def test_a_card_has_the_tensors_of_the_transformers_module(name: str):
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    card = card_of(name)
    layers = next(key for key in ("num_hidden_layers", "n_layer") if key in card)
    config = {**card, layers: 1}
    model = spec_from_config(config, name=name, source="its card, of one layer")
    fields = {key: value for key, value in config.items() if key not in ("model_type", HEADER)}
    with torch.device("meta"):
        settings = transformers.AutoConfig.for_model(card["model_type"], **fields)
        module = transformers.AutoModelForCausalLM.from_config(settings)
    corrections = [named for named in module.named_buffers() if named[0].endswith("e_score_correction_bias")]
    expected = {name: tuple(tensor.shape) for name, tensor in (*module.named_parameters(), *corrections)}
    assert HfNames.of(card["model_type"], model, "module").shapes == expected
