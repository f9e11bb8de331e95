"""Hugging Face configuration data: defaults, aliases, what is refused and how."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import autoshard
from autoshard.errors import InputError
from autoshard.spec.hf import types as hf_types
from autoshard.spec.hf.config import spec_from_config
from autoshard.spec.hf.fields import ALIASES, UNMODELLED
from autoshard.spec.hf.types import MODEL_TYPES
from autoshard.spec.hf.writing import config_of
from autoshard.spec.model import LayerKind
from autoshard.spec.model_parts import LatentAttention, RotaryScaling, Router
from tests.spec.hf.smallest import SIZES, SMALLEST, faults, read, refused

CARDS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(autoshard.__file__).parents[1] / "models").glob("*.json"))
}
MXFP4, FP8 = {"quant_method": "mxfp4"}, {"quant_method": "fp8"}
YARN = {"type": "yarn", "factor": 4.0}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip


# ----------------------------------------------------------------------------------------------- acceptance


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_only_the_sizes_must_be_stated(family: str):
    spellings = {alias: name for name, aliases in ALIASES.items() for alias in aliases}
    for field in SMALLEST[family]:
        kept = {key: value for key, value in SMALLEST[family].items() if key != field}
        assert [fault.where for fault in faults({"model_type": family, **kept})] == [spellings.get(field, field)]
    assert read(family).name == "m"


CORRECTED = Router(scores="sigmoid", correction=True)
LOCAL = LayerKind(name="local", window=16)
TURNED = LayerKind(name="local", window=16, rotary_theta=1e4)
ALIKE = LayerKind(name="local", window=4096)
UNSCALED = {"rope_type": "default"}
LONG_YARN = RotaryScaling(
    kind="yarn", factor=32.0, low_frequency_factor=1.0, high_frequency_factor=32.0, original_positions=4096,
    truncate=False, mscale=1.0,
)  # fmt: skip
SLIDING = {"use_sliding_window": True, "sliding_window": 16}


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2, "head_dim": 32},
         {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "num_kv_heads": 2, "head_dim": 32}),
        ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False},
         {"parallel_residual": False, "qkv_bias": False, "mlp_bias": True}),
        ("gpt_neox", {"rotary_emb_base": 5000, "rotary_pct": 0.5}, {"rotary_theta": 5000.0, "rotary_fraction": 0.5}),
        ("qwen2", {}, {"qkv_bias": True, "out_bias": False, "window": None}),
        ("qwen3", {"attention_bias": True}, {"out_bias": True, "qk_norm": True}),
        ("gpt2", {"n_inner": 100, "tie_word_embeddings": False}, {"ffn": 100, "tied_embeddings": False}),
        ("gpt2", {"n_inner": None}, {"ffn": 256}),
        ("gpt2", {}, {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
        ("gpt2", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.2},
         {"hidden_dropout": 0.1, "attention_dropout": 0.2}),
        ("gpt_neox", {"hidden_dropout": 0.3, "attention_dropout": 0.4},
         {"hidden_dropout": 0.3, "attention_dropout": 0.4}),
        ("llama", {"attention_dropout": 0.1}, {"hidden_dropout": 0.0, "attention_dropout": 0.1}),
        ("mixtral", {"num_experts_per_tok": 3, "sliding_window": 16},
         {"num_experts": 4, "experts_per_token": 3, "window": 16}),
        ("mistral", {"num_key_value_heads": None}, {"num_kv_heads": 8, "window": 4096}),
        ("mistral", {"sliding_window": None}, {"window": None}),
        ("qwen2", {**SLIDING, "max_window_layers": 0}, {"window": 16, "order": ""}),
        ("qwen2", {**SLIDING, "max_window_layers": 1}, {"window": None, "order": "layer/local*2", "kinds": (LOCAL,)}),
        ("qwen3", {**SLIDING, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
         {"window": None, "order": "local/layer/local", "kinds": (LOCAL,)}),
        ("qwen3_moe", {"mlp_only_layers": [1], "intermediate_size": 80},
         {"order": "layer/dense/layer", "kinds": (LayerKind(name="dense", dense_ffn=80),)}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1]}, {"order": "dense*3"}),
        ("qwen2", {**SLIDING, "max_window_layers": 3}, {"window": None}),
        ("qwen2", {**SLIDING, "layer_types": ["sliding_attention"] * 3}, {"window": 16}),
        ("qwen3", {"layer_types": ["full_attention"] * 3, "sliding_window": None}, {"window": None}),
        ("llama", {"sliding_window": 16, "use_sliding_window": False}, {"window": None}),
        ("qwen3_moe", {"intermediate_size": 99, "num_experts_per_tok": 3, "head_dim": 32},
         {"ffn": 176, "num_experts": 8, "experts_per_token": 3, "qk_norm": True, "window": None, "head_dim": 32}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16}, {"window": 16}),
        ("qwen3_moe", {}, {"router": Router(normalised=False)}),
        ("qwen3_moe", {"norm_topk_prob": True}, {"router": None, "shared_ffn": 0}),
        ("glm4_moe_lite", {}, {"order": "dense/layer*2", "kinds": (LayerKind(name="dense", dense_ffn=176),)}),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "dense", "sparse"], "first_k_dense_replace": 2},
         {"order": "dense*2/layer"}),
        ("olmo3", {"num_hidden_layers": 4}, {"order": "local*3/layer", "kinds": (ALIKE,)}),
        ("minimax_m2", {"rotary_dim": 64}, {"rotary_fraction": 0.5, "qk_norm_over": "all heads"}),
        ("minimax_m2", {"rotary_dim": 64, "partial_rotary_factor": 1.0}, {"rotary_fraction": 1.0}),
        ("glm4_moe", {}, {"order": "dense/layer*2", "kinds": (LayerKind(name="dense", dense_ffn=10944),),
                          "router": CORRECTED, "shared_ffn": 176, "rotary_fraction": 0.5, "qk_norm": False}),
        ("glm4_moe", {"first_k_dense_replace": 0, "attention_bias": True, "n_shared_experts": 3, "use_qk_norm": True},
         {"order": "", "qkv_bias": True, "out_bias": False, "shared_ffn": 528, "qk_norm": True}),
        ("glm4_moe", {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 2.5,
                      "num_experts_per_tok": 4},
         {"router": replace(CORRECTED, normalised=False, scale=2.5, groups=4, chosen_groups=2, group_score="best two"),
          "experts_per_token": 4}),
        ("glm4_moe", {"n_group": 4, "topk_group": 4, "num_nextn_predict_layers": 2}, {"router": CORRECTED}),
        ("deepseek_v3", {}, {"latent": LatentAttention(query_rank=1536, kv_rank=512, rotary_dim=64, value_dim=128),
                             "head_dim": 192, "num_kv_heads": 128, "rotary_fraction": 1}),
        ("deepseek_v2", {"q_lora_rank": None, "v_head_dim": 8, "qk_rope_head_dim": 6, "kv_lora_rank": 9, "head_dim": 5},
         {"latent": LatentAttention(query_rank=None, kv_rank=9, rotary_dim=6, value_dim=8), "head_dim": 134}),
        ("deepseek_v2", {"attention_bias": True, "num_nextn_predict_layers": 1, "n_shared_experts": 2},
         {"qkv_bias": True, "out_bias": True}),
        ("gpt_oss", {"sliding_window": 16, "swiglu_limit": 3, "swiglu_alpha": 2},
         {"order": "local/layer/local", "window": None, "kinds": (LOCAL,), "head_dim": 64, "sinks": True,
          "router_bias": True, "mlp_bias": True, "qkv_bias": True, "out_bias": True, "router": None,
          "glu_limit": 3.0, "glu_slope": 2.0}),
        ("gpt_oss", {"layer_types": ["full_attention"] * 3, "attention_bias": False, "rope_scaling": UNSCALED},
         {"order": "", "window": None, "qkv_bias": False, "mlp_bias": True, "rotary_scaling": None}),
        ("gpt_oss", {"rope_scaling": None, "sliding_window": None},
         {"order": "", "window": None, "rotary_theta": 150000.0, "rotary_scaling": LONG_YARN}),
        ("olmo2", {}, {"norm_place": "after", "qk_norm_over": "all heads", "norm_offset": 0}),
        ("gemma3_text", {"sliding_window_pattern": 2, "sliding_window": 16},
         {"order": "local/layer/local", "window": None, "norm_place": "both", "norm_offset": 1, "query_scalar": None,
          "rotary_theta": 1e6, "scaled_embeddings": True, "kinds": (TURNED,)}),
        ("gemma3_text", {"sliding_window_pattern": 2, "layer_types": ["full_attention"] * 3},
         {"order": "", "window": None, "rotary_theta": 1e6}),
        ("gemma3_text", {"rope_local_base_freq": 50, "sliding_window": 16},
         {"order": "", "window": 16, "rotary_theta": 50}),
        ("gemma3_text", {"sliding_window_pattern": 2, "rope_theta": 1e4}, {"kinds": (ALIKE,)}),
        ("gemma3_text", {"query_pre_attn_scalar": 16}, {"query_scalar": 16}),
        ("gemma3_text", {"query_pre_attn_scalar": 16, "head_dim": 16}, {"query_scalar": None}),
        ("gemma3_text", {"final_logit_softcapping": 20}, {"logit_cap": 20, "score_cap": None}),
    ],
)  # fmt: skip
def test_the_options_of_each_family_reach_the_model(family: str, changes: dict[str, Any], expected: dict[str, Any]):
    model = read(family, **changes)
    assert {name: getattr(model, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"n_group": 3, "topk_group": 2}, ["n_group"]),
        ({"n_group": 8, "topk_group": 4, "num_experts_per_tok": 2}, ["n_group"]),  # the best two of one expert
        ({"n_group": 2, "topk_group": 3}, ["topk_group"]),
        ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 4}, ["topk_group"]),
        ({"routed_scaling_factor": 0}, ["routed_scaling_factor"]),
        ({"n_shared_experts": 0}, ["n_shared_experts"]),
        ({"scoring_func": "softmax", "topk_method": "greedy"}, ["scoring_func", "topk_method"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq"]),
        ({"first_k_dense_replace": -1}, ["first_k_dense_replace"]),
    ],
)
def test_what_routers_cannot_be_is_refused_by_the_name_of_its_field(changes: dict[str, Any], fields: list[str]):
    assert sorted(refused("glm4_moe", **changes)) == fields


@pytest.mark.parametrize(
    ("changes", "router"),
    [
        ({}, Router(normalised=False)),
        ({"routed_scaling_factor": 16.0, "n_group": 4, "topk_group": 2}, Router(normalised=False, scale=16.0)),
        ({"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
         Router(normalised=False, groups=4, chosen_groups=2)),
        ({"topk_method": "noaux_tc"}, "topk_method"),
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
    ],
)  # fmt: skip
def test_routers_of_deepseek_v2_are_read_and_written(
    changes: dict[str, Any], router: Router | str, monkeypatch: pytest.MonkeyPatch
):
    """As they will be of any type whose code limits tokens to the groups with the best experts."""
    usual = MODEL_TYPES["glm4_moe"]
    defaults = {**usual.defaults, "n_group": None, "topk_group": None, "topk_method": "greedy", "norm_topk_prob": False}
    kind = replace(usual, router="groups", defaults={**defaults, "scoring_func": "softmax", "num_experts_per_tok": 2})
    monkeypatch.setitem(hf_types.MODEL_TYPES, "glm4_moe", kind)  # pyright: ignore[reportArgumentType]
    if isinstance(router, str):
        assert refused("glm4_moe", **changes) == [router]
        return
    model = read("glm4_moe", **changes)
    assert model.router == router and read("glm4_moe", **config_of(model)) == model


def test_other_names_of_a_field_are_known_and_fields_without_effect_ignored():
    renamed = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 32}
    config = {"model_type": "gpt2", "vocab_size": 96, **renamed}
    assert spec_from_config(config, name="m", source="test") == read("gpt2") == read("gpt2", hidden_size=64)
    assert refused("gpt2", hidden_size=68) == ["n_embd"]
    ignored = {"summary_first_dropout": 0.1, "bos_token_id": [1], "torch_dtype": 7, "autoshard": None}
    assert read("gpt2", **ignored) == read("gpt2")


GEMMA_ROPE = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9e5}, "sliding_attention": {}}


def test_layers_that_attend_to_a_window_turn_heads_by_a_base_of_their_own():
    """In the older form and the newer one; rope_scaling is about the layers that see everything."""
    scaling = RotaryScaling(kind="linear", factor=8.0)
    older = {"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_theta": 9e5, "rope_local_base_freq": 70.0}
    newer = {"rope_parameters": GEMMA_ROPE | {"sliding_attention": {"rope_type": "default", "rope_theta": 70.0}}}
    for changes in (older, newer):
        model = read("gemma3_text", sliding_window_pattern=2, **changes)
        assert (model.rotary_theta, model.rotary_scaling) == (9e5, scaling)
        local = model.of_kind("local")
        assert (local.rotary_theta, local.rotary_scaling, local.window) == (70.0, None, 4096)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"final_logit_softcapping": 0}, ["final_logit_softcapping"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"rope_parameters": {"rope_type": "default"}}, ["rope_parameters.rope_type"]),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 8.0}}},
         ["rope_parameters.sliding_attention.rope_type"]),
        ({"rope_parameters": {"full_attention": 5}}, ["rope_parameters.full_attention"]),
        ({"rope_local_base_freq": 0.5}, ["rope_local_base_freq"]),
        ({"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar"]),
        ({"sliding_window_pattern": 0}, ["sliding_window_pattern"]),
        ({"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, ["layer_types"]),
        ({"num_hidden_layers": 10**30}, ["num_hidden_layers"]),
        ({"hidden_activation": "silu", "hidden_act": "gelu"}, ["hidden_activation"]),
    ],
)  # fmt: skip
def test_what_gemma_cannot_be_is_refused_by_the_name_of_its_field(changes: dict[str, Any], fields: list[str]):
    assert refused("gemma3_text", **changes) == fields


def test_of_a_model_that_also_sees_images_the_part_that_reads_text_is_read():
    text = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3}
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    assert spec_from_config(whole, name="m", source="test") == read("gemma3_text")
    assert [fault.where for fault in faults({"model_type": "gemma3"})] == ["text_config"]
    broken = {**whole, "text_config": text | {"hidden_size": 0}}
    assert [fault.where for fault in faults(broken)] == ["text_config.hidden_size"]


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


@pytest.mark.parametrize(
    ("family", "rope", "mscale", "growth"),
    [  # growth is what transformers multiplies queries and keys by, each of them, over the whole of a head
        ("llama", {}, 1.0, 1 + 0.1 * math.log(4)),
        ("qwen3", {"attention_factor": 1.25}, None, 1.25),
        ("llama", {"attention_factor": 1.0}, 0.0, 1.0),
        ("llama", {"mscale": 1.0, "mscale_all_dim": 1.0}, 0.0, 1.0),
        ("mistral", {"mscale": 1.0, "mscale_all_dim": 0.5}, None, (1 + 0.1 * math.log(4)) / (1 + 0.05 * math.log(4))),
        ("deepseek_v3", {"mscale": 0.707, "mscale_all_dim": 0.707}, 0.707, 1 + 0.0707 * math.log(4)),
        ("deepseek_v2", {"attention_factor": 1.0}, 0.0, 1.0),
    ],
)  # fmt: skip
def test_yarn_makes_scores_larger_as_in_transformers(
    family: str, rope: dict[str, Any], mscale: float | None, growth: float
):
    model = read(family, rope_scaling=YARN | rope, max_position_embeddings=64)
    assert model.rotary_scaling and model.rotary_scaling.growth == pytest.approx(growth, rel=1e-12)
    assert mscale is None or model.rotary_scaling.mscale == mscale
    assert model.score_scale == (None if growth == 1 else pytest.approx(model.head_dim**-0.5 * growth**2))
    assert (model.rotary_scaling.original_positions, model.rotary_scaling.high_frequency_factor) == (64, 32)


@pytest.mark.parametrize(
    ("rope", "fields"),
    [
        ({}, ["mscale_all_dim"]),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, ["mscale_all_dim"]),
        ({"attention_factor": 1.2}, ["attention_factor"]),
        ({"mscale": 1.0, "mscale_all_dim": 1.0, "speed": 1}, ["speed"]),
    ],
)
def test_a_part_of_heads_that_would_grow_alone_is_refused_by_name(rope: dict[str, Any], fields: list[str]):
    assert refused("deepseek_v3", rope_scaling=YARN | rope) == [f"rope_scaling.{field}" for field in fields]


def test_yarn_may_begin_and_end_at_the_same_number_of_turns_as_in_kimi_k2():
    kimi = {"type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    model = read("deepseek_v3", rope_scaling=kimi | {"original_max_position_embeddings": 4096})
    scaling = model.rotary_scaling
    assert scaling and (scaling.low_frequency_factor, scaling.high_frequency_factor) == (1.0, 1.0)
    assert spec_from_config(config_of(model), name="m", source="test") == model


def test_yarn_without_speeds_or_of_part_of_a_head_is_refused():
    assert refused("llama", rope_scaling=YARN, rope_theta=1.0) == ["rope_theta"]
    assert refused("gpt_neox", rope_scaling=YARN, rotary_pct=0.5) == ["rotary_pct"]
    grows = read("gpt_neox", rope_scaling=YARN | {"attention_factor": 1.0}, rotary_pct=0.5)
    assert grows.rotary_scaling and grows.score_scale is None


# --------------------------------------------------------------------------------------------------- refusal


@pytest.mark.parametrize("kind", ["falcon", "", None, 3, ["llama"], "llama "])
def test_an_unknown_architecture_names_the_field_and_the_known_families(kind: object):
    (fault,) = faults({"model_type": kind, **SIZES})
    assert fault.where == "model_type"
    assert all(family in fault.message for family in MODEL_TYPES)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_what_is_not_modelled_is_refused_by_name_and_accepted_when_off(family: str):
    for field, off in UNMODELLED.items():
        for value in off:
            assert read(family, **{field: value}) == read(family)
        assert refused(family, **{field: (not off[0]) if isinstance(off[0], bool) else 7}) == [field]
    assert read(family, output_router_logits=False) == read(family, output_router_logits=None) == read(family)
    with pytest.raises(InputError, match="belongs to the question: --router-balance-loss"):
        read(family, output_router_logits=True)
    assert read("llama", architectures=["LlamaForCausalLM"]) == read("llama", architectures=None)


@pytest.mark.parametrize("stated", [None, MXFP4, FP8, FP8 | {"fmt": "e4m3", "weight_block_size": [64, 128]}])
def test_how_files_hold_weights_changes_no_model(stated: Any):
    assert read("gpt_oss", quantization_config=stated) == read("gpt_oss")


@pytest.mark.parametrize(
    ("stated", "where", "says"),
    [
        ({"quant_method": "gptq"}, ".quant_method", "weights in 'gptq' are not read, only in 'mxfp4' and 'fp8'. Save"),
        ({}, ".quant_method", "weights in null are not read"),
        (7, "", "expected"),
        (FP8 | {"fmt": "e5m2"}, ".fmt", "FP8 of the kind 'e5m2' is not read"),
        *(
            (FP8 | {"weight_block_size": block}, ".weight_block_size", "must say how many rows and columns have one")
            for block in (None, 128, [128], [0, 128], ["a", "b"], [True, True])
        ),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_files_in_formats_that_are_not_read_are_refused(family: str, stated: Any, where: str, says: str):
    texts = {"model_type": "gemma3", "text_config": SMALLEST["gemma3_text"]}
    data = texts if family == "gemma3" else {"model_type": family, **SMALLEST[family]}
    (fault,) = faults({**data, "quantization_config": stated})
    assert fault.where == f"quantization_config{where}" and says in fault.message


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *(("llama", {"architectures": value}) for value in (["MistralForCausalLM"], "LlamaForCausalLM", 1)),
        *(("llama", {"hidden_size": value}) for value in ("4096", 64.0, True, None, 10**30, 36)),
        *(("llama", {"num_hidden_layers": value}) for value in (0, 10**6)),
        ("llama", {"num_attention_heads": 5}),
        *(("llama", {"num_key_value_heads": value}) for value in (3, 0)),
        ("mistral", {"num_attention_heads": 4}),
        ("gpt2", {"n_embd": 2**30}),
        ("llama", {"head_dim": 15}),
        *(("llama", {"rms_norm_eps": value}) for value in (0, float("nan"))),
        *(("llama", {"rope_theta": value}) for value in (float("inf"), 10**400, 0.5)),
        *(("llama", {"hidden_act": value}) for value in ("quick_gelu", 3)),
        ("llama", {"tie_word_embeddings": 1}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"sliding_window": 16}),
        ("llama", {"num_local_experts": 8}),
        ("llama", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        ("mistral", {"attention_bias": True}),
        ("mistral", {"mlp_bias": True}),
        ("mistral", {"sliding_window": 0}),
        ("mixtral", {"num_local_experts": 1}),
        ("mixtral", {"num_experts_per_tok": 5}),
        ("mixtral", {"num_experts": 5}),
        ("gpt2", {"n_inner": "no"}),
        ("gpt2", {"num_key_value_heads": 1}),
        ("gpt2", {"head_dim": 32}),
        ("gpt2", {"n_head": 7}),
        ("gpt_neox", {"use_parallel_residual": "yes"}),
        *(("gpt_neox", {"rotary_pct": value}) for value in (0, 1.5)),
        ("gpt_neox", {"rotary_pct": 0.5, "partial_rotary_factor": 0.25}),
        *(
            ("qwen2", {"layer_types": value})
            for value in (["sliding_attention"] * 3, ["full_attention"] * 2, [["full_attention"]] * 3, {})
        ),
        ("qwen2", {"attention_bias": False}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"num_key_value_heads": 64}),
        *(("deepseek_v3", {"qk_rope_head_dim": value}) for value in (0, 63, None)),
        *(("deepseek_v2", {name: 0}) for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim")),
        ("deepseek_v2", {"mlp_bias": True}),
        *(("gpt_oss", changes) for changes in ({"swiglu_limit": 0}, {"swiglu_alpha": -1.0}, {"mlp_bias": False})),
        ("gpt_oss", {"hidden_act": "gelu"}),
        ("mixtral", {"swiglu_limit": 7.0}),
    ],
)
def test_a_field_that_cannot_be_used_is_named(family: str, changes: dict[str, Any]):
    assert refused(family, **changes) == [next(iter(changes))]


@pytest.mark.parametrize(
    ("rope", "fields"),
    [
        ("linear", [""]),
        ([1], [""]),
        ({"rope_type": "longrope", "factor": 4.0}, [".rope_type"]),
        ({"rope_type": "yarn"}, [".factor"]),
        (YARN | {"beta_fast": 0.5}, [".beta_fast"]),
        (YARN | {"attention_factor": 0.5}, [".attention_factor"]),
        (YARN | {"factor": 1.0, "attention_factor": 1.5}, [".attention_factor"]),
        ({"type": "linear", "factor": 4.0, "beta_fast": 32}, [".beta_fast"]),
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
    for group in ("rope_scaling", "rope_parameters"):
        assert refused("llama", **{group: rope}) == [f"{group}{field}" for field in fields]


def test_all_faults_come_in_one_error_and_say_what_is_expected():
    changes = {"vocab_size": "many", "num_key_value_heads": 3, "hidden_act": "mish", "norm_topk_prob": False}
    changes |= {
        "rope_scaling": {"rope_type": "dynamic", "speed": 1},
        "architectures": ["Other"],
        "num_hidden_layers": 0,
    }
    expected = {"rope_scaling.rope_type", "rope_scaling.speed"} | set(changes) - {"rope_scaling"}
    assert sorted(refused("llama", **changes)) == sorted(expected)
    found = faults({"model_type": "llama", **SIZES, "hidden_size": "4096", "hidden_act": "sily"})
    assert sorted(map(str, found)) == [
        "hidden_act: 'sily' is not known. Did you mean silu?",
        "hidden_size: expected a whole number, found '4096'",
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
        st.sampled_from([*LLAMA3_ROPE, *YARN, "beta_fast", "mscale", "mscale_all_dim", "x"]),
        st.one_of(st.floats(), st.text(max_size=8)),
        max_size=4,
    ),
    st.just(LLAMA3_ROPE),
    st.just(YARN),
)
OTHER_FIELDS = [
    *("q_lora_rank", "qk_rope_head_dim", "v_head_dim", "rope_interleave"),
    "rope_local_base_freq",
    "query_pre_attn_scalar",
    "head_dim",
    "rope_parameters",
    "layer_types",
    "use_sliding_window",
    "sliding_window",
    *UNMODELLED,
]


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
