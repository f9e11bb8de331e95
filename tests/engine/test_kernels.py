"""Every operation computed by torch is what the graph defines with numpy, in double to the last digits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pkgutil import walk_packages
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard.engine.torch.kernels.attention as attention_kernels
import autoshard.engine.torch.kernels.fused_attention as fused_attention
import autoshard.engine.torch.kernels.matrices as matrices
from autoshard.engine.nxd.blocks import COMPUTE
from autoshard.engine.torch.formats import Formats, sum_of_squares
from autoshard.engine.torch.kernels import KernelContext, Rotations, kernel_of
from autoshard.engine.torch.kernels.attention import join_parts
from autoshard.engine.torch.kernels.matrices import Multiplier
from autoshard.engine.torch.kernels.products import adding
from autoshard.errors import InputError
from autoshard.graph import kinds
from autoshard.graph.block import TOKENS, WIDE, Block
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.kinds.attention import Attend, Rotary
from autoshard.graph.kinds.indexing import random_document_starts
from autoshard.graph.kinds.linear import Collect, Deliver, Einsum
from autoshard.graph.kinds.pointwise import Unary
from autoshard.graph.op import Array, Call, Dims, Op, OpKind, Output, Tensor
from autoshard.layout.interpret import joined_attention
from autoshard.plan.tables import check_kernels, has_kernel
from autoshard.run.placement import zigzag
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import BalancedOver, Documents, Precision, Workload
from tests.engine.small_models import BIASES, graph_of, small_models
from tests.reference_step import random_weights

EXACT = KernelContext(formats=Formats(exact=True))
QUERY: Dims = ("batch", "seq", "kv_heads", "q_group", "head_dim")
KEY: Dims = ("batch", "kv_seq", "kv_heads", "head_dim")
TAKEN = tuple(Tensor(name=name, dims=dims, dtype="fp32") for name, dims in (("q", QUERY), ("k", KEY), ("v", KEY)))
MADE = tuple(Tensor(name=name, dims=dims, dtype="fp32") for name, dims in (("o", QUERY), ("l", QUERY[:-1])))


OPTIONS = (
    "no option", "query and key norm", "part of a head turned", "learned positions", "window", "experts",
    "scaled embeddings, residuals and logits", "capped scores and logits",
    "an MLP for all tokens by a share of each", "linear attention",
)  # fmt: skip
CARDS = ("deepseek-v2", "deepseek-v3", "gpt-oss-120b", "olmo2-13b")  # with kinds of operations that no option has
SMALL = small_models()
MODELS = {name: SMALL[name] for name in (*OPTIONS, *CARDS)} | {
    name: replace(SMALL["layer norm"], positions="learned", gated_mlp=False, activation=name, **BIASES)
    for name in ("gelu", "gelu_tanh", "relu", "relu2", "silu")
}
QUESTIONS = {
    **{f"experts balanced over a {over}": (MODELS["experts"], "joined", over) for over in ("batch", "sequence")},
    **{
        f"{name}, {documents} documents": (model, documents, None)
        for name, model in MODELS.items()
        for documents in (("joined",) if "experts" in name else ("joined", "separate"))
    },
}


def inputs(graph_sizes: Mapping[str, int], block: Block, random: np.random.Generator) -> dict[str, Array]:
    """Everything that a block reads and does not make."""
    made = {name for op in block.ops for name in op.outputs}
    limit = {"tokens": graph_sizes["vocab"], "labels": graph_sizes["vocab"]}
    found: dict[str, Array] = {}
    for tensor in block.tensors.values():
        shape = [graph_sizes[dim] for dim in tensor.dims]
        if tensor.name in made:
            continue
        if tensor.name == "document_starts":
            found[tensor.name] = random_document_starts(random, (graph_sizes["batch"], graph_sizes["seq"]))
        elif tensor.dtype == "int64":
            along = np.arange(shape[-1])
            found[tensor.name] = random.integers(0, limit[tensor.name], shape) if tensor.name in limit else along
        else:
            found[tensor.name] = random.normal(size=shape)
    return found


def computed(
    model: ModelSpec, documents: Documents = "joined", over: BalancedOver | None = None
) -> Iterator[tuple[Block, Op, Call, list[Array], tuple[Array, ...]]]:
    """Run every block of a model with numpy, and yield each operation with what it read and made."""
    losses: dict[str, Any] = {"router_balance_loss": 0.1, "router_z_loss": 0.1, "router_balance_over": over}
    workload = Workload(
        seq_len=6, global_batch=2, precision=Precision.named("bf16"), documents=documents, **(losses if over else {})
    )
    graph, random = decoder_graph(model, workload, load_kernels("torch_cuda"), micro_batch=2), np.random.default_rng(0)
    assert random_weights(graph, random)
    for block in graph.blocks:
        known = inputs(graph.sizes, block, random)
        for op in block.select("micro_batch"):
            call = block.call(op, graph.sizes)
            arrays = [known[name] for name in op.inputs]
            results = op.kind.evaluate(call, *arrays)
            known |= dict(zip(op.outputs, results, strict=True))
            if not isinstance(op.kind, Deliver | Collect):  # of which ranks make copies, sums and collectives
                yield block, op, call, arrays, results


def test_models_have_every_kind_of_operation_of_all_small_models():
    def kinds_of(models: Mapping[str, ModelSpec]) -> set[type[OpKind]]:
        graphs = map(graph_of, models.values())
        return {type(op.kind) for graph in graphs for block in graph.blocks for op in block.select("micro_batch")}

    assert kinds_of(MODELS) == kinds_of(SMALL)


@pytest.mark.parametrize(("model", "documents", "over"), QUESTIONS.values(), ids=QUESTIONS)
def test_every_operation_of_a_step_gives_what_the_graph_gives_in_the_formats_of_the_plan(
    model: ModelSpec, documents: Documents, over: BalancedOver | None
):
    """And a result of a kind that owns its result is no view of an input."""
    local, owners = KernelContext(formats=Formats()), set[str]()
    for block, op, call, arrays, results in computed(model, documents, over):
        tensors = [torch.from_numpy(np.array(array)) for array in arrays]
        found = kernel_of(op.kind, call, EXACT)(*tensors)
        most = 1e-12 * max(1.0, 0.0, *(np.abs(array).max() for array in arrays if array.dtype == np.float64))
        for tensor, expected in zip(found, results, strict=True):
            np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-11, atol=most, err_msg=f"{block.kind} {op}")
        if op.kind.owns_result:
            owners.add(type(op.kind).__name__)
            storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
            assert storages.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in found), f"{block.kind} {op}"
        given = [local.formats.tensor(array, one.dtype) for array, one in zip(arrays, call.inputs, strict=True)]
        for tensor, output in zip(kernel_of(op.kind, call, local)(*given), call.outputs, strict=True):
            assert tensor.dtype == local.formats.of(output.dtype), f"{block.kind}.{op.name} gives {tensor.dtype}"
    assert owners >= {"Einsum", "Multiply", "NormGradient", "Place"}


@pytest.mark.parametrize(
    "model", [MODELS["no option"], MODELS["experts"]], ids=["matrices", "a matrix for each expert"]
)
def test_a_product_that_adds_itself_to_a_sum_gives_both_added(model: ModelSpec):
    weights = [each for each in computed(model) if each[1].pass_ == "W" and isinstance(each[1].kind, Einsum)]
    assert weights
    for block, op, call, arrays, (expected,) in weights:
        assert isinstance(op.kind, Einsum)
        add = adding(op.kind, call, Multiplier(EXACT.formats.device))
        assert add, f"{block.kind} {op} lies otherwise than its sum"
        total = torch.linspace(-1, 1, expected.size, dtype=torch.float64).reshape(expected.shape)
        before = total.numpy().copy()
        (found,) = add(total, *(torch.from_numpy(np.array(array)) for array in arrays))
        assert found is total
        np.testing.assert_allclose(total.numpy(), before + expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("model", [MODELS["no option"], MODELS["experts"]], ids=["matrices", "experts"])
def test_a_product_of_bf16_adds_itself_to_a_sum_in_fp32_without_rounding(
    model: ModelSpec, monkeypatch: pytest.MonkeyPatch
):
    """As GPUs do; the host has no such product, so one of FP32 stands for it."""
    monkeypatch.setattr(matrices, "_add_wide", lambda total, left, right: total.addmm_(left.float(), right.float()))
    for _, op, call, arrays, _ in (each for each in computed(model) if each[1].pass_ == "W"):
        if isinstance(op.kind, Einsum):
            add, (left, right) = (
                adding(op.kind, call, Multiplier(EXACT.formats.device)),
                (torch.from_numpy(one).bfloat16() for one in arrays),
            )
            assert add
            (found,) = add(torch.ones([call.sizes[dim] for dim in op.kind.dims]), left, right)
            expected = op.kind.evaluate(call, left.double().numpy(), right.double().numpy())[0]
            np.testing.assert_allclose(found.numpy() - 1, expected, rtol=0, atol=1e-4)


def test_a_product_whose_dims_come_in_another_order_than_the_sums_does_not_add_itself():
    left, right = (Tensor(name=name, dims=dims, dtype="fp32") for name, dims in (("x", ("a", "k")), ("y", ("b", "k"))))
    result = Tensor(name="z", dims=("b", "a"), dtype="fp32")
    call = Call(sizes={"a": 2, "b": 3, "k": 4}, inputs=(left, right), outputs=(result,))
    assert adding(Einsum(dims=("b", "a")), call, Multiplier(EXACT.formats.device)) is None


@pytest.mark.parametrize(
    "equation",
    [
        "cbda,ab->cd",
        "abcd,dc->ab",
        "ab,cd->cbda",
        "ba,ab->",
        "ab,a->b",
        "a,ba->b",
        "cab,ba->c",
        "eab,eba->e",
        "abc,ba->ac",
    ],
)
def test_dims_of_both_factors_may_stand_in_any_order(equation: str):
    names, sizes = equation.replace("->", ",").split(","), dict(zip("abcde", (2, 3, 5, 7, 4), strict=True))
    left, right, result = (Tensor(name=name or "sum", dims=tuple(name), dtype="fp32") for name in names)
    call, kind = Call(sizes=sizes, inputs=(left, right), outputs=(result,)), Einsum(dims=result.dims)
    factors = [torch.randn([sizes[dim] for dim in name], dtype=torch.float64) for name in names[:2]]
    (found,) = kernel_of(kind, call, EXACT)(*factors)
    torch.testing.assert_close(found, torch.einsum(equation, *factors))


class Products(TorchDispatchMode):
    """Notes the formats of the factors of products while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in func.__name__ for word in ("mm", "attention_for_cpu_backward")):
            self.formats.append(args[1].dtype)
        return func(*args, **(kwargs or {}))


def test_where_half_formats_are_slow_products_are_of_fp32_and_rounded_once(monkeypatch: pytest.MonkeyPatch):
    """As processors without AVX-512 compute them, on which a step in BF16 would take five times as long."""
    local, noted = KernelContext(formats=Formats()), dict[bool, list[torch.dtype]]()
    for slow in (False, True):
        for module in (matrices, fused_attention):
            monkeypatch.setattr(module, "slow_halves", lambda _, slow=slow: {torch.bfloat16} if slow else set())
        with Products() as seen:
            for _, op, call, arrays, _ in computed(MODELS["experts"]):
                given = [local.formats.tensor(array, one.dtype) for array, one in zip(arrays, call.inputs, strict=True)]
                if isinstance(op.kind, Einsum):
                    hold_product(op.kind, call, given)
                else:
                    kernel_of(op.kind, call, local)(*given)
        noted[slow] = seen.formats
    assert torch.bfloat16 in noted[False] and len(noted[False]) == len(noted[True])
    assert torch.bfloat16 not in noted[True] and torch.float32 in noted[True]


def hold_product(kind: Einsum, call: Call, given: list[torch.Tensor]) -> None:
    """Hold a product, and one that adds itself to a sum of its format, against numbers that are rounded once."""
    expected = torch.from_numpy(kind.evaluate(call, *(tensor.double().numpy() for tensor in given))[0])
    (result,) = kernel_of(kind, call, KernelContext(formats=Formats()))(*given)
    torch.testing.assert_close(result.double(), expected, rtol=2**-8, atol=1e-5)
    if add := adding(kind, call, Multiplier(EXACT.formats.device)):
        total = torch.ones(expected.shape, dtype=given[0].dtype)
        (into,) = add(total, *given)
        assert into is total
        torch.testing.assert_close(total.double(), expected + 1, rtol=2**-8, atol=1e-5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cube(OpKind):
    """An operation that nobody has written for torch."""

    def infer(self, inputs: "list[Tensor]") -> tuple[Output, ...]:  # pyright: ignore
        return (Output(dims=inputs[0].dims, dtype=inputs[0].dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        return (arrays[0] ** 3,)


class CubeOnTorch(Cube):
    """The same with a kernel."""

    def torch_kernel(self, call: Call) -> Any:
        return lambda x: (x**3,)


X = Tensor(name="x", dims=("seq",), dtype="fp32")
CALL = Call(inputs=(X,), outputs=(X,), sizes={"seq": 2})


def test_an_operation_of_a_user_runs_by_its_own_kernel():
    (found,) = kernel_of(CubeOnTorch(), CALL, KernelContext(formats=Formats()))(torch.tensor([2.0, 3.0]))
    assert found.tolist() == [8.0, 27.0] and has_kernel(CubeOnTorch(), "torch")


def test_an_operation_without_a_kernel_is_refused():
    with pytest.raises(InputError, match=r"no kernel for the kind Cube. Give the class a method torch_kernel"):
        kernel_of(Cube(), CALL, KernelContext(formats=Formats()))
    block = graph_of(small_models()["no option"]).block("layer")
    ops = tuple(replace(op, kind=Cube()) if op.name == "act" else op for op in block.ops)
    for engine, message in (("torch", "layer.act: the torch engine has no kernel"), ("nxd", "has no layer or module")):
        with pytest.raises(InputError, match=message):
            check_kernels([replace(block, ops=ops)], "nxd" if engine == "nxd" else "torch")


def kinds_of(engine: str) -> Mapping[str, type[OpKind]]:
    modules = [import_module(module.name) for module in walk_packages(kinds.__path__, f"{kinds.__name__}.")]
    classes = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    found = [each for each in classes if issubclass(each, OpKind) and engine in vars(each).get("engines", ())]
    return {kind.__name__: kind for kind in found}


def test_kinds_name_the_engines_that_have_a_kernel_for_them():
    registered = {kind.__name__ for kind in kernel_of.registry if kind.__module__.startswith("autoshard.graph")}
    own = {name for name, kind in kinds_of("torch").items() if kind.torch_kernel is not OpKind.torch_kernel}
    assert registered - {"OpKind"} == set(kinds_of("torch")) - own
    experts = {"TopK", "Softmax", "Slot", "Dispatch", "Combine"}  # inside NxD's own layer
    assert {kind.__name__ for kind in COMPUTE} | experts == set(kinds_of("nxd"))


def test_a_kind_that_computes_by_token_gives_some_tokens_what_it_gives_all():
    checked = set[str]()
    for _, op, call, arrays, results in computed(MODELS["no option"]):
        tensors = (*call.inputs, *call.outputs)
        if op.kind.by_token and {tensor.dims for tensor in tensors} <= {WIDE, TOKENS}:
            checked.add(type(op.kind).__name__)
            few = replace(call, sizes={**call.sizes, "seq": 2})
            found = op.kind.evaluate(few, *(array[:, 2:4] for array in arrays))
            for array, whole in zip(found, results, strict=True):
                np.testing.assert_allclose(array, whole[:, 2:4], err_msg=op.name)
    assert checked == {"Add", "Cast", "Multiply", "Pick", "Place", "Reduce", "Repeat", "Unary", "UnaryGradient"}


class Capped(CubeOnTorch):
    """What caps logits, and says nothing of tokens."""


class CappedByToken(Capped):
    """The same, and says so."""

    by_token: ClassVar[bool | None] = True


def test_a_kind_that_works_on_logits_says_whether_it_computes_by_token():
    block = graph_of(small_models()["no option"]).block("head")
    exponentials = next(op for op in block.ops if isinstance(op.kind, Unary) and op.kind.function == "exp")
    silent, stated = (
        replace(block, ops=tuple(replace(op, kind=kind) if op is exponentials else op for op in block.ops))
        for kind in (Capped(), CappedByToken())
    )
    with pytest.raises(
        InputError, match=rf"head.{exponentials.name}: capped reads or makes a value for every token and word"
    ):
        check_kernels([silent], "torch")
    check_kernels([stated], "torch")


def attention(positions: Array, key_positions: Array, attend: Attend, *starts: Array, value_dim: int = 4) -> None:
    """Compare attention and its gradient on some positions with what the graph defines."""
    sizes = {"batch": len(starts[0]) if starts else 2, "seq": len(positions), "kv_seq": len(key_positions)}
    sizes |= {"kv_heads": 2, "q_group": 3, "head_dim": 4, "value_dim": value_dim}
    taken = (*TAKEN[:2], replace(TAKEN[2], dims=(*KEY[:-1], attend.value_width)))
    made = (replace(MADE[0], dims=(*QUERY[:-1], attend.value_width)), MADE[1])
    (step,) = attend.gradient(taken, (0, 1, 2))
    assert step.kind
    dims = [("seq",), ("kv_seq",), *([("batch", "seq")] if starts else [])]
    where = tuple(Tensor(name=" ".join(one), dims=one, dtype="int64") for one in dims)
    random = np.random.default_rng(0)
    arrays = [random.normal(size=[sizes[dim] for dim in one.dims]) for one in taken]
    arrays += [positions, key_positions, *starts]
    forward = Call(inputs=(*taken, *where), outputs=made, sizes=sizes)
    expected = attend.evaluate(forward, *arrays)
    found = kernel_of(attend, forward, EXACT)(*map(torch.from_numpy, arrays))
    for tensor, array in zip(found, expected, strict=True):
        np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-10, atol=1e-12)
    if not np.isfinite(expected[1]).all():  # in a ring the denominators are those of all keys
        return
    upstream = random.normal(size=expected[0].shape)
    backward = Call(inputs=(made[0], *taken, *where[:2], *made, *where[2:]), outputs=taken, sizes=sizes)
    given_arrays = [upstream, *arrays[:5], *expected, *starts]
    slopes = step.kind.evaluate(backward, *given_arrays)
    gradients = kernel_of(step.kind, backward, EXACT)(*map(torch.from_numpy, given_arrays))
    for tensor, array in zip(gradients, slopes, strict=True):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "zeros of the device's kernel stay in memory"
        np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-10, atol=1e-12)


@given(
    st.integers(1, 4), st.integers(1, 5), st.booleans(), st.booleans(),
    st.sampled_from([fused_attention.KERNELS, {}]), st.data(),
)  # fmt: skip
def test_attention_between_any_two_parts_of_a_sequence(ranks, part, mirrored, separate, kernels, data):
    count = 2 * ranks * part
    order = zigzag(count, ranks) if mirrored else np.arange(count)
    blocks = order.reshape(ranks, -1)
    mine, other = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, ranks - 1))
    window = data.draw(st.sampled_from([None, 1, 2, 5, 100]))
    begins = data.draw(st.lists(st.sets(st.integers(1, count)), min_size=1, max_size=3)) if separate else []
    starts = [np.maximum.accumulate([at if at in row else 0 for at in range(count)])[blocks[mine]] for row in begins]
    keys, value_dim = data.draw(st.sampled_from([blocks[other], order])), data.draw(st.sampled_from([2, 4, 7]))
    attend = Attend(window=window, value_width="head_dim" if value_dim == 4 else "value_dim")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_attention, "KERNELS", kernels)
        patch.setattr(attention_kernels, "_ROWS", 3)
        attention(blocks[mine], keys, attend, *([np.array(starts)] if separate else []), value_dim=value_dim)


def test_sequences_that_are_cut_alike_are_attended_to_together():
    """Four documents in two ways to cut, of three sequences: as many calls of a kernel."""
    starts = torch.tensor([[0, 0, 2, 2], [0, 0, 2, 2], [0, 1, 1, 1]])
    along = torch.arange(4)
    found = list(attention_kernels.visible_pairs(along, along, starts, None, in_rows=False))
    assert {seen.sees for seen in found} == {"causal"}
    assert [(seen.rows, seen.queries.slice) for seen in found] == [
        ((0, 2), slice(0, 2)), ((0, 2), slice(2, 4)), ((2, 3), slice(0, 1)), ((2, 3), slice(1, 4)),
    ]  # fmt: skip


@pytest.mark.parametrize("head_dim", [4, 6])
def test_angles_that_start_again_with_every_document_are_made_once_for_all_layers(head_dim: int):
    cached, kind, like = Rotations(), Rotary(fraction=1.0, theta=100.0), torch.empty(0, dtype=torch.float64)
    along = torch.arange(6)
    starts = torch.tensor([[0, 0, 2, 2, 2, 5], [0, 1, 2, 3, 4, 5]])
    cos, sin = cached.of(kind, (along, starts), head_dim, like)
    expected = (along - starts)[..., None] * torch.from_numpy(kind.frequencies(head_dim))
    sines = torch.stack([-expected.sin(), expected.sin()], -2)
    torch.testing.assert_close((cos, sin), (expected.cos().unsqueeze(-2), sines), rtol=0, atol=1e-15)
    assert cached.of(kind, (along, starts), head_dim, like)[0] is cos
    assert cached.of(kind, (along,), head_dim, like)[0].shape == (6, 1, head_dim // 2)


def test_parts_of_an_attention_join_as_the_graph_defines():
    random = np.random.default_rng(0)
    parts = [(random.normal(size=(2, 3, 4, 5)), random.normal(size=(2, 3, 4))) for _ in range(2)]
    parts[0][1][0] = -np.inf
    expected = joined_attention(*parts)
    found = join_parts(*((torch.from_numpy(one), torch.from_numpy(two)) for one, two in parts))
    for tensor, array in zip(found, expected, strict=True):
        np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-12)


class Largest(torch.overrides.TorchFunctionMode):
    """Notes the most elements that any tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.elements = max(self.elements, found.numel())
        return found


@pytest.mark.parametrize("window", [None, 64])
def test_no_mask_is_as_large_as_the_scores(window: int | None):
    count, kind = 4096, Attend(window=window)
    sizes = {"batch": 1, "seq": count, "kv_seq": count, "kv_heads": 1, "q_group": 1, "head_dim": 4}
    call = Call(inputs=TAKEN, outputs=MADE, sizes=sizes)
    given_tensors = [torch.zeros([sizes[dim] for dim in one.dims]) for one in TAKEN]
    attend, along = kernel_of(kind, call, KernelContext(formats=Formats())), torch.arange(count)
    with Largest() as seen:
        attend(*given_tensors, along, along)
    assert seen.elements < count * count / 8


@pytest.mark.parametrize("count", [0, 5, 1024, 3 * 2**20 + 5])
def test_a_sum_of_many_squares_is_as_exact_as_one_of_few(count: int):
    """One sum in FP32, as torch's product of two vectors makes it, loses 1e-4 of the longest."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(count, generator=generator) * torch.rand(count, generator=generator) ** 4
    assert sum_of_squares(numbers).item() == pytest.approx(numbers.double().square().sum().item(), rel=2e-6)


def test_a_number_that_is_not_finite_shows_in_a_sum_of_squares():
    assert [sum_of_squares(torch.tensor([1.0, number])).isfinite().item() for number in (2.0, np.inf, np.nan)] == [
        True,
        False,
        False,
    ]
