"""Against an oracle that nobody here wrote: what PyTorch's DTensor accepts without redistribution, we accept alike."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.blocks.choices import OpChoice, made_layout, op_cuts, subsets
from autoshard.graph.block import Block
from autoshard.graph.kinds.attention import Attend, AttendGradient
from autoshard.graph.kinds.experts import TopK
from autoshard.graph.kinds.indexing import Lookup, Pick, ScatterAdd
from autoshard.graph.kinds.linear import Einsum
from autoshard.graph.kinds.norm import Norm, NormGradient, NormWeightGradient, Softmax, SoftmaxGradient
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.graph.kinds.pointwise import Add, Cast, Multiply, Reduce, Repeat, Unary, UnaryGradient
from autoshard.graph.op import Dims, Op, OpKind, Tensor

ATEN = torch.ops.aten
SIZES = {
    "batch": 4,
    "seq": 6,
    "hidden": 8,
    "ffn": 10,
    "experts": 4,
    "slots": 6,
    "vocab": 12,
    "kv_heads": 2,
    "head_dim": 8,
}
SIZES |= {"kv_seq": 6, "q_group": 1, "choices": 2, "one": 1}
NUM_RANKS = 2

Lies = str  # "whole", "sum", "max", or the name of the dim that is cut
Row = tuple[tuple[Lies, ...], tuple[Lies, ...]]  # how inputs lie, how results lie


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation as both sides know it; ``dims`` are those of the arrays that torch gets and gives."""

    kind: OpKind
    reads: Sequence[tuple[Dims, str]]  # dims and dtype of each of our inputs
    call: Callable[..., Any]
    torch_reads: Sequence[Dims] | None = None  # where torch wants other dims than we do
    torch_gives: Sequence[Dims] | None = None
    alike: Sequence[int] | None = None  # inputs with one number are tried in one placement only: there are too many
    our_order: Sequence[int] | None = (
        None  # where the kind's own inputs stand among ``reads``, if they are not in order
    )


X, Y = ("batch", "seq", "hidden"), ("batch", "seq", "vocab")
FLAT, WEIGHT = ("seq", "hidden"), ("hidden", "ffn")
QUERY = ("batch", "seq", "kv_heads", "q_group", "head_dim")
KEY = ("batch", "kv_seq", "kv_heads", "head_dim")
_HEADS = ("batch", "kv_heads", "seq", "head_dim")
_KEYS = ("batch", "kv_heads", "kv_seq", "head_dim")


def _norm(x: Any, weight: Any) -> Any:
    return ATEN.native_layer_norm(x, [SIZES["hidden"]], weight, None, 1e-5)[:1]


def _repeat(x: Any) -> Any:
    return ATEN.expand(x, [SIZES[dim] for dim in X])


def _norm_weight_gradient(upstream: Any, x: Any, stat: Any) -> Any:
    weight = _distributed(("hidden",), "bf16", "whole", x.device_mesh)
    wanted = [False, True, False]
    return ATEN.native_layer_norm_backward(upstream, x, [SIZES["hidden"]], stat, stat, weight, None, wanted)[1:2]


def _attend_gradient(upstream: Any, q: Any, k: Any, v: Any, result: Any, lse: Any) -> Any:
    length, none = SIZES["seq"], torch.zeros((), dtype=torch.int64, device="meta")
    return ATEN._scaled_dot_product_flash_attention_backward(
        upstream, q, k, v, result, lse, None, None, length, length, 0.0, False, none, none
    )


def _norm_gradient(upstream: Any, x: Any, stat: Any, weight: Any) -> Any:
    wanted = [True, False, False]
    shape = [SIZES["hidden"]]
    return ATEN.native_layer_norm_backward(upstream, x, shape, stat, stat, weight, None, wanted)[:1]


CASES: Mapping[str, Case] = {
    "einsum": Case(kind=Einsum(dims=("seq", "ffn")), reads=[(FLAT, "bf16"), (WEIGHT, "bf16")], call=ATEN.mm),
    "experts": Case(
        kind=Einsum(dims=("experts", "slots", "ffn")),
        reads=[(("experts", "slots", "hidden"), "bf16"), (("experts", "hidden", "ffn"), "bf16")],
        call=ATEN.bmm,
    ),
    **{
        name: Case(kind=Unary(function=cast(Any, name)), reads=[(X, "bf16")], call=call)
        for name, call in {
            "silu": ATEN.silu, "gelu": ATEN.gelu, "relu": ATEN.relu, "exp": ATEN.exp, "log": ATEN.log,
            "negate": ATEN.neg,
        }.items()
    },
    "silu gradient": Case(
        kind=UnaryGradient(function="silu"), reads=[(X, "bf16"), (X, "bf16")], call=ATEN.silu_backward
    ),
    "multiply": Case(kind=Multiply(), reads=[(X, "bf16"), (X, "bf16")], call=ATEN.mul),
    "add": Case(kind=Add(), reads=[(X, "bf16"), (X, "bf16")], call=ATEN.add),
    "subtract": Case(kind=Add(sign=-1), reads=[(X, "bf16"), (X, "bf16")], call=ATEN.sub),
    "bias": Case(kind=Add(), reads=[(X, "bf16"), (("hidden",), "bf16")], call=ATEN.add),
    "accumulate": Case(kind=Accumulate(), reads=[(WEIGHT, "fp32"), (WEIGHT, "fp32")], call=ATEN.add),
    "sum": Case(kind=Reduce(function="sum", over=("vocab",)), reads=[(Y, "bf16")], call=lambda x: ATEN.sum(x, [2])),
    "max": Case(kind=Reduce(function="max", over=("vocab",)), reads=[(Y, "bf16")], call=lambda x: ATEN.amax(x, [2])),
    "repeat": Case(
        kind=Repeat(dims=X), reads=[(("seq", "hidden"), "bf16")], call=_repeat
    ),
    "cast": Case(kind=Cast(dtype="fp32"), reads=[(X, "bf16")], call=lambda x: ATEN._to_copy(x, dtype=torch.float64)),
    "softmax": Case(kind=Softmax(over="hidden"), reads=[(X, "bf16")], call=lambda x: ATEN._softmax(x, -1, False)),
    "softmax gradient": Case(
        kind=SoftmaxGradient(over="hidden"),
        reads=[(X, "bf16"), (X, "bf16")],
        call=lambda d, y: ATEN._softmax_backward_data(d, y, -1, torch.float32),
    ),
    "norm": Case(
        kind=Norm(function="layer", over="hidden", eps=1e-5),
        reads=[(X, "bf16"), (("hidden",), "bf16")],
        call=_norm,
        torch_gives=[X],
    ),
    "rms norm": Case(
        kind=Norm(function="rms", over="hidden", eps=1e-5),
        reads=[(X, "bf16"), (("hidden",), "bf16")],
        call=lambda x, weight: ATEN._fused_rms_norm(x, [SIZES["hidden"]], weight, 1e-5)[:1],
        torch_gives=[X],
    ),
    "norm gradient": Case(
        kind=NormGradient(function="layer", over="hidden"),
        reads=[(X, "bf16"), (X, "bf16"), (("batch", "seq"), "fp32"), (("hidden",), "bf16")],
        call=_norm_gradient,
        torch_reads=[X, X, ("batch", "seq", "one"), ("hidden",)],
    ),
    "norm weight gradient": Case(
        kind=NormWeightGradient(function="layer", over="hidden"),
        reads=[(X, "bf16"), (X, "bf16"), (("batch", "seq"), "fp32")],
        call=_norm_weight_gradient,
        torch_reads=[X, X, ("batch", "seq", "one")],
    ),
    "lookup": Case(
        kind=Lookup(), reads=[(("vocab", "hidden"), "bf16"), (("batch", "seq"), "int64")], call=ATEN.embedding
    ),
    "scatter add": Case(
        kind=ScatterAdd(dims=("vocab", "hidden")),
        reads=[(X, "bf16"), (("batch", "seq"), "int64")],
        call=lambda d, index: ATEN.embedding_dense_backward(d, index, SIZES["vocab"], -1, False),
    ),
    "pick": Case(
        kind=Pick(over="vocab"),
        reads=[(Y, "bf16"), (("batch", "seq"), "int64")],
        call=lambda x, index: ATEN.gather(x, 2, index),
        torch_reads=[Y, ("batch", "seq", "one")],
        torch_gives=[("batch", "seq", "one")],
    ),
    "top k": Case(kind=TopK(), reads=[(("batch", "seq", "experts"), "bf16")], call=lambda x: ATEN.topk(x, 2)),
    "attend": Case(
        kind=Attend(),
        reads=[
            (QUERY, "bf16"), (KEY, "bf16"), (KEY, "bf16"), (("seq",), "int64"), (("kv_seq",), "int64"),
        ],
        call=lambda q, k, v: ATEN._scaled_dot_product_flash_attention(q, k, v)[:2],
        torch_reads=[_HEADS, ("batch", "kv_heads", "kv_seq", "head_dim"), ("batch", "kv_heads", "kv_seq", "head_dim")],
        torch_gives=[_HEADS, ("batch", "kv_heads", "seq")],
    ),
    "attend gradient": Case(
        kind=AttendGradient(),
        reads=[
            (QUERY, "bf16"), (QUERY, "bf16"), (KEY, "bf16"), (KEY, "bf16"), (QUERY, "bf16"),
            (("batch", "kv_heads", "q_group", "seq"), "fp32"), (("seq",), "int64"), (("kv_seq",), "int64"),
        ],
        call=_attend_gradient,
        torch_reads=[_HEADS, _HEADS, _KEYS, _KEYS, _HEADS, ("batch", "kv_heads", "seq")],
        torch_gives=[_HEADS, _KEYS, _KEYS],
        our_order=(0, 1, 2, 3, 6, 7, 4, 5),
        alike=(0, 0, 1, 1, 0, 2),
    ),
}  # fmt: skip


class Redistributes(Exception):
    """DTensor would change the layout of an argument."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (NUM_RANKS,))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_redistribution(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise Redistributes

    monkeypatch.setattr(OpDispatcher, "redistribute_local_args", staticmethod(refuse))


def theirs(case: Case, mesh: DeviceMesh) -> set[Row]:
    """Every placement of the inputs that DTensor takes as it is, and where the results lie then."""
    reads = case.torch_reads or [dims for dims, _ in case.reads]
    dtypes = [dtype for _, dtype in case.reads][: len(reads)]
    options = [
        ["whole", *(dim for dim in dims if dim != "one"), *(["sum"] if dtype != "int64" else [])]
        for dims, dtype in zip(reads, dtypes, strict=True)
    ]
    found: set[Row] = set()
    for places in itertools.product(*options):
        if case.alike and len(set(zip(case.alike, places, strict=True))) > len(set(case.alike)):
            continue
        arrays = [
            _distributed(dims, dtype, place, mesh) for dims, dtype, place in zip(reads, dtypes, places, strict=True)
        ]
        try:
            results = case.call(*arrays)
        except (Redistributes, RuntimeError, NotImplementedError, AssertionError, ValueError, IndexError):
            continue  # not without a change of layout, or not at all
        made = results if isinstance(results, tuple | list) else (results,)
        gives = case.torch_gives or [_result_dims(case, index) for index in range(len(made))]
        found.add((places, tuple(_place(one, dims) for one, dims in zip(made, gives, strict=True))))
    return found


def _distributed(dims: Dims, dtype: str, place: Lies, mesh: DeviceMesh) -> DTensor:
    shape = [SIZES[dim] // (NUM_RANKS if dim == place else 1) for dim in dims]
    local = torch.zeros(shape, dtype=torch.int64 if dtype == "int64" else torch.float32, device="meta")
    placement = {"whole": Replicate(), "sum": Partial()}.get(place) or Shard(dims.index(place))
    return DTensor.from_local(local, mesh, [placement], run_check=False)


def _place(array: DTensor, dims: Dims) -> Lies:
    (placement,) = array.placements
    if isinstance(placement, Partial):
        return placement.reduce_op
    return dims[placement.dim] if isinstance(placement, Shard) else "whole"


def _parts(case: Case) -> tuple[Op, dict[str, Tensor]]:
    inputs = [Tensor(name=f"in{n}", dims=dims, dtype=cast(Any, dtype)) for n, (dims, dtype) in enumerate(case.reads)]
    ordered = [inputs[number] for number in case.our_order or range(len(inputs))]
    inferred = case.kind.infer(ordered)
    outputs = [Tensor(name=f"out{n}", dims=out.dims, dtype=out.dtype) for n, out in enumerate(inferred)]
    names = (tuple(one.name for one in inputs), tuple(one.name for one in outputs))
    op = Op(name="op", kind=case.kind, inputs=names[0], outputs=names[1], source="op")
    return op, {one.name: one for one in (*inputs, *outputs)}


def _result_dims(case: Case, index: int) -> Dims:
    op, tensors = _parts(case)
    return tensors[op.outputs[index]].dims


def ours(case: Case) -> set[Row]:
    """Every cut of the operation over one atom, with what passes through; how its tensors lie then."""
    op, tensors = _parts(case)
    block = cast(Block, SimpleNamespace(tensors=tensors))
    found: set[Row] = set()
    for cuts in op_cuts(block, op, ("m",)):
        for passed in subsets(("m",) if case.kind.linear_through() and not any(cuts.values()) else ()):
            choice = OpChoice(cuts=cuts, passed=passed)
            linear = case.kind.linear_through()
            reads = [
                choice.layout(tensors[name].dims, passed if n in linear else ()) for n, name in enumerate(op.inputs)
            ]
            makes = [made_layout(op, tensors, name, choice) for name in op.outputs]
            found.add((tuple(map(_word, reads)), tuple(map(_word, makes))))
    return found


def _word(layout: Any) -> Lies:
    if layout.sums or layout.maxima:
        return "sum" if layout.sums else "max"
    return next((dim for dim, cut in layout.dims if cut), "whole")


# A weight is never pending, and a product of a pending factor is as large or larger than the factor in all models here,
# so that nothing is lost by summing first: a reader takes a pending sum only where its kind says so.
PENDING_FACTOR: Mapping[str, set[Row]] = {
    name: {(("sum", "whole"), ("sum",)), (("whole", "sum"), ("sum",))} for name in ("einsum", "experts", "multiply")
} | {"rms norm": {(("whole", "sum"), ("sum",))}}
# Element by element a tensor keeps its size (a cast to FP32 doubles it), so that the sum costs no less afterwards; only
# where two pending tensors are added would one sum do for both.
PENDING_ELEMENTWISE: Mapping[str, set[Row]] = {
    **{name: {(("sum",), ("sum",))} for name in ("negate", "cast", "repeat")},
    **{name: {(("sum", "sum"), ("sum",))} for name in ("add", "subtract", "bias")},
}
KNOWN = (PENDING_FACTOR, PENDING_ELEMENTWISE)
# DTensor has no operation like these.
ONLY_OURS = {
    "AdamW", "ClipScale", "Collect", "Combine", "CombineGradient", "Deliver", "Dispatch", "DispatchGradient",
    "Rotary", "Sgd", "Slot", "SquareSum",
}  # fmt: skip
# Their DTensor counterparts scatter into an array of zeros that ours do not read.
NOT_COMPARED = {"Place", "TopKGradient"}


@pytest.mark.parametrize("name", CASES)
def test_what_dtensor_accepts_we_accept_with_the_same_result_but_for_known_differences(
    name: str, mesh: DeviceMesh
) -> None:
    case = CASES[name]
    accepted = theirs(case, mesh)
    assert len(accepted) > 1, "nothing was compared"
    num_reads, num_results = len(case.torch_reads or case.reads), len(next(iter(accepted))[1])
    mine = {(reads[:num_reads], results[:num_results]) for reads, results in ours(case)}
    known = {row for difference in KNOWN for row in difference.get(name, set[Row]())}
    assert accepted - mine == known


def test_at_most_five_differences_are_known() -> None:
    assert len(KNOWN) <= 5


def test_every_kind_is_compared_or_named_as_having_no_counterpart() -> None:
    compared = {type(case.kind).__name__ for case in CASES.values()}
    assert {kind.__name__ for kind in _kinds(OpKind)} == compared | ONLY_OURS | NOT_COMPARED


def _kinds(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        if kind.__module__.startswith("autoshard.graph.kinds"):
            yield kind
        yield from _kinds(kind)


def test_an_argument_that_must_change_is_noticed(mesh: DeviceMesh) -> None:
    x = _distributed(X, "bf16", "sum", mesh)
    with pytest.raises(Redistributes):
        ATEN.silu(x)
