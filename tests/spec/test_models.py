"""The cards, their parameter counts, and how a model is found by name or path."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import autoshard
from autoshard.errors import InputError
from autoshard.spec.hf.config import spec_from_config
from autoshard.spec.hf.writing import config_of
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import HEADER, load_model, model_names
from autoshard.spec.model_parts import LatentAttention, RotaryScaling

CARDS = Path(autoshard.__file__).parents[1] / "models"

# Published or counted by hand; not taken from the formula under test.
PARAMETERS = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "gpt-neox-20b": 20_554_567_680,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-235b-a22b": 235_093_634_560,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "gpt2-xl": 1_557_611_200,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    "phi4-14b": 14_659_507_200,
    "ernie4.5-0.3b": 360_748_032,
    "devstral2-123b": 125_025_988_608,
    "granite3.3-8b": 8_170_864_640,
    "olmoe-1b-7b": 6_919_161_856,
    "ernie4.5-21b-a3b": 21_825_436_160,  # transformers counts the corrections of choices, too
    "nemotron4-15b": 15_628_775_424,
    "nemotron4-340b": 341_029_195_776,
    "smollm3-3b": 3_075_098_624,
    "exaone4-32b": 32_003_216_384,
    "seed-oss-36b": 36_151_104_512,
    "glm4.5-air": 106_852_245_504,
    "glm4.5": 352_797_814_784,
    "glm4.7-flash": 29_943_390_976,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "minimax-m2": 228_689_748_992,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-397b-a17b": 396_346_350_336,
    "qwen3.5-27b": 26_895_998_464,
}
SIZES: dict[str, Any] = {
    "name": "m", "num_layers": 2, "hidden": 64, "ffn": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "vocab": 32, "max_positions": 32, "norm": "rms", "norm_eps": 1e-5, "source": "test", "activation": "silu",
    "gated_mlp": True, "positions": "rotary",
}  # fmt: skip


NARROW = LatentAttention(query_rank=8, kv_rank=8, rotary_dim=4, value_dim=8)
YARN = RotaryScaling(kind="yarn", factor=4.0, high_frequency_factor=32.0, original_positions=16, mscale=1.0)


def card(name: str) -> dict[str, Any]:
    return json.loads((CARDS / f"{name}.json").read_text(encoding="utf-8"))


def write(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def faults_of(name_or_path: str | Path) -> str:
    with pytest.raises(InputError) as caught:
        load_model(name_or_path)
    return str(caught.value)


# billions that their makers publish: model cards of DeepSeek-V3 and V2, Qwen3, GPT-OSS, Kimi-K2 and Mixtral on the hub
ACTIVE = {
    "deepseek-v3": 37, "deepseek-v2": 21, "qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22, "gpt-oss-20b": 3.6,
    "gpt-oss-120b": 5.1, "kimi-k2": 32, "mixtral-8x7b": 12.9, "llama3-8b": 8.03,
}  # fmt: skip


def test_a_token_meets_as_many_parameters_as_makers_publish():
    for name, billions in ACTIVE.items():
        model = load_model(name)
        # GPT-OSS counts without the embedding, which no token multiplies
        table = model.vocab * model.hidden if name.startswith("gpt-oss") else 0
        assert (model.active_parameters - table) / 1e9 == pytest.approx(billions, rel=0.03), name
        assert (model.active_parameters == model.num_parameters) == (model.num_experts == 0)


def test_a_card_has_exactly_the_published_parameters():
    assert {name: load_model(name).num_parameters for name in PARAMETERS} == PARAMETERS


def test_names_are_sorted_and_found_without_reading_a_card(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> bytes:
        raise AssertionError("a card was read")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert list(model_names()) == sorted(model_names())


@pytest.mark.parametrize("name", model_names())
def test_a_card_says_its_name_and_where_its_numbers_are_from(name: str):
    header = card(name)[HEADER]
    assert header["name"] == name == load_model(name).name
    assert load_model(name).source == header["source"]


def test_a_card_whose_source_is_no_reference_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content = card("tiny-llama")
    content[HEADER]["source"] = "somebody told me"
    write(tmp_path / "tiny-llama.json", content)
    monkeypatch.setattr("autoshard.spec.model_catalogue.shipped", lambda _: tmp_path)
    said = "autoshard.source: must say where the numbers are from, with one of: https://, arXiv:"
    assert said in faults_of("tiny-llama")


def test_a_file_is_named_after_its_stem_and_a_config_after_its_folder(tmp_path: Path):
    plain = {key: value for key, value in card("llama3-8b").items() if key != HEADER}
    assert load_model(write(tmp_path / "mine.json", plain)).name == "mine"
    folder = tmp_path / "my-model"
    folder.mkdir()
    write(folder / "config.json", plain)
    for given_as in (folder, str(folder), folder / "config.json", f"{folder}/config.json"):
        spec = load_model(given_as)
        assert (spec.name, spec.source) == ("my-model", "the user's config.json")
        assert spec.num_parameters == PARAMETERS["llama3-8b"]


def test_a_card_wins_over_a_folder_of_its_name_unless_a_path_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "llama3-8b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_model("llama3-8b").num_parameters == PARAMETERS["llama3-8b"]
    assert "there is no such file" in faults_of("./llama3-8b")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b" \n", "is empty"),
        (b"{", "is not JSON: "),
        (b"model_type: llama", "is not JSON: Expecting value in column 1"),
        (b"{\n1", "in line 2, column 1"),
        (b"[1, 2]", "must be a JSON object"),
        (b"\x80abc", "is not text in UTF-8"),
        (b"{}", "model_type: missing"),
        (17 * 2**20 * b" ", "far too large"),
    ],
)
def test_a_file_that_is_no_config_is_refused_with_its_path(tmp_path: Path, content: bytes, expected: str):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    message = faults_of(path)
    assert message.startswith(str(path)) and expected in message and "\n" not in message


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lama3-70b", "llama3-70b"),
        ("zzz", "autoshard list models prints all"),
        ("", "autoshard list models prints all"),
        ("nothing.json", "there is no such file"),
        ("/tmp", "config.json: there is no such file"),
        ("/dev/null", "not a regular file"),
        ("a\0b.json", "there is no such file"),
        ("x/" + "y" * 5000, "File name too long"),
    ],
)
def test_unknown_names_and_odd_paths_are_refused(name: str, says: str):
    assert says in faults_of(name)


def test_the_path_stands_before_every_fault(tmp_path: Path):
    path = write(tmp_path / "mine.json", card("llama3-8b") | {"hidden_size": "4096", "vocab_size": -1})
    assert [line.split(": ")[:2] for line in faults_of(path).splitlines()] == [
        [str(path), "hidden_size"],
        [str(path), "vocab_size"],
    ]


@given(st.binary(max_size=200))
def test_any_bytes_give_an_input_error(tmp_path_factory: pytest.TempPathFactory, content: bytes):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_bytes(content)
    faults_of(path)


def model(**changes: Any) -> ModelSpec:
    return ModelSpec(**(SIZES | changes))


def llama3(**changes: Any) -> RotaryScaling:
    return RotaryScaling(kind="llama3", **changes)


@pytest.mark.parametrize(
    ("build", "changes", "fields"),
    [
        (model, {"num_layers": 0, "hidden": -1, "vocab": 2**31}, ["num_layers", "hidden", "vocab"]),
        (model, {"num_kv_heads": 3}, ["num_kv_heads"]),
        (model, {"num_kv_heads": 0, "num_layers": 10_001}, ["num_layers", "num_kv_heads"]),
        (model, {"head_dim": 15}, ["head_dim"]),
        (model, {"rotary_fraction": 0.0}, ["rotary_fraction", "head_dim"]),
        (model, {"rotary_theta": 0.5, "norm_eps": 0.0, "window": 0}, ["rotary_theta", "window", "norm_eps"]),
        (model, {"num_experts": 1, "experts_per_token": 2}, ["num_experts", "experts_per_token"]),
        (model, {"experts_per_token": 2}, ["experts_per_token"]),
        (model, {"latent": NARROW}, ["num_heads"]),
        (
            model,
            {"latent": NARROW, "num_kv_heads": 4, "head_dim": 4, "qk_norm": True, "norm": "layer"},
            ["latent.rotary_dim", "qk_norm", "norm"],
        ),
        (
            model,
            {"latent": NARROW, "num_kv_heads": 4, "rotary_fraction": 0.5, "positions": "learned"},
            ["rotary_fraction", "positions"],
        ),
        (LatentAttention, {"query_rank": 0, "kv_rank": 0, "rotary_dim": 3, "value_dim": 0, "norm_eps": 0.0},
         ["query_rank", "kv_rank", "value_dim", "rotary_dim", "norm_eps"]),
        (model, {"rotary_scaling": YARN, "rotary_fraction": 0.5, "rotary_theta": 1.0},
         ["rotary_fraction", "rotary_theta"]),
        (RotaryScaling, {"kind": "linear", "factor": 2.0, "mscale": 1.0}, ["mscale"]),
        (RotaryScaling, {"kind": "linear", "factor": 2.0, "truncate": False}, ["truncate"]),
        (
            llama3,
            {"factor": 0.5, "low_frequency_factor": 4.0, "high_frequency_factor": 1.0},
            ["factor", "high_frequency_factor", "original_positions"],
        ),
    ],
)  # fmt: skip
def test_an_impossible_model_names_every_fault(
    build: Callable[..., object], changes: Mapping[str, Any], fields: list[str]
):
    with pytest.raises(InputError) as caught:
        build(**changes)
    assert [fault.where for fault in caught.value.faults] == fields


def test_a_sequence_beyond_the_positions_is_warned_about():
    model = load_model("llama3-8b")
    assert model.beyond_positions(model.max_positions) == ""
    assert "16384 tokens are longer than the 8192 positions of llama3-8b" in model.beyond_positions(16384)


def test_kimi_k2_is_read_as_deepseek_v3_whose_code_its_config_names():
    """The fields of moonshotai/Kimi-K2-Instruct's config.json that are read; 1.03 T parameters, 32.9 G at work."""
    rope = {"type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    published: dict[str, Any] = {
        "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "vocab_size": 163840,
        "num_hidden_layers": 61, "first_k_dense_replace": 1, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 384,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "aux_loss_alpha": 0.001,
        "seq_aux": True, "ep_size": 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
        "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-06, "rope_theta": 50000.0, "tie_word_embeddings": False,
        "rope_scaling": rope | {"original_max_position_embeddings": 4096},
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    }  # fmt: skip
    model = spec_from_config(published, name="m", source="test")
    assert spec_from_config(published | {"model_type": "deepseek_v3"}, name="m", source="test") == model
    assert round(model.num_parameters / 1e9) == 1026
    assert config_of(model)["model_type"] == "deepseek_v3"
