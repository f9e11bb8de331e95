"""Reduced models in Hugging Face folders, and conversions in this process."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from autoshard.engine.hf_names import HfNames
from autoshard.plan.build import build_plan
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.runtime.convert.converting import Conversion, Done, convert
from autoshard.spec.model_catalogue import load_config, load_model
from autoshard.spec.workload import Precision, Workload
from tests.neuron.cases import few_ranks

SIZES: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 37,  # which nothing divides
    "max_position_embeddings": 16,
    "num_local_experts": 8,
    "rotary_dim": 4,
    "num_experts": 16,
    "n_routed_experts": 16,
    "n_layer": 4,
    "n_embd": 64,
    "n_inner": 48,
    "n_head": 8,
    "vocab": 37,
    "n_positions": 16,
}


def reduced(card: str) -> dict[str, Any]:
    """The configuration of a card at reduced width; whether heads are grouped, tied or biased stays."""
    config = dict(load_config(card))
    alone = config.get("num_key_value_heads") in (None, config.get("num_attention_heads"))
    sizes = {**SIZES, "num_key_value_heads": 8} if alone else SIZES
    return {key: sizes.get(key, value) for key, value in config.items()}


def written(folder: Path, config: Mapping[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Write a folder of drawn weights, every number another."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    names = HfNames.of(config["model_type"], load_model(folder))
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in names.shapes.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    return {
        name: one
        for file in sorted(folder.glob("*.safetensors"))
        for name, one in safetensors.torch.load_file(file).items()
    }


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    """Both hold the same bits."""
    assert left.keys() == right.keys()
    for name, one in left.items():
        assert one.dtype == right[name].dtype
        bits, others = (tensor.contiguous().view(torch.uint8) for tensor in (one, right[name]))
        np.testing.assert_array_equal(bits, others, err_msg=name)


def converted(source: Path, target: Path, **options: Any) -> Done:
    """Convert in this process."""
    usual: dict[str, Any] = {"plan": None, "form": "hf", "model": None, "dtype": None, "tokenizer": None, "qkv": None}
    return convert(Conversion(source=source, target=target, **{**usual, "workers": 2, **options}), lambda _: None)


def cut(text: str, model: Any, platform: str = "trn1") -> Plan:
    """A plan of the nxd engine without a table: who holds what of NxD's files follows from its axes and stages."""
    candidate = Candidate.parse(text)
    workload = Workload(seq_len=8, global_batch=8, precision=Precision.named("bf16"))
    return build_plan(candidate, model, few_ranks(platform, candidate.num_ranks), workload, "nxd")
