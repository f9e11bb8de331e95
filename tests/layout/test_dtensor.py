"""Against an oracle that nobody here wrote: what PyTorch's DTensor accepts without redistribution, we accept alike."""

import inspect
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
from autoshard.graph.kinds.attention import Attend
from autoshard.graph.kinds.experts import TopK
from autoshard.graph.kinds.indexing import Lookup, Pick, ScatterAdd
from autoshard.graph.kinds.linear import Einsum
from autoshard.graph.kinds.norm import Norm, NormGradient, NormWeightGradient, Softmax, SoftmaxGradient
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.graph.kinds.pointwise import (
    Add,
    Cast,
    Multiply,
    Reduce,
    Repeat,
    ScaleBy,
    SoftCap,
    SoftCapGradient,
    Unary,
    UnaryGradient,
)
from autoshard.graph.op import Dims, Op, OpKind, Tensor
from tests.slower import each_third_is_fast

ATEN = torch.ops.aten
SIZES = {"batch": 4, "seq": 6, "kv_seq": 6, "hidden": 8, "ffn": 10, "experts": 4, "slots": 6, "vocab": 12}
SIZES |= {"kv_heads": 2, "q_group": 1, "head_dim": 8, "choices": 2, "one": 1}
NUM_RANKS = 2

Lies = str  # "whole", "sum", "max", or the name of the dim that is cut
Row = tuple[tuple[Lies, ...], tuple[Lies, ...]]  # how inputs lie, how results lie


@dataclass(frozen=True)
class Case:
    """One operation as both sides know it: our kind, the dims of what it reads (``<``: of indices), and torch's call.

    ``torch_reads`` and ``torch_gives`` are the dims of the arrays of torch where it wants others than we do.
    """

    kind: OpKind
    reads: Sequence[str]
    call: Callable[..., Any]
    torch_reads: Sequence[str] | None = None
    torch_gives: Sequence[str] | None = None


X, Y, STAT, INDEX = "batch seq hidden", "batch seq vocab", "batch seq one", "batch seq <"
QUERY, KEY = "batch seq kv_heads q_group head_dim", "batch kv_seq kv_heads head_dim"
HEADS, KEYS = "batch kv_heads seq head_dim", "batch kv_heads kv_seq head_dim"
SHAPE = [SIZES["hidden"]]


def dims_of(text: str) -> Dims:
    return tuple(text.removesuffix(" <").split())


def _norm_weight_gradient(upstream: Any, x: Any, stat: Any) -> Any:
    weight = _distributed("hidden", "whole", x.device_mesh)
    return ATEN.native_layer_norm_backward(upstream, x, SHAPE, stat, stat, weight, None, [False, True, False])[1:2]


def _norm_gradient(upstream: Any, x: Any, stat: Any, weight: Any) -> Any:
    return ATEN.native_layer_norm_backward(upstream, x, SHAPE, stat, stat, weight, None, [True, False, False])[:1]


def _over(kind: Any, **options: Any) -> Any:
    return kind(over="hidden", **options)


CASES: Mapping[str, Case] = {
    "einsum": Case(Einsum(dims=("seq", "ffn")), ["seq hidden", "hidden ffn"], ATEN.mm),
    "experts": Case(
        Einsum(dims=("experts", "slots", "ffn")), ["experts slots hidden", "experts hidden ffn"], ATEN.bmm
    ),
    "silu": Case(Unary(function="silu"), [X], ATEN.silu),
    "negate": Case(Unary(function="negate"), [X], ATEN.neg),
    "silu gradient": Case(UnaryGradient(function="silu"), [X, X], ATEN.silu_backward),
    "multiply": Case(Multiply(), [X, X], ATEN.mul),
    "cap": Case(SoftCap(cap=1.0, dtype="fp32"), [X], ATEN.tanh),
    "cap gradient": Case(SoftCapGradient(cap=1.0, dtype="fp32"), [X, X], ATEN.tanh_backward),
    "scale": Case(ScaleBy(factor=0.3), [X], lambda x: ATEN.mul(x, 0.3)),
    "add": Case(Add(), [X, X], ATEN.add),
    "subtract": Case(Add(sign=-1), [X, X], ATEN.sub),
    "bias": Case(Add(), [X, "hidden"], ATEN.add),
    "accumulate": Case(Accumulate(), ["hidden ffn", "hidden ffn"], ATEN.add),
    "sum": Case(Reduce(function="sum", over=("vocab",)), [Y], lambda x: ATEN.sum(x, [2])),
    "max": Case(Reduce(function="max", over=("vocab",)), [Y], lambda x: ATEN.amax(x, [2])),
    "repeat": Case(
        Repeat(dims=dims_of(X)), ["seq hidden"], lambda x: ATEN.expand(x, [SIZES[dim] for dim in dims_of(X)])
    ),
    "cast": Case(Cast(dtype="fp32"), [X], lambda x: ATEN._to_copy(x, dtype=torch.float64)),
    "softmax": Case(_over(Softmax), [X], lambda x: ATEN._softmax(x, -1, False)),
    "softmax gradient": Case(
        _over(SoftmaxGradient), [X, X], lambda d, y: ATEN._softmax_backward_data(d, y, -1, torch.float32)
    ),
    "norm": Case(
        _over(Norm, function="layer", eps=1e-5), [X, "hidden"],
        lambda x, weight: ATEN.native_layer_norm(x, SHAPE, weight, None, 1e-5)[:1], torch_gives=[X],
    ),
    "rms norm": Case(
        _over(Norm, function="rms", eps=1e-5), [X, "hidden"],
        lambda x, weight: ATEN._fused_rms_norm(x, SHAPE, weight, 1e-5)[:1], torch_gives=[X],
    ),
    "norm gradient": Case(
        _over(NormGradient, function="layer"), [X, X, "batch seq", "hidden"], _norm_gradient, [X, X, STAT, "hidden"]
    ),
    "norm weight gradient": Case(
        _over(NormWeightGradient, function="layer"), [X, X, "batch seq"], _norm_weight_gradient, [X, X, STAT]
    ),
    "lookup": Case(Lookup(), ["vocab hidden", INDEX], ATEN.embedding),
    "scatter add": Case(
        ScatterAdd(dims=("vocab", "hidden")), [X, INDEX],
        lambda d, index: ATEN.embedding_dense_backward(d, index, SIZES["vocab"], -1, False),
    ),
    "pick": Case(
        Pick(over="vocab"), [Y, INDEX], lambda x, index: ATEN.gather(x, 2, index), [Y, "batch seq one <"], [STAT]
    ),
    "top k": Case(TopK(), ["batch seq experts"], lambda x: ATEN.topk(x, 2)),
    "attend": Case(
        Attend(), [QUERY, KEY, KEY, "seq <", "kv_seq <"],
        lambda q, k, v: ATEN._scaled_dot_product_flash_attention(q, k, v)[:2],
        [HEADS, KEYS, KEYS], [HEADS, "batch kv_heads seq"],
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
    reads = case.torch_reads or case.reads
    options = [
        ["whole", *(dim for dim in dims_of(text) if dim != "one"), *([] if "<" in text else ["sum"])] for text in reads
    ]
    op, tensors = _parts(case)
    found: set[Row] = set()
    for places in itertools.product(*options):
        arrays = [_distributed(text, place, mesh) for text, place in zip(reads, places, strict=True)]
        try:
            results = case.call(*arrays)
        except (Redistributes, RuntimeError, NotImplementedError, AssertionError, ValueError, IndexError):
            continue  # not without a change of layout, or not at all
        made = results if isinstance(results, tuple | list) else (results,)
        gives = [*map(dims_of, case.torch_gives)] if case.torch_gives else [tensors[name].dims for name in op.outputs]
        found.add((places, tuple(_place(one, dims) for one, dims in zip(made, gives, strict=True))))
    return found


def _distributed(text: str, place: Lies, mesh: DeviceMesh) -> DTensor:
    dims = dims_of(text)
    shape = [SIZES[dim] // (NUM_RANKS if dim == place else 1) for dim in dims]
    local = torch.zeros(shape, dtype=torch.int64 if "<" in text else torch.float32, device="meta")
    placement = {"whole": Replicate(), "sum": Partial()}.get(place) or Shard(dims.index(place))
    return DTensor.from_local(local, mesh, [placement], run_check=False)


def _place(array: DTensor, dims: Dims) -> Lies:
    (placement,) = array.placements
    if isinstance(placement, Partial):
        return placement.reduce_op
    return dims[placement.dim] if isinstance(placement, Shard) else "whole"


def _parts(case: Case) -> tuple[Op, dict[str, Tensor]]:
    inputs = [
        Tensor(name=f"in{n}", dims=dims_of(text), dtype="int64" if "<" in text else "bf16")
        for n, text in enumerate(case.reads)
    ]
    inferred = case.kind.infer(inputs)
    outputs = [Tensor(name=f"out{n}", dims=out.dims, dtype=out.dtype) for n, out in enumerate(inferred)]
    names = (tuple(one.name for one in inputs), tuple(one.name for one in outputs))
    op = Op(name="op", kind=case.kind, inputs=names[0], outputs=names[1], source="op")
    return op, {one.name: one for one in (*inputs, *outputs)}


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
    "AdamW", "ClipScale", "Collect", "Combine", "CombineGradient", "Deliver", "Dispatch", "DispatchGradient", "Drop",
    "Opaque", "OpaqueGradient", "Join", "JoinGradient", "Rotary", "Sgd", "Slot", "SquareSum",
    "Choose", "ChooseGradient", "CorrectionStep", "ExcessLoad",
    "RouterBalance", "RouterBalanceGradient", "RouterLoad", "RouterZ", "RouterZGradient",
    "SinkAttend", "SinkAttendGradient", "GatedDelta", "GatedDeltaGradient", "Decay", "DecayGradient",
    "CausalConv", "CausalConvWeightGradient",
    "ClampedGlu", "ClampedGluGradient", "ShiftRows", "SumRows", "ChosenBias", "ChosenBiasGradient",
    "MeanSquare", "MeanSquareGradient", "Rescale", "RescaleSquareGradient", "RescaleWeightGradient",  # half a norm each
}  # fmt: skip
# Their DTensor counterparts scatter into an array of zeros that ours do not read; attention's has four numbers more.
NOT_COMPARED = {"Place", "TopKGradient", "AttendGradient"}


@pytest.mark.parametrize("name", each_third_is_fast(CASES))
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


def concrete(base: type) -> Iterator[type]:
    """The classes under a class that have all they need."""
    for derived in base.__subclasses__():
        yield from [] if inspect.isabstract(derived) else [derived]
        yield from concrete(derived)


def test_every_kind_is_compared_or_named_as_having_no_counterpart() -> None:
    compared = {type(case.kind).__name__ for case in CASES.values()}
    package = {kind.__name__ for kind in concrete(OpKind) if kind.__module__.startswith("autoshard.graph.kinds")}
    assert package == compared | ONLY_OURS | NOT_COMPARED


def test_an_argument_that_must_change_is_noticed(mesh: DeviceMesh) -> None:
    x = _distributed(X, "sum", mesh)
    with pytest.raises(Redistributes):
        ATEN.silu(x)
