"""Hugging Face configuration data: defaults, aliases, what is refused and how."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import autoshard
from autoshard.errors import Fault, InputError
from autoshard.spec.hf_config import ACTIVATIONS, MODEL_TYPES, UNMODELLED, spec_from_config
from autoshard.spec.model import ModelSpec, RotaryScaling

CARDS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(autoshard.__file__).parents[1] / "models").glob("*.json"))
}
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GPT2_SIZES: dict[str, Any] = {"vocab_size": 96, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 32}
# The fewest fields with which each family is accepted; some families default to 8 or 32 key/value heads.
SMALLEST: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mistral": SIZES | {"num_attention_heads": 8},
    "mixtral": SIZES | {"num_attention_heads": 8, "num_local_experts": 4},
    "gpt2": GPT2_SIZES,
    "gpt_neox": SIZES | {"num_attention_heads": 8, "hidden_size": 128},
    "qwen2": SIZES | {"num_attention_heads": 32},
    "qwen3": SIZES | {"num_attention_heads": 32},
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def read(family: str, **changes: Any) -> ModelSpec:
    return spec_from_config({"model_type": family, **SMALLEST[family], **changes}, name="m", source="test")


def faults(config: Mapping[str, Any]) -> tuple[Fault, ...]:
    with pytest.raises(InputError) as caught:
        spec_from_config(config, name="m", source="test")
    return caught.value.faults


def refused(family: str, **changes: Any) -> list[str]:
    """Return the fields that are named when these changes are refused."""
    return [fault.where for fault in faults({"model_type": family, **SMALLEST[family], **changes})]


# ----------------------------------------------------------------------------------------------- acceptance


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_only_the_sizes_must_be_stated(family: str):
    for field in SMALLEST[family]:
        kept = {key: value for key, value in SMALLEST[family].items() if key != field}
        assert [fault.where for fault in faults({"model_type": family, **kept})] == [field]
    assert read(family).name == "m"


def test_the_options_of_each_family_reach_the_model():
    llama = read("llama", attention_bias=True, mlp_bias=True, num_key_value_heads=2, head_dim=32)
    assert (llama.qkv_bias, llama.out_bias, llama.mlp_bias) == (True, True, True)
    assert (llama.num_kv_heads, llama.head_dim) == (2, 32)
    neox = read("gpt_neox", use_parallel_residual=False, attention_bias=False, rotary_emb_base=5000, rotary_pct=0.5)
    assert (neox.parallel_residual, neox.qkv_bias, neox.mlp_bias) == (False, False, True)
    assert (neox.rotary_theta, neox.rotary_fraction) == (5000.0, 0.5)
    assert (read("qwen2").qkv_bias, read("qwen2").out_bias) == (True, False)
    assert read("qwen3", attention_bias=True).out_bias
    assert read("qwen3").qk_norm
    assert read("gpt2", n_inner=100, tie_word_embeddings=False).ffn == 100
    assert read("gpt2", n_inner=None).ffn == 256
    mixtral = read("mixtral", num_experts_per_tok=3, sliding_window=16)
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.window) == (4, 3, 16)
    assert read("mistral", num_key_value_heads=None).num_kv_heads == 8


def test_the_other_names_of_a_field_are_known():
    renamed = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 32}
    assert spec_from_config({"model_type": "gpt2", "vocab_size": 96, **renamed}, name="m", source="test") == read(
        "gpt2"
    )
    assert refused("gpt2", hidden_size=65) == ["hidden_size"]
    assert read("gpt2", hidden_size=64) == read("gpt2")


def test_dropout_and_other_fields_without_effect_are_ignored():
    ignored = {"attn_pdrop": 0.1, "resid_pdrop": 0.3, "bos_token_id": [1], "torch_dtype": 7, "autoshard": None}
    assert read("gpt2", **ignored) == read("gpt2")


def test_windows_are_read_where_all_layers_have_the_same():
    assert read("mistral").window == 4096
    assert read("mistral", sliding_window=None).window is None
    assert read("qwen2").window is None
    sliding = {"use_sliding_window": True, "sliding_window": 16}
    assert read("qwen2", **sliding, max_window_layers=0).window == 16
    assert read("qwen2", **sliding, max_window_layers=3).window is None
    assert read("qwen2", **sliding, layer_types=["sliding_attention"] * 3).window == 16
    assert read("qwen3", layer_types=["full_attention"] * 3, sliding_window=None).window is None
    assert read("llama", sliding_window=16, use_sliding_window=False).window is None


@pytest.mark.parametrize("group", ["rope_scaling", "rope_parameters"])
def test_rotary_scaling_is_read_from_both_places(group: str):
    linear = read("llama", **{group: {"type": "linear", "factor": 2}, "rope_theta": 5000})
    assert linear.rotary_scaling == RotaryScaling(kind="linear", factor=2.0)
    assert linear.rotary_theta == 5000.0
    llama3 = read("llama", **{group: LLAMA3_ROPE | {"rope_theta": 7000.0}, "rope_theta": 5000.0})
    assert llama3.rotary_scaling is not None
    assert (llama3.rotary_scaling.original_positions, llama3.rotary_theta) == (512, 7000.0)
    assert read("llama", **{group: {"rope_type": "default", "rope_theta": 9.0}}).rotary_theta == 9.0
    assert read("llama", **{group: None}).rotary_scaling is None


# --------------------------------------------------------------------------------------------------- refusal


@pytest.mark.parametrize("kind", ["falcon", "dbrx", "", None, 3, ["llama"], "llama "])
def test_an_unknown_architecture_names_the_field_and_the_known_families(kind: object):
    (fault,) = faults({"model_type": kind, **SIZES})
    assert fault.where == "model_type"
    assert all(family in fault.message for family in MODEL_TYPES)


@pytest.mark.parametrize("classes", [["LlamaForSequenceClassification"], ["MistralForCausalLM"], "LlamaForCausalLM", 1])
def test_another_class_of_the_family_is_refused(classes: object):
    assert refused("llama", architectures=classes) == ["architectures"]
    assert read("llama", architectures=["LlamaForCausalLM"]) == read("llama", architectures=None)


@pytest.mark.parametrize("field", UNMODELLED)
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_what_is_not_modelled_is_refused_by_name_and_accepted_when_off(family: str, field: str):
    off = UNMODELLED[field]
    for value in off:
        assert read(family, **{field: value}) == read(family)
    on = {True: False, False: True}.get(off[0], 7) if isinstance(off[0], bool) else 7
    assert refused(family, **{field: on}) == [field]


@pytest.mark.parametrize(
    ("family", "changes", "fields"),
    [
        ("llama", {"hidden_size": "4096"}, ["hidden_size"]),
        ("llama", {"hidden_size": 64.0}, ["hidden_size"]),
        ("llama", {"hidden_size": True}, ["hidden_size"]),
        ("llama", {"hidden_size": None}, ["hidden_size"]),
        ("llama", {"hidden_size": 10**30}, ["hidden_size"]),
        ("llama", {"num_hidden_layers": 0}, ["num_hidden_layers"]),
        ("llama", {"num_hidden_layers": 10**6}, ["num_hidden_layers"]),
        ("llama", {"num_attention_heads": 5}, ["num_attention_heads"]),
        ("llama", {"num_key_value_heads": 3}, ["num_key_value_heads"]),
        ("llama", {"num_key_value_heads": 0}, ["num_key_value_heads"]),
        ("mistral", {"num_attention_heads": 4}, ["num_attention_heads"]),
        ("llama", {"hidden_size": 36}, ["hidden_size"]),
        ("gpt2", {"n_embd": 2**30}, ["n_embd"]),
        ("llama", {"head_dim": 15}, ["head_dim"]),
        ("llama", {"rms_norm_eps": 0}, ["rms_norm_eps"]),
        ("llama", {"rms_norm_eps": float("nan")}, ["rms_norm_eps"]),
        ("llama", {"rope_theta": float("inf")}, ["rope_theta"]),
        ("llama", {"rope_theta": 10**400}, ["rope_theta"]),
        ("llama", {"hidden_act": "quick_gelu"}, ["hidden_act"]),
        ("llama", {"hidden_act": 3}, ["hidden_act"]),
        ("llama", {"tie_word_embeddings": 1}, ["tie_word_embeddings"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ("llama", {"sliding_window": 16}, ["sliding_window"]),
        ("llama", {"num_local_experts": 8}, ["num_local_experts"]),
        ("llama", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, ["layer_types"]),
        ("mistral", {"attention_bias": True}, ["attention_bias"]),
        ("mistral", {"mlp_bias": True}, ["mlp_bias"]),
        ("mistral", {"sliding_window": 0}, ["sliding_window"]),
        ("mixtral", {"num_local_experts": 1}, ["num_local_experts"]),
        ("mixtral", {"num_experts_per_tok": 5}, ["num_experts_per_tok"]),
        ("mixtral", {"num_experts": 5}, ["num_experts"]),
        ("gpt2", {"n_inner": "no"}, ["n_inner"]),
        ("gpt2", {"num_key_value_heads": 1}, ["num_key_value_heads"]),
        ("gpt2", {"head_dim": 32}, ["head_dim"]),
        ("gpt2", {"n_head": 7}, ["n_head"]),
        ("gpt_neox", {"use_parallel_residual": "yes"}, ["use_parallel_residual"]),
        ("gpt_neox", {"rotary_pct": 0}, ["rotary_pct"]),
        ("gpt_neox", {"rotary_pct": 1.5}, ["rotary_pct"]),
        ("gpt_neox", {"rotary_pct": 0.5, "partial_rotary_factor": 0.25}, ["partial_rotary_factor"]),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, ["max_window_layers"]),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, ["layer_types"]),
        ("qwen2", {"layer_types": ["full_attention"] * 2}, ["layer_types"]),
        ("qwen2", {"layer_types": {}}, ["layer_types"]),
        ("qwen2", {"attention_bias": False}, ["attention_bias"]),
    ],
)
def test_a_field_that_cannot_be_used_is_named(family: str, changes: dict[str, Any], fields: list[str]):
    assert refused(family, **changes) == fields


@pytest.mark.parametrize(
    ("rope", "fields"),
    [
        ("linear", [""]),
        ([1], [""]),
        ({"rope_type": "yarn", "factor": 4.0}, [".rope_type"]),
        ({"type": "dynamic", "factor": 4.0}, [".type"]),
        ({"type": "linear", "rope_type": "default"}, [".type"]),
        ({"rope_type": "linear"}, [".factor"]),
        ({"rope_type": "linear", "factor": 0.5}, [".factor"]),
        ({"rope_type": "llama3", "factor": 8.0}, [".low_freq_factor", ".high_freq_factor"]),
        (LLAMA3_ROPE | {"high_freq_factor": 1.0}, [".high_freq_factor"]),
        (LLAMA3_ROPE | {"original_max_position_embeddings": 0}, [".original_max_position_embeddings"]),
        ({"full_attention": {"rope_type": "default"}}, [".full_attention"]),
    ],
)
def test_a_rotary_group_that_cannot_be_used_is_named(rope: object, fields: list[str]):
    assert refused("llama", rope_scaling=rope) == [f"rope_scaling{field}" for field in fields]
    assert refused("llama", rope_parameters=rope) == [f"rope_parameters{field}" for field in fields]


def test_all_faults_come_in_one_error():
    changes = {"vocab_size": "many", "num_key_value_heads": 3, "hidden_act": "mish", "norm_topk_prob": False}
    changes |= {"rope_scaling": {"rope_type": "yarn", "speed": 1}, "architectures": ["Other"], "num_hidden_layers": 0}
    expected = {"rope_scaling.rope_type", "rope_scaling.speed"} | set(changes) - {"rope_scaling"}
    assert sorted(refused("llama", **changes)) == sorted(expected)


def test_a_fault_says_what_was_found_and_what_is_expected():
    assert [str(fault) for fault in faults({"model_type": "llama", **SIZES, "hidden_size": "4096"})] == [
        "hidden_size: expected a whole number, found '4096'"
    ]
    assert [str(fault) for fault in faults({"model_type": "llama", **SIZES, "hidden_act": "sily"})] == [
        "hidden_act: 'sily' is not known. Did you mean silu?"
    ]


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, 3, 10**9, 10**30, -(10**400), 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(), st.text(max_size=4)), max_size=3),
    st.dictionaries(
        st.sampled_from([*LLAMA3_ROPE, "type", "x"]), st.one_of(st.floats(), st.text(max_size=8)), max_size=4
    ),
    st.just(LLAMA3_ROPE),
)
OTHER_FIELDS = ["head_dim", "rope_parameters", "layer_types", "use_sliding_window", "sliding_window", *UNMODELLED]


@given(data=st.data())
def test_a_damaged_card_is_a_model_or_an_input_error(data: st.DataObject):
    config = dict(CARDS[data.draw(st.sampled_from(sorted(CARDS)))])
    for field in data.draw(st.lists(st.sampled_from([*config, *OTHER_FIELDS]), min_size=1, max_size=4)):
        if data.draw(st.booleans()):
            config.pop(field, None)
        else:
            config[field] = data.draw(VALUES)
    try:
        spec = spec_from_config(config, name="m", source="test")
    except InputError as error:
        named = {fault.where for fault in error.faults}
        # The user's spelling, never that of ModelSpec.
        assert not named & {"", "num_layers", "hidden", "ffn", "num_heads", "num_kv_heads", "vocab", "max_positions"}
    else:
        assert spec.num_parameters > 0


# --------------------------------------------------------------------------------- the oracle: transformers


def settings_of(config: Mapping[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    fields = {key: value for key, value in config.items() if key != "model_type"}
    return transformers.AutoConfig.for_model(config["model_type"], **fields)


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in MODEL_TYPES),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 6}),
    ("llama", {"tie_word_embeddings": True, "rope_scaling": LLAMA3_ROPE}),
    ("mistral", {"head_dim": 32, "num_key_value_heads": 2}),
    ("mixtral", {"num_experts_per_tok": 3, "head_dim": 32}),
    ("gpt2", {"n_inner": 100, "tie_word_embeddings": False}),
    ("gpt_neox", {"attention_bias": False, "use_parallel_residual": False, "tie_word_embeddings": True}),
    ("qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("qwen3", {"num_key_value_heads": 4, "attention_bias": True, "head_dim": 16}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "options"), OPTIONS)
def test_transformers_builds_as_many_parameters_with_every_option(family: str, options: dict[str, Any]):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    settings = settings_of({"model_type": family, **SMALLEST[family], **options})
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(settings)
    assert sum(p.numel() for p in module.parameters()) == read(family, **options).num_parameters


@pytest.mark.slow
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_the_defaults_are_those_of_transformers(family: str):
    spec, settings = read(family), settings_of({"model_type": family, **SMALLEST[family]})
    row = MODEL_TYPES[family]
    assert spec.max_positions == settings.max_position_embeddings
    assert spec.norm_eps == getattr(settings, row.norm_eps)
    assert spec.activation == ACTIVATIONS[getattr(settings, row.activation)]
    assert spec.tied_embeddings == settings.tie_word_embeddings
    assert spec.num_kv_heads == getattr(settings, "num_key_value_heads", spec.num_heads)
    assert spec.parallel_residual == getattr(settings, "use_parallel_residual", False)
    assert spec.experts_per_token == getattr(settings, "num_experts_per_tok", 0)
    assert spec.window == getattr(settings, "sliding_window", None)
    rope = getattr(settings, "rope_parameters", None)
    assert (spec.positions == "rotary") == (rope is not None)
    if rope is not None:
        assert spec.rotary_theta == rope["rope_theta"]
        assert spec.rotary_fraction == rope.get("partial_rotary_factor", 1.0)
        assert rope["rope_type"] == "default"


@pytest.mark.slow
def test_activations_with_one_name_compute_one_function():
    torch = pytest.importorskip("torch")
    activations = pytest.importorskip("transformers.activations")
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    gelu = torch.nn.functional.gelu
    expected = {
        "silu": torch.nn.functional.silu(x),
        "relu": torch.relu(x),
        "gelu": gelu(x),
        "gelu_tanh": gelu(x, approximate="tanh"),
    }
    for name, kind in ACTIVATIONS.items():
        torch.testing.assert_close(activations.ACT2FN[name](x), expected[kind], rtol=0, atol=1e-9)
