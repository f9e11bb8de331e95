"""Files of NxD: what we write is what the vendor's converter writes and NxD loads; what both write comes back."""

import importlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.spec.model_catalogue import load_model
from tests.neuron.cases import PATIENCE_S, as_started
from tests.neuron.nxd_ranks import on_nxd_ranks
from tests.runtime.convert.cases import converted, cut, read, reduced, same, written

pytestmark = [pytest.mark.nxd, pytest.mark.usefixtures("nxd")]
FILE = "model/dp_rank_00_tp_rank_{:02d}_pp_rank_{:02d}.pt"


def run_vendor(folder: Path, tp: int, pp: int) -> None:
    """What every rank runs: load what we wrote with NxD, and save it again in both of its forms."""
    with as_started(tp):
        torch_xla: Any = importlib.import_module("torch_xla")
        state = importlib.import_module("neuronx_distributed.parallel_layers.parallel_state")
        checkpoint = importlib.import_module("neuronx_distributed.trainer.checkpoint")
        torch_xla._XLAC = type("Xlac", (), {"_xla_sync_multi": staticmethod(lambda *_, **__: None)})
        state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
        file = FILE.format(state.get_tensor_model_parallel_rank(), state.get_pipeline_model_parallel_rank())
        module = nn.Module()
        for name, tensor in torch.load(folder / "ours" / file, weights_only=True).items():
            *path, last = name.split(".")
            inside = module
            for part in path:
                if part not in dict(inside.named_children()):
                    inside.add_module(part, nn.Module())
                inside = inside.get_submodule(part)
            inside.register_parameter(last, nn.Parameter(torch.empty_like(tensor)))
        checkpoint.load_checkpoint(str(folder), tag="ours", model=module, strict=True)
        for tag, xser in (("plain", False), ("xser", True)):
            checkpoint.save_checkpoint(str(folder / tag), tag="theirs", model=module, use_xser=xser)


@pytest.mark.parametrize("text", ["tp=4,pp=1,dp=1", "tp=2,pp=2,dp=1"])
def test_what_nxd_loads_of_us_and_saves_comes_back(text: str, tmp_path: Path) -> None:
    written(tmp_path / "first", {**reduced("llama3-8b"), "vocab_size": 40})
    plan = cut(text, load_model(tmp_path / "first"))
    converted(tmp_path / "first", tmp_path / "ours", form="nxd", plan=plan)
    on_nxd_ranks(4, run_vendor, tmp_path, plan.mesh.size("tp"), plan.mesh.size("pp"), timeout_s=PATIENCE_S)
    for tag in ("plain", "xser"):
        assert any((tmp_path / tag / "theirs" / "model").glob("*.tensors")) == (tag == "xser")
        converted(tmp_path / tag, tmp_path / f"from {tag}", model=str(tmp_path / "first"))
        same(read(tmp_path / f"from {tag}"), read(tmp_path / "first"))


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
    beside_the_vendor(config, text, options, qkv, tmp_path)


# Query heads, KV heads and tp: trn2's order differs from trn1's, in most also in which rank is like the first.
HEADS = [(8, 2, 8), (16, 2, 8), (16, 2, 16), (32, 2, 32), (32, 4, 32), (8, 4, 8)]


def with_heads(queries: int, keys: int, tp: int) -> dict[str, Any]:
    sizes = {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": 4, "hidden_size": 4 * queries}
    return {**reduced("llama3-8b"), **sizes, "intermediate_size": 2 * tp, "vocab_size": 2 * tp}


@pytest.mark.parametrize("qkv", ["fused", "split"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_the_vendors_converter_orders_heads_alike_on_trn1(
    heads: tuple[int, int, int], qkv: Any, tmp_path: Path
) -> None:
    queries, keys, tp = heads
    options = {"kv_size_multiplier": tp // keys, "qkv_linear": True, "fuse_qkv": qkv == "fused"}
    beside_the_vendor(with_heads(queries, keys, tp), f"tp={tp},pp=1,dp=1", options, qkv, tmp_path)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_ranks_of_trn2_that_share_a_head_in_nxd_hold_the_same(heads: tuple[int, int, int], tmp_path: Path) -> None:
    """Its converter repeats keys in trn1's order for trn2 too, so its groups of ranks say what its layer expects."""
    queries, keys, tp = heads
    state: Any = importlib.import_module("neuronx_distributed.parallel_layers.parallel_state")
    first = written(tmp_path / "first", with_heads(queries, keys, tp))
    converted(
        first, tmp_path / "ours", form="nxd", plan=cut(f"tp={tp},pp=1,dp=1", load_model(first), "trn2"), qkv="split"
    )
    files = [torch.load(tmp_path / "ours" / FILE.format(rank, 0), weights_only=True) for rank in range(tp)]
    whole, layer = read(first), "model.layers.1.self_attn"
    whole_keys = whole[f"{layer}.k_proj.weight"].reshape(keys, 4, -1)
    groups = state.arrange_kv_groups(1, tp, tp // keys, False, state.hardware.TRN2)
    for head, group in enumerate(groups):
        for rank in group:
            assert torch.equal(files[rank][f"{layer}.qkv_proj.weight_k"], whole_keys[head])
        joined = torch.cat([files[rank][f"{layer}.qkv_proj.weight_q"] for rank in group])
        assert torch.equal(joined, whole[f"{layer}.q_proj.weight"].chunk(keys)[head]), "its queries"
    converted(tmp_path / "ours", tmp_path / "last", model=str(first))
    same(read(tmp_path / "last"), whole)


def beside_the_vendor(config: dict[str, Any], text: str, options: dict[str, Any], qkv: Any, tmp_path: Path) -> None:
    """What both write is the same, and what the vendor reads back of ours is the first; so do we."""
    written(tmp_path / "first", config, torch.bfloat16)
    usual: dict[str, Any] = dict.fromkeys(("qkv_linear", "fuse_qkv", "coalesce_qkv", "load_xser"), False)
    usual |= {"pad_attn_heads": False, "kv_size_multiplier": 1, "hw_backend": "trn1", "ep_size": 1, "n_layers": 4}
    usual |= {"model_style": "hf", "model_key": None, "virtual_pp_size": 1, "i_tp_round_factor": 0, **options}
    plan = cut(text, load_model(tmp_path / "first"), usual["hw_backend"])
    tp, pp = plan.mesh.size("tp"), plan.mesh.size("pp")
    converted(tmp_path / "first", tmp_path / "ours", form="nxd", plan=plan, qkv=qkv)
    converted(tmp_path / "ours", tmp_path / "last")
    same(read(tmp_path / "last"), read(tmp_path / "first"))
    converter = importlib.import_module("neuronx_distributed.scripts.checkpoint_converter").CheckpointConverterBase()
    args = Namespace(
        **usual, tp_size=tp, pp_size=pp,
        config=str(tmp_path / "first" / "config.json"), input_dir=str(tmp_path / "ours" / "model"),
    )  # fmt: skip
    whole, named = read(tmp_path / "first"), [f"model.layers.{number}" for number in range(4)]
    cuts = importlib.import_module("neuronx_distributed.pipeline.partition").create_partitions(pp, named)
    given = converter.coalesce_qkv(dict(whole), config, tp) if args.coalesce_qkv else whole
    for rank, stage in ((rank, stage) for rank in range(tp) for stage in range(pp)):
        theirs = converter.convert_full_state_to_tp(given, args, rank, stage, 0, cuts, config)
        same(torch.load(tmp_path / "ours" / FILE.format(rank, stage), weights_only=True), theirs)
    if (args.qkv_linear and not args.fuse_qkv) or args.coalesce_qkv:  # what it reads back rightly

        def load(_: Any, tp_rank: int, pp_rank: int, ep_rank: int) -> Any:
            return torch.load(converter.get_input_filename(args, tp_rank, pp_rank, ep_rank, 1))

        converter.load_partial_no_xser = load
        same(converter.merge_tp_checkpoints(args), whole)
