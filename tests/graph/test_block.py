"""A block and a graph refuse to exist when they are not right."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from autoshard.graph.block import OpGraph
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.kinds.optimizer import AdamW
from autoshard.graph.op import Op
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision, Workload
from tests.kit import tiny

WORKLOAD = Workload(seq_len=8, global_batch=4, precision=Precision.named("bf16"))
GRAPH = decoder_graph(tiny(), WORKLOAD, load_kernels("te"), micro_batch=1)
LAYER = GRAPH.block("layer")


def with_op(name: str, **changes: Any) -> dict[str, Any]:
    return {"ops": tuple(replace(op, **changes) if op.name == name else op for op in LAYER.ops)}


def reading(reader: str, **others: str) -> dict[str, Any]:
    return with_op(reader, inputs=tuple(others.get(name, name) for name in LAYER.op(reader).inputs))


def added(op: Op, **tensors: Any) -> dict[str, Any]:
    return {"ops": (*LAYER.ops, op), "tensors": {**LAYER.tensors, **tensors}}


SECOND = replace(LAYER.op("q.weight.sum"), name="q.weight.sum2", outputs=("q.weight.sum2",))
SECOND_SUM = replace(LAYER.tensors["q.weight.sum"], name="q.weight.sum2")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (added(replace(LAYER.op("q"), name="q_twice")), r"q_twice defines \['q'\] again"),
        (reading("q", attn_in="nothing"), r"speaks of \['nothing'\]"),
        ({"gives": ("elsewhere",)}, r"speaks of \['elsewhere'\]"),
        (added(SECOND, **{"q.weight.sum2": SECOND_SUM}), r"gradients .* for parameters"),
        ({"ops": tuple(op for op in LAYER.select("micro_batch") if op.name != "up.weight.sum")}, "for parameters"),
        (reading("q", attn_in="attn_norm"), r"q reads \['attn_norm'\] undelivered"),
        (reading("attn_norm", block_in="x"), r"attn_norm reads \['x'\] undelivered"),
    ],
)
def test_a_wrong_block_is_refused(changes: dict[str, Any], says: str):
    with pytest.raises(AssertionError, match=says):
        replace(LAYER, **changes)


@given(data=st.data())
def test_an_operation_that_reads_what_does_not_exist_yet_or_makes_something_else_is_refused(data: st.DataObject):
    reader = data.draw(st.sampled_from([op for op in LAYER.ops if op is not LAYER.ops[0]]))
    made = {name: op for op in LAYER.ops for name in op.outputs}
    makers = [made[name] for name in reader.inputs if name in made]
    if makers:
        maker = data.draw(st.sampled_from(makers))
        ops = [op for op in LAYER.ops if op is not maker]
        ops.insert(ops.index(reader) + 1, maker)
        with pytest.raises(AssertionError, match=r"before they exist"):
            replace(LAYER, ops=tuple(ops))
    tensor = LAYER.tensors[reader.outputs[0]]
    other = "fp16" if tensor.dtype != "fp16" else "bf16"
    for change in ({"dims": (*tensor.dims, "vocab")}, {"dtype": other}):
        with pytest.raises(AssertionError):
            replace(LAYER, tensors={**LAYER.tensors, tensor.name: replace(tensor, **change)})


def test_neighbours_that_disagree_on_the_hidden_state_are_refused():
    head = GRAPH.block("head")
    ops = tuple(op for op in head.ops if op.inputs == head.takes)
    wide = {name: replace(head.tensors[name], dtype="fp32") for op in ops for name in (*op.inputs, *op.outputs)}
    other = replace(head, ops=ops, tensors=wide, fused=(), saved=(), gives=())
    with pytest.raises(AssertionError, match="is not"):
        replace(GRAPH, blocks=(*GRAPH.blocks[:2], other))
    with pytest.raises(AssertionError, match="nothing goes from layer to embed"):
        replace(GRAPH, blocks=(*GRAPH.blocks[:2], GRAPH.blocks[0]))


def test_every_activation_reaches_its_readers_through_one_deliver(model: ModelSpec, graph_of: Callable[..., OpGraph]):
    for block in graph_of(model, "torch_cuda").blocks:
        delivers = [op for op in block.select("micro_batch", "F") if isinstance(op.kind, Deliver)]
        assert len({op.inputs for op in delivers}) == len(delivers)
        read = {name for op in block.select("micro_batch", "F") for name in op.inputs}
        assert [op.name for op in delivers if op.name not in read] == []


def test_only_the_weights_of_products_wait_for_pass_w(model: ModelSpec, graph_of: Callable[..., OpGraph]):
    for block in graph_of(model, "torch_cuda").blocks:
        products = {op.inputs[1] for op in block.select("micro_batch", "F") if op.kind.label == "einsum"}
        late = {f"{name}.sum" for name in products} | {f"{name.removesuffix('.weight')}.d1" for name in products}
        assert {op.name for op in block.select("micro_batch", "W")} == late


def test_the_step_phase_updates_each_weight_once_and_clips_by_all(model: ModelSpec, graph_of: Callable[..., OpGraph]):
    graph = graph_of(model, "torch_cuda")
    for block in graph.blocks:
        owned = [t.name for t in block.parameters if f"{block.kind}.{t.name}" not in graph.tied]
        for word in ("reduce", "square", "update", "cast", "gather"):
            assert [op.source for op in block.select("step") if op.name.endswith(f".{word}")] == owned
        for op in block.select("step"):
            if isinstance(op.kind, AdamW):  # only weights of norms and biases do not decay
                assert (op.kind.decay == 0) == op.source.endswith(("norm.weight", ".bias")), op.source
    squares = {f"{b.kind}.{op.name}" for b in graph.blocks for op in b.select("step") if op.kind.label == "square_sum"}
    assert set(graph.update.op("clip").inputs) == squares
