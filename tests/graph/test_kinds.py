"""Every kind of operation, and every gradient rule executed op by op, against torch in float64."""

import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import autoshard.graph.kinds
from autoshard.graph.builder import BlockBuilder, add_backward
from autoshard.graph.kinds.attention import Attend, Join, Rotary
from autoshard.graph.kinds.choosing import Choose, CorrectionStep, ExcessLoad
from autoshard.graph.kinds.dropout import PHILOX_FLOPS, Drop
from autoshard.graph.kinds.expert_biases import ChosenBias, ShiftRows
from autoshard.graph.kinds.experts import Combine, Dispatch, Slot, TopK
from autoshard.graph.kinds.indexing import Lookup, Pick, random_document_starts
from autoshard.graph.kinds.linear import Deliver, Einsum
from autoshard.graph.kinds.norm import MeanSquare, Norm, Rescale, Softmax
from autoshard.graph.kinds.opaque import Opaque
from autoshard.graph.kinds.optimizer import AdamW, ClipScale, Sgd, SquareSum
from autoshard.graph.kinds.pointwise import Add, Cast, ClampedGlu, Function, Multiply, Reduce, ScaleBy, SoftCap, Unary
from autoshard.graph.kinds.router import RouterBalance, RouterLoad, RouterZ
from autoshard.graph.kinds.sinks import SinkAttend
from autoshard.graph.op import DIMS, Array, Call, Differentiable, Dims, Op, OpKind
from autoshard.spec.workload import Dtype, Precision
from tests.graph.attention_references import (
    Reference,
    Sizes,
    reference_attention,
    reference_capped,
    reference_drop,
    reference_dropping,
    reference_rotary,
    reference_scaled,
    reference_sinks,
)
from tests.graph.choosing_references import (
    CORRECTED,
    GREEDY,
    UNCORRECTED,
    excess_of,
    reference_choose,
    reference_sigmoid_balance,
)
from tests.graph.delta_references import DELTA
from tests.graph.expert_references import (
    reference_chosen_bias,
    reference_clamped_glu,
    reference_combine,
    reference_dispatch,
    reference_places,
)
from tests.graph.loads import draw_loaded, load_of_sequences, reference_balance
from tests.graph.optimizer_references import reference_adamw, reference_clip, reference_sgd

torch: Any = pytest.importorskip("torch")
F: Any = torch.nn.functional

Draw = Callable[[Sizes, np.random.Generator], list[Array]]
TOLERANCE = 1e-9
EXACT = Precision(weights="fp64", activations="fp64", gradients="fp64", masters=None, moments="fp64")


@dataclass(frozen=True)
class Case:
    """A kind, the dims of its inputs (``batch seq < vocab``: below the size of vocab), torch's word."""

    kind: OpKind
    inputs: tuple[str, ...]
    reference: Reference
    draw: Draw | None = None

    @property
    def has_gradient(self) -> bool:
        return isinstance(self.kind, Differentiable) and self.kind not in CONSTANTS


MAXIMUM = Reduce(function="max", over=("vocab",))  # passes no gradient on purpose
LOADS = RouterLoad(over="batch"), RouterLoad(over="sequence")
CONSTANTS = (MAXIMUM, Slot(), *LOADS)
ROUTERS = {"choose greedily": GREEDY, "choose by scores": UNCORRECTED, "choose by corrected scores": CORRECTED}

# -- what torch says -------------------------------------------------------------------------------


def reference_norm(function: str, eps: float) -> Reference:
    """Torch's norms over the last dim, and the reciprocal of the size they divide by."""

    def normalise(x: Any, *rest: Any) -> tuple[Any, Any]:
        weights, shape = rest[:-1], x.shape[-1:]
        if function == "layer":
            statistic = (x.var(dim=-1, correction=0) + eps).rsqrt()
            return F.layer_norm(x, shape, *weights, eps=eps), statistic
        return F.rms_norm(x, shape, *weights, eps=eps), (x.pow(2).mean(dim=-1) + eps).rsqrt()

    return normalise


# -- inputs that are not just random numbers -------------------------------------------------------


def normal(sizes: Sizes, rng: np.random.Generator, *names: str) -> Array:
    return rng.normal(size=[sizes[name] for name in names])


def positions(sizes: Sizes) -> list[Array]:
    """Queries are the last of the positions that the keys have."""
    start = sizes["kv_seq"] - sizes["seq"]
    return [np.arange(start, sizes["kv_seq"]), np.arange(sizes["kv_seq"])]


def starts(sizes: Sizes, rng: np.random.Generator) -> Array:
    """Of the documents of the queries; the first may have begun before them."""
    return random_document_starts(rng, (sizes["batch"], sizes["kv_seq"]))[:, sizes["kv_seq"] - sizes["seq"] :]


def numbers(sizes: Sizes, rng: np.random.Generator, dim: str) -> Array:
    """Keys of sequences, or numbers of what lies along a dim, of which this may be a part."""
    if dim == "batch":
        return rng.integers(0, 2**63 - 1, sizes[dim])
    return rng.integers(0, 5) + np.arange(sizes[dim])


def draw_drop(sizes: Sizes, rng: np.random.Generator) -> list[Array]:
    return [
        normal(sizes, rng, "batch", "seq", "hidden"), numbers(sizes, rng, "batch"), positions(sizes)[0],
        numbers(sizes, rng, "hidden"),
    ]  # fmt: skip


def draw_rotary(*dims: str, apart: bool = False) -> Draw:
    return lambda sizes, rng: [normal(sizes, rng, *dims), positions(sizes)[0], starts(sizes, rng)][: 2 + apart]


def draw_places(sizes: Sizes, rng: np.random.Generator) -> list[Array]:
    at = rng.integers(0, sizes["positions"], sizes["seq"])
    return [normal(sizes, rng, "positions", "hidden"), at, rng.integers(0, at + 1, (sizes["batch"], sizes["seq"]))]


def draw_documents(sizes: Sizes, rng: np.random.Generator) -> list[Array]:
    return [*draw_attention(sizes, rng), starts(sizes, rng)]


def draw_attention(sizes: Sizes, rng: np.random.Generator, width: str = "head_dim") -> list[Array]:
    query = normal(sizes, rng, "batch", "seq", "kv_heads", "q_group", "head_dim")
    keys = [normal(sizes, rng, "batch", "kv_seq", "kv_heads", dim) for dim in ("head_dim", width)]
    return [query, *keys, *positions(sizes)]


def draw_routing(sizes: Sizes, rng: np.random.Generator) -> list[Array]:
    scores = torch.tensor(normal(sizes, rng, "batch", "seq", "experts"))
    expert = scores.topk(sizes["choices"]).indices
    return [expert.numpy(), reference_places(expert, sizes).numpy()]


# -- the cases: at least one of each kind, or of the kind whose gradient it is ---------------------

ROUTED = "batch seq choices <"  # experts, then places
LOGITS = "batch seq experts"
VALUES, SHARED = "batch kv_seq kv_heads value_dim", "batch seq rotary_dim"
X, HEADS, KEYS = "batch seq hidden", "batch seq kv_heads q_group head_dim", "batch kv_seq kv_heads head_dim"
UNARY: Mapping[Function, Reference] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "log": torch.log,
    "negate": torch.neg,
}


def dims(text: str) -> Dims:
    return tuple(text.split(" <")[0].removesuffix("+").split())


def product(out: str, left: str, right: str) -> Case:
    letters = {dim: chr(ord("a") + index) for index, dim in enumerate(DIMS)}
    a, b, c = ("".join(letters[dim] for dim in dims(text)) for text in (left, right, out))
    return Case(Einsum(dims=dims(out)), (left, right), lambda x, y, _: torch.einsum(f"{a},{b}->{c}", x, y))


def norm(name: Any, over: str, *inputs: str, eps: float = 1e-3, offset: float = 0.0) -> Case:
    plain = reference_norm(name, eps)
    reference = plain if not offset else lambda x, weight, *rest: plain(x, weight + offset, *rest)
    return Case(Norm(function=name, over=over, eps=eps, offset=offset), inputs, reference)


def rotary(x: str, fraction: float = 1.0, theta: float = 10000.0, *, apart: bool = False) -> Case:
    kind = Rotary(fraction=fraction, theta=theta, over=dims(x)[-1])
    where = ("seq <", *(("batch seq <",) if apart else ()))
    reference = reference_rotary(fraction, theta, kind.over)
    return Case(kind, (x, *where), reference, draw_rotary(*dims(x), apart=apart))


def attention(window: int | None = None, *, apart: bool = False, dropped: float = 0.0) -> Case:
    inputs = (HEADS, KEYS, KEYS, "seq <", "kv_seq <", *(("batch seq <",) if apart else ()))
    draw, reference = draw_documents if apart else draw_attention, reference_attention(window)
    if not dropped:
        return Case(Attend(window=window), inputs, reference, draw)
    return Case(
        Attend(window=window, dropped=dropped), (*inputs, "batch <", "kv_heads <", "q_group <"),
        reference_dropping(dropped),
        lambda sizes, rng: [*draw(sizes, rng), *(numbers(sizes, rng, dim) for dim in ("batch", "kv_heads", "q_group"))],
    )  # fmt: skip


def encoding(window: int | None = None) -> Case:
    """Attention that sees what comes after a token, too."""
    reference = reference_attention(window, sees_all=True)
    return Case(Attend(window=window, sees_all=True), attention().inputs, reference, draw_attention)


def with_sinks(case: Case) -> Case:
    """The attention of a case with a number for each query head, which joins the sums of its softmax."""
    assert isinstance(case.kind, Attend) and case.draw
    draw, kind = case.draw, SinkAttend(window=case.kind.window, dropped=case.kind.dropped)
    return Case(
        kind, (*case.inputs, "kv_heads q_group"), reference_sinks(case.reference),
        lambda sizes, rng: [*draw(sizes, rng), normal(sizes, rng, "kv_heads", "q_group")],
    )  # fmt: skip


def reference_join(shared: Any, own: Any, _: Sizes) -> Any:
    return torch.cat([shared[:, :, None].expand(*own.shape[:3], shared.shape[-1]), own], -1)


def mixed(x: Any) -> Any:
    """The stand-in for what code does along the last dim, which it needs whole."""
    return x + x.mean(-1, keepdim=True)


CASES: Mapping[str, Case] = {
    "a product with heads": product(HEADS, X, "kv_heads q_group head_dim hidden"),
    "a product back from heads": product(X, HEADS, "hidden kv_heads q_group head_dim"),
    "a product per expert": product("experts slots ffn", "experts slots hidden", "experts ffn hidden"),
    **{
        name: Case(Unary(function=name), (X + " +" * (name == "log"),), lambda x, _, function=function: function(x))
        for name, function in UNARY.items()
    },
    "multiply": Case(Multiply(), (X, X), lambda x, y, _: x * y),
    "multiply by a number of each token": Case(Multiply(), (X, "batch seq"), lambda x, y, _: x * y[..., None]),
    "add": Case(Add(), (X, X), lambda x, y, _: x + y),
    "add a bias": Case(Add(), (X, "hidden"), lambda x, y, _: x + y),
    "subtract": Case(Add(sign=-1), (X, X), lambda x, y, _: x - y),
    "sum": Case(Reduce(function="sum", over=("seq", "batch")), (X,), lambda x, _: x.sum((0, 1))),
    "maximum": Case(MAXIMUM, ("batch seq vocab",), lambda x, _: x.amax(-1)),
    "cast": Case(Cast(dtype="fp64"), (X,), lambda x, _: x),
    "softmax": Case(Softmax(over="choices"), ("batch seq choices",), lambda x, _: x.softmax(-1)),
    "rms norm": norm("rms", "hidden", X, "hidden"),
    "rms norm of heads": norm("rms", "head_dim", HEADS, "head_dim"),
    "layer norm": norm("layer", "hidden", X, "hidden", "hidden"),
    "rms norm with an offset": norm("rms", "hidden", X, "hidden", offset=1.0),
    "layer norm with an offset": norm("layer", "hidden", X, "hidden", "hidden", offset=0.5),
    "mean square": Case(
        MeanSquare(over=dims("kv_heads q_group head_dim"), count=12), (HEADS,),
        lambda x, _: x.square().sum((2, 3, 4)) / 12,
    ),
    "rescale": Case(
        Rescale(eps=1e-3), (HEADS, "batch seq +", "kv_heads q_group head_dim"),
        lambda x, square, w, _: x * w / (square[..., None, None, None] + 1e-3).sqrt(),
    ),
    "own": Case(
        Opaque(does="own", dims=dims(X), whole=("ffn", "hidden"), num_functions=3), (X, "hidden", "seq ffn"),
        lambda x, w, t, _: torch.tanh(mixed(x) + mixed(w) + mixed(t).mean(-1)[:, None]),
    ),
    "own product": Case(
        Opaque(does="own_product", dims=("seq",), products=(("seq", "hidden"),), whole=("hidden",)),
        ("seq", "seq hidden"), lambda x, w, _: torch.tanh(x + mixed(w).mean(-1)),
    ),
    "lookup": Case(
        Lookup(), ("vocab hidden", "batch seq < vocab"), lambda table, at, _: F.embedding(at, table)
    ),
    "lookup from where a document starts": Case(
        Lookup(), ("positions hidden", "seq <", "batch seq <"),
        lambda table, at, starts, _: torch.stack([table[at - row] for row in starts]),
        draw_places,
    ),
    "scaled lookup": Case(
        Lookup(scale=3.5), ("vocab hidden", "batch seq < vocab"), lambda table, at, _: 3.5 * F.embedding(at, table)
    ),
    "pick": Case(
        Pick(over="vocab"), ("batch seq vocab", "batch seq < vocab"),
        lambda x, at, _: x.gather(-1, at[..., None])[..., 0],
    ),
    "rotary": rotary(HEADS),
    "rotary of keys, part of the head": rotary("batch seq kv_heads head_dim", fraction=0.5, theta=500.0),
    "rotary of keys from where a document starts": rotary("batch seq kv_heads head_dim", fraction=0.5, apart=True),
    "rotary of a key of all heads": rotary(SHARED),
    "join": Case(Join(), (SHARED, "batch seq kv_heads plain_dim"), reference_join),
    "attend": attention(),
    "attend to values of a width of their own": Case(
        Attend(value_width="value_dim"), (HEADS, KEYS, VALUES, "seq <", "kv_seq <"), reference_attention(None),
        lambda sizes, rng: draw_attention(sizes, rng, "value_dim"),
    ),
    "attend to all": encoding(),
    "attend to both sides in a window": encoding(window=2),
    "attend with another scale": Case(Attend(scale=0.3), attention().inputs, reference_scaled(0.3), draw_attention),
    "sinks": with_sinks(attention()),
    "sinks of documents in a window": with_sinks(attention(window=2, apart=True)),
    "sinks of an attention that drops": with_sinks(attention(dropped=0.4)),
    "capped attention": Case(Attend(cap=0.3), attention().inputs, reference_capped(0.3), draw_attention),
    "soft cap": Case(SoftCap(cap=0.7, dtype="fp64"), (X,), lambda x, _: 0.7 * torch.tanh(x / 0.7)),
    "scale": Case(ScaleBy(factor=0.3), (X,), lambda x, _: 0.3 * x),
    "clamped glu": Case(ClampedGlu(limit=0.6, slope=1.7), (X, X), reference_clamped_glu(0.6, 1.7)),
    "attend to a document": attention(apart=True),
    "attend to a document in a window": attention(window=2, apart=True),
    "drop": Case(Drop(dropped=0.3, stream=2), (X, "batch <", "seq <", "hidden <"), reference_drop(0.3, 2), draw_drop),
    "attention that drops": attention(dropped=0.4),
    "attention to a document that drops": attention(apart=True, dropped=0.4),
    "top k": Case(TopK(), ("batch seq experts",), lambda x, sizes: tuple(x.topk(sizes["choices"]))),
    **{
        name: Case(Choose(router=router), (LOGITS, "experts")[: 1 + router.correction], reference_choose(router))
        for name, router in ROUTERS.items()
    },
    "excess": Case(
        ExcessLoad(), ("batch seq choices < experts",), lambda at, sizes: excess_of(at, sizes["experts"]).double()
    ),
    "correction step": Case(
        CorrectionStep(speed=0.5), ("experts", "experts"), lambda bias, excess, _: bias - 0.5 * excess.sign()
    ),
    "slot": Case(Slot(), ("batch seq choices < experts",), reference_places),
    "load": Case(LOADS[0], ("batch seq choices < experts",), lambda at, sizes: load_of_sequences(at, sizes).sum(0)),
    "load of each sequence": Case(LOADS[1], ("batch seq choices < experts",), load_of_sequences),
    "balance": Case(RouterBalance(), (LOGITS, "experts <"), reference_balance, draw_loaded(by_sequence=False)),
    "balance of each sequence": Case(
        RouterBalance(), (LOGITS, "batch experts <"), reference_balance, draw_loaded(by_sequence=True)
    ),
    "balance of each sequence by sigmoids": Case(
        RouterBalance(scores="sigmoid"), (LOGITS, "batch experts <"), reference_sigmoid_balance,
        draw_loaded(by_sequence=True),
    ),
    "z": Case(RouterZ(), (LOGITS,), lambda x, _: x.logsumexp(-1).square().sum()),
    "dispatch": Case(Dispatch(), (X, ROUTED, ROUTED), reference_dispatch),
    "combine": Case(Combine(), ("experts slots hidden", "batch seq choices", ROUTED, ROUTED), reference_combine),
    "shift rows": Case(
        ShiftRows(), ("experts slots ffn", "experts ffn"), lambda rows, bias, _: rows + bias[:, None]
    ),
    "chosen bias": Case(
        ChosenBias(), ("batch seq choices", "batch seq choices < experts", "experts hidden"), reference_chosen_bias
    ),
    "chosen bias of those that found a slot": Case(
        ChosenBias(), ("batch seq choices", ROUTED, "experts hidden", ROUTED), reference_chosen_bias
    ),
    "deliver": Case(Deliver(), (X,), lambda x, _: x),
    "deliver along another dim": Case(
        Deliver(rename=(("seq", "kv_seq"),)), ("batch seq kv_heads head_dim",), lambda x, _: x
    ),
    **{name: Case(kind, inputs, reference) for name, (kind, inputs, reference, _) in DELTA.items()},
    "square sum": Case(SquareSum(), ("ffn hidden",), lambda x, _: x.pow(2).sum()),
    "clip": Case(ClipScale(limit=1.0), ("+", "+"), reference_clip),
    "adamw": Case(AdamW(), (*["ffn hidden"] * 2, "ffn hidden +", "ffn hidden", "+", "+", "+"), reference_adamw),
    "sgd": Case(Sgd(), ("ffn hidden", "ffn hidden", "+", "+"), reference_sgd),
}  # fmt: skip


@st.composite
def dim_sizes(draw: Callable[..., Any]) -> Sizes:
    """Small sizes, 1 among them, within what a model can have."""
    sizes = {dim: draw(st.integers(1, 4)) for dim in DIMS}
    sizes["head_dim"] = draw(st.sampled_from([4, 8, 16]))  # half of it is rotated, in pairs
    sizes["rotary_dim"] = sizes["plain_dim"] = sizes["head_dim"] // 2
    sizes["kv_seq"] = sizes["seq"] + draw(st.integers(0, 2))
    sizes["choices"] = min(sizes["choices"], sizes["experts"])
    return sizes


def block_of(case: Case) -> tuple[BlockBuilder, Op]:
    """Write the case down as a block whose every number is a parameter, with its backward pass."""
    builder = BlockBuilder(EXACT)
    for index, text in enumerate(case.inputs):
        dtype: Dtype = "int64" if "<" in text else "fp64"
        role = "input" if "<" in text or not case.has_gradient else "parameter"
        builder.add(f"in{index}", dims(text), dtype, role)
    outputs = builder.append("out", case.kind, [f"in{i}" for i in range(len(case.inputs))], source="out")
    forward = builder.ops[0]
    if case.has_gradient:
        seed = builder.add("seed", builder.tensors[outputs[0]].dims, "fp64", "gradient")
        add_backward(builder, (), {outputs[0]: seed})
    return builder, forward


def call_of(builder: BlockBuilder, op: Op, sizes: Sizes) -> Call:
    tensors = [tuple(builder.tensors[name] for name in names) for names in (op.inputs, op.outputs)]
    return Call(inputs=tensors[0], outputs=tensors[1], sizes=sizes)


def arrays_of(case: Case, sizes: Sizes, rng: np.random.Generator) -> list[Array]:
    if case.draw:
        return case.draw(sizes, rng)
    drawn: list[Array] = []
    routing = iter(draw_routing(sizes, rng))
    for text in case.inputs:
        shape = [sizes[dim] for dim in dims(text)]
        below = text.partition("< ")[2]
        if text == ROUTED:
            drawn.append(next(routing))
        elif below:
            drawn.append(rng.integers(0, sizes[below], shape))
        else:
            array = np.asarray(rng.normal(size=shape))
            drawn.append(np.abs(array) + 0.1 if text.endswith("+") else array)
    return drawn


def run(builder: BlockBuilder, sizes: Sizes, values: dict[str, Array]) -> None:
    for op in builder.ops:
        call = call_of(builder, op, sizes)
        results = op.kind.evaluate(call, *(values[name] for name in op.inputs))
        for tensor, result in zip(call.outputs, results, strict=True):
            assert result.shape == tuple(sizes[dim] for dim in tensor.dims), str(tensor)
            values[tensor.name] = result


def agree(ours: Sequence[Array], theirs: Sequence[Any]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other.detach().numpy(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
@given(sizes=dim_sizes(), seed=st.integers(0, 2**32 - 1))
def test_a_kind_and_the_gradient_derived_from_it_equal_torch(name: str, sizes: Sizes, seed: int):
    case, rng = CASES[name], np.random.default_rng(seed)
    if not isinstance(case.kind, Attend):  # only attention can look at more keys than it has queries
        sizes = {**sizes, "kv_seq": sizes["seq"]}
    builder, forward = block_of(case)
    values = {f"in{index}": array for index, array in enumerate(arrays_of(case, sizes, rng))}
    leaves = [torch.tensor(array) for array in values.values()]
    for leaf in leaves:
        leaf.requires_grad_(case.has_gradient and leaf.is_floating_point())
    expected = case.reference(*leaves, sizes)
    expected = expected if isinstance(expected, tuple) else (expected,)
    values["seed"] = rng.normal(size=tuple(expected[0].shape))
    trained = [f"in{i}" for i, leaf in enumerate(leaves) if leaf.requires_grad]
    values |= {f"{leaf}.grad": np.zeros_like(values[leaf]) for leaf in trained}
    run(builder, sizes, values)
    agree([values[output] for output in forward.outputs], expected)
    if case.has_gradient:
        expected[0].backward(torch.tensor(values["seed"]))
        agree([values[f"{leaf}.sum"] for leaf in trained], [leaf.grad for leaf in leaves if leaf.requires_grad])


# -- no kind without a case ------------------------------------------------------------------------


def kinds_of_the_package() -> set[type[OpKind]]:
    """Every concrete class of the modules under ``graph/kinds``."""
    found: set[type[OpKind]] = set()
    for module in pkgutil.iter_modules(autoshard.graph.kinds.__path__, "autoshard.graph.kinds."):
        for _, member in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(member, OpKind) and not inspect.isabstract(member):
                found.add(member)
    return found


def all_calls(sizes: Sizes) -> Iterator[tuple[OpKind, Call]]:
    """Every operation that any case makes, forward and backward."""
    for case in CASES.values():
        builder, _ = block_of(case)
        yield from ((op.kind, call_of(builder, op, sizes)) for op in builder.ops)


# Different primes, so that a count can come from one product of dims only.
PRIMES: Sizes = dict(
    zip(DIMS, (2, 3, 5, 7, 11, 4, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 6, 53, 59, 61, 67, 71, 73), strict=True)
)
T, H, E, K = 2 * 3, 13, 19, 29  # tokens, hidden, experts, choices
TH, Q, QK = T * H, T * 7 * 11, 2 * 7 * 11 * 3 * 5  # elements of X, query heads, (query, key) pairs of all heads
HEADS_PRODUCT = (2 * TH * 7 * 11 * 4, 0)
EXPECTED: Mapping[str, tuple[int, int]] = {  # matrix FLOPs, vector FLOPs
    **dict.fromkeys(("a product with heads", "a product back from heads"), HEADS_PRODUCT),
    "a product per expert": (2 * E * 23 * 17 * H, 0),
    **dict.fromkeys((*UNARY, "multiply", "multiply by a number of each token", "scale", "sum", "cast"), (0, TH)),
    **dict.fromkeys(("add", "add a bias", "subtract"), (0, TH)),
    "maximum": (0, T * 37),
    "softmax": (0, 4 * T * K),
    **dict.fromkeys(
        (name + more for name in ("rms norm", "layer norm") for more in ("", " with an offset")), (0, 4 * TH)
    ),
    "mean square": (0, 2 * Q * 4),
    "rescale": (0, 2 * Q * 4),
    "scaled lookup": (0, TH),
    "rms norm of heads": (0, 4 * Q * 4),
    "rotary": (0, 3 * Q * 4),
    "rotary of keys, part of the head": (0, 3 * T * 7 * 2),
    "rotary of keys from where a document starts": (0, 3 * T * 7 * 2),
    # As many pairs as if documents saw each other: what is counted is no less than what is done.
    **dict.fromkeys((name for name in CASES if name.startswith("attend")), (2 * 2 * QK * 4, 5 * QK)),
    "attend to values of a width of their own": (2 * QK * (4 + 53), 5 * QK),
    "rotary of a key of all heads": (0, 3 * T * 6),
    "drop": (0, PHILOX_FLOPS * TH),
    **dict.fromkeys(
        ("attention that drops", "attention to a document that drops"), (2 * 2 * QK * 4, (5 + PHILOX_FLOPS + 1) * QK)
    ),
    **dict.fromkeys(("sinks", "sinks of documents in a window"), (2 * 2 * QK * 4, 5 * QK + Q * 4)),
    "sinks of an attention that drops": (2 * 2 * QK * 4, (5 + PHILOX_FLOPS + 1) * QK + Q * 4),
    "capped attention": (2 * 2 * QK * 4, (5 + 3) * QK),
    "soft cap": (0, 3 * TH),
    "clamped glu": (0, 8 * TH),
    "shift rows": (0, E * 23 * 17),
    **dict.fromkeys(("chosen bias", "chosen bias of those that found a slot"), (0, 2 * T * K * H)),
    "own": (0, 3 * TH),
    "own product": (2 * 3 * H, 3 * H),
    "top k": (0, T * E),
    "slot": (0, T * K),
    **dict.fromkeys(("load", "load of each sequence"), (0, T * K)),
    **dict.fromkeys((name for name in CASES if name.startswith("balance")), (0, 6 * T * E)),
    **dict.fromkeys(ROUTERS, (0, 8 * T * E)),
    "excess": (0, T * K),
    "correction step": (0, 3 * E),
    "z": (0, 4 * T * E),
    "combine": (0, 2 * T * K * H),
    **{name: flops for name, (*_, flops) in DELTA.items()},
    "square sum": (0, 2 * 17 * H),
    "clip": (0, 1),
    "adamw": (0, 15 * 17 * H),
    "sgd": (0, 2 * 17 * H),
}
EXPECTED_BACKWARD: Mapping[str, tuple[int, int]] = {  # by label: the first operation that has it
    # Of every pair: scale, mask, subtract the log, exponentiate; subtract the row's sum, multiply, scale back.
    "attend_gradient": (4 * 2 * QK * 4, (4 + 3) * QK),
    "choose_gradient": (0, 8 * T * E),
    "clamped_glu_gradient": (0, 16 * TH),
    "soft_cap_gradient": (0, 4 * TH),
    "chosen_bias_gradient": (0, 4 * T * K * H),
    "sink_attend_gradient": (4 * 2 * QK * 4, (4 + 3) * QK + 2 * Q * 4),
    "sum_rows": (0, E * 23 * 17),
    "combine_gradient": (0, 3 * T * K * H),
    "join_gradient": (0, T * 7 * 6),  # a sum over the heads
    "mean_square_gradient": (0, Q * 4),
    "rescale_square_gradient": (0, 3 * Q * 4),
    "rescale_weight_gradient": (0, 3 * Q * 4),
    "own_gradient": (0, 2 * 3 * TH),
    "own_product_gradient": (2 * 2 * 3 * H, 2 * 3 * H),
    "dispatch_gradient": (0, T * K * H),
    "rms_norm_gradient": (0, 8 * TH),
    "router_balance_gradient": (0, 8 * T * E),
    "router_z_gradient": (0, 6 * T * E),
    "rms_norm_weight_gradient": (0, 3 * TH),
    "rotary_back": (0, 3 * Q * 4),
    "scatter_add": (0, TH),
    "silu_gradient": (0, TH),
    "softmax_gradient": (0, 4 * T * K),
}
MOVED: Mapping[str, int] = {  # bytes of float64 and int64, where it is not all that is read and written
    "lookup": 8 * (2 * TH + T),  # rows read, rows written, indices: never the table
    "scaled lookup": 8 * (2 * TH + T),
    "lookup from where a document starts": 8 * (2 * TH + 3 + T),
    "pick": 8 * 3 * T,
    **dict.fromkeys(("deliver", "deliver along another dim", "collect"), 0),  # one reader: nothing to add
}


def assert_counts(name: str, kind: OpKind, call: Call, flops: tuple[int, int]) -> None:
    assert (kind.matrix_flops(call), kind.vector_flops(call)) == flops
    tensors = {tensor.name: tensor for tensor in (*call.inputs, *call.outputs)}
    whole = sum(math.prod(PRIMES[dim] for dim in t.dims) * (4 if t.dtype == "fp32" else 8) for t in tensors.values())
    assert kind.traffic_bytes(call) == MOVED.get(name, whole)


@pytest.mark.parametrize("name", CASES)
def test_a_kind_counts_its_flops_and_bytes_as_counted_by_hand(name: str):
    builder, forward = block_of(CASES[name])
    assert_counts(name, forward.kind, call_of(builder, forward, PRIMES), EXPECTED.get(name, (0, 0)))


@pytest.mark.parametrize("label", [*EXPECTED_BACKWARD, "collect", "place", "repeat", "top_k_gradient"])
def test_a_derived_operation_counts_its_flops_and_bytes_as_counted_by_hand(label: str):
    kind, call = next((kind, call) for kind, call in all_calls(PRIMES) if kind.label == label)
    assert_counts(label, kind, call, EXPECTED_BACKWARD.get(label, (0, 0)))


def test_products_with_values_count_their_width_and_not_that_of_keys():
    builder, _ = block_of(CASES["attend to values of a width of their own"])
    backward = next(op for op in builder.ops if op.kind.label == "attend_gradient")
    assert backward.kind.matrix_flops(call_of(builder, backward, PRIMES)) == 2 * 2 * QK * (4 + 53)


def test_every_kind_of_the_package_is_compared_with_torch():
    executed = {type(kind) for kind, _ in all_calls(PRIMES)}
    assert len(kinds_of_the_package()) > 25
    assert kinds_of_the_package() == executed


def test_labels_are_readable_and_name_one_kind_each():
    owners: dict[str, set[type[OpKind]]] = {}
    for kind, _ in all_calls(PRIMES):
        owners.setdefault(kind.label, set()).add(type(kind))
    assert {label: kinds for label, kinds in owners.items() if len(kinds) > 1} == {}
    assert [label for label in owners if not re.fullmatch(r"[a-z]+\d*(_[a-z0-9]+)*", label)] == []
