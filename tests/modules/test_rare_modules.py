"""Modules whose form is rare, as strangers write them: what is sharded, and what is refused in a sentence."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import einsum, nn
from torch.linalg import multi_dot
from torch.nn.functional import cross_entropy, ctc_loss, embedding, kl_div, linear, relu
from torch.nn.utils.parametrizations import weight_norm
from transformers import LlamaConfig, LlamaForCausalLM

from autoshard.errors import InputError
from autoshard.modules.capture import capture
from autoshard.modules.shard import shard_module
from autoshard.modules.state.tree import ModuleTree
from tests.modules.comparing import compared, largest_error, random_cuts, run_to_compare
from tests.modules.modules import Own, numbers
from tests.slower import each_third_is_fast

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The tensor attributes self.*_flat_weights",
    "ignore:.*weight_norm", "ignore:The .grad",
)  # fmt: skip


def in_another_order(own: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(own.a(x))
    y = x + own.turned(x.transpose(1, 2)).transpose(1, 2)
    return own.b(y) * y


def chain(own: Any, x: torch.Tensor) -> torch.Tensor:
    """The scores of all paths through a table of transitions, as in a conditional random field."""
    emitted = own.a(x)
    found = emitted[:, 0]
    for step in range(1, emitted.shape[1]):
        found = torch.logsumexp(found[:, :, None] + own.matrix + emitted[:, step, None], 1)
    return found.logsumexp(-1).mean()


def in_windows(own: Any, x: torch.Tensor) -> torch.Tensor:
    """Keys are the tokens that queries are, under another name, which is split where they are read."""
    q, k = own.a(x), own.b(x)
    scores = torch.einsum("btc,bsc->bts", q, k).view(4, 8, 2, 4).softmax(-1)
    return torch.einsum("bts,bsc->btc", scores.reshape(4, 8, 8), k)


def with_hidden(own: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = own.a(x)
    return own.b(hidden), hidden, hidden.mT


def with_part_of_the_loss(own: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    part = own.a(x).pow(2).sum()
    return part + own.b(x).sum(), part


def in_three(own: Any, x: torch.Tensor) -> torch.Tensor:
    """The rows of the first are never those of the last, though they are added to them behind the product."""
    y = own.b(x)
    return einsum("...ij,jk,...kl->...il", own.a(x), own.matrix, y) + y.mT


def of_codebooks(own: Any, x: torch.Tensor) -> torch.Tensor:
    """One table for two codebooks, which the head takes apart."""
    codes = torch.arange(64).view(4, 8, 2) % 16
    return linear(own.a(x) + own.table(codes).sum(2), own.table.weight).view(4, 8, 2, 8).softmax(-1)


def with_positions(own: Any, x: torch.Tensor) -> torch.Tensor:
    """Rows by place, of a table that has as many rows as there are places, and is added as it is too."""
    places = (own.b(x)[0].argsort(0)[:, 0] + 3) % 8
    return own.a(x) + embedding(places, own.matrix) + own.matrix


def with_one_state(own: Any, x: torch.Tensor) -> torch.Tensor:
    """A net over time whose first state is its first cell too."""
    state = own.a(x)[None, :, 0]
    return own.net(x, (state, state))[0]


def of_second_axis(own: Any, x: torch.Tensor) -> torch.Tensor:
    labels = torch.arange(32).view(4, 8) % 8
    of_each = cross_entropy(own.b(x).mT, labels, reduction="none") * (labels > 2)
    return cross_entropy(own.a(x).mT, labels, ignore_index=1, label_smoothing=0.1) + of_each.sum()


def taught(own: Any, x: torch.Tensor) -> torch.Tensor:
    return kl_div(own.a(x).log_softmax(-1), own.b(x).softmax(-1).detach(), reduction="batchmean")


def attend() -> nn.Module:
    return Own(lambda own, q, kv: own.layer(q, kv, kv)[0], layer=nn.MultiheadAttention(8, 2, batch_first=True))


def decode() -> nn.Module:
    return Own(lambda own, x, y: own.layer(x, y), layer=nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True))


_CASES: dict[str, tuple[Callable[[], nn.Module], Sequence[Sequence[int]]]] = {
    "a residual in another order": (lambda: Own(in_another_order, turned=nn.Conv1d(8, 8, 1, bias=False)), [(4, 6, 8)]),
    "a computed weight": (lambda: Own(lambda own, x: linear(x, own.matrix * 2, own.shift)), [(4, 8)]),
    "a weight with a norm": (lambda: nn.Sequential(weight_norm(nn.Linear(8, 8))), [(4, 8)]),
    "cross attention": (attend, [(4, 5, 8), (4, 7, 8)]),
    "a decoder of torch": (decode, [(4, 5, 8), (4, 7, 8)]),
    "a table read in two orders": (lambda: Own(chain), [(4, 6, 8)]),
    "scores in windows": (lambda: Own(in_windows), [(4, 8, 8)]),
    "a product of three": (lambda: Own(lambda own, x: einsum("bi,ij,bj->b", x, own.matrix, own.a(x))), [(4, 8)]),
    "a product with letters alone": (lambda: Own(lambda own, x: einsum("bi,jk->bk", own.a(x), own.matrix)), [(4, 8)]),
    "a product of three with rows twice": (lambda: Own(lambda own, x: multi_dot([own.a(x), own.matrix, x])), [(8, 8)]),
    "a product whose dims are added later": (lambda: Own(in_three), [(4, 8, 8)]),
    "a table of codebooks": (lambda: Own(of_codebooks, table=nn.Embedding(16, 8)), [(4, 8, 8)]),
    "rows of a table that is added": (lambda: Own(with_positions), [(4, 8, 8)]),
    "a state that is a cell": (lambda: Own(with_one_state, net=nn.LSTM(8, 8, batch_first=True)), [(8, 6, 8)]),
    "classes on the second axis": (lambda: Own(of_second_axis), [(4, 8, 8)]),
    "a teacher": (lambda: Own(taught), [(4, 8, 8)]),
    "a recurrent net": (lambda: Own(lambda own, x: own.net(x)[0], net=nn.GRU(8, 8, batch_first=True)), [(4, 6, 8)]),
    "a result that is read": (lambda: Own(with_hidden), [(4, 8)]),
    "a part of the loss": (lambda: Own(with_part_of_the_loss), [(4, 8)]),
    "a weight that is returned": (lambda: Own(lambda own, x: (own.a(x), own.a.weight)), [(4, 8)]),
    "a result that is detached": (lambda: Own(lambda own, x: (own.a(x), own.b(x).detach())), [(4, 8)]),
    "nothing that is trained": (lambda: Own(lambda own, x: own.a(x) + x).requires_grad_(False), [(4, 8)]),
    "no parameters": (lambda: nn.Softmax(-1), [(4, 8)]),
    "gradients off": (lambda: Own(torch.no_grad()(lambda own, x: own.a(x))), [(4, 8)]),
}  # fmt: skip


def of(name: str) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    make, shapes = _CASES[name]
    with_gradient = name != "nothing that is trained"
    return make().double().eval(), [numbers(*shape).detach().requires_grad_(with_gradient) for shape in shapes]


@pytest.mark.parametrize("name", each_third_is_fast(_CASES))
def test_solved_and_random_cuts_give_the_results_and_every_gradient(name: str):
    module, inputs = of(name)
    found = shard_module(module, inputs, "local", "data=2,model=2", precision="fp32")
    assert not found.kept_whole
    errors = {one.name: one.error for one in found.prove(module, inputs)}
    run = run_to_compare(module, inputs)
    trained = {f"{tensor.name}.sum" for tensor in run.traced.block.parameters}
    for seed in range(3):
        drawn = compared(run, random_cuts(run.traced, random.Random(seed)))
        assert {one.name for one in drawn} >= trained
        errors |= {f"{one.name} {seed}": one.error for one in drawn}
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("nothing that is trained", 0), ("gradients off", 0), ("a result that is detached", 2), ("a part of the loss", 4)],
)
def test_gradients_reach_what_they_reach_in_torch(name: str, parameters: int):
    module, inputs = of(name)
    found = shard_module(module, inputs, "local", "data=2,model=2", precision="fp32")
    assert len(found.traced.block.parameters) == parameters


def test_only_what_draws_random_numbers_is_refused_as_random():
    net = nn.GRU(8, 8, num_layers=2, dropout=0.1, batch_first=True).double()
    with pytest.raises(InputError, match="gru draws random numbers"):
        capture(net, [numbers(4, 6, 8)])
    assert capture(net.eval(), [numbers(4, 6, 8)]).program.steps


def test_layouts_that_do_not_fit_are_not_saved(tmp_path: Path):
    found = shard_module(nn.Linear(8, 8), [torch.ones(4, 8)], "local", "data=2,model=2", memory_bytes=1)
    with pytest.raises(InputError, match=r"memory_bytes: nothing fits; the least is [\d,]+ bytes"):
        found.save(tmp_path / "module.json")


def test_a_proof_of_16_bits_is_refused_with_the_remedy():
    module, x = nn.Linear(8, 8).bfloat16(), torch.ones(4, 8, dtype=torch.bfloat16)
    found = shard_module(module, [x], "local", "data=2,model=2")
    with pytest.raises(InputError, match=r"a proof computes in double: give module.double\(\), and such inputs"):
        found.prove(module, [x])


def first_three(own: Any, x: torch.Tensor) -> torch.Tensor:
    return own.a(x[:, :3])


@pytest.mark.parametrize(
    ("module", "options", "says"),
    [
        (Own(first_three), {}, r"in first_three return own.a\(x\[:, :3\]\): cannot be traced: RuntimeError: "),
        (Own(lambda own, x: {own.a(x)}), {}, "module: returns a set, whose parts torch does not know; make it a tuple"),
        (first_three, {}, "module: is <function first_three at .*, and no torch.nn.Module"),
        (nn.Linear(8, 8), {"memory_bytes": "1GB"}, "memory_bytes: is '1GB', and no number of bytes"),
        (nn.Linear(8, 8), {"results": "loss"}, r"results: is one text; write \['loss'\]"),
        (nn.Linear(8, 8), {"pins": {"weight": ["_", "_"]}}, r"pins.weight: is \['_', '_'\], and no text"),
        (nn.Linear(8, 8), {"mesh": {"data": 2.0}}, "mesh: has sizes that are no whole numbers: {'data': 2.0}"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_meant_is_refused_with_its_place(module: Any, options: dict[str, Any], says: str):
    with pytest.raises(InputError, match=says):
        shard_module(module, [torch.ones(4, 8)], "local", **{"mesh": "data=2,model=2", **options})


def by_itself(own: Any, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return function(own.a(x)) * own.b(x).mean()


@pytest.mark.parametrize(
    "function",
    [
        lambda z: linear(z, z),
        lambda z: linear(z, z, z[0]) + linear(z, z[0])[:, None],
        lambda z: torch.nn.functional.mse_loss(z, z.clone()) + torch.nn.functional.mse_loss(z, z),
        lambda z: torch.nn.functional.cross_entropy(z, z),
        lambda z: (lambda cube: torch.nn.functional.conv1d(cube, cube, padding=1))(z[None] * z[:, None]),
        lambda z: z.index_add(0, torch.arange(8) // 2, z),
        lambda z: torch.nn.functional.scaled_dot_product_attention(z, z.exp(), z.sin(), attn_mask=z),
        lambda z: torch.nn.functional.scaled_dot_product_attention(z, z.exp(), z[:, None] + z),
        lambda z: z + z.mean().log_softmax(0) + z[0, 0].sum(-1) * z[0, 0].amax(0),
    ],
)  # fmt: skip
def test_an_operation_may_read_one_tensor_in_two_places_and_tensors_of_other_ranks(function: Callable[..., Any]):
    module = Own(lambda own, x: by_itself(own, function, x)).double()
    assert largest_error(run_to_compare(module, [numbers(8, 8)]), 4) < 1e-12


def worst(module: nn.Module, inputs: Sequence[torch.Tensor]) -> float:
    """Return the largest error of results and gradients on virtual ranks."""
    sharded = shard_module(module, inputs, "local", "data=2,model=2", precision="fp32")
    return max(compared.error for compared in sharded.prove(module, inputs))


@pytest.mark.parametrize("name", ["graph", "code", "class", "1"])
def test_a_parameter_may_have_any_name(name: str):
    module = Own(lambda own, x: relu(own.a(x), inplace=True) * getattr(own, name))
    module.register_parameter(name, nn.Parameter(torch.randn(8)))
    assert worst(module.double(), [numbers(4, 8)]) < 1e-12


def each_row(own: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(linear, in_dims=(0, None))(x, own.matrix)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Own(each_row),
        lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.Tanh()),
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Tanh()).eval(),
    ],
)
def test_functions_over_rows_and_weights_that_hooks_compute_are_sharded(make: Callable[[], nn.Module]):
    module = make().double()
    weight = getattr(module[0], "weight", None) if isinstance(module, nn.Sequential) else None
    assert worst(module, [numbers(4, 6, 8)]) < 1e-12
    if isinstance(module, nn.Sequential):
        assert isinstance(weight, torch.Tensor) and type(module[0].weight) is torch.Tensor


def similar(own: Any, x: torch.Tensor) -> torch.Tensor:
    """The loss of SimCLR, which sees no sample as its pair."""
    z = torch.nn.functional.normalize(own.a(torch.cat([x, own.b(x)])), dim=-1)
    pairs = (torch.arange(len(z)) + len(x)) % len(z)
    return torch.nn.functional.cross_entropy((z @ z.mT).fill_diagonal_(-1e9), pairs)


@pytest.mark.parametrize(
    "function",
    [
        similar,
        lambda own, x: (own.a(x)[:, :3] @ own.matrix[:3]).fill_diagonal_(2, wrap=True) * own.b(x),
        lambda own, x: torch.cat([own.a(x), x, x.mT]).fill_diagonal_(2, wrap=True),
        lambda own, x: torch.cat([own.a(x), x]).fill_diagonal_(2),
        lambda own, x: torch.einsum("bi,bj,bk->ijk", own.a(x), x, x).contiguous().fill_diagonal_(0),
    ],
)
def test_a_diagonal_that_is_filled_may_be_cut(function: Callable[..., Any]):
    module, x = Own(function).double(), numbers(8, 8)
    assert not capture(module, [x]).program.kept_whole
    assert worst(module, [x]) < 1e-12


def test_hidden_states_of_a_module_of_transformers_may_be_asked_for_at_its_first_call():
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    module = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=16, use_cache=False))
    inputs = {"input_ids": torch.zeros(2, 4, dtype=torch.int64), "output_hidden_states": True}
    captured = capture(module, inputs)
    assert {"hidden_states.0", "hidden_states.1"} <= {result.name for result in captured.program.results}
    assert captured.exported.state.difference(ModuleTree.of(module)) is None


@dataclass
class Answer:
    logits: torch.Tensor


def spoken(own: Any, x: torch.Tensor) -> torch.Tensor:
    return ctc_loss(own.a(x).log_softmax(-1)[:, None], torch.tensor([[0, 2, 1]]), torch.tensor([6]), torch.tensor([3]))


def averaged(own: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        own.b.weight.mul_(0.9).add_(own.a.weight, alpha=0.1)
    return own.a(x) + own.b(x)


def forces(own: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_(True)
    return torch.autograd.grad(own.a(x).tanh().sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (spoken, "decides by numbers that only a run knows. A function that autoshard.local marks may do so"),
        (lambda own, x: own.a(x)[x[:, 0] > 0], "index gives numbers or a shape that only a run knows"),
        (lambda own, x: torch.cov(own.a(x)), "decides by numbers that only a run knows"),
        (lambda own, x: own.a(x) * x.max().item(), "mul takes numbers that only a run knows. A function"),
        (lambda own, x: torch.eye(6).to_sparse() @ own.a(x), "is a sparse tensor, which is not supported; give"),
        (lambda own, x: torch.view_as_complex(own.a(x).view(6, 4, 2)).exp().sum(), "complex numbers, .* marks may do"),
        (lambda own, x: torch.func.jvp(own.a, (x,), (x,))[1], "no operation on tensors that autoshard sees into. A f"),
        (lambda own, x: own.a(x) * torch.randn(8, generator=torch.Generator()), "draws with a generator of its own"),
        (lambda own, x: own.a(x) * random.random(), "module: forward draws numbers from Python or numpy, or sets a"),
        (lambda own, x: own.a(x)[:, :4].as_strided((3,), (8,), 5), "as_strided reads memory between or beside the"),
        (lambda own, x: own.a(x).as_strided((3,), (8,)).add_(1), "a result of as_strided is changed in place, which"),
        (lambda own, x: own.a(x).as_strided((7, 8), (8, 1)), "as_strided|out of bounds"),
        (lambda own, x: Answer(own.a(x)), r"returns a .*Answer, whose .* call torch.export.register_dataclass\(Answer"),
        (lambda own, x: x > 0, "module: returns no tensor that follows from a parameter, or an input with a gradient"),
        (
            forces,
            "module: takes a gradient inside of forward, or another function that torch cannot trace; write it as op",
        ),
        (
            lambda own, x: torch.func.jacrev(own.a)(x),
            "module: takes a gradient inside of forward, .*; write it as operations",
        ),
        (averaged, "module: changes its parameter b.weight in place; make it a buffer"),
        (
            lambda own, x: own.a(x) + embedding(torch.arange(6), own.b.weight, max_norm=1.0),
            "changes its parameter b.weight in place; give its embedding no max_norm, and scale the rows",
        ),
        (lambda own, x: own.a(x.add_(1)), "module: changes its input .* in place; let it change a clone"),
        (lambda own, x: None, "module: returns no tensor that follows from a parameter"),
    ],
)
def test_what_no_program_holds_is_refused_with_a_remedy(function: Callable[..., Any], says: str):
    with pytest.raises(InputError, match=says):
        shard_module(Own(function), [torch.randn(6, 8)], "local", "data=2,model=2")
