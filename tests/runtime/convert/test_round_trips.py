"""Every form is left as it was entered, bit by bit; transformers, NxD and runs find in it what they expect."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st

from autoshard.engine.hf_names import shapes_of
from autoshard.engine.nxd.shards import FAMILIES
from autoshard.errors import InputError
from autoshard.plan.build import build_plan
from autoshard.plan.candidate import Candidate
from autoshard.plan.codec import dump
from autoshard.plan.plan import Plan
from autoshard.run.folder import folder_of
from autoshard.runtime.convert.converting import form_of
from autoshard.runtime.convert.nxd import nxd_outputs
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model, model_names
from autoshard.spec.workload import Precision, Workload
from tests.kit import DIFFERENT_LAYERS, SMALL_FAMILIES
from tests.ranks.cases import plan_of
from tests.runtime.convert.cases import converted, cut, read, reduced, same, written
from tests.runtime.convert.test_opening import module_of
from tests.runtime.training_cases import plan_of as run_plan, trained
from tests.slower import rest_is_slow

transformers: Any = pytest.importorskip("transformers")

LAYOUTS = (
    "tp=1,pp=1,dp=1", "tp=2,pp=2,dp=1", "tp=4,pp=1,dp=2,zero=3", "tp=2,pp=4,dp=1", "tp=1,pp=2,dp=2", "tp=8,pp=1,dp=1",
)  # fmt: skip
CUTS = (
    "tp=1,pp=1,dp=1", "tp=2,pp=2,dp=1", "tp=8,pp=2,dp=1", "tp=4,pp=4,dp=1", "tp=2,pp=2,vp=2,dp=1,schedule=interleaved",
)  # fmt: skip


@pytest.mark.parametrize("card", rest_is_slow(model_names(), 1, 2))
@settings(max_examples=1)
@given(data=st.data())
def test_through_all_forms_and_back(card: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory):
    folder, config = tmp_path_factory.mktemp("forms"), reduced(card)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    first = written(folder / "first", config, dtype)
    model = load_model(first)
    texts = data.draw(st.lists(st.sampled_from(LAYOUTS), min_size=2, max_size=2))
    plans = [plan_of(text, model, global_batch=8) for text in texts]
    converted(first, folder / "one", form="autoshard", plan=plans[0])
    converted(folder / "one", folder / "other", form="autoshard", plan=plans[1])
    converted(folder / "other", folder / "whole", form="autoshard")
    last = folder / "whole"
    if config["model_type"] in FAMILIES:
        text, platform = data.draw(st.sampled_from(CUTS)), data.draw(st.sampled_from(["trn1", "trn2"]))
        qkv = data.draw(st.sampled_from(["fused", "split", "apart", None]))
        last = folder / "nxd"
        converted(folder / "other", last, form="nxd", plan=cut(text, model, platform), qkv=qkv)
        assert form_of(last) == "nxd"
    converted(last, folder / "state.pt", form="pt")
    converted(folder / "state.pt", folder / "last", model=str(last))
    same(read(first), read(folder / "last"))
    assert (folder / "last" / "tokenizer.json").read_text() == "{}"


# Experts are cut over what cuts sequences or heads elsewhere.
FOLDED = (
    "tp=2,pp=1,cp=2,dp=2,ep=2,fold=cp.tp", "tp=1,pp=2,cp=2,dp=1,fold=cp", "tp=2,pp=1,cp=2,dp=2,ep=2,fold=tp",
    "tp=2,pp=1,cp=2,dp=2,zero=3,fold=cp",
)  # fmt: skip


@pytest.mark.parametrize("text", FOLDED)
def test_experts_of_folded_axes_are_all_written(text: str, tmp_path: Path) -> None:
    first = written(tmp_path / "first", reduced("mixtral-8x7b"))
    plan = plan_of(text, load_model(first), global_batch=8, seq_len=16)
    converted(first, tmp_path / "ours", form="autoshard", plan=plan)
    converted(tmp_path / "ours", tmp_path / "last")
    same(read(first), read(tmp_path / "last"))


CASES = [
    ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    *DIFFERENT_LAYERS,
    *((family, {}) for family in SMALL_FAMILIES),
]


@pytest.mark.parametrize(("family", "changes"), rest_is_slow(CASES, 2))
def test_logits_of_what_is_exported_are_those_of_transformers(family: str, changes: Any, tmp_path: Path):
    module = module_of(family, **changes)
    module.save_pretrained(tmp_path / "first", max_shard_size="6KB")
    model = load_model(tmp_path / "first")
    plan = plan_of("tp=2,pp=2,dp=1", model)
    converted(tmp_path / "first", tmp_path / "ours", form="autoshard", plan=plan)
    source = tmp_path / "ours"
    if family in FAMILIES:
        converted(source, tmp_path / "nxd", form="nxd", plan=plan)
        source = tmp_path / "nxd"
    converted(source, tmp_path / "last")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "last", attn_implementation="eager")
    tokens = torch.randint(0, 19, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(found(tokens).logits, module(tokens).logits, rtol=0, atol=1e-5)
    tied = changes.get("tie_word_embeddings", False)
    assert found.config.tie_word_embeddings == module.config.tie_word_embeddings
    assert not tied or found.lm_head.weight is found.model.embed_tokens.weight


MODEL = "tiny-llama"


@pytest.mark.slow
@pytest.mark.ranks
def test_a_state_that_was_cut_for_another_plan_goes_on_bit_for_bit(tmp_path: Path) -> None:
    plan, other = run_plan("tp=1,pp=1,dp=2"), run_plan("tp=2,pp=2,dp=1")
    whole = trained(plan, tmp_path / "whole", 4)
    trained(plan, tmp_path / "first", 2)
    converted(tmp_path / "first" / "checkpoints", tmp_path / "second" / "checkpoints", form="autoshard", plan=other)
    files = list((tmp_path / "second" / "checkpoints" / "step-00000002").glob("rank-*.safetensors"))
    assert len(files) == 4
    assert trained(plan, tmp_path / "second", 4).curve == {number: whole.curve[number] for number in (3, 4)}


@pytest.mark.slow
@pytest.mark.ranks
def test_weights_of_every_form_begin_a_run_alike(tmp_path: Path) -> None:
    plan = run_plan("tp=1,pp=2,dp=1", precision="fp32")
    first = trained(plan, tmp_path / "first", 3)
    at = tmp_path / "first" / "checkpoints"
    model = tmp_path / "config.json"
    model.write_text((Path(__file__).parents[3] / "models" / f"{MODEL}.json").read_text())
    converted(at, tmp_path / "hf", model=str(model))
    converted(tmp_path / "hf", tmp_path / "ours", form="autoshard", plan=plan)
    converted(tmp_path / "hf", tmp_path / "nxd", form="nxd", plan=cut("tp=2,pp=2,dp=1", plan.model))
    places = {"run": at.parent, "checkpoints": at, "step": at / folder_of(3)}
    losses = {
        where: trained(plan, tmp_path / f"from {where}", 1, init_weights=str(path)).curve[1]
        for where, path in {**places, **{name: tmp_path / name for name in ("hf", "ours", "nxd")}}.items()
    }
    assert len(set(losses.values())) == 1, losses
    assert losses["run"] < first.curve[1] - 0.05, "trained weights, on the first batch"


@pytest.mark.slow
@pytest.mark.ranks
def test_weights_that_one_rank_alone_reads_and_refuses_end_the_start_of_all(tmp_path: Path) -> None:
    plan = run_plan("tp=1,pp=2,dp=1", precision="fp32")
    trained(plan, tmp_path / "first", 1)
    model = tmp_path / "config.json"
    model.write_text((Path(__file__).parents[3] / "models" / f"{MODEL}.json").read_text())
    converted(tmp_path / "first" / "checkpoints", tmp_path / "hf", model=str(model))
    tensors = read(tmp_path / "hf")
    name = "model.layers.3.mlp.up_proj.weight"  # of the last stage
    tensors[name][0, 0] = float("nan")
    safetensors.torch.save_file(tensors, tmp_path / "hf" / "model.safetensors")
    said = rf"init_weights: rank 1: .*model\.safetensors: {name}: holds numbers that are not finite"
    with pytest.raises(InputError, match=said):
        trained(plan, tmp_path / "second", 1, init_weights=str(tmp_path / "hf"))


@pytest.mark.ranks
def test_a_run_of_a_model_without_a_card_gets_the_configuration_of_its_plan(tmp_path: Path) -> None:
    plan = run_plan("tp=1,pp=1,dp=1")
    mine = replace(plan, model=replace(plan.model, name="mine", rotary_theta=500_000.0))
    trained(mine, tmp_path / "run", 1)
    (tmp_path / "run" / "plan.json").write_text(dump(mine))
    converted(tmp_path / "run", tmp_path / "out")
    assert not list(load_model(tmp_path / "out").differences(mine.model))
    module = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    same(dict(module.state_dict()), read(tmp_path / "out"))
    odd = replace(mine, model=replace(mine.model, parallel_residual=True, num_experts=4, experts_per_token=2))
    (tmp_path / "run" / "plan.json").write_text(dump(odd))
    with pytest.raises(InputError, match=r"run: model: no architecture of transformers that is known .* Type --model"):
        converted(tmp_path / "run", tmp_path / "other")


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


@pytest.mark.slow
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
