"""Files of NxD come back bit by bit however heads, copies of keys and the order of ranks meet, or are refused.

Which rank holds which heads is derived here anew, from what NxD does with whole tensors.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from autoshard.cli import main
from autoshard.engine.nxd.shards import Qkv
from autoshard.errors import InputError
from autoshard.plan.codec import dump
from autoshard.runtime.convert import converting, nxd, stored
from autoshard.spec.model_catalogue import load_model
from tests.neuron.cases import nxd_plan
from tests.ranks.cases import plan_of
from tests.runtime.convert.cases import converted, cut, read, reduced, same, written
from tests.slower import covering, rest_is_slow
from tests.soak.conversions import hunt

HEAD_DIM = 4
GRID = (  # query heads, KV heads, tp
    (8, 2, 8), (16, 2, 8), (16, 2, 16), (32, 2, 32), (32, 4, 32), (8, 4, 8), (16, 4, 8), (8, 2, 4), (8, 1, 8),
    (8, 8, 4), (8, 2, 2), (8, 4, 2),
)  # fmt: skip
HARD = (16, 2, 8)  # copies outnumber the KV heads, and trn2's order is not that of trn1
FILE = "model/dp_rank_00_tp_rank_{:02d}_pp_rank_00.pt"
ATTENTION = "model.layers.0.self_attn"


def config_of(heads: int, kv_heads: int, tp: int, **changes: Any) -> dict[str, Any]:
    """A Llama of one layer with these heads, whose other sizes ``tp`` divides."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": HEAD_DIM}
    sizes |= {"hidden_size": 16, "intermediate_size": 2 * tp, "num_hidden_layers": 1}
    return {**reduced("llama3-8b"), **sizes, **changes}


def heads_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, HEAD_DIM, *tensor.shape[1:])


def as_nxd_cuts(whole: Mapping[str, torch.Tensor], tp: int, platform: str, rank: int) -> dict[str, torch.Tensor]:
    """The attention of a rank, as NxD's GQA layer holds it.

    cited: neuronx_distributed/modules/qkv_linear.py and scripts/checkpoint_converter.py: whole keys are repeated
    (trn1: all heads again and again; trn2: every head next to itself) and cut into as many pieces as ranks. Queries,
    and the columns of the output, are in such an order that each rank has queries of its KV head.
    """
    queries, keys, values, output = (whole[f"{ATTENTION}.{name}_proj.weight"] for name in "qkvo")
    q, k, v, o = heads_of(queries), heads_of(keys), heads_of(values), heads_of(output.T.contiguous())
    num_copies = max(1, tp // len(k))
    if platform == "trn1":
        k, v = (torch.cat([heads] * num_copies) for heads in (k, v))
        group = len(q) // (len(k) // num_copies) // num_copies  # queries of a KV head that a rank has
        places = [
            kv_head * group * num_copies + copy * group + number
            for copy in range(num_copies)
            for kv_head in range(len(k) // num_copies)
            for number in range(group)
        ]
        q, o = q[places], o[places]
    else:
        k, v = (heads.repeat_interleave(num_copies, dim=0) for heads in (k, v))
    q, k, v, o = (heads.chunk(tp)[rank].flatten(0, 1) for heads in (q, k, v, o))
    return {f"{ATTENTION}.qkv_proj.weight_qkv": torch.cat([q, k, v]), f"{ATTENTION}.o_proj.weight": o.T}


@pytest.mark.parametrize("platform", rest_is_slow(["trn1", "trn2"]))
@pytest.mark.parametrize("grid", rest_is_slow([(grid,) for grid in GRID], 2), ids=str)
def test_each_order_of_heads_comes_back(grid: tuple[int, int, int], platform: str, tmp_path: Path) -> None:
    first = written(tmp_path / "first", config_of(*grid))
    model, tp = load_model(first), grid[2]
    plan = cut(f"tp={tp},pp=1,dp=1", model, platform)
    forms: tuple[Qkv | None, ...] = ("fused", "split", "apart")
    for qkv in forms:
        converted(first, tmp_path / f"nxd {qkv}", form="nxd", plan=plan, qkv=qkv)
        converted(tmp_path / f"nxd {qkv}", tmp_path / f"hf {qkv}")
        same(read(tmp_path / f"hf {qkv}"), read(first))
    for rank in range(tp):
        state = torch.load(tmp_path / "nxd fused" / FILE.format(rank), weights_only=True)
        expected = as_nxd_cuts(read(first), tp, platform, rank)
        same({name: state[name] for name in expected}, expected)
    source = tmp_path / "nxd fused"
    converted(source, tmp_path / "last", plan=plan)
    same(read(tmp_path / "last"), read(first))
    ours = plan_of("tp=2,pp=1,dp=1", model)
    for name, other in (("whole", None), ("cut", ours)):
        converted(source, tmp_path / f"ours {name}", form="autoshard", plan=other)
        converted(tmp_path / f"ours {name}", tmp_path / f"last {name}", model=str(first))
        same(read(tmp_path / f"last {name}"), read(first))


@pytest.mark.parametrize("platform", ["trn1", "trn2"])
def test_the_plan_of_the_files_may_cut_a_checkpoint_of_ours(platform: str, tmp_path: Path) -> None:
    first = written(tmp_path / "first", config_of(*HARD))
    plan = nxd_plan("tp=8,pp=1,dp=1", load_model(first), platform)
    converted(first, tmp_path / "nxd", form="nxd", plan=plan)
    converted(tmp_path / "nxd", tmp_path / "ours", form="autoshard", plan=plan)
    converted(tmp_path / "ours", tmp_path / "last", model=str(first))
    same(read(tmp_path / "last"), read(first))


def alike(folder: Path) -> Path:
    """Write a model whose KV heads are all the same, so that numbers do not show the order of ranks."""
    written(folder, config_of(*HARD))
    tensors = read(folder)
    for name in ("k", "v"):
        whole = heads_of(tensors[f"{ATTENTION}.{name}_proj.weight"])
        whole[:] = whole[:1].clone()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("platform", ["trn1", "trn2"])
def test_an_order_that_numbers_do_not_show_is_that_of_the_plan(
    platform: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = alike(tmp_path / "first")
    plan = cut("tp=8,pp=1,dp=1", load_model(first), platform)
    converted(first, tmp_path / "nxd", form="nxd", plan=plan)
    file = tmp_path / "plan.json"
    file.write_text(dump(plan))
    assert main(["convert", str(tmp_path / "nxd"), str(tmp_path / "last")]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'nxd'}: all heads of keys and values are alike" in said and "Type --plan" in said
    assert main(["convert", str(tmp_path / "nxd"), str(tmp_path / "last"), "--plan", str(file), "--to", "hf"]) == 0
    same(read(tmp_path / "last"), read(first))


def test_a_plan_of_another_order_than_the_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = written(tmp_path / "first", config_of(*HARD))
    plans = {platform: cut("tp=8,pp=1,dp=1", load_model(first), platform) for platform in ("trn1", "trn2")}
    converted(first, tmp_path / "nxd", form="nxd", plan=plans["trn2"])
    with pytest.raises(InputError, match=r"lie in the order of trn2, and those of the plan in that of trn1\. Type"):
        converted(tmp_path / "nxd", tmp_path / "last", plan=plans["trn1"])
    converted(tmp_path / "nxd", tmp_path / "cut again", form="nxd", plan=plans["trn1"])
    assert main(["convert", str(tmp_path / "cut again"), str(tmp_path / "last")]) == 0
    assert f"{tmp_path / 'cut again'}: read with copies of keys in the order of trn1" in capsys.readouterr().out
    same(read(tmp_path / "last"), read(first))


def test_copies_that_fit_no_order_are_refused(tmp_path: Path) -> None:
    first = written(tmp_path / "first", config_of(*HARD))
    converted(first, tmp_path / "nxd", form="nxd", plan=cut("tp=8,pp=1,dp=1", load_model(first), "trn2"))
    file = tmp_path / "nxd" / FILE.format(3)
    state = torch.load(file, weights_only=True)
    state[f"{ATTENTION}.qkv_proj.weight_qkv"][-1, -1] += 1  # a value of one copy
    torch.save(state, file)
    with pytest.raises(InputError, match=r"weight_qkv: its ranks hold copies of keys and values, which differ in trn1"):
        converted(tmp_path / "nxd", tmp_path / "last")


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_whatever_is_stored_twice_must_be_the_same(name: str, tmp_path: Path) -> None:
    """Norms are on every rank; a tied head repeats the table."""
    first = written(tmp_path / "first", config_of(8, 2, 2, tie_word_embeddings=True))
    converted(first, tmp_path / "nxd", form="nxd", plan=cut("tp=2,pp=1,dp=1", load_model(first)))
    file = tmp_path / "nxd" / FILE.format(1)
    state = torch.load(file, weights_only=True)
    state[name].view(-1)[0] += 1
    torch.save(state, file)
    with pytest.raises(InputError, match=r"holds the same numbers of .* and they differ"):
        converted(tmp_path / "nxd", tmp_path / "last")


def test_a_reader_that_takes_the_wrong_order_is_caught_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded: the order of trn1 for files of trn2. Copies differ; where nobody looks at them, sums of squares do."""
    first = written(tmp_path / "first", config_of(*HARD))
    converted(first, tmp_path / "nxd", form="nxd", plan=cut("tp=8,pp=1,dp=1", load_model(first), "trn2"))
    monkeypatch.setattr(nxd, "_order_by_values", lambda ranks, orders: "trn1")
    with pytest.raises(InputError, match=r"holds the same numbers of layer\.0\.k\.weight"):
        converted(tmp_path / "nxd", tmp_path / "last")
    monkeypatch.setattr(stored, "same_bits", lambda numbers, others: True)
    with pytest.raises(InputError, match=r"the sum of squares of layer\.0\.k\.weight is .* and .* in the files of NxD"):
        converted(tmp_path / "nxd", tmp_path / "last")


@pytest.mark.parametrize(
    ("card", "dtype"),
    covering(["mixtral-8x7b", "gpt-neox-20b", "qwen3-8b", "llama2-13b"], ["bf16", "fp16", None], fast=1),
)
def test_sums_of_squares_hold_for_all_families_and_formats(card: str, dtype: str | None, tmp_path: Path) -> None:
    config = {**reduced(card), "tie_word_embeddings": False}
    first = written(tmp_path / "first", config)
    converted(first, tmp_path / "nxd", form="nxd", plan=cut("tp=4,pp=2,dp=1", load_model(first)))
    converted(tmp_path / "nxd", tmp_path / "last", dtype=dtype)
    converted(tmp_path / "nxd", tmp_path / "again", form="nxd", plan=cut("tp=8,pp=1,dp=1", load_model(first)))
    assert json.loads((tmp_path / "last" / "config.json").read_text())["model_type"] == config["model_type"]


@pytest.mark.slow
def test_the_hunt_for_conversions_holds_and_catches_a_seeded_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded: trn1's order for all, and nobody who compares; what comes back is another model."""
    result = hunt(8, 3, tmp_path)
    assert result.held > 4 and not result.failures, result
    monkeypatch.setattr(nxd, "_order_by_values", lambda ranks, orders: "trn1")
    monkeypatch.setattr(stored, "same_bits", lambda numbers, others: True)
    monkeypatch.setattr(converting, "refuse_other_sums", lambda *_: None)
    broken = hunt(8, 3, tmp_path).failures
    assert broken and all("must come back bit for bit" in failure for failure in broken)
