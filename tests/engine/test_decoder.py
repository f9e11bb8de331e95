"""The decoder is its graph: parameters, loss, gradients, FLOPs, and what it keeps for backward."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoshard.graph.block import distinct_bytes
from autoshard.graph.count import matrix_flops
from autoshard.graph.evaluate import evaluate_step, instances, random_document_starts, random_weights
from autoshard.graph.kinds.linear import Deliver
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model, model_names
from autoshard.spec.workload import Documents
from tests.engine.small_models import BATCH, SEQ, graph_of, micro_batches, reduced, roomy, small_models

torch: Any = pytest.importorskip("torch")
einops: Any = pytest.importorskip("einops")
flop_counter: Any = pytest.importorskip("torch.utils.flop_counter")
python_dispatch: Any = pytest.importorskip("torch.utils._python_dispatch")
attend: Any = pytest.importorskip("autoshard.engine.decoder.attend")
decoder: Any = pytest.importorskip("autoshard.engine.decoder.model")
leaves: Any = pytest.importorskip("autoshard.engine.decoder.leaves")

MODELS = small_models()
with_every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
WITH_CAPACITY = {
    **{name: (model, None) for name, model in MODELS.items()},
    **{f"{name}, capacity 2": (model, 2.0) for name, model in MODELS.items() if model.num_experts},
}
APART = (
    "no option",
    "keys of one head",
    "part of a head turned",
    "learned positions",
    "window",
    "experts and all else",
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def tensors(batch: Mapping[str, Any], *names: str) -> list[Any]:
    return [torch.tensor(batch[name]) for name in names]


def loaded(model: ModelSpec, weights: Mapping[str, Any], capacity: float | None = None) -> Any:
    module = decoder.Decoder(model, expert_capacity=capacity, dtype=torch.float64)
    module.load_state_dict(decoder.state_of(weights))
    return module


# -- parameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", model_names())
def test_a_whole_card_on_meta_has_the_parameters_of_its_graph(name: str):
    model = load_model(name)
    module, graph = decoder.Decoder(model, device="meta", dtype=torch.bfloat16), graph_of(model)
    expected = {
        f"{name}.{tensor.name}": tuple(graph.sizes[dim] for dim in tensor.dims)
        for name, block in instances(graph)
        for tensor in block.parameters
    }
    state = module.state_dict()
    assert {decoder.graph_name(name): tuple(tensor.shape) for name, tensor in state.items()} == expected
    assert sum(parameter.numel() for parameter in module.parameters()) == graph.num_parameters()
    assert {(tensor.device.type, tensor.dtype) for tensor in state.values()} == {("meta", torch.bfloat16)}
    assert decoder.state_of({decoder.graph_name(name): tensor for name, tensor in state.items()}).keys() == state.keys()
    assert not list(module.buffers())  # they would be garbage after a start on meta


@with_every_model
def test_every_forward_operation_is_a_leaf_of_its_name_in_the_order_of_the_graph(model: ModelSpec):
    module, graph = decoder.Decoder(model), graph_of(model)
    for kind, block in (("embed", module.embed), ("layer", module.layers[1]), ("head", module.head)):
        ops = [op for op in graph.block(kind).select("micro_batch", "F") if not isinstance(op.kind, Deliver)]
        assert [name for name, _ in block.named_children()] == [op.name for op in ops]
        assert [child for child in block.children() if list(child.children())] == []
        for op in ops:
            parameters = {f"{op.name}.{name}" for name, _ in block.get_submodule(op.name).named_parameters()}
            assert parameters == {name for name in op.inputs if graph.block(kind).tensors[name].role == "parameter"}


def test_new_weights_are_drawn_and_biases_and_norms_start_neutral():
    torch.manual_seed(0)
    module = decoder.Decoder(MODELS["experts and all else"])
    for name, parameter in module.named_parameters():
        leaf = module.get_submodule(name.rpartition(".")[0])
        if isinstance(leaf, leaves.Norm) or name.endswith("bias"):
            assert (parameter == float(isinstance(leaf, leaves.Norm) and name.endswith("weight"))).all()
        else:
            assert 0.015 < parameter.std() < 0.025


# -- against the graph -----------------------------------------------------------------------------


def check_step(
    model: ModelSpec, *, capacity: float | None, of_graph: float | None, documents: Documents = "joined"
) -> None:
    """Compare loss and every gradient, summed over two micro-batches, with numpy's."""
    rng = np.random.default_rng(7)
    graph = graph_of(model, capacity=of_graph, documents=documents)
    names = ("tokens", "labels", "token_weight", "positions", "document_starts")[: 5 if documents == "separate" else 4]
    weights, batches = random_weights(graph, rng), micro_batches(model, rng)
    expected = evaluate_step(graph, weights, batches)
    module, loss = loaded(model, weights, capacity), 0.0
    for batch in batches:
        part = module(*tensors(batch, *names))
        part.backward()
        loss += part.item()
    assert loss == pytest.approx(expected.loss, rel=1e-12)
    found = {decoder.graph_name(name): parameter.grad.numpy() for name, parameter in module.named_parameters()}
    assert found.keys() == expected.gradients.keys()
    largest = max(np.abs(gradient).max() for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=1e-10 * largest, err_msg=name)


@with_every_model
def test_loss_and_every_gradient_are_those_of_the_graph(model: ModelSpec):
    check_step(model, capacity=None, of_graph=roomy(model))


@pytest.mark.parametrize("name", APART)
def test_documents_that_do_not_see_each_other_are_those_of_the_graph(name: str):
    check_step(MODELS[name], capacity=None, of_graph=roomy(MODELS[name]), documents="separate")


@pytest.mark.parametrize("capacity", [0.3, 1.0, 1.25, 2.0])
@pytest.mark.parametrize("name", ["experts", "one expert per token", "mixtral-8x22b"])
def test_full_experts_drop_the_tokens_that_the_graph_drops(name: str, capacity: float):
    check_step(MODELS[name], capacity=capacity, of_graph=capacity)


def test_of_equal_router_logits_the_lower_expert_is_chosen():
    choose = decoder.Choose(2)
    _, expert = choose(torch.tensor([[[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0], [0.0, 1.0, 0.0, 5.0]]]))
    assert expert.tolist() == [[[1, 2], [0, 1], [3, 1]]]


def test_a_product_takes_a_shard_of_its_weight():
    product = leaves.Product({"kv_heads": 4, "head_dim": 2}, {"hidden": 3}, {})
    x, whole = torch.ones(1, 5, 3), product.weight.detach()
    expected = product(x)[:, :, 1:3]
    product.weight = torch.nn.Parameter(whole[1:3].clone())
    torch.testing.assert_close(product(x), expected)


def test_positions_count_from_zero_unless_they_are_given():
    model = MODELS["learned positions"]
    module = loaded(model, random_weights(graph_of(model), np.random.default_rng(0)))
    tokens = torch.arange(SEQ)[None]
    assert torch.equal(module.logits(tokens), module.logits(tokens, torch.arange(SEQ)))
    assert not torch.equal(module.logits(tokens), module.logits(tokens, torch.arange(SEQ) + 1))


def test_a_decoder_that_starts_on_meta_computes_the_same():
    model = MODELS["llama3 scaling"]
    weights = random_weights(graph_of(model), np.random.default_rng(0))
    module = decoder.Decoder(model, device="meta", dtype=torch.float64).to_empty(device="cpu")
    module.load_state_dict(decoder.state_of(weights))
    tokens = torch.arange(SEQ)[None]
    assert torch.equal(module.logits(tokens), loaded(model, weights).logits(tokens))


@with_every_model
def test_bf16_is_near_and_the_loss_is_fp32(model: ModelSpec):
    rng = np.random.default_rng(7)
    weights, (batch,) = random_weights(graph_of(model), rng, scale=0.1), micro_batches(model, rng, count=1)
    module, exact = loaded(model, weights).to(torch.bfloat16), loaded(model, weights)
    args = tensors(batch, "tokens", "labels")
    loss = module(*args, torch.tensor(batch["token_weight"], dtype=torch.float32))
    assert loss.dtype == torch.float32 and module.logits(args[0]).dtype == torch.bfloat16
    assert loss.item() == pytest.approx(exact(*args, torch.tensor(batch["token_weight"])).item(), rel=0.02)
    loss.backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in module.parameters())


# -- FLOPs -----------------------------------------------------------------------------------------


class EagerAttend(torch.nn.Module):
    """Attention of single products, which the counter of FLOPs sees; it writes the whole mask."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window

    def forward(self, query: Any, key: Any, value: Any, starts: Any = None) -> Any:
        where = torch.arange(query.shape[1])
        distance = where[:, None] - where[None, :]
        hidden = (distance < 0) | (distance >= (self.window or query.shape[1]))
        if starts is not None:
            hidden = hidden | (where[None, None] < starts[:, :, None])[:, None, None]
        scores = einops.einsum(query, key, "b s k g d, b t k d -> b k g s t") / query.shape[-1] ** 0.5
        weight = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return einops.einsum(weight, value, "b k g s t, b t k d -> b s k g d")


@with_every_model
def test_the_flops_counted_are_those_of_the_graph(model: ModelSpec):
    check_flops(model, "joined")


@pytest.mark.parametrize("name", APART)
def test_the_flops_of_separate_documents_are_counted_as_if_they_were_joined(name: str):
    check_flops(MODELS[name], "separate")


def check_flops(model: ModelSpec, documents: Documents) -> None:
    graph = graph_of(model, documents=documents)
    starts = ("document_starts",) if documents == "separate" else ()
    module = decoder.Decoder(model)
    for layer in module.layers:
        layer.attend = EagerAttend(model.window)  # leaves are replaced by name
    (batch,) = micro_batches(model, np.random.default_rng(0), count=1)
    with flop_counter.FlopCounterMode(display=False) as counter:
        loss = module(*tensors(batch, "tokens", "labels", "token_weight", "positions", *starts))
        forward = counter.get_total_flops()
        loss.backward()
    expected = [sum(block.repeat * matrix_flops(block, p, graph.sizes) for block in graph.blocks) for p in ("F", "IW")]
    assert [forward, counter.get_total_flops() - forward] == expected


# -- what is kept for backward ---------------------------------------------------------------------


def kept(run: Callable[[], Any], there_anyway: Iterable[Any]) -> tuple[Any, int]:
    """Return what a run gives, and the bytes that autograd keeps, each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    for tensor in there_anyway:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return result, sum(storages.values())


def differences(model: ModelSpec, precision: str) -> dict[str, int]:
    """Return by how many bytes the module is known to keep more or less than the graph says, by block."""
    tokens, width = BATCH * SEQ, DTYPES[precision].itemsize
    wider = model.norm == "layer" and precision == "fp32"
    return {
        "embed": 0,
        # torch's relu keeps its result, which the next product keeps anyway, where the graph keeps its input.
        "layer": -tokens * model.ffn * width * (model.activation == "relu")
        # A layer norm keeps its centred input: as much as the FP32 copy, but apart from an input that is FP32 already,
        # which matters where that is kept for another reader.
        + tokens * model.hidden * width * (wider and model.parallel_residual),
        # The logarithm keeps the sum that it is taken of.
        "head": 4 * tokens,
    }


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(("model", "capacity"), WITH_CAPACITY.values(), ids=WITH_CAPACITY.keys())
def test_backward_keeps_the_bytes_of_the_graph(model: ModelSpec, capacity: float | None, precision: str):
    graph = graph_of(model, capacity=capacity, precision=precision)
    module = decoder.Decoder(model, expert_capacity=capacity, dtype=DTYPES[precision])
    (batch,) = micro_batches(model, np.random.default_rng(0), count=1)
    tokens, labels, positions = tensors(batch, "tokens", "labels", "positions")
    weight = torch.tensor(batch["token_weight"], dtype=torch.float32)
    there = [*module.parameters(), tokens, labels, weight, positions]
    turns = None
    if model.positions == "rotary":
        turns = leaves.rotary_turns(model, positions, DTYPES[precision])
        there.append(turns)  # one for all layers
    found: dict[str, int] = {}
    x, found["embed"] = kept(lambda: module.embed(tokens, positions), there)
    y, found["layer"] = kept(lambda: module.layers[0](x, turns), there)
    _, found["head"] = kept(lambda: module.head(y, labels, weight), there)
    more = differences(model, precision)
    assert found == {b.kind: distinct_bytes(b.saved, graph.sizes) + more[b.kind] for b in graph.blocks}


# -- attention -------------------------------------------------------------------------------------


class Largest(python_dispatch.TorchDispatchMode):
    """Watches every tensor that an operation makes, for the one with the most elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("window", [None, 24, 300])
def test_a_long_sequence_makes_no_tensor_of_seq_by_seq(window: int | None):
    seq_len = 1024
    module = decoder.Decoder(replace(reduced(load_model("tiny-llama")), num_layers=1, window=window))
    tokens = torch.zeros(1, seq_len, dtype=torch.int64)
    with Largest() as largest:
        module(tokens, tokens, torch.ones(1, seq_len)).backward()
    assert seq_len * 32 <= largest.elements < seq_len * seq_len


@pytest.mark.parametrize("apart", [False, True], ids=["", "documents"])
@pytest.mark.parametrize(("seq_len", "window"), [(9, 1), (10, 3), (9, 4), (600, 300), (513, 256), (600, None)])
def test_attention_in_tiles_equals_attention_with_a_mask(seq_len: int, window: int | None, *, apart: bool):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, seq_len, 2, 3, 4), (2, seq_len, 2, 4), (2, seq_len, 2, 4))
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    upstream = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    starts = torch.from_numpy(random_document_starts(np.random.default_rng(0), (2, seq_len))) if apart else None
    results = [leaf(*inputs, starts) for leaf in (attend.Attend(window), EagerAttend(window))]
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(result, inputs, upstream) for result in results]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
