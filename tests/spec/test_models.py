"""The cards, their parameter counts, and how a model is found by name or path."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import autoshard
from autoshard.errors import InputError
from autoshard.spec.model import ModelSpec, RotaryScaling
from autoshard.spec.model_catalogue import HEADER, load_model, model_names

CARDS = Path(autoshard.__file__).parents[1] / "models"

# Published or counted by hand; not taken from the formula under test.
PARAMETERS = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "gpt-neox-20b": 20_554_567_680,
    "qwen3-8b": 8_190_735_360,
    "gpt2-xl": 1_557_611_200,
}


def card(name: str) -> dict[str, Any]:
    return json.loads((CARDS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_card_has_exactly_the_published_parameters(name: str):
    assert load_model(name).num_parameters == PARAMETERS[name]


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
    assert "autoshard.source: must say where the numbers are from, with one of: https://, arXiv:" in faults_of(
        "tiny-llama"
    )


def test_a_llama_is_read_field_by_field():
    assert load_model("llama3.1-70b") == ModelSpec(
        name="llama3.1-70b",
        num_layers=80,
        hidden=8192,
        ffn=28672,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        vocab=128256,
        max_positions=131072,
        norm="rms",
        norm_eps=1e-5,
        activation="silu",
        gated_mlp=True,
        positions="rotary",
        rotary_theta=500000.0,
        rotary_scaling=RotaryScaling(
            kind="llama3", factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8192
        ),
        source=card("llama3.1-70b")[HEADER]["source"],
    )


# ---------------------------------------------------------------------------------------------------- paths


def write(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def faults_of(name_or_path: str | Path) -> str:
    with pytest.raises(InputError) as caught:
        load_model(name_or_path)
    return str(caught.value)


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


def test_an_unknown_name_is_refused_with_the_nearest():
    assert "llama3-70b" in faults_of("lama3-70b")
    assert "tiny-llama" in faults_of("zzz")
    assert "tiny-llama" in faults_of("")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"{", "is not JSON: "),
        (b"model_type: llama", "in line 1, column 1"),
        (b"[1, 2]", "must be a JSON object"),
        (b'"llama"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"\x80abc", "is not text in UTF-8"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "is not usable JSON"),
        (b"{}", "model_type: missing"),
    ],
)
def test_a_file_that_is_no_config_is_refused_with_its_path(tmp_path: Path, content: bytes, expected: str):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    message = faults_of(path)
    assert message.startswith(str(path))
    assert expected in message
    assert "\n" not in message


def test_missing_and_odd_paths_are_refused(tmp_path: Path):
    assert "there is no such file" in faults_of(tmp_path / "nothing.json")
    assert "config.json: there is no such file" in faults_of(tmp_path)
    assert "not a regular file" in faults_of("/dev/null")
    assert "there is no such file" in faults_of("a\0b.json")
    assert "File name too long" in faults_of("x/" + "y" * 5000)


def test_a_file_of_weights_is_refused_before_it_is_read(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(17 * 2**20)
    assert "far too large" in faults_of(path)


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
    sizes: dict[str, Any] = {"num_layers": 2, "hidden": 64, "ffn": 128, "num_heads": 4, "num_kv_heads": 2}
    sizes |= {"head_dim": 16, "vocab": 32, "max_positions": 32, "norm": "rms", "norm_eps": 1e-5, "source": "test"}
    sizes |= {"name": "m", "activation": "silu", "gated_mlp": True, "positions": "rotary"}
    return ModelSpec(**(sizes | changes))


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"num_layers": 0, "hidden": -1, "vocab": 2**31}, ["num_layers", "hidden", "vocab"]),
        ({"num_kv_heads": 3}, ["num_kv_heads"]),
        ({"num_kv_heads": 0, "num_layers": 10_001}, ["num_layers", "num_kv_heads"]),
        ({"head_dim": 15}, ["head_dim"]),
        ({"rotary_fraction": 0.0}, ["rotary_fraction", "head_dim"]),
        ({"rotary_theta": 0.5, "norm_eps": 0.0, "window": 0}, ["rotary_theta", "norm_eps", "window"]),
        ({"num_experts": 1, "experts_per_token": 2}, ["num_experts", "experts_per_token"]),
        ({"experts_per_token": 2}, ["experts_per_token"]),
    ],
)
def test_an_impossible_model_names_every_fault(changes: Mapping[str, Any], fields: list[str]):
    with pytest.raises(InputError) as caught:
        model(**changes)
    assert [fault.where for fault in caught.value.faults] == fields


def test_an_impossible_rotary_scaling_is_refused():
    with pytest.raises(InputError) as caught:
        RotaryScaling(kind="llama3", factor=0.5, low_frequency_factor=4.0, high_frequency_factor=1.0)
    wrong = [fault.where for fault in caught.value.faults]
    assert wrong == ["factor", "high_frequency_factor", "original_positions"]


# --------------------------------------------------------------------------------- the oracle: transformers


def parameters_of_the_module(config: Mapping[str, Any]) -> int:
    """Count the parameters of the transformers module on the meta device; a shared one once."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    fields = {key: value for key, value in config.items() if key != "model_type"}
    settings = transformers.AutoConfig.for_model(config["model_type"], **fields)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(settings)
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", model_names())
def test_transformers_builds_as_many_parameters_from_the_card(name: str):
    assert parameters_of_the_module(card(name)) == load_model(name).num_parameters
