"""Files of NxD: what we write is what the vendor's converter writes and loads in the real NxD, and back."""

import importlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from autoshard.spec.model_catalogue import load_model
from tests.neuron.features import PATIENCE_S
from tests.neuron.vendor_llama import run_vendor
from tests.ranks.spawn import on_ranks
from tests.runtime.convert.cases import converted, cut, read, reduced, same, written
from tests.runtime.convert.test_opening import module_of

pytestmark = [pytest.mark.nxd, pytest.mark.usefixtures("nxd")]

RUNS = {
    "fused": ("tp=2,pp=1,dp=1", "trn1", "fused", 1),
    "split, trn1": ("tp=4,pp=1,dp=1", "trn1", "split", 2),
    "fused copies, trn1": ("tp=4,pp=1,dp=1", "trn1", "fused", 2),
    "fused copies, trn2": ("tp=4,pp=1,dp=1", "trn2", "fused", 2),
    "split copies, trn2": ("tp=4,pp=1,dp=1", "trn2", "split", 2),
    "heads of their own": ("tp=2,pp=1,dp=1", "trn1", "plain", 1),
    "pipeline": ("tp=2,pp=2,dp=1", "trn1", "fused", 1),
}


@pytest.mark.parametrize("name", list(RUNS))
def test_what_we_write_loads_in_nxd_and_what_it_saves_comes_back(name: str, tmp_path: Path) -> None:
    text, platform, qkv, copies = RUNS[name]
    module = module_of("llama", vocab_size=20, num_key_value_heads=4 if qkv == "plain" else 2)
    module.save_pretrained(tmp_path / "first")
    model = load_model(tmp_path / "first")
    plan = cut(text, model, platform)
    converted(tmp_path / "first", tmp_path / "ours", form="nxd", plan=plan, qkv=qkv)
    sizes = {
        key: getattr(model, key)
        for key in ("num_layers", "hidden", "ffn", "num_heads", "num_kv_heads", "head_dim", "vocab")
    }
    tokens = torch.randint(0, 20, (2, 7), generator=torch.Generator().manual_seed(1))
    how = {"tp": plan.mesh.size("tp"), "pp": plan.mesh.size("pp"), "platform": platform, "qkv": qkv, "copies": copies}
    found = on_ranks(plan.mesh.num_ranks, run_vendor, tmp_path, sizes, {**how, "tokens": tokens}, timeout_s=PATIENCE_S)
    with torch.no_grad():
        expected = module(tokens).logits
    for logits in (one for one in found if one is not None):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    first = read(tmp_path / "first")
    for tag in ("plain", "xser"):
        assert any((tmp_path / tag / "theirs" / "model").glob("*.tensors")) == (tag == "xser")
        converted(tmp_path / tag, tmp_path / f"from {tag}", model=str(tmp_path / "first"))
        same(read(tmp_path / f"from {tag}"), first)


CONVERTED = {
    "llama3-70b": ("tp=8,pp=2,dp=1", {"kv_size_multiplier": 4, "qkv_linear": True, "fuse_qkv": True}, "fused"),
    "llama3-8b": ("tp=8,pp=4,dp=1", {"kv_size_multiplier": 4, "qkv_linear": True}, "split"),
    "mistral-7b": ("tp=2,pp=1,dp=1", {}, "apart"),
    "llama2-13b": ("tp=8,pp=2,dp=1", {"coalesce_qkv": True}, "plain"),
    "llama2-7b": ("tp=4,pp=1,dp=1", {}, "apart"),
}


@pytest.mark.parametrize("card", list(CONVERTED))
def test_the_vendors_converter_writes_the_same_and_reads_ours(card: str, tmp_path: Path) -> None:
    text, options, qkv = CONVERTED[card]
    config = {**reduced(card), "vocab_size": 40}
    config |= {"num_key_value_heads": config.get("num_key_value_heads", config["num_attention_heads"])}
    written(tmp_path / "first", config, torch.bfloat16)
    plan = cut(text, load_model(tmp_path / "first"))
    converted(tmp_path / "first", tmp_path / "ours", form="nxd", plan=plan, qkv=qkv)
    converter = importlib.import_module("neuronx_distributed.scripts.checkpoint_converter").CheckpointConverterBase()
    tp, pp = plan.mesh.size("tp"), plan.mesh.size("pp")
    usual: dict[str, Any] = dict.fromkeys(
        ("qkv_linear", "fuse_qkv", "coalesce_qkv", "pad_attn_heads", "load_xser"), False
    )
    args = Namespace(
        **{**usual, "kv_size_multiplier": 1, "hw_backend": "trn1", "model_style": "hf", "model_key": None, **options},
        tp_size=tp, pp_size=pp, ep_size=1, n_layers=4, virtual_pp_size=1, i_tp_round_factor=0,
        config=str(tmp_path / "first" / "config.json"), input_dir=str(tmp_path / "ours" / "model"),
    )  # fmt: skip
    whole = read(tmp_path / "first")
    named = [f"model.layers.{number}" for number in range(4)]
    cuts = importlib.import_module("neuronx_distributed.pipeline.partition").create_partitions(pp, named)
    given = converter.coalesce_qkv(dict(whole), config, tp) if args.coalesce_qkv else whole
    for rank, stage in ((rank, stage) for rank in range(tp) for stage in range(pp)):
        theirs = converter.convert_full_state_to_tp(given, args, rank, stage, 0, cuts, config)
        ours = torch.load(
            tmp_path / f"ours/model/dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt", weights_only=True
        )
        same(ours, theirs)
    if (args.qkv_linear and not args.fuse_qkv) or args.coalesce_qkv:  # what it reads back rightly

        def load(_: Any, tp_rank: int, pp_rank: int, ep_rank: int) -> Any:
            return torch.load(converter.get_input_filename(args, tp_rank, pp_rank, ep_rank, 1))

        converter.load_partial_no_xser = load
        same(converter.merge_tp_checkpoints(args), whole)
