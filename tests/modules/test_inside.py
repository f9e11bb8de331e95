"""What a module does inside: autocast on or off, results of classes of its own, numbers that only a run knows."""

import multiprocessing
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as tree

from autoshard.errors import InputError
from autoshard.modules.capture import capture
from autoshard.modules.shard import shard_module
from autoshard.modules.sharded import shard
from tests.ranks.spawn import each_rank

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


class Inside(nn.Module):
    """Calls a function of its layers, of numbers and of places."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.a, self.b = function, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> Any:
        return self.function(self, self.a(x), places)


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.linspace(-1, 1, 64, dtype=dtype).reshape(8, 8), torch.arange(8) % 4]


def switched_off(m: Any, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        factor = m.b(y).softmax(-1)
    with torch.autocast("cpu", enabled=False):
        return m.b(y * factor).softmax(-1)


def switched_on(m: Any, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.b(y).float()


def of_another_device(m: Any, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", enabled=False):
        return m.b(y).softmax(-1)


@pytest.mark.parametrize("function", [switched_off, of_another_device])
def test_autocast_off_inside_changes_nothing_where_it_is_off_around(function: Any):
    module = Inside(function).double()
    found = shard_module(module, inputs(), "h100-80", "data=8")
    assert max(one.error for one in found.prove(module, inputs())) < 1e-12 and not found.kept_whole


def of_constants(m: Any, y: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        angles = places[:, None].to(y.dtype) @ torch.ones(1, 8, dtype=y.dtype) / 3
    return m.b(y) * angles.sin()


def gradients_off(m: Any, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        factor = m.b(y)
        with torch.no_grad():
            factor = factor + m.b(y)
    return y * factor


def test_gradients_that_are_switched_inside_of_autocast_are_refused_with_their_line():
    with pytest.raises(InputError, match=r"test_inside.py.* with torch.no_grad\(\):: gradients are switched inside"):
        shard_module(Inside(gradients_off), inputs(torch.float32), "h100-80", "data=8")


def switched_on_twice(m: Any, y: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return switched_on(m, y, places) * 2


@pytest.mark.parametrize("function", [switched_on_twice, of_constants])
@each_rank(2)
def test_autocast_as_around_the_module_rounds_alike_and_is_off_in_what_depends_on_no_parameter(function: Any):
    rows: list[torch.Tensor] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module = shard(Inside(function), inputs(torch.float32), "data=2")
    for one, casts in ((Inside(function), False), (Inside(function), True), (module, True)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
            result: Any = one(*inputs(torch.float32))
        result.square().sum().backward()
        whole: list[Any] = [getattr(own.grad, "full_tensor", lambda own=own: own.grad)() for own in one.parameters()]
        rows.append(torch.cat([result.detach().flatten(), *(own.flatten() for own in whole)]).double())
    exact, plain, sharded = rows
    far, moved = (float((one - plain).norm() / exact.norm()) for one in (sharded, exact))
    assert far < moved < 0.1 and moved > 1e-4


@pytest.mark.parametrize(
    ("function", "around", "says"),
    [
        (switched_on, False, "runs with autocast to bfloat16 inside of a module that is called with autocast off"),
        (switched_off, True, "runs with autocast off inside of a module that is called with autocast to bfloat16"),
    ],
)
def test_autocast_other_than_around_the_module_is_refused_with_its_line(function: Any, around: bool, says: str):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around), pytest.raises(InputError) as caught:
        capture(Inside(function), inputs(torch.float32))
    assert says in str(caught.value) and "test_inside.py" in str(caught.value)


@dataclass
class Made:
    """A result that torch takes apart without names, as those of diffusers."""

    sample: torch.Tensor
    loss: torch.Tensor


def made_known() -> None:
    if Made not in tree.SUPPORTED_NODES:
        tree.register_pytree_node(Made, lambda one: ([one.sample, one.loss], None), lambda parts, _: Made(*parts))


def with_own_class(m: Any, y: torch.Tensor, _: torch.Tensor) -> Made:
    return Made(m.b(y), y.square().mean())


@each_rank(2)
def test_a_result_of_a_class_without_names_is_made_again():
    made_known()
    plain, module = Inside(with_own_class), shard(Inside(with_own_class), inputs(torch.float32), "data=2")
    wanted, found = (one(*inputs(torch.float32)) for one in (plain, module))
    found.loss.backward()
    assert max(float((getattr(wanted, key) - getattr(found, key)).abs().max()) for key in ("sample", "loss")) < 1e-6
    assert type(found) is Made


def decides(m: Any, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return m.b(y) if y.sum() > 0 else y


def test_only_the_refusal_is_said_of_what_only_a_run_knows(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(InputError, match=r"if y.sum\(\) > 0 else y: decides by numbers that only a run knows"):
        capture(Inside(decides), inputs())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "function",
    [
        lambda m, y, places: (y * torch.bincount(places, minlength=8)).sum(),
        lambda m, y, places: y.sum() * torch.bincount(places, minlength=16),
        lambda m, y, places: torch.cat([y.sum()[None], torch.bincount(places, minlength=16) * 1.0]).sum(),
    ],
)
def test_a_length_that_only_a_run_knows_is_refused_with_its_line(function: Any):
    with pytest.raises(InputError, match=r"test_inside.py.*that only a run knows|what only a run knows") as caught:
        capture(Inside(function), inputs())
    assert "test_inside.py" in str(caught.value)


def sharded_alone(port: int) -> None:
    """Shard over more ranks than there are, as a script of torchrun does: the mesh makes the group."""
    names = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        shard(Inside(decides), inputs(torch.float32), "data=2,model=2")


def too_few() -> str:
    with pytest.raises(InputError) as caught:
        sharded_alone(0)  # any port that is free
    return str(caught.value)


def at_a_port_in_use() -> str:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        with pytest.raises(dist.DistNetworkError) as caught:
            sharded_alone(used.getsockname()[1])
    return str(caught.value)


def said_by(body: Callable[[], str]) -> str:
    """Call a function in a process of its own: torch counts groups that could not begin, and waits for them."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply_async(body).get(timeout=300)


def test_too_few_ranks_are_counted_also_where_the_mesh_makes_their_group():
    said = said_by(too_few)
    assert said == "mesh: 4 ranks do not run here (1 do); start as many: torchrun --nproc-per-node 4 SCRIPT"


def test_a_group_that_cannot_begin_says_what_torch_says_and_nothing_of_ranks():
    assert "EADDRINUSE" in said_by(at_a_port_in_use)
