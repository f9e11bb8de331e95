"""What each platform keeps for backward, against figures worked out by hand and against torch itself."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from autoshard.graph.block import Block, FusedOps, OpGraph
from autoshard.graph.fusing import Flow, fuse, saved_tensors
from autoshard.spec.kernels import Kernel, Kernels, load_kernels
from autoshard.spec.model import ModelSpec
from tests.kit import tiny

GraphOf = Callable[..., OpGraph]


def kept_bytes(graph: OpGraph, kind: str) -> int:
    return sum(by_storage(graph, kind).values())


def by_storage(graph: OpGraph, kind: str) -> dict[str, int]:
    return {entry.storage: entry.tensor.num_bytes(graph.sizes) for entry in graph.block(kind).saved}


def table_of(*kernels: Kernel) -> Kernels:
    return replace(load_kernels("te"), kernels=kernels, selective={})


def group_of(block: Block, op: str) -> FusedOps:
    return next(group for group in block.fused if op in group.ops)


# -- Megatron-LM with TransformerEngine ------------------------------------------------------------

# -- plain PyTorch ---------------------------------------------------------------------------------


def measured_bytes(run: Callable[[], Any], constants: list[Any]) -> list[int]:
    """Run something under autograd and return the bytes of every storage that it keeps, constants apart."""
    torch: Any = pytest.importorskip("torch")
    known = {tensor.untyped_storage().data_ptr() for tensor in constants}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.numel() > 1:
            kept[storage.data_ptr()] = storage  # holding it keeps the address from being used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    assert result.requires_grad
    return sorted(storage.nbytes() for storage in kept.values())


SHAPE = tiny(num_layers=1, hidden=64, ffn=160, head_dim=16, vocab=96)


def torch_layer(dtype: Any) -> tuple[Callable[[], Any], list[Any]]:
    """A Llama layer of single torch operations, as plain PyTorch models write it; also its constants."""
    torch: Any = pytest.importorskip("torch")
    functional = torch.nn.functional

    def weight(*shape: int) -> Any:
        return torch.randn(*shape, dtype=dtype).requires_grad_()

    hidden, ffn, kv = 64, 160, 2 * 16
    norms = [weight(hidden), weight(hidden)]
    products = [weight(size, hidden) for size in (hidden, kv, kv, hidden, ffn, ffn)] + [weight(hidden, ffn)]
    cos, sin = torch.randn(8, 16, dtype=dtype), torch.randn(8, 16, dtype=dtype)
    x = torch.randn(2, 8, hidden, dtype=dtype).requires_grad_()

    def norm(x: Any, weight: Any) -> Any:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    def heads(x: Any, weight: Any) -> Any:
        return functional.linear(x, weight).unflatten(-1, (-1, 16)).transpose(1, 2)

    def rotary(x: Any) -> Any:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    def layer() -> Any:
        q, k, v, o, gate, up, down = products
        normed = norm(x, norms[0])
        queries, keys = rotary(heads(normed, q)), rotary(heads(normed, k))
        mixed = functional.scaled_dot_product_attention(
            queries, keys, heads(normed, v), is_causal=True, enable_gqa=True
        )
        after = x + functional.linear(mixed.transpose(1, 2).flatten(2), o)
        normed = norm(after, norms[1])
        inner = functional.silu(functional.linear(normed, gate)) * functional.linear(normed, up)
        return after + functional.linear(inner, down)

    return layer, [*norms, *products, cos, sin]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_torch_keeps_of_a_layer_exactly_the_tensors_that_the_table_says(precision: str, graph_of: GraphOf):
    torch: Any = pytest.importorskip("torch")
    run, constants = torch_layer({"bf16": torch.bfloat16, "fp32": torch.float32}[precision])
    ours = by_storage(graph_of(SHAPE, "torch_cuda", seq_len=8, micro_batch=2, precision=precision), "layer")
    assert sorted(ours.values()) == measured_bytes(run, constants)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_torch_keeps_of_the_loss_the_fp32_log_softmax_only(precision: str, graph_of: GraphOf):
    torch: Any = pytest.importorskip("torch")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    logits = torch.randn(16, 96, dtype=dtype).requires_grad_()
    labels = torch.randint(0, 96, (16,))
    loss = measured_bytes(lambda: torch.nn.functional.cross_entropy(logits.float(), labels), [labels])
    block = graph_of(SHAPE, "torch_cuda", seq_len=8, micro_batch=2, precision=precision)
    (ours,) = group_of(block.block("head"), "loss").saves
    assert [ours.tensor.num_bytes(block.sizes)] == loss


# -- the tables on every model ---------------------------------------------------------------------


def test_every_forward_operation_runs_in_exactly_one_kernel(model: ModelSpec, kernels: Kernels, graph_of: GraphOf):
    for block in graph_of(model, kernels.name).blocks:
        forward = [op.name for op in block.select("micro_batch", "F") if op.kind.label != "deliver"]
        assert sorted(name for group in block.fused for name in group.ops) == sorted(forward)
        assert {save.storage for group in block.fused for save in group.saves} == {s.storage for s in block.saved}
        for group in block.fused:
            assert (group.kernel.launches.forward > 0 and group.kernel.launches.backward > 0) == kernels.eager


# Bytes kept of each (query, key) pair of a head. Megatron-LM of 2021: softmax, mask and result of dropout, 5 a s^2 b of
# Korthikanti et al. 2022 (arXiv:2205.05198, section 4). NxD without flash attention: the softmax in FP32 and in bf16.
PAIR_BYTES: Mapping[str, int] = {"megatron": 2 + 1 + 2, "nxd_core": 4 + 2}


def test_only_unfused_attention_keeps_scores(kernels: Kernels, llama: ModelSpec, graph_of: GraphOf):
    """Twice the sequence, twice the bytes, but for the pairs: there are four times as many."""
    short, long = (kept_bytes(graph_of(llama, kernels.name, seq_len=n), "layer") for n in (8, 16))
    batch, heads = 2, llama.num_heads
    assert long - 2 * short == PAIR_BYTES.get(kernels.name, 0) * batch * heads * (16**2 - 2 * 8**2)
    attention = group_of(graph_of(llama, kernels.name).block("layer"), "attend")
    fused = kernels.name not in PAIR_BYTES
    assert (attention.kernel.skips_masked, attention.kernel.backward_flops_ratio) == (fused, 1.25 if fused else 1.0)


def test_megatron_of_2021_keeps_of_a_gpt_layer_what_was_counted_for_it(graph_of: GraphOf):
    """Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1: s b h (34 + 5 a s / h), of which 2 are masks of dropout.

    That is 34 bytes for each token and hidden number: 11 of attention, 19 of the MLP, 4 of the two norms. Their dropout
    after each half keeps a mask, 2 bytes together, which the graph has no operation for; queries, keys and values are
    kept as they are made, and a norm's statistic in FP32 is left out there.
    """
    shape = replace(SHAPE, num_kv_heads=4, ffn=4 * 64, gated_mlp=False, activation="gelu", norm="layer",
                    positions="learned", qkv_bias=True, out_bias=True, mlp_bias=True)  # fmt: skip
    seq, batch, hidden, heads = 8, 2, 64, 4
    kept = by_storage(graph_of(shape, "megatron", seq_len=seq, micro_batch=batch), "layer")
    statistics = {name for name in kept if name.endswith(".stat")}
    counted = sum(size for name, size in kept.items() if name not in statistics)
    assert len(statistics) == 2
    assert counted == seq * batch * hidden * (34 - 2 + 5 * heads * seq / hidden)


def fused_by(layer: Block, *kernels: Kernel) -> dict[str, FusedOps]:
    """Return the kernels of a layer by their first operations, under a table of these alone."""
    return {group.ops[0]: group for group in fuse(Flow(dict(layer.tensors), layer.ops), table_of(*kernels))}


@pytest.mark.parametrize("table", ["torch_engine", "torch_engine_gpu"])
def test_capped_scores_are_written_and_capped_logits_are_made_again(table: str, graph_of: GraphOf):
    plain, capped = (graph_of(tiny(score_cap=cap, logit_cap=cap), table) for cap in (None, 0.4))
    (flash, rows), cap = (group_of(graph.block("layer"), "attend").kernel for graph in (plain, capped)), "logit_cap"
    assert flash.score_bytes.forward == 0 < rows.score_bytes.forward < rows.score_bytes.backward
    assert rows.skips_masked and "shifted" in group_of(capped.block("head"), cap).ops
    kept = [{save.storage for save in graph.block("head").saved} for graph in (plain, capped)]
    assert kept[0] == kept[1] and "unembed" in kept[0]


def test_an_operation_without_an_entry_keeps_what_its_gradient_reads(llama: ModelSpec, graph_of: GraphOf):
    layer = graph_of(llama, "torch_cuda").block("layer")
    flow, fused = Flow(dict(layer.tensors), layer.ops), tuple(fused_by(layer).values())
    assert [group.ops for group in fused] == [(op,) for group in layer.fused for op in group.ops]
    forward = {name for op in flow.forward for name in (*op.inputs, *op.outputs)}
    reads = {flow.root(n) for op in layer.select("micro_batch", "IW") for n in op.inputs if n in forward}
    assert {save.storage for save in saved_tensors(flow, fused)} == {name for name in reads if flow.is_kept(name)}


def test_entries_of_a_table_decide_in_order(llama: ModelSpec, graph_of: GraphOf):
    layer = graph_of(llama, "torch_engine").block("layer")
    (products,) = (entry for entry in load_kernels("torch_engine").kernels if "q" in entry.ops)
    assert {("q",), ("k",), ("down",)} <= {group.ops for group in fused_by(layer, products).values()}
    assert fused_by(layer, replace(products, apart=False))["q"].ops == ("q", "k", "v", "o", "up", "gate", "down")
    special = Kernel(ops=("mlp_norm",), saves=("out1",), source="this test")
    general = Kernel(ops=("*_norm",), saves=("in0",), source="this test")
    found = fused_by(layer, special, general)
    assert [save.storage for save in found["mlp_norm"].saves] == ["mlp_norm.stat"]
    assert [save.storage for save in found["attn_norm"].saves] == ["x"]
    copies = Kernel(ops=("act", "product"), saves=("copy:in*", "in*@fp32", "in0"), source="this test")
    assert [(save.storage, save.tensor.dtype) for save in fused_by(layer, copies)["act"].saves] == [
        ("act.copy0", "bf16"),  # a copy of every input is memory of its own each
        ("act.copy0_1", "bf16"),
        ("act.copy1", "fp32"),
        ("act.copy1_1", "fp32"),
        ("gate", "bf16"),
    ]
