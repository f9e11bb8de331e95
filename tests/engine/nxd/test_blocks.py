"""The modules that the nxd engine makes of a graph, without NxD: loss and gradients are the graph's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoshard.engine.nxd.blocks import (
    BlockModule,
    FirstStage,
    LastStage,
    Leaf,
    MiddleStage,
    NxdDecoder,
    RotaryTable,
    attend,
    compute_of,
    module_steps,
)
from autoshard.engine.nxd.model import flash_attend, ring_attend
from autoshard.errors import InputError
from autoshard.graph.block import OpGraph
from autoshard.graph.kinds.attention import Rotary
from autoshard.graph.op import Array
from autoshard.spec.model import ModelSpec
from autoshard.spec.record import options_on
from tests.engine.small_models import SEQ, graph_of, micro_batches, small_models
from tests.reference_step import evaluate_step, random_weights

MLP = ("up", "gate", "act", "product", "down")
DENSE = {
    name: model
    for name, model in small_models().items()
    # as Rules refuse them
    if not (model.num_experts or model.window or model.tied_embeddings or options_on(model) or model.score_scale)
}


def block_of(graph: OpGraph, kind: str, weights: dict[str, Array], instance: str) -> BlockModule:
    """A block with a leaf for every operation."""
    block = graph.block(kind)
    pairs: list[tuple[object, nn.Module]] = []
    for step in module_steps(block, ()):
        op = block.op(step.ops[0])
        own = [name for name in op.inputs if block.tensors[name].role == "parameter"]
        given = {name.rpartition(".")[2]: torch.tensor(weights[f"{instance}.{name}"]) for name in own}
        pairs.append((step, Leaf(compute_of(block, op), {name: nn.Parameter(one) for name, one in given.items()})))
    return BlockModule(pairs, (block.gives[0],))  # pyright: ignore[reportArgumentType]


def decoder_of(graph: OpGraph, model: ModelSpec, weights: dict[str, Array], again: tuple[str, ...]) -> NxdDecoder:
    kind = next((op.kind for op in graph.block("layer").ops if isinstance(op.kind, Rotary)), None)
    rotary = RotaryTable(kind, model.head_dim, range(SEQ)) if kind else None
    layers = [block_of(graph, "layer", weights, f"layer.{number}") for number in range(model.num_layers)]
    layers = [layer.grouped(again, lambda module: module) if again else layer for layer in layers]
    return NxdDecoder(
        FirstStage(block_of(graph, "embed", weights, "embed.0"), range(SEQ)),
        [MiddleStage(layer, rotary) for layer in layers],
        LastStage(block_of(graph, "head", weights, "head.0"), 1),
    )


@pytest.mark.parametrize("name", DENSE)
def test_loss_and_every_gradient_are_those_of_the_graph(name: str):
    """And of every second model with the operations of its MLP in one group, which is computed again."""
    model, again = DENSE[name], MLP if [*DENSE].index(name) % 2 else ()
    rng, graph = np.random.default_rng(7), graph_of(model, precision="fp32")
    weights, (batch,) = dict(random_weights(graph, rng)), micro_batches(model, rng, count=1)
    expected = evaluate_step(graph, weights, [batch])
    module = decoder_of(graph, model, weights, again)
    loss = module(*(torch.tensor(batch[name]) for name in ("tokens", "labels", "token_weight")))
    loss.backward()
    assert loss.item() == pytest.approx(expected.loss, rel=1e-12)
    gradients = {name: one.grad.numpy() for name, one in module.named_parameters() if one.grad is not None}
    largest = max(np.abs(gradient).max() for gradient in expected.gradients.values())
    assert len(gradients) == len(expected.gradients)
    for name, gradient in expected.gradients.items():
        kind, number, leaf, weight = name.split(".")
        where = f"layers.{number}.block" if kind == "layer" else f"{kind}.block"
        (found,) = (one for at, one in gradients.items() if at.startswith(where) and at.endswith(f".{leaf}.{weight}"))
        np.testing.assert_allclose(found, gradient, rtol=0, atol=1e-10 * largest, err_msg=name)


def test_a_kind_without_a_module_is_named():
    block = graph_of(small_models()["experts"]).block("layer")
    with pytest.raises(InputError, match=r"layer\.choose: the nxd engine has no module for the kind top_k"):
        compute_of(block, block.op("choose"))


def mixed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of [batch, head, seq, head_dim], as many keys as queries."""
    assert query.shape == key.shape == value.shape
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def flash(query: Tensor, key: Tensor, value: Tensor, lnc: int, **options: bool) -> Tensor:
    assert lnc == 2 and options == {"mixed_precision": True}  # in its default layout, [batch, head, head_dim, seq]
    return mixed(*(one.transpose(-1, -2) for one in (query, key, value)))


def ring(query: Tensor, key: Tensor, value: Tensor, rank_id: int, pairs: Any, *, mixed_precision: bool) -> Tensor:
    assert rank_id == 5 and pairs == [[5, 5]] and mixed_precision
    return mixed(query, key, value)


@pytest.mark.parametrize("layer", [partial(flash_attend, flash, 2), partial(ring_attend, ring, 5, [[5, 5]])])
def test_a_kernel_gets_every_head_and_gives_them_back_in_our_order(layer: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 6, 3, 4, 8, dtype=torch.double, requires_grad=True)  # 3 KV heads, 4 queries for each
    key, value = (torch.randn(2, 6, 3, 8, dtype=torch.double, requires_grad=True) for _ in range(2))
    upstream, inputs = torch.randn_like(query), (query, key, value)
    found, expected = layer(*inputs), attend(*inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(made, inputs, upstream) for made in (found, expected)))


def test_angles_are_made_once_for_a_device_and_a_format() -> None:
    table = RotaryTable(Rotary(fraction=1.0, theta=1e4), 8, range(3, 7))
    (first, again, other) = (
        table.like(torch.zeros(1, dtype=dtype)) for dtype in (torch.float32,) * 2 + (torch.float64,)
    )
    assert first is again and other.dtype == torch.float64
    torch.testing.assert_close(first.double(), other)
    assert first.shape == (2, 4, 4) and first[1, 0, 0] == torch.tensor(3.0).sin()
