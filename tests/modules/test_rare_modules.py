"""Modules whose form is rare: computed weights, tensors in another order, results that are read or constant."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import einsum, nn
from torch.linalg import multi_dot
from torch.nn.functional import cross_entropy, embedding, kl_div, linear
from torch.nn.utils.parametrizations import weight_norm

from autoshard.errors import InputError
from autoshard.modules.capture import capture
from autoshard.modules.shard import shard_module
from tests.modules.comparing import compared, largest_error, random_cuts, run_to_compare
from tests.modules.modules import Own, numbers
from tests.slower import each_third_is_fast

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The tensor attributes self.*_flat_weights"
)


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
