"""Which model a configuration is about: a name that says so, and never a larger model of the same family."""

from pathlib import Path

import pytest

from autoshard.errors import InputError
from autoshard.imports.imported import imported_run
from autoshard.imports.question import ImportOptions, imported_question

_REGISTRY = """
def {function}():
    return Trainer.Config(
        hf_assets_path={assets!r}, model_spec=model_registry({flavor!r}),
        training=TrainingConfig(max_context_length=4096),
    )
"""


def model_of(folder: Path, family: str, function: str, flavor: str, assets: str = "./tests/assets/tokenizer") -> str:
    (folder / family).mkdir()
    path = folder / family / "config_registry.py"
    path.write_text(_REGISTRY.format(function=function, flavor=flavor, assets=assets), encoding="utf-8")
    return imported_question(imported_run(f"{path}:{function}"), ImportOptions()).request.model.name


@pytest.mark.parametrize(
    ("family", "function", "flavor", "assets", "card"),
    [
        ("deepseek_v3", "deepseek_v3_671b", "671B", "./assets/hf/DeepSeek-V3.1-Base", "deepseek-v3"),
        ("qwen3", "qwen3_8b_pretrain", "8B", "./tests/assets/tokenizer", "qwen3-8b"),
        ("llama3", "llama3_debugmodel", "debugmodel", "./tests/assets/tokenizer", "llama31debugmodel"),
    ],
)
def test_a_flavor_of_the_size_of_a_card_is_that_card(
    tmp_path: Path, family: str, function: str, flavor: str, assets: str, card: str
) -> None:
    assert model_of(tmp_path, family, function, flavor, assets) == card


@pytest.mark.parametrize(
    ("family", "function", "flavor", "assets"),
    [
        ("deepseek_v3", "deepseek_v3_16b", "16B", "./assets/hf/deepseek-moe-16b-base"),
        ("deepseek_v3", "deepseek_v3_debugmodel", "debugmodel", "./tests/assets/tokenizer"),
        ("kimi_k2_7", "moonlight_16b_a3b", "moonlight-16B-A3B", "./assets/hf/Moonlight-16B-A3B"),
        ("kimi_k2_7", "kimi_vl_a3b", "Kimi-VL-A3B", "./assets/hf/Kimi-VL-A3B"),
        ("glm", "glm_45v", "GLM-4.5V", "./assets/hf/GLM-4.5V"),
    ],
)
def test_a_smaller_model_of_the_family_of_a_card_is_asked_for(
    tmp_path: Path, family: str, function: str, flavor: str, assets: str
) -> None:
    with pytest.raises(InputError, match=r"has no card\. Type a card"):
        model_of(tmp_path, family, function, flavor, assets)


@pytest.mark.parametrize(
    ("stem", "card"),
    [("deepseek_v3_16b", ""), ("deepseek_v3_debugmodel", ""), ("deepseek_v3", "deepseek-v3"),
     ("mixtral_8x7b_16k", "mixtral-8x7b"), ("tiny_llama", "tiny-llama"), ("qwen3_30b_a3b", "qwen3-30b-a3b")],
)  # fmt: skip
def test_the_name_of_a_file_is_no_card_where_it_says_another_size(tmp_path: Path, stem: str, card: str) -> None:
    path = tmp_path / f"{stem}.yaml"
    path.write_text("tensor_model_parallel_size: 2\n", encoding="utf-8")
    if not card:
        with pytest.raises(InputError, match=r"the file names none\. Type a card"):
            imported_question(imported_run(str(path)), ImportOptions())
    else:
        assert imported_question(imported_run(str(path)), ImportOptions()).request.model.name == card


def test_a_function_that_changes_only_the_mesh_is_a_configuration_and_one_that_changes_none_is_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "features.py"
    path.write_text(
        "def pp2():\n    config = base()\n    config.parallelism.pipeline_parallel_degree = 2\n    return config\n"
        "def quiet():\n    config = base()\n    config.metrics.log_freq = 1\n    return config\n",
        encoding="utf-8",
    )
    assert imported_run(f"{path}:pp2").facts["layout.pp"] == 2
    with pytest.raises(InputError, match=r"features\.py:quiet: is no configuration of a training run"):
        imported_run(f"{path}:quiet")
