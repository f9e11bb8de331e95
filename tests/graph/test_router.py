"""Where losses of routers stand in a graph: beside the hidden state, and on the logits by which experts are chosen."""

from typing import Any

import pytest

from autoshard.graph.block import Block
from autoshard.graph.builder import BlockBuilder, finish
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.fusing import recompute
from autoshard.graph.kinds.experts import TopK
from autoshard.graph.kinds.linear import Einsum
from autoshard.graph.kinds.norm import Softmax
from autoshard.graph.router import add_router_losses
from autoshard.spec.kernels import load_kernels
from autoshard.spec.workload import Precision, Workload
from tests.kit import tiny

KERNELS = load_kernels("torch_cuda")
LOSSES: dict[str, Any] = {"router_balance_loss": 0.01, "router_z_loss": 0.001}


def work(**losses: Any) -> Workload:
    return Workload(seq_len=4, global_batch=2, precision=Precision.named("bf16"), **losses)


def layer(name: str = "mixtral", **losses: Any) -> Block:
    return decoder_graph(tiny(name), work(**losses), KERNELS, micro_batch=2).block("layer")


def test_losses_are_results_beside_the_hidden_state_whose_gradients_are_given() -> None:
    block = layer(**LOSSES)
    assert block.gives == ("mlp_add", "router_balance", "router_z") and block.carry_out == "mlp_add"
    assert {block.tensors[f"d.{name}"].dims for name in block.gives[1:]} == {()}
    assert {block.op(f"{name}.d0").pass_ for name in block.gives[1:]} == {"I"}
    assert [op.name for op in block.ops if "router_balance.d0" in op.inputs] == ["router_out.d0"]


@pytest.mark.parametrize(("name", "losses"), [("mixtral", {}), ("llama", LOSSES)])
def test_without_a_coefficient_or_a_router_nothing_is_added(name: str, losses: dict[str, Any]) -> None:
    """So plans that were made before keep their tables; that a dense model has such a loss is refused by a Rule."""
    block = layer(name, **losses)
    assert block.ops == layer(name).ops and block.gives == ("mlp_add",)


def test_a_load_is_counted_again_only_where_all_is_computed_again() -> None:
    block = layer(**LOSSES)
    assert not [op.name for op in recompute(block, KERNELS, ("act",)).ops if "router_load.again" in op.name]
    again = [op.name for op in recompute(block, KERNELS, None).ops if op.again]
    assert "router_load.again" in again


def test_a_choice_by_probabilities_is_trained_by_the_logits_they_are_made_of() -> None:
    b = BlockBuilder(Precision.named("fp32"))
    x = b.add("x", ("batch", "seq", "hidden"))
    weight = b.weight("router.weight", "experts", "hidden")
    logits = b.emit("router", Einsum(dims=("batch", "seq", "experts")), x, weight)
    probability = b.emit("probability", Softmax(over="experts"), logits)
    names = add_router_losses(b, work(**LOSSES))
    assert names == (), "nothing chooses yet"
    b.emit("choose", TopK(), probability)
    names = add_router_losses(b, work(**LOSSES))
    block = finish(b, "layer", KERNELS, takes=(x,), gives=names)
    assert [block.op(name).inputs[0] for name in names] == ["router_out", "router_out"]
