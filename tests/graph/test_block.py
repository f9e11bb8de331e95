"""A block and a graph refuse to exist when they are not right."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from autoshard.graph.block import Block, OpGraph
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.kinds.optimizer import AdamW
from autoshard.graph.op import Op
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload

GRAPH = decoder_graph(
    load_model("tiny-llama"),
    Workload(seq_len=8, global_batch=4, precision=Precision.named("bf16")),
    load_kernels("te"),
    micro_batch=1,
)
LAYER = GRAPH.block("layer")


def with_op(name: str, **changes: Any) -> tuple[Op, ...]:
    return tuple(replace(op, **changes) if op.name == name else op for op in LAYER.ops)


def with_tensor(name: str, **changes: Any) -> dict[str, Any]:
    return {**LAYER.tensors, name: replace(LAYER.tensors[name], **changes)}


@given(data=st.data())
def test_an_operation_that_reads_what_does_not_exist_yet_is_refused(data: st.DataObject):
    reader = data.draw(st.sampled_from([op for op in LAYER.ops if op is not LAYER.ops[0]]))
    made = {name: op for op in LAYER.ops for name in op.outputs}
    makers = [made[name] for name in reader.inputs if name in made]
    if makers:
        maker = data.draw(st.sampled_from(makers))
        ops = [op for op in LAYER.ops if op is not maker]
        ops.insert(ops.index(reader) + 1, maker)
        with pytest.raises(AssertionError, match=r"before they exist"):
            replace(LAYER, ops=tuple(ops))


@given(data=st.data())
def test_a_result_with_the_wrong_dims_or_dtype_is_refused(data: st.DataObject):
    produced = [name for op in LAYER.ops for name in op.outputs if LAYER.tensors[name].dims]
    name = data.draw(st.sampled_from(produced))
    other = "fp16" if LAYER.tensors[name].dtype != "fp16" else "bf16"
    change = data.draw(st.sampled_from([{"dims": (*LAYER.tensors[name].dims, "vocab")}, {"dtype": other}]))
    with pytest.raises(AssertionError):
        replace(LAYER, tensors=with_tensor(name, **change))


def test_only_weights_of_norms_and_biases_do_not_decay(model: ModelSpec, graph_of: Callable[..., OpGraph]):
    for block in graph_of(model, "torch_cpu").blocks:
        for op in block.select("step"):
            if isinstance(op.kind, AdamW):
                assert (op.kind.decay == 0) == op.source.endswith(("norm.weight", ".bias")), op.source


def test_a_tensor_that_is_made_twice_is_refused():
    again = replace(LAYER.op("q"), name="q_twice")
    with pytest.raises(AssertionError, match=r"q_twice defines \['q'\] again"):
        replace(LAYER, ops=(*LAYER.ops, again))


def test_a_tensor_that_is_not_declared_is_refused():
    with pytest.raises(AssertionError, match=r"speaks of \['nothing'\]"):
        replace(LAYER, ops=with_op("q", inputs=("nothing", "q.weight")))
    with pytest.raises(AssertionError, match=r"speaks of \['elsewhere'\]"):
        replace(LAYER, carry_out="elsewhere")


def test_two_gradients_for_a_parameter_are_refused():
    total = LAYER.op("q.weight.sum")
    second = replace(total, name="q.weight.sum2", outputs=("q.weight.sum2",))
    tensors = {**LAYER.tensors, "q.weight.sum2": replace(LAYER.tensors["q.weight.sum"], name="q.weight.sum2")}
    with pytest.raises(AssertionError, match=r"gradients .* for parameters"):
        replace(LAYER, ops=(*LAYER.ops, second), tensors=tensors)


@pytest.mark.parametrize("parameter", [tensor.name for tensor in LAYER.parameters])
def test_a_parameter_without_a_gradient_is_refused(parameter: str):
    ops = tuple(op for op in LAYER.select("micro_batch") if op.name != f"{parameter}.sum")
    with pytest.raises(AssertionError, match=r"gradients .* for parameters"):
        replace(LAYER, ops=ops)


@pytest.mark.parametrize(
    ("reader", "delivered", "raw"), [("q", "attn_in", "attn_norm"), ("attn_norm", "block_in", "x")]
)
def test_an_undelivered_read_is_refused(reader: str, delivered: str, raw: str):
    inputs = tuple(raw if name == delivered else name for name in LAYER.op(reader).inputs)
    with pytest.raises(AssertionError, match=rf"{reader} reads \['{raw}'\] undelivered"):
        replace(LAYER, ops=with_op(reader, inputs=inputs))


def test_neighbours_that_disagree_on_the_hidden_state_are_refused():
    head = GRAPH.block("head")
    other = {**head.tensors, "x": replace(head.tensors["x"], dtype="fp32")}
    with pytest.raises(AssertionError, match="is not"):
        replace(GRAPH, blocks=(*GRAPH.blocks[:2], replace_shape(head, other)))
    with pytest.raises(AssertionError, match="nothing goes from layer to embed"):
        replace(GRAPH, blocks=(*GRAPH.blocks[:2], GRAPH.blocks[0]))


def replace_shape(block: Block, tensors: dict[str, Any]) -> Block:
    """Let the block take a carry of another dtype, with nothing behind its deliver."""
    ops = tuple(op for op in block.ops if op.inputs == (block.carry_in,))
    tensors["head_in"] = replace(tensors["head_in"], dtype=tensors["x"].dtype)
    used = {name: tensors[name] for op in ops for name in (*op.inputs, *op.outputs)}
    return replace(block, ops=ops, tensors=used, fused=(), saved=(), carry_out=None)


def test_every_activation_reaches_its_readers_through_one_deliver(model: ModelSpec, graph_of: Callable[..., OpGraph]):
    for block in graph_of(model, "torch_cpu").blocks:
        delivers = [op for op in block.select("micro_batch", "F") if isinstance(op.kind, Deliver)]
        assert len({op.inputs for op in delivers}) == len(delivers)
        read = {name for op in block.select("micro_batch", "F") for name in op.inputs}
        assert [op.name for op in delivers if op.name not in read] == []


def test_only_the_weights_of_products_wait_for_pass_w(model: ModelSpec, graph_of: Callable[..., OpGraph]):
    for block in graph_of(model, "torch_cpu").blocks:
        late = {op.name for op in block.select("micro_batch", "W")}
        products = {op.inputs[1] for op in block.select("micro_batch", "F") if op.kind.label == "einsum"}
        assert late == {f"{name}.sum" for name in products} | {
            f"{name.removesuffix('.weight')}.d1" for name in products
        }


def test_the_step_phase_reduces_squares_updates_and_gathers_each_weight_once(
    model: ModelSpec, graph_of: Callable[..., OpGraph]
):
    graph = graph_of(model, "torch_cpu")
    for block in graph.blocks:
        owned = [t.name for t in block.parameters if f"{block.kind}.{t.name}" not in graph.tied]
        for word in ("reduce", "square", "update", "cast", "gather"):
            assert [op.source for op in block.select("step") if op.name.endswith(f".{word}")] == owned


def test_the_clip_factor_sees_the_squares_of_all_gradients(model: ModelSpec, graph_of: Callable[..., OpGraph]):
    graph = graph_of(model, "torch_cpu")
    squares = {f"{b.kind}.{op.name}" for b in graph.blocks for op in b.select("step") if op.kind.label == "square_sum"}
    assert set(graph.update.op("clip").inputs) == squares
