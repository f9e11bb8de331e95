"""Recompute changes what is kept and computed, never a number that comes out."""

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.graph.block import Block, OpGraph
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.fusing import Flow, recompute
from autoshard.spec.kernels import Kernels, kernels_names, load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload
from tests.reference_step import StepResult, evaluate_step, random_weights

GraphOf = Callable[..., OpGraph]
TOLERANCE = 1e-12


def evaluated(graph: OpGraph, micro_batches: Callable[..., Any]) -> StepResult:
    rng = np.random.default_rng(0)
    return evaluate_step(graph, random_weights(graph, rng), micro_batches(graph, rng))


def assert_same(ours: StepResult, theirs: StepResult) -> None:
    assert ours.loss == pytest.approx(theirs.loss, rel=TOLERANCE)
    assert ours.norm == pytest.approx(theirs.norm, rel=TOLERANCE)
    assert ours.gradients.keys() == theirs.gradients.keys()
    for name, gradient in theirs.gradients.items():
        np.testing.assert_allclose(ours.gradients[name], gradient, atol=TOLERANCE, rtol=TOLERANCE, err_msg=name)
    for name, weight in theirs.weights.items():
        np.testing.assert_allclose(ours.weights[name], weight, atol=1e-9, err_msg=name)


def transformed(graph: OpGraph, kernels: Kernels, names: tuple[str, ...] | None, *kinds: str) -> OpGraph:
    blocks = [recompute(block, kernels, names) if block.kind in kinds else block for block in graph.blocks]
    return replace(graph, blocks=tuple(blocks))


def storages(block: Block) -> set[str]:
    return {entry.storage for entry in block.saved}


def clones(block: Block) -> list[str]:
    return [op.name.removesuffix(".again") for op in block.ops if op.again]


def kernel_ops(block: Block) -> list[str]:
    return [name for group in block.fused for name in group.ops]


def keeps_its_own(kernels: Kernels, group: tuple[str, ...]) -> bool:
    """Whether the table, not the gradient, says what this kernel keeps."""
    entries = [k for k in kernels.kernels if any(fnmatchcase(group[0], pattern) for pattern in k.ops)]
    return bool(entries) and entries[0].saves is not None


def assert_backward_reads_what_is_there(block: Block, kernels: Kernels) -> None:
    """All that backward reads is kept, computed again, or in a form that its kernel keeps by itself."""
    flow = Flow(dict(block.tensors), block.ops)
    again = set(clones(block))
    own = {op for group in block.fused if keeps_its_own(kernels, group.ops) for op in group.ops}
    forward = {name for op in flow.forward for name in (*op.inputs, *op.outputs) if flow.is_kept(name)}
    kept = storages(block)
    for op in block.select("micro_batch", "IW"):
        lost = [name for name in op.inputs if name in forward and flow.root(name) not in kept]
        excused = not op.again and op.source in own and op.source not in again
        assert not lost or excused, f"{op.name} reads {lost}, which nobody kept"


GRAPHS = [(name, table) for name in ("tiny-llama", "tiny-mixtral", "gpt2-xl", "qwen3-8b") for table in kernels_names()]


@cache
def small_graph(which: tuple[str, str]) -> OpGraph:
    """The graph of a small model of this shape, with the kernels of this table."""
    name, table = which
    small = {"num_layers": 1, "hidden": 8, "ffn": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "vocab": 8}
    workload = Workload(seq_len=4, global_batch=2, precision=Precision.named("bf16"))
    return decoder_graph(replace(load_model(name), **small), workload, load_kernels(table), micro_batch=1)


@st.composite
def choices(draw: Callable[..., Any]) -> tuple[tuple[str, str], str, tuple[str, ...] | None]:
    which = draw(st.sampled_from(sorted(GRAPHS)))
    graph, kernels = small_graph(which), load_kernels(which[1])
    kind = draw(st.sampled_from(["embed", "layer", "layer", "layer", "head"]))
    known = [*kernel_ops(graph.block(kind)), *(kernels.selective if kind == "layer" else ())]
    names = st.lists(st.sampled_from(known), min_size=1, max_size=8, unique=True).map(tuple)
    return which, kind, draw(st.none() | names)


@given(choice=choices())
def test_any_set_of_operations_can_be_computed_again(choice: Any, micro_batches: Callable[..., Any]):
    which, kind, names = choice
    graph, kernels = small_graph(which), load_kernels(which[1])
    changed = transformed(graph, kernels, names, kind)
    assert_same(evaluated(changed, micro_batches), evaluated(graph, micro_batches))


@given(choice=choices())
def test_what_is_kept_is_what_others_and_clones_read_and_clones_are_read_themselves(choice: Any):
    which, kind, names = choice
    graph, kernels = small_graph(which), load_kernels(which[1])
    before = graph.block(kind)
    after = recompute(before, kernels, names)
    assert_backward_reads_what_is_there(before, kernels)
    assert_backward_reads_what_is_there(after, kernels)
    flow = Flow(dict(before.tensors), before.ops)
    named = set(kernel_ops(before) if names is None else kernels.resolve(names))
    whole = {op for group in before.fused if set(group.ops) & named for op in group.ops}
    read = {flow.root(name) for name in flow.external_inputs(sorted(whole))}
    others = {
        save.storage
        for group in before.fused
        if not set(group.ops) & whole
        for save in group.saves
        if not (kernels.remakes_inputs and save.op in whole)
    }
    assert storages(after) == read | others
    assert set(clones(after)) <= whole | {op.name for op in before.ops if op.kind.label == "deliver"}
    if kernels.clones_end == "last_saved":
        read = {name for op in after.ops for name in op.inputs}
        assert [op.name for op in after.ops if op.again and not read.intersection(op.outputs)] == []


def test_full_keeps_the_input_of_the_layer_only(model: ModelSpec, kernels: Kernels, graph_of: GraphOf):
    graph = graph_of(model, kernels.name)
    layer = recompute(graph.block("layer"), kernels, None)
    assert [entry.storage for entry in layer.saved] == ["x"]
    assert layer.saved[0].tensor.num_bytes(graph.sizes) == 2 * 2 * 8 * model.hidden


def test_where_clones_end_decides_whether_the_last_product_runs_again(llama: ModelSpec, graph_of: GraphOf):
    for table in ("te", "torch_cuda", "nxd"):
        kernels, graph = load_kernels(table), graph_of(llama, table)
        before = graph.block("layer")
        after = recompute(before, kernels, None)
        forward, repeated = (block.matrix_flops("F", graph.sizes) for block in (before, after))
        extra = after.matrix_flops("FIW", graph.sizes) - before.matrix_flops("FIW", graph.sizes)
        down = before.op("down").kind.matrix_flops(before.call(before.op("down"), graph.sizes))
        assert forward == repeated
        if kernels.clones_end == "output":
            assert extra == forward
            assert {"down", "mlp_out", "mlp_add"} <= set(clones(after))
        else:
            assert extra == forward - down
            assert not {"down", "mlp_out", "mlp_add"} & set(clones(after))


@pytest.mark.parametrize(
    ("table", "name", "gone", "new"),
    [
        ("te", "core_attn", {"attend.lse"}, set[str]()),
        ("torch_engine", "attention", {"attend.lse"}, set[str]()),
        # Copies of keys and values and both of the softmax go; what they are copied from stays.
        ("nxd_core", "CoreAttention", {f"attend.copy{number}" for number in (1, 2, 3, 4)}, {"k_rotary", "v"}),
        # The softmax, dropout's mask and its result.
        ("megatron", "core_attn", {f"attend.copy{number}" for number in (1, 2, 3)}, set[str]()),
    ],
)
def test_selective_attention(table: str, name: str, gone: set[str], new: set[str], llama: ModelSpec, graph_of: GraphOf):
    before = graph_of(llama, table).block("layer")
    after = recompute(before, load_kernels(table), (name,))
    assert clones(after) == ["attend"]
    assert (storages(before) - storages(after), storages(after) - storages(before)) == (gone, new)
    assert {"q_rotary", "k_rotary", "v", "attend"} <= storages(after)  # "attend" is what o multiplies


def test_with_flash_attention_nxd_never_calls_the_module_core_attention(llama: ModelSpec, graph_of: GraphOf):
    layer, table = graph_of(llama, "nxd").block("layer"), load_kernels("nxd")
    assert table.resolve(("CoreAttention",)) == ()
    assert recompute(layer, table, ("CoreAttention",)) is layer
    both = recompute(layer, table, ("CoreAttention", "LlamaMLP"))
    assert storages(both) == storages(recompute(layer, table, ("LlamaMLP",)))
    assert "attend" not in clones(both)


def test_unknown_names_are_refused_all_at_once_with_the_nearest_known(llama: ModelSpec, graph_of: GraphOf):
    with pytest.raises(InputError) as caught:
        recompute(graph_of(llama, "te").block("layer"), load_kernels("te"), ("core_atn", "gat", "attend"))
    first, second = (str(fault) for fault in caught.value.faults)
    assert first == "recompute: layer has no operation 'core_atn'. Did you mean core_attn?"
    assert second == "recompute: layer has no operation 'gat'. Did you mean gate or act?"
