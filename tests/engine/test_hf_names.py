"""Hugging Face weights become ours and back: names, shapes, round trips, and the same loss from the same weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import autoshard
from autoshard.engine.hf_names import HF_NAMES, Form, HfNames
from autoshard.errors import InputError
from autoshard.graph.op import Array
from autoshard.spec.hf_config import MODEL_TYPES, spec_from_config
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import HEADER, model_names
from tests.engine.hf_whole import from_hf, to_hf
from tests.engine.small_models import BATCH, SEQ, graph_of, micro_batches, roomy
from tests.reference_step import evaluate_step
from tests.slower import rest_is_slow
from tests.small_configs import SMALL_FAMILIES, small_config

CARDS = Path(autoshard.__file__).parents[1] / "models"
FORMS: tuple[Form, ...] = ("published", "module")
FLAGS: Mapping[str, tuple[str, ...]] = {
    "llama": ("attention_bias", "mlp_bias", "tie_word_embeddings"),
    "qwen3": ("attention_bias", "tie_word_embeddings"),
}


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
        "n_inner" if family == "gpt2" else "intermediate_size": draw(small),
        "max_position_embeddings": draw(small),
    }
    if not single:
        config |= {"num_key_value_heads": kv_heads, "head_dim": head_dim, "hidden_size": draw(small)}
    if family == "gpt_neox":
        config["rotary_pct"] = 1.0
    if family == "mixtral":
        config |= {"num_local_experts": draw(st.integers(2, 4)), "num_experts_per_tok": 1}
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


@given(config=configs(), form=st.sampled_from(FORMS), data=st.data())
def test_there_and_back_changes_nothing_and_rows_of_theirs_are_boxes_of_ours(
    config: Mapping[str, Any], form: Form, data: st.DataObject
):
    family, model = config["model_type"], model_of(config)
    ours = numbered(model)
    theirs = to_hf(family, model, ours, np.empty, form)
    assert sum(tensor.size for tensor in theirs.values()) == model.num_parameters
    assert len(np.unique(np.concatenate([tensor.ravel() for tensor in theirs.values()]))) == model.num_parameters
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
        HfNames.of("gpt2", model_of(small("qwen3")))
    with pytest.raises(InputError, match=r"'lama' has no table of names.*llama"):
        HfNames.of("lama", model_of(small("llama")))


# -- against transformers --------------------------------------------------------------------------

MORE: Mapping[str, Mapping[str, Any]] = {
    "llama with biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama with one head per key": {"num_key_value_heads": 4},
    "gpt_neox in sequence": {"use_parallel_residual": False},
}


def small(name: str) -> dict[str, Any]:
    """Return a reduced configuration; the name's first word is the architecture."""
    return small_config(name.split()[0], **MORE.get(name, {}))


def transformers_module(config: Mapping[str, Any], device: str = "cpu") -> Any:
    """Return the module of a configuration with drawn weights; on ``meta`` it has none."""
    transformers: Any = pytest.importorskip("transformers")
    torch: Any = pytest.importorskip("torch")
    fields = {key: value for key, value in config.items() if key not in ("model_type", HEADER)}
    hf_config = transformers.AutoConfig.for_model(config["model_type"], **fields)
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with torch.device(device):
        module = transformers.AutoModelForCausalLM.from_config(hf_config, **implementations, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters() if device == "cpu" else ():
        parameter.data.normal_(0, 0.4, generator=generator)
    return module


def card_of(name: str) -> dict[str, Any]:
    return json.loads((CARDS / f"{name}.json").read_text(encoding="utf-8"))


FIRST_OF_FAMILY = {card_of(name)["model_type"]: name for name in reversed(model_names())}.values()


@pytest.mark.parametrize(
    "name",
    rest_is_slow(sorted(model_names(), key=lambda name: name not in FIRST_OF_FAMILY), len(FIRST_OF_FAMILY)),
)
def test_a_card_has_the_tensors_of_the_transformers_module(name: str):
    card = card_of(name)
    layers = next(key for key in ("num_hidden_layers", "n_layer") if key in card)
    config = {**card, layers: 1}
    model = spec_from_config(config, name=name, source="its card, of one layer")
    module = transformers_module(config, device="meta")
    expected = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert HfNames.of(card["model_type"], model, "module").shapes == expected


@pytest.mark.parametrize("name", [*SMALL_FAMILIES, *MORE])
def test_the_same_weights_give_the_same_loss(name: str):
    torch: Any = pytest.importorskip("torch")
    from tests.graph.test_against_transformers import InFloat64

    config = small(name)
    with InFloat64():
        model, theirs = model_of(config), transformers_module(config)
    weights = from_hf(config["model_type"], model, theirs.state_dict(), torch.empty)
    rng, graph = np.random.default_rng(3), graph_of(model, capacity=roomy(model))
    (batch,) = micro_batches(model, rng, count=1)
    weight = np.full(batch["tokens"].shape, 1 / (BATCH * (SEQ - 1)))
    weight[:, -1] = 0  # transformers shifts the labels, and has none for the last token
    batch = {**batch, "labels": np.roll(batch["tokens"], -1, axis=1), "token_weight": weight}
    tokens = torch.tensor(batch["tokens"])
    with InFloat64():
        expected = theirs(input_ids=tokens, labels=tokens, use_cache=False).loss.item()
    found = evaluate_step(graph, {name: tensor.numpy() for name, tensor in weights.items()}, [batch]).loss
    assert found == pytest.approx(expected, abs=1e-11)
