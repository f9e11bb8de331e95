"""A model that is written as a config.json is read as the same model, by autoshard and by transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoshard.errors import InputError
from autoshard.spec.hf.config import spec_from_config
from autoshard.spec.hf.writing import config_of
from autoshard.spec.model_catalogue import load_model, model_names
from tests.engine.hf_whole import from_hf, to_hf
from tests.kit import DIFFERENT_LAYERS, SMALL_FAMILIES, small_config
from tests.slower import each_third_is_fast

LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.5, "beta_slow": 0.25}
YARN |= {"original_max_position_embeddings": 16}
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((family, {}) for family in SMALL_FAMILIES),
    *((family, {"tie_word_embeddings": True}) for family in ("llama", "qwen2", "gpt_neox")),
    *(("llama", {"rope_scaling": scaling}) for scaling in (LLAMA3_ROPE, {"rope_type": "linear", "factor": 2.0})),
    ("llama", {"rope_scaling": YARN}),
    ("qwen3", {"rope_scaling": YARN | {"attention_factor": 1.3, "truncate": False}}),
    ("deepseek_v3", {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}, "attention_bias": True}),
    ("deepseek_v3", {"rope_scaling": YARN | {"attention_factor": 1.0}}),
    ("deepseek_v2", {"q_lora_rank": 5}),
    ("gpt_oss", {"layer_types": ["full_attention"] * 2, "rope_scaling": {"rope_type": "default"}, "swiglu_alpha": 2.0}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_new", "rope_theta": 5e5}),
    ("qwen2", {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 0}),
    *DIFFERENT_LAYERS,
    ("qwen3", {"attention_bias": True}),
    ("mixtral", {"sliding_window": 3}),
    ("qwen3_moe", {"sliding_window": 3, "use_sliding_window": True}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("gpt2", {"tie_word_embeddings": False, "activation_function": "relu"}),
)


@pytest.mark.parametrize("card", model_names())
def test_every_card_is_written_and_read_as_the_same_model(card: str) -> None:
    model = load_model(card)
    assert spec_from_config(config_of(model), name=model.name, source=model.source) == model


@pytest.mark.parametrize(("family", "changes"), each_third_is_fast(OPTIONS), ids=str)
def test_transformers_computes_the_same_with_the_written_config(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    torch: Any = pytest.importorskip("torch")
    safetensors: Any = pytest.importorskip("safetensors.torch")
    config = transformers.AutoConfig.for_model(**small_config(family, **changes))
    torch.manual_seed(3)
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    module.save_pretrained(tmp_path)
    tokens = torch.randint(0, 19, (2, 9), generator=torch.Generator().manual_seed(1))
    model = load_model(tmp_path)
    written = config_of(model)
    if written["model_type"] != family:  # whose tensors may have other names, or numbers in another order
        ours = from_hf(family, model, safetensors.load_file(tmp_path / "model.safetensors"), torch.empty)
        theirs = to_hf(written["model_type"], model, ours, torch.empty)
        safetensors.save_file(theirs, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(written))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    apart = 0 if type(again) is type(module) else 1e-6  # the same function in other operations
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, module(tokens).logits, rtol=0, atol=apart)


def test_a_model_that_no_architecture_computes_is_refused() -> None:
    odd = replace(load_model("tiny-llama"), parallel_residual=True, num_experts=4, experts_per_token=2)
    with pytest.raises(InputError, match=r"no architecture of transformers .* Type --model with the config\.json of"):
        config_of(odd)
