"""Families of models: their defaults are those of transformers, and what the code of one alone has."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoshard.engine.hf_names import HfNames
from autoshard.errors import InputError
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.kinds.dropout import Drop
from autoshard.spec.hf.config import spec_from_config
from autoshard.spec.hf.fields import ACTIVATIONS, ALIASES
from autoshard.spec.hf.types import MODEL_TYPES
from autoshard.spec.hf.writing import config_of
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model_parts import LinearAttention, Router
from autoshard.spec.workload import Precision, Workload
from tests.spec.hf.smallest import SMALLEST, faults, read, refused


def settings_of(family: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoConfig.for_model(family, **SMALLEST[family], **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_the_defaults_are_those_of_transformers(family: str):
    spec, settings = read(family), settings_of(family)

    def stated(name: str, default: Any = None) -> Any:
        return next(
            (getattr(settings, each) for each in (name, *ALIASES.get(name, ())) if hasattr(settings, each)), default
        )

    assert spec.max_positions == settings.max_position_embeddings
    assert spec.norm_eps == stated("rms_norm_eps")
    assert spec.activation == ACTIVATIONS[stated("hidden_act")]
    assert spec.tied_embeddings == settings.tie_word_embeddings
    assert spec.num_kv_heads == (stated("num_key_value_heads") or spec.num_heads)
    assert spec.parallel_residual == stated("use_parallel_residual", False)
    all_dense = not spec.num_experts  # as those of V3 with few layers, whatever the class says of experts
    assert spec.experts_per_token == (0 if all_dense else stated("num_experts_per_tok", 0))
    used = "sliding_attention" in (getattr(settings, "layer_types", None) or ["sliding_attention"])
    window = stated("sliding_window") if used else 0
    assert max(spec.of_kind(kind).window or 0 for kind in spec.layer_counts) == (window or 0)
    rope = stated("rope_parameters")
    assert (spec.positions == "rotary") == (rope is not None)
    if rope is not None:
        rope = rope.get("sliding_attention", rope)  # Gemma's few layers all attend to a window
        scaling = spec.rotary_scaling.kind if spec.rotary_scaling else "default"
        assert (spec.rotary_theta, scaling) == (rope["rope_theta"], rope["rope_type"])
        assert spec.rotary_fraction == rope.get("partial_rotary_factor", 1.0)


@pytest.mark.slow
def test_activations_with_one_name_compute_one_function():
    torch = pytest.importorskip("torch")
    activations = pytest.importorskip("transformers.activations")
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    functional = torch.nn.functional
    expected = {name: getattr(functional, name)(x) for name in ("silu", "relu", "gelu")}
    expected["relu2"] = expected["relu"] ** 2
    expected["gelu_tanh"] = functional.gelu(x, approximate="tanh")
    for name, kind in ACTIVATIONS.items():
        torch.testing.assert_close(activations.ACT2FN[name](x), expected[kind], rtol=0, atol=1e-9)


# ------------------------------------------------------------------------------------------ Phi-3 and Seed-OSS


LONG = {"short_factor": [1.0] * 48, "long_factor": [1.5] * 48}


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_factors_of_single_frequencies_are_refused_with_what_may_be_planned(name: str):
    """The rope_scaling of Phi-4-mini and of Phi-3 with 128k tokens; older files say su or yarn."""
    config = {"model_type": "phi3", **SMALLEST["phi3"], "rope_scaling": {"type": name, **LONG}}
    (fault,) = faults(config)
    assert (fault.where, repr(name) in fault.message) == ("rope_scaling.type", True)
    assert "Write null to plan alone" in fault.message
    assert read("phi3", rope_scaling=None).rotary_scaling is None
    assert refused("llama", rope_scaling={"rope_type": "longrope", **LONG}) == ["rope_scaling.rope_type"]


def test_phi3_turns_a_part_of_each_head_and_attends_to_its_window():
    model = read("phi3", partial_rotary_factor=0.75, sliding_window=2047)
    assert (model.rotary_fraction, model.rotary_dims, model.window) == (0.75, 12, 2047)
    assert refused("phi3", rope_scaling={"rope_type": "linear", "factor": 2.0}) == ["rope_scaling.rope_type"]


@pytest.mark.parametrize(("family", "field"), [("phi3", "resid_pdrop"), ("seed_oss", "residual_dropout")])
def test_embeddings_are_whole_where_layers_alone_drop_numbers(family: str, field: str):
    model = read(family, **{field: 0.1})
    assert (model.hidden_dropout, model.drops_embeddings) == (0.1, False)
    assert config_of(model)[field] == 0.1
    workload = Workload(seq_len=8, global_batch=1, precision=Precision.named("bf16"))
    graph = decoder_graph(model, workload, load_kernels("torch_engine"), micro_batch=1)
    drops = [op.name for block in graph.blocks for op in block.ops if isinstance(op.kind, Drop) and op.pass_ == "F"]
    assert drops == ["attn_drop", "mlp_drop"]
    assert read(family).drops_embeddings


# ------------------------------------------------------------------------------------------- Ministral 3


def test_queries_that_grow_with_their_position_are_refused_with_what_shorter_sequences_need():
    """The rope_parameters of mistralai/Ministral-3-8B and of Devstral-Small-2."""
    yarn = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "rope_theta": 1e6}
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = {"model_type": "ministral3", **SMALLEST["ministral3"], "rope_parameters": yarn}
    for growth in ({"llama_4_scaling_beta": 0.1}, {}):
        (fault,) = faults({**config, "rope_parameters": yarn | growth})
        assert fault.where == "rope_parameters.llama_4_scaling_beta"
        assert "behind the first 16384 positions" in fault.message
    model = read("ministral3", rope_parameters=yarn | {"llama_4_scaling_beta": 0, "max_position_embeddings": 262144})
    assert model.rotary_scaling and (model.rotary_scaling.kind, model.score_scale) == ("yarn", None)
    assert refused("llama", rope_parameters=yarn | {"llama_4_scaling_beta": 0.0}) != []


def test_the_text_model_of_mistral_small_is_read():
    """config.json of mistralai/Mistral-Small-3.2-24B-Instruct-2506 holds it beside a vision tower."""
    text = {"model_type": "mistral", **SMALLEST["mistral"], "sliding_window": None}
    whole = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    assert spec_from_config(whole, name="m", source="test") == read("mistral", sliding_window=None)
    with pytest.raises(InputError, match=r"text_config.rope_parameters: missing, and must state"):
        newer = {key: size for key, size in SMALLEST["ministral3"].items() if key != "rope_parameters"}
        spec_from_config({**whole, "text_config": {"model_type": "ministral3", **newer}}, name="m", source="test")


# ------------------------------------------------------------------------------------------------- Granite


def test_multipliers_of_granite_scale_embeddings_scores_residuals_and_logits():
    stated = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 16.0}
    model = read("granite", **stated, attention_multiplier=0.0078125)
    assert (model.embedding_scale, model.residual_scale, model.logit_divisor) == (12.0, 0.22, 16.0)
    assert model.score_scale == 0.0078125 and config_of(model).items() >= stated.items()
    assert read("granite").score_scale == 1.0 and read("llama", **stated) == read("llama")
    for field in (*stated, "attention_multiplier"):
        assert refused("granite", **{field: 0.0}) == [field]


# ------------------------------------------------------------------------------- Nemotron-4, Arcee and Jais-2


@pytest.mark.parametrize(
    ("family", "norm", "offset", "bias"),
    [("nemotron", "layer", 1.0, False), ("arcee", "rms", 0.0, False), ("jais2", "layer", 0.0, True)],
)
def test_mlps_of_squared_relus_have_no_gate(family: str, norm: str, offset: float, bias: bool):
    model = read(family, norm_eps=1e-3) if family == "nemotron" else read(family)
    assert (model.activation, model.gated_mlp, model.norm, model.norm_offset) == ("relu2", False, norm, offset)
    assert (model.qkv_bias, model.out_bias, model.mlp_bias) == (bias, bias, bias)
    assert model.norm_eps == (1e-3 if family == "nemotron" else 1e-5) and read(family, hidden_act="gelu") != model
    assert spec_from_config(config_of(model), name="m", source="test") == model


# -------------------------------------------------------------------------- OLMoE, Granite-MoE and ERNIE's mixtures


def test_mixtures_of_ernie_have_experts_in_every_so_many_layers():
    def order(**fields: int) -> str:
        return read("ernie4_5_moe", num_hidden_layers=6, **fields).order

    model = read("ernie4_5_moe", moe_k=3, moe_num_shared_experts=1)
    assert model.router == Router(scores="softmax", correction=True) and model.shared_ffn == model.ffn == 176
    assert (model.experts_per_token, model.of_kind("dense").ffn) == (3, 12288)
    assert order() == "dense/layer*5" and order(moe_layer_start_index=0) == ""
    assert order(moe_layer_interval=2) == "dense/layer/dense/layer/dense/layer"
    assert order(moe_layer_start_index=2, moe_layer_end_index=3) == "dense*2/layer*2/dense*2"
    assert not read("ernie4_5_moe", moe_layer_start_index=5).num_experts
    assert refused("ernie4_5_moe", use_bias=True) == ["use_bias"]
    for fields in ({}, {"moe_layer_interval": 2}, {"moe_layer_start_index": 5}):
        spec = read("ernie4_5_moe", num_hidden_layers=5, **fields)
        assert spec_from_config(config_of(spec), name="m", source="test") == spec


def test_olmoe_weighs_experts_by_the_softmax_of_all_and_norms_all_heads_together():
    model = read("olmoe", norm_topk_prob=False)
    assert model.router == Router(normalised=False) and model.qk_norm_over == "all heads"
    assert read("granitemoe", residual_multiplier=0.22).residual_scale == 0.22
    assert read("granitemoe").router is None and refused("olmoe", clip_qkv=8.0) == ["clip_qkv"]


# --------------------------------------------------------------------------------------------- Mixtures of Qwen2


def test_mixtures_of_qwen2_count_an_mlp_of_its_own_width_by_a_share_of_each_token():
    """The options of Qwen/Qwen1.5-MoE-A2.7B; windows are those of the class, which no published config uses."""
    model = read("qwen2_moe", mlp_only_layers=[0], intermediate_size=24, shared_expert_intermediate_size=40)
    assert (model.shared_ffn, model.shared_gated, model.qkv_bias) == (40, True, True)
    assert (model.router, model.order, model.window) == (Router(normalised=False), "dense/layer*2", None)
    assert (model.of_kind("dense").ffn, model.of_kind("dense").shared_gated) == (24, False)
    shares = model.num_parameters - replace(model, shared_gated=False).num_parameters
    assert shares == 2 * 64, "a number for each of the hidden state, in each layer with experts"
    turns = read("qwen2_moe", use_sliding_window=True, sliding_window=5, max_window_layers=2)
    assert turns.order == "local/layer*2" and turns.of_kind("local").window == 5
    assert read("qwen2_moe", norm_topk_prob=True).router is None and not read("qwen2_moe", qkv_bias=False).qkv_bias
    for spec in (model, turns):
        config = config_of(spec)
        assert spec_from_config(config, name="m", source="test") == spec and config["model_type"] == "qwen2_moe"
    assert refused("qwen2_moe", shared_expert_intermediate_size=0) == ["shared_expert_intermediate_size"]
    assert refused("qwen3_moe", shared_expert_intermediate_size=40) == ["shared_expert_intermediate_size"]


# ------------------------------------------------------------------------------------------------ Gemma 2


def test_gemma2_caps_scores_and_logits_and_every_other_layer_attends_to_a_window():
    model = read("gemma2")
    assert (model.logit_cap, model.score_cap, model.order) == (30.0, 50.0, "local/layer/local")
    assert {model.of_kind(name).window for name in model.layer_counts} == {4096, None}
    plain = read("gemma2", final_logit_softcapping=None, attn_logit_softcapping=None)
    assert (plain.logit_cap, plain.score_cap) == (None, None)
    for spec in (model, plain):
        config = config_of(spec)
        assert spec_from_config(config, name="m", source="test") == spec and config["model_type"] == "gemma2"
    for field in ("final_logit_softcapping", "attn_logit_softcapping"):
        assert refused("gemma2", **{field: 0.0}) == refused("llama", **{field: 30.0}) == [field]


# ---------------------------------------------------------------------------------- ERNIE, GLM-4 and StarCoder2


@pytest.mark.parametrize(("family", "biased"), [("ernie4_5", False), ("starcoder2", True)])
def test_one_field_says_whether_all_products_have_biases(family: str, biased: bool):
    for stated, expected in (({}, biased), ({"use_bias": not biased}, not biased)):
        model = read(family, **stated)
        assert (model.qkv_bias, model.out_bias, model.mlp_bias) == (expected,) * 3


def test_files_of_ernie_on_the_hub_name_its_architecture_with_one_more_line():
    assert read("ernie4_5", architectures=["Ernie4_5_ForCausalLM"]) == read("ernie4_5")
    assert refused("ernie4_5", architectures=["Ernie4_5_MoeForCausalLM"]) == ["architectures"]


def test_starcoder2_drops_numbers_of_embeddings_as_of_layers():
    drops = {"residual_dropout": 0.1, "embedding_dropout": 0.1}
    model = read("starcoder2", **drops, norm_epsilon=1e-6)
    assert (model.hidden_dropout, model.drops_embeddings, model.norm_eps) == (0.1, True, 1e-6)
    assert config_of(model).items() >= {**drops, "norm_epsilon": 1e-6}.items()
    assert refused("starcoder2", **drops | {"embedding_dropout": 0.2}) == ["embedding_dropout"]


def test_neighbours_that_are_turned_become_halves():
    """Their pair (2, 3) of a head of 8, of which 4 are turned, is ours of the second place of both halves."""
    model = read("glm4", num_attention_heads=2, hidden_size=16, head_dim=8)
    weight = np.arange(16.0).repeat(16).reshape(16, 16)
    names = HfNames.of("glm4", model).patches()["model.layers.0.self_attn.q_proj.weight"]
    ours = np.zeros((2, 1, 8, 16))
    for patch in names:
        ours[patch.place] = patch.view(weight)
    assert ours[0, 0, :, 0].tolist() == [0, 2, 1, 3, 4, 5, 6, 7]


# ------------------------------------------------------------------------------------- layers that turn nothing


@pytest.mark.parametrize(
    ("changes", "order"),
    [
        ({}, "layer*3/unrotated"),
        ({"no_rope_layer_interval": 2}, "layer/unrotated/layer/unrotated"),
        ({"no_rope_layers": [0, 1, 1, 0]}, "unrotated/layer*2/unrotated"),
        ({"no_rope_layers": [0] * 36}, "unrotated*4"),
        ({"no_rope_layers": [1] * 4}, ""),
    ],
)
def test_smollm3_counts_or_lists_layers_without_positions(changes: dict[str, Any], order: str):
    model = read("smollm3", num_hidden_layers=4, **changes)
    assert model.order == order and spec_from_config(config_of(model), name="m", source="test") == model
    assert {model.of_kind(kind.name).rotary_dims for kind in model.kinds} <= {0} and model.rotary_dims == 16


def test_a_list_that_lacks_layers_is_refused():
    assert refused("smollm3", no_rope_layers=[1, 0]) == ["no_rope_layers"]
    assert refused("smollm3", no_rope_layer_interval=0) == ["no_rope_layer_interval"]


def test_exaone_turns_queries_and_keys_within_its_window_alone():
    model = read("exaone4", num_hidden_layers=5)
    assert (model.order, model.window, model.positions) == ("local*3/unrotated/local", None, "rotary")
    assert (model.of_kind("local").window, model.of_kind("local").positions) == (4096, "rotary")
    assert (model.of_kind("unrotated").window, model.of_kind("unrotated").positions) == (None, "none")
    assert read("exaone4", num_hidden_layers=3).window == 4096
    whole = read("exaone4", sliding_window=None, layer_types=["full_attention"] * 3)
    assert (whole.order, whole.window, whole.positions) == ("", None, "rotary")


@pytest.mark.parametrize("out", [False, True])
def test_seed_oss_states_the_bias_behind_attention_alone(out: bool):
    model = read("seed_oss", attention_out_bias=out)
    assert (model.qkv_bias, model.out_bias, model.mlp_bias) == (True, out, False)


def test_linear_attention_lies_in_the_layers_that_a_config_names() -> None:
    sizes = {"hidden_size": 64, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_conv_kernel_dim": 3}
    model = read("qwen3_5_text", **sizes, linear_key_head_dim=8, linear_value_head_dim=6, full_attention_interval=2)
    assert model.order == "linear/layer/linear"
    assert model.of_kind("linear").linear == LinearAttention(key_heads=2, value_heads=4, key_dim=8, value_dim=6, taps=3)
    assert (model.linear, model.gated_attention, model.norm_offset, model.rotary_dims) == (None, True, 1.0, 64)
    everywhere = read("qwen3_5_text", layer_types=["linear_attention"] * 3)
    assert everywhere.order == "linear*3" and everywhere.has_linear_layers
    dense = read("qwen3_next", mlp_only_layers=[0], intermediate_size=96)
    assert dense.order == "dense_linear/linear*2" and dense.of_kind("dense_linear").ffn == 96
    for spec in (model, everywhere, dense):
        assert spec_from_config(config_of(spec), name=spec.name, source=spec.source) == spec


def test_olmo_hybrid_has_norms_before_linear_attention_and_behind_attention() -> None:
    model = read("olmo_hybrid")
    linear = model.of_kind("linear")
    assert (model.order, model.norm_place, linear.norm_place) == ("linear*2/layer", "after", "before")
    assert linear.linear == LinearAttention(
        key_heads=4, value_heads=4, key_dim=12, value_dim=24, taps=4, reach=2.0, norm_eps=1e-5
    )
    near = read("olmo_hybrid", linear_allow_neg_eigval=False, rope_parameters={"rope_theta": None})
    moving = near.of_kind("linear").linear
    assert moving and replace(moving, reach=2.0) == linear.linear and (moving.reach, near.positions) == (1.0, "none")
    for spec in (model, near):
        assert spec_from_config(config_of(spec), name=spec.name, source=spec.source) == spec


def test_linear_attention_that_no_class_has_is_refused() -> None:
    assert refused("olmo_hybrid", layer_types=["full_attention"] * 3) == ["layer_types"]
    assert refused("qwen3_5_text", layer_types=["linear_attention", "sliding_attention", "full_attention"]) == [
        "layer_types"
    ]
    assert refused("qwen3_next", linear_key_head_dim=64, linear_value_head_dim=128) == ["linear_key_head_dim"]
    assert refused("qwen3_5_text", linear_num_value_heads=3, linear_num_key_heads=2) == ["linear_num_value_heads"]
    assert refused("llama", layer_types=["linear_attention"] * 3) == ["layer_types"]
