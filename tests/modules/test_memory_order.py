"""Numbers of a rank may lie in memory otherwise than those of the module that was traced."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import relu

from autoshard.engine.torch.recording import Recording
from autoshard.modules.capture import capture
from autoshard.modules.nodes import fill_slots
from autoshard.modules.rewriting.parts import part_of
from autoshard.modules.running.functions import FunctionWriter
from tests.modules.modules import Own

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
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
