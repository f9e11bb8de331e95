"""Hugging Face folders fill the weights of ranks: the first loss is that of transformers; what is wrong is named."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autoshard.engine.torch.engine import build
from autoshard.errors import InputError
from autoshard.plan.plan import Plan
from autoshard.run.placement import StatePiece
from autoshard.run.protocol import Run
from autoshard.runtime.convert.converting import form_of, read_weights
from autoshard.runtime.convert.ours import naming_removed
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.training import Training
from autoshard.spec.workload import Precision
from tests.kit import DIFFERENT_LAYERS, SMALL_FAMILIES, small_config
from tests.ranks.cases import plan_of
from tests.ranks.spawn import on_ranks
from tests.slower import rest_is_slow

transformers: Any = pytest.importorskip("transformers")
safetensors: Any = pytest.importorskip("safetensors.torch")

BATCH, SEQ = 4, 8
LAYOUTS = (
    "tp=1,pp=1,dp=1",
    "tp=2,pp=1,dp=1,sp=false",
    "tp=4,pp=1,dp=1",
    "tp=1,pp=2,dp=1,vp=1,schedule=zb_h1",
    "tp=1,pp=1,dp=2",
    "tp=1,pp=1,dp=4,zero=3",
    "tp=2,pp=1,dp=2,zero=0",
    "tp=1,pp=1,cp=2,dp=1",
)
CASES = [
    ("llama", "tp=2,pp=2,dp=1", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("mixtral", "tp=2,pp=1,dp=2,ep=2", {}),
    ("gpt_neox", "tp=1,pp=2,dp=1", {"use_parallel_residual": False, "tie_word_embeddings": True}),
    ("qwen3_moe", "tp=1,pp=1,dp=4,ep=4", {}),
    ("mixtral", "tp=1,pp=2,dp=2,ep=2", {"tie_word_embeddings": True}),
    ("gpt2", "tp=1,pp=2,dp=2,zero=3", {}),
    *((family, "tp=2,pp=2,dp=1", changes) for family, changes in DIFFERENT_LAYERS),
    *((family, text, {}) for family in SMALL_FAMILIES for text in LAYOUTS),
]
TOKENS = np.random.default_rng(3).integers(0, 19, (BATCH, SEQ))


def module_of(family: str, **changes: Any) -> Any:
    config = small_config(family, **changes)
    fields = {key: value for key, value in config.items() if key != "model_type"}
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **fields), **options)
    generator = torch.Generator().manual_seed(5)
    corrections = [buffer for name, buffer in made.named_buffers() if name.endswith("e_score_correction_bias")]
    for weight in (*made.parameters(), *corrections):
        weight.data.normal_(0, 0.3, generator=generator)
    return made


def plan_for(folder: Path, text: str = "tp=1,pp=1,dp=1") -> Plan:
    return plan_of(text, load_model(folder), seq_len=SEQ, global_batch=BATCH, precision=Precision.named("fp32"))


def first_step(plan: Plan, folder: Path) -> tuple[float, float]:
    """What every rank runs: the engine of a run, filled from a folder; transformers shifts the labels by itself."""
    engine = build(plan, Run(folder=folder, training=Training(seed=9)))
    read_weights(folder, plan, engine.pieces())
    engine.restored(0)
    labels, weight = np.roll(TOKENS, -1, axis=1), np.full(TOKENS.shape, 1 / (BATCH * (SEQ - 1)))
    weight[:, -1] = 0
    where = {"positions": np.arange(SEQ), "key_positions": np.arange(SEQ)}
    parts = [np.split(array, plan.schedule.num_micro_batches) for array in (TOKENS, labels, weight)]
    batches = [{"tokens": t, "labels": n, "token_weight": w, **where} for t, n, w in zip(*parts, strict=True)]
    report = engine.step(batches, 1e-3)
    return report.loss, report.norm


@pytest.mark.ranks
@pytest.mark.parametrize(("family", "text", "changes"), rest_is_slow(CASES, 0, 5))
def test_the_first_loss_is_that_of_transformers(family: str, text: str, changes: Mapping[str, Any], tmp_path: Path):
    module = module_of(family, **changes)
    module.save_pretrained(tmp_path)
    batch = torch.tensor(TOKENS)
    loss = module(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in module.parameters() if parameter.requires_grad]).norm()
    plan = plan_for(tmp_path, text)
    for found in on_ranks(plan.mesh.num_ranks, first_step, plan, tmp_path):
        assert found == pytest.approx((float(loss.detach()), float(norm)), rel=1e-5)


def box(weight: str, shape: tuple[int, ...], dtype: torch.dtype, **changes: Any) -> StatePiece:
    given: dict[str, Any] = {"weight": weight, "part": "weight", "whole": shape, "offsets": (0,) * len(shape)}
    return StatePiece(**{**given, "memory": torch.full(shape, 7.0, dtype=dtype), **changes})


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_formats_are_converted_and_shards_found(stored: torch.dtype, tmp_path: Path):
    module = module_of("llama").to(stored)
    module.save_pretrained(tmp_path, max_shard_size="6KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    plan = plan_for(tmp_path)
    plan = replace(plan, model=replace(plan.model, max_positions=99))  # how long contexts were is free
    for wanted in (torch.float64, torch.float32, torch.bfloat16):
        up, norm = box("layer.1.up.weight", (24, 16), wanted), box("head.0.final_norm.weight", (16,), wanted)
        other = box("layer.1.up.weight", (24, 16), wanted, part="moment1")
        given = box("layer.1.down.weight", (16, 24), wanted, reads=False)
        read_weights(tmp_path, plan, [up, norm, other, given])
        assert torch.equal(up.memory, module.model.layers[1].mlp.up_proj.weight.to(wanted))
        assert torch.equal(norm.memory, module.model.norm.weight.to(wanted))
        assert (other.memory == 7).all() and (given.memory == 7).all()


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = safetensors.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.save_file(tensors, folder / "model.safetensors")


def cut(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])


def reconfigured(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def indexed(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)


def test_modules_that_predict_further_tokens_are_left_out_and_no_other_layer_is(tmp_path: Path):
    module_of("deepseek_v3").save_pretrained(tmp_path)
    plan, weight = plan_for(tmp_path), box("layer.0.up.weight", (40, 16), torch.float32)
    behind = {"model.layers.2.mlp.up_proj.weight": torch.zeros(24, 16)}
    rewritten(tmp_path, lambda tensors: tensors.update(behind))
    with pytest.raises(InputError, match="is no tensor of this model"):
        read_weights(tmp_path, plan, [weight])
    rewritten(tmp_path, lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": torch.zeros(16, 32)}))
    read_weights(tmp_path, plan, [weight])


GATE = "model.layers.0.mlp.gate_proj.weight"
FAULTS: Mapping[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "several faults at once": (
        lambda f: rewritten(f, lambda t: t.update({"model.layers.0.mlp.extra": t.pop(GATE)})),
        (f"folder: {GATE}: missing", "model.safetensors: model.layers.0.mlp.extra: is no tensor of this model"),
    ),
    "a tensor has another shape": (
        lambda f: rewritten(f, lambda t: t.update({GATE: torch.zeros(24, 17)})),
        (f"model.safetensors: {GATE}: has shape (24, 17), the model asks for (24, 16)",),
    ),
    "a format without fractions": (
        lambda f: rewritten(f, lambda t: t.update({GATE: t[GATE].to(torch.int8)})),
        (f"model.safetensors: {GATE}: holds I8, and only F64, F32, F16, BF16 can be read",),
    ),
    "a truncated file": (lambda f: cut(f, 9000), ("model.safetensors: is no whole file", "Download it again")),
    "a truncated header": (lambda f: cut(f, 100), ("model.safetensors: is no whole file of tensors",)),
    "an empty file": (lambda f: cut(f, 0), ("model.safetensors: is no whole file of tensors",)),
    "another model": (
        lambda f: reconfigured(f, num_hidden_layers=3, rms_norm_eps=0.5),
        ("num_layers: is 3 there and 2 in the plan's", "norm_eps: is 0.5", "plan for it: --model"),
    ),
    "no configuration": (lambda f: (f / "config.json").unlink(), ("config.json: there is no such file",)),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ("holds no *.safetensors. Write them with transf",)),
    "a shard is missing": (
        lambda f: indexed(f, json.dumps({"weight_map": {GATE: "model-1.safetensors"}})),
        ("model-1.safetensors: there is no such file, though model.safetensors.index.json names it",),
    ),
    "a shard has not what the index says": (
        lambda f: indexed(f, json.dumps({"weight_map": {"sth": "model.safetensors"}})),
        ("model.safetensors: sth: is not there, though model.safetensors.index.json says so (1 such",),
    ),
    "an index of something else": (lambda f: indexed(f, "{}"), ("weight_map: must say for each tensor the file",)),
    "a shard outside": (
        lambda f: indexed(f, json.dumps({"weight_map": {GATE: f"{os.pardir}/other.safetensors"}})),
        (f"weight_map: names files outside of its folder: {os.pardir}/other.safetensors. Download",),
    ),
    "a shard at an absolute path": (
        lambda f: indexed(f, json.dumps({"weight_map": {GATE: str(f / "model.safetensors")}})),
        ("weight_map: names files outside of its folder: /",),
    ),
    "a tensor in two files": (
        lambda f: (
            safetensors.save_file({GATE: torch.zeros(24, 16)}, f / "model-2.safetensors"),
            (f / "model.safetensors").rename(f / "model-1.safetensors"),
        ),
        (f"model-2.safetensors: {GATE}: is in ", "model-1.safetensors too"),
    ),
    "a whole file beside shards": (
        lambda f: (
            shutil.copy(f / "model.safetensors", f / "model-1.safetensors"),
            indexed(f, json.dumps({"weight_map": {GATE: "model-1.safetensors"}})),
        ),
        ("model.safetensors: lies beside model.safetensors.index.json, which does not name it",),
    ),
    "an adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), ("adapter_config.json: transformers adds",)),
    "another file by the configuration": (
        lambda f: reconfigured(f, transformers_weights="other.safetensors"),
        ("config.json: transformers_weights: names other.safetensors, which is not read",),
    ),
}


NOT_FINITE = (float("nan"), float("inf"), float("-inf"))


@pytest.mark.parametrize("number", NOT_FINITE, ids=str)
def test_numbers_that_are_not_finite_begin_no_run(number: float, tmp_path: Path):
    module_of("llama").save_pretrained(tmp_path)
    rewritten(tmp_path, lambda t: t[GATE].view(-1).index_fill_(0, torch.tensor(7), number))
    read_weights(tmp_path, plan_for(tmp_path), [box("layer.0.up.weight", (24, 16), torch.float32)])  # another one
    with pytest.raises(InputError, match=rf"{GATE}: holds numbers that are not finite\. Copy it again"):
        read_weights(tmp_path, plan_for(tmp_path), [box("layer.0.gate.weight", (24, 16), torch.float32)])


@pytest.mark.parametrize(("spoil", "words"), FAULTS.values(), ids=FAULTS)
def test_what_is_wrong_is_named(spoil: Callable[[Path], object], words: tuple[str, ...], tmp_path: Path):
    folder = tmp_path / "folder"
    module_of("llama").save_pretrained(folder)
    plan = plan_for(folder)
    spoil(folder)
    with pytest.raises(InputError) as caught:
        read_weights(folder, plan, [])
    assert not [word for word in words if word not in str(caught.value)]


@pytest.mark.parametrize("name", ["step-00000009.partial", "step-00000009"])
def test_a_checkpoint_that_a_kill_has_cut_off_is_said_to_be_none(name: str, tmp_path: Path) -> None:
    """Its safetensors alone looked like a folder of Hugging Face, each of whose tensors is a fault."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "rank-00000.safetensors").write_bytes(b"half of a header")
    with pytest.raises(InputError, match=rf"{name}: is a checkpoint that was not finished\. Take one before it"):
        form_of(folder)
    (folder / "config.json").write_text("{}")
    assert form_of(folder) == "hf"


@pytest.mark.parametrize("removed", [False, True])
def test_a_checkpoint_that_its_run_removes_while_it_is_read_is_named_as_such(removed: bool, tmp_path: Path) -> None:
    for step in (2, 4):
        (tmp_path / "checkpoints" / f"step-0000000{step}").mkdir(parents=True)
    file = tmp_path / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    says = "removed that of step 2 meanwhile .*Type the same command again" if removed else "No such file"
    with pytest.raises(InputError if removed else FileNotFoundError, match=says), naming_removed(tmp_path):
        if removed:
            file.parent.rmdir()
        raise FileNotFoundError(2, "No such file or directory", str(file))
