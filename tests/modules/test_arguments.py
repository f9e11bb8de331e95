"""Operations and their arguments: each that torch knows is read, or keeps its operation whole, or is refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import relu

from autoshard.engine.torch.recording import Recording
from autoshard.errors import InputError
from autoshard.modules.capture import _IGNORED, _SAME, capture  # pyright: ignore[reportPrivateUsage]
from autoshard.modules.nodes import fill_slots
from autoshard.modules.rewriting import complex_numbers, randomness
from autoshard.modules.rewriting.parts import part_of
from autoshard.modules.rules import RULES
from autoshard.modules.rules.arguments import PLACING, READ, SPARSE
from autoshard.modules.running.functions import FunctionWriter
from autoshard.modules.shard import shard_module
from tests.modules.modules import Own

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
OF_TORCH = {name for name in (*RULES, *_SAME) if "::" not in name}  # not an operation of a library
# Of these the operation is kept whole, or cut as probing finds.
UNREAD = {
    ("addmm", "out_dtype"), ("baddbmm", "out_dtype"), ("bmm", "out_dtype"), ("mm", "out_dtype"), ("view", "dtype"),
    ("_grouped_mm", "bias"), ("_grouped_mm", "out_dtype"),
}  # fmt: skip


def schemas() -> Iterator[tuple[str, Any]]:
    """Yield the schemas of functions of tensors that have a rule."""
    for name in sorted(OF_TORCH):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            schema = getattr(packet, overload)._schema
            gives = {str(one.type) for one in schema.returns}
            takes = {str(one.type) for one in schema.arguments}
            of_tensors = gives <= {"Tensor", "List[Tensor]"} and takes & {"Tensor", "List[Tensor]"}
            of_lists = any(one.name in ("a", "l", "el", "list") or "Dict" in str(one.type) for one in schema.arguments)
            if of_tensors and not of_lists and not schema.is_mutable and "out" not in overload:
                yield name, schema


def test_every_argument_that_torch_knows_is_read_or_keeps_its_operation_whole():
    found = {(name, one.name) for name, schema in schemas() for one in schema.arguments}
    known = {(name, argument) for name, own in READ.items() for argument in own}
    unknown = {pair for pair in found - known if pair[1] not in PLACING | SPARSE} - UNREAD
    assert not unknown, "write them into a rule and into rules/arguments.py, or into UNREAD"
    assert not known - found - {("detach", "self"), *(("fill", one) for one in ("self", "value"))}, "torch lacks them"
    assert {*READ} >= OF_TORCH


def test_an_argument_that_a_new_torch_has_is_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.modules.test_arguments.READ", {**READ, "softmax": READ["softmax"] - {"dtype"}})
    with pytest.raises(AssertionError, match="softmax"):
        test_every_argument_that_torch_knows_is_read_or_keeps_its_operation_whole()


class Table(nn.Module):
    """Takes rows of a table, most of them more than once."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.e, self.a = nn.Embedding(5, 8, **options), nn.Linear(8, 8)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.a(self.e(index))


@pytest.mark.parametrize("options", [{}, {"scale_grad_by_freq": True}, {"padding_idx": 1}])
def test_rows_of_a_table_have_the_gradient_of_the_whole_batch(options: dict[str, Any]):
    index = torch.arange(32).reshape(8, 4) % 5
    module = Table(**options).double()
    found = shard_module(module, [index], "h100-80", "data=8", pins={"a.weight": "[_, _]"})
    assert max(one.error for one in found.prove(module, [index])) < 1e-12


class Of(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function, self.a = function, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self.function(self.a(x), index)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, index: F.embedding(index, x, sparse=True),
        lambda x, index: torch.gather(x, 0, index[:, None].expand(-1, 8), sparse_grad=True),
        lambda x, index: x.relu().to_sparse().to_dense(),
    ],
)
def test_what_is_sparse_is_refused_with_its_line(function: Any):
    with pytest.raises(InputError, match=r"sparse.*\n?") as caught:
        capture(Of(function), [torch.ones(8, 8), torch.arange(4)])
    assert "test_arguments.py" in str(caught.value)


@torch.library.custom_op("autoshard_tests::relu6", mutates_args=())
def named_apart(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("autoshard_tests::softmax", mutates_args=())
def named_alike(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.softmax(0)


@pytest.mark.parametrize("function", [named_apart, named_alike])
def test_a_users_operation_is_no_operation_of_torch_because_of_its_name(function: Any):
    function.register_fake(lambda x, *_: torch.empty_like(x))
    given = (1,) if function is named_alike else ()
    captured = capture(Of(lambda x, _: function(x, *given)), [torch.ones(8, 8), torch.arange(4)])
    (line,) = captured.program.kept_whole
    assert "autoshard_tests" in line


@torch.library.custom_op("autoshard_tests::exp", mutates_args=())
def with_self(self: torch.Tensor) -> torch.Tensor:
    return self.clone() - 1


@pytest.mark.parametrize("function", [named_apart, named_alike, with_self])
def test_a_users_operation_is_called_in_written_functions_by_its_own_name(function: Any):
    function.register_fake(lambda x, *_: torch.empty_like(x))
    given = (1,) if function is named_alike else ()
    recording = Recording()
    with FakeTensorMode(), torch.no_grad():
        x = recording.name(torch.empty(3, 4))
        with recording:
            result = function(x, *given) * 2
    part = FunctionWriter(device=torch.device("cpu")).function(recording.operations, [result])
    numbers = torch.randn(3, 4)
    assert torch.equal(part.run([numbers])[0], function(numbers, *given) * 2)


def test_a_tensor_that_lies_otherwise_in_memory_than_torch_said_is_viewed():
    recording = Recording()
    with FakeTensorMode(), torch.no_grad():
        upstream, x = recording.name(torch.empty(4, 6, 8)), recording.name(torch.empty(6, 4, 8).transpose(0, 1))
        with recording:
            gradient = torch.ops.aten.softplus_backward.default(upstream, x, 1, 20)
            result = gradient.transpose(0, 1).view(6, 32) if gradient.stride() == x.stride() else gradient.view(24, 8)
    assert result.dim() == 2
    part = FunctionWriter(device=torch.device("cpu")).function(recording.operations, [result])
    for turned in (False, True):
        inputs = [torch.randn(4, 6, 8), torch.randn(4, 6, 8)]
        expected = torch.ops.aten.softplus_backward.default(*inputs, 1, 20)
        if result.shape[0] == 6:
            expected = expected.transpose(0, 1)
        laid = [one.mT.contiguous().mT if turned else one for one in inputs]
        by_id = dict(zip((id(upstream), id(x)), laid, strict=True))
        (found,) = part.run([by_id[id(read)] for read in part.reads])
        assert torch.allclose(found, expected.reshape(result.shape))


def bits(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return x * (x.detach().view(torch.int64) > 0)


def parts(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:, -100:4], x[:, -4:], x[:, 1:7:2], x[:, 2:100]], dim=1)


@pytest.mark.parametrize("function", [bits, parts])
def test_arguments_out_of_the_ordinary_are_right(function: Any):
    module, inputs = Of(function).double(), [torch.randn(8, 8, dtype=torch.float64), torch.arange(4)]
    found = shard_module(module, inputs, "h100-80", "data=8")
    assert max(one.error for one in found.prove(module, inputs)) < 1e-12


NAMES = sorted(
    name
    for name in {*RULES, *_SAME, *_IGNORED, "detach", "fill", *randomness._WRITTEN, *complex_numbers._WRITTEN}
    if "::" not in name
)


def define(name: str, factor: float) -> None:
    """Give running sums along the first dim, which a cut of that dim changes, a name of torch."""

    def running(x: torch.Tensor) -> torch.Tensor:
        return factor * x.cumsum(0)

    def back(_: object, upstream: torch.Tensor) -> torch.Tensor:
        return factor * upstream.flip(0).cumsum(0).flip(0)

    operation = torch.library.custom_op(f"names_of_torch::{name}", running, mutates_args=())
    operation.register_fake(torch.empty_like)
    operation.register_autograd(back)


class Named(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        return sum((getattr(torch.ops.names_of_torch, name)(y) for name in NAMES), torch.zeros_like(y))


def test_an_operation_of_a_user_with_a_name_of_torch_is_computed_as_the_user_wrote_it() -> None:
    for number, name in enumerate(NAMES):
        define(name, 1 + number / len(NAMES))
    x = torch.randn(16, 8, dtype=torch.float64, requires_grad=True)
    module = Named()
    found = shard_module(module, [x], "h100-80", "dp=8", batch="dp")
    assert max(part.error for part in found.prove(module, [x])) < 1e-12


ROWS, COLUMNS = torch.tensor([0, 2, 1]), torch.tensor([1, 1, 3])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x[:, ROWS, COLUMNS] * y,
        lambda x, y: x[ROWS, :, COLUMNS] * y[:3, :1],
        lambda x, y: torch.ops.aten.index_put.default(x * 2, [None, ROWS, COLUMNS], y),
        lambda x, y: torch.ops.aten.index_put.default(x * 2, [ROWS, None, COLUMNS], y[:3, :1], True),
    ],
)
def test_rows_that_are_taken_along_inner_dims_are_written_as_torch_takes_them(function: Callable[..., torch.Tensor]):
    recording, given = Recording(), (torch.randn(5, 4, 5), torch.randn(5, 3))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        x, y = (recording.name(torch.empty(tensor.shape)) for tensor in given)
        with recording:
            result = function(x, y)
    part = FunctionWriter(device=torch.device("cpu")).function(recording.operations, [result])
    values = dict(zip((id(x), id(y)), given, strict=True))
    inputs = [values.get(id(read), read) for read in part.reads]
    assert torch.equal(part.run(inputs)[0], function(*given))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.as_strided((3, 2, 4), (8, 4, 1)),
        lambda x: x.T.as_strided((5, 4), (2, 4)),
        lambda x: x.T.as_strided((6, 3), (4, 1), 8),
        lambda x: x.view(1, 4, 4, 3, 1),
        lambda x: torch.ops.aten._unsafe_view.default(x, [16, 3]),
    ],
)
def test_numbers_are_where_the_module_had_them_however_a_rank_holds_its_tensor(function: Callable[..., torch.Tensor]):
    module, x = Own(lambda own, x: function(own.a(x))), torch.randn(6, 8)
    captured = capture(module, [x])
    step = next(step for step in captured.program.steps if step.whole)
    h = torch.arange(48.0).view(6, 8)
    turned = h if step.reads[0].value.positions == step.reads[0].positions else h.T
    for laid in (turned, turned.T.contiguous().T):
        given = fill_slots(step.arguments, [laid])
        assert torch.equal(step.function(*given), function(h))


def test_inputs_of_a_call_may_lie_in_memory_otherwise_than_the_examples():
    def forward(own: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return relu(own.a(x), inplace=True) * y.reshape(-1, 8)

    captured = capture(Own(forward), [torch.ones(6, 8), torch.ones(3, 2, 8)])
    (node,) = (node for node in captured.inputs.values() if node.op == "call_function")
    y = torch.randn(2, 3, 8).transpose(0, 1)
    part = part_of(captured.exported.program.graph_module, [node])
    places = [each for each in part.graph.nodes if each.op == "placeholder"]
    assert torch.equal(part(*[y if place is places[-1] else None for place in places])[0], y.reshape(-1, 8))
