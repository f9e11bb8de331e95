"""The vendor's layout: Llama-3 70B on 16 trn1 nodes as files, names and shapes; which copy of keys lies where."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autoshard.engine.hf_names import shapes_of
from autoshard.plan.build import build_plan
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.runtime.convert.nxd import nxd_outputs
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload
from tests.runtime.convert.cases import converted, read, reduced, same, written

# cited: aws-neuron/neuronx-distributed fbac349: names, what is cut along which axis, and fused QKV are those of
# scripts/checkpoint_converter.py, and tp 32, pp 8, KV multiplier 4 those of its examples for Llama-3 70B.
LAYER = {
    "input_layernorm.weight": (8192,),
    "self_attn.qkv_proj.weight_qkv": (2 * 128 + 2 * 128, 8192),  # 2 of 64 query heads, 1 of 8 * 4 of keys and of values
    "self_attn.o_proj.weight": (8192, 256),
    "post_attention_layernorm.weight": (8192,),
    "mlp.gate_up_proj.weight": (2 * 28672 // 32, 8192),
    "mlp.down_proj.weight": (8192, 28672 // 32),
}
FIRST = {"model.embed_tokens.weight": (128256 // 32, 8192)}
LAST = {"model.norm.weight": (8192,), "lm_head.weight": (128256 // 32, 8192)}


def plan_for(model: ModelSpec, platform: str = "trn1.32xlarge", nodes: int = 16, text: str = "tp=32,pp=8,dp=2") -> Plan:
    workload = Workload(seq_len=8192, global_batch=1024, precision=Precision.named("bf16"))
    return build_plan(Candidate.parse(text), model, replace(load_cluster(platform), num_nodes=nodes), workload, "nxd")


def test_the_files_of_llama_3_70b_by_names_and_shapes() -> None:
    model = load_model("llama3-70b")
    dtypes = dict.fromkeys(shapes_of(model), torch.bfloat16)
    outputs = nxd_outputs(plan_for(model), "llama", model, dtypes, None)
    stages = [(rank, stage) for stage in range(8) for rank in range(32)]
    assert [one.file for one in outputs] == [
        f"model/dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt" for rank, stage in stages
    ]
    for output, (_, stage) in zip(outputs, stages, strict=True):
        expected = {
            f"model.layers.{layer}.{name}": shape
            for layer in range(10 * stage, 10 * stage + 10)
            for name, shape in LAYER.items()
        }
        expected |= FIRST if stage == 0 else LAST if stage == 7 else {}
        assert {one.name: one.shape for one in output.entries} == expected


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["trn1", "trn2"])
def test_the_70b_shape_at_reduced_width_is_256_files_and_comes_back(platform: str, tmp_path: Path) -> None:
    config = {
        **reduced("llama3-70b"), "num_hidden_layers": 80, "hidden_size": 16, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 2, "intermediate_size": 64, "vocab_size": 128,
    }  # fmt: skip
    written(tmp_path / "first", config, torch.bfloat16)
    model = load_model(tmp_path / "first")
    plan = plan_for(model) if platform == "trn1" else plan_for(model, "trn2.48xlarge", 8, "tp=32,pp=8,dp=2,lnc=2")
    done = converted(tmp_path / "first", tmp_path / "nxd", form="nxd", plan=plan)
    assert done.num_files == 256 == len(list((tmp_path / "nxd" / "model").iterdir()))
    keys = read(tmp_path / "first")["model.layers.70.self_attn.k_proj.weight"].view(8, 2, 16)
    for at in range(32):
        file = tmp_path / "nxd" / "model" / f"dp_rank_00_tp_rank_{at:02d}_pp_rank_07.pt"
        fused = torch.load(file, weights_only=True)["model.layers.70.self_attn.qkv_proj.weight_qkv"]
        assert torch.equal(fused[4:6], keys[at % 8 if platform == "trn1" else at // 4])
    converted(tmp_path / "nxd", tmp_path / "last")
    same(read(tmp_path / "first"), read(tmp_path / "last"))
