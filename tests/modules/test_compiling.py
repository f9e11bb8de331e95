"""Sharded modules in compiled functions: the numbers of the plain module, one compilation of equal layers."""

import copy
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, cast

import pytest
import torch

import autoshard.modules.running.capturing as capturing
import autoshard.modules.running.functions as functions
from autoshard.modules.local import local
from autoshard.modules.sharded import ShardedModule, shard
from autoshard.run.protocol import EngineMode
from autoshard.runtime.machine import missing_compiler
from tests.modules.comparing import cut_on_ranks, devices_of, difference
from tests.modules.modules import MODULES, SINGLE
from tests.modules.test_sharded import traced
from tests.ranks.spawn import each_rank, on_ranks
from tests.slower import rest_is_slow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
compiler = pytest.mark.skipif(bool(missing_compiler("cpu")), reason="no compiler here")


def as_they_are(_: torch.device) -> Callable[..., Any]:
    return lambda piece, _: piece


def differences(names: Sequence[str], mode: EngineMode) -> dict[str, float]:
    devices, found = devices_of("a=2"), dict[str, float]()
    for name in names:
        whole, inputs, sharding = traced(name, "a=2")
        plain = copy.deepcopy(whole)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*(without being compiled|step by step)")
            module = cut_on_ranks(copy.deepcopy(whole), sharding, 0, devices, mode=mode)
            found[name] = difference(plain, module, inputs)
        with torch.no_grad():
            wanted, own = plain(*inputs), module(*inputs)
        found[f"{name} alone"] = float((wanted - own).abs().max() / wanted.abs().max())
    return found


def hold(names: Sequence[str], mode: EngineMode) -> None:
    for found in on_ranks(2, differences, names, mode, timeout_s=600):
        wrong = {
            name: one for name, one in found.items() if one > (1e-6 if name.removesuffix(" alone") in SINGLE else 1e-11)
        }
        assert not wrong and len(found) == 2 * len(names), wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [tuple(MODULES)[3::12], pytest.param(tuple(MODULES), marks=[pytest.mark.slow, pytest.mark.thorough])]
)
def test_steps_without_functions_compute_what_the_plain_module_does(names: Sequence[str]):
    hold(names, "literal")


_COMPILED = (
    "Llama layer", "square weight with residual", "mixture of experts by slots", "convnet, batch norm in training",
)  # fmt: skip


@compiler
@pytest.mark.parametrize("name", rest_is_slow(_COMPILED, 0))
def test_compiled_modules_compute_what_the_plain_module_does(name: str):
    hold([name], "compiled")


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def stack(layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Layer() for _ in range(layers))).double()


def batch() -> torch.Tensor:
    return torch.randn(4, 6, 8, dtype=torch.float64)


def num_compiled(layers: int) -> tuple[float, int]:
    """The difference from the plain module, and how many functions were compiled."""
    module, x = stack(layers), batch()
    plain, given = copy.deepcopy(module), list[object]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "compiler_of", lambda _: lambda piece, _: given.append(piece) or piece)
        worst = difference(plain, shard(module, [x], "a=2", compile=True), [x])
    return worst, len(given)


@pytest.mark.slow
def test_equal_layers_are_compiled_once():
    few, many = on_ranks(2, num_compiled, 3), on_ranks(2, num_compiled, 5)
    assert max(worst for worst, _ in (*few, *many)) < 1e-12
    assert [count for _, count in few] == [count for _, count in many]
    assert few[0][1] > 0


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("compile_fx_inner", "a part of the module runs without being compiled: no such machine"),
        ("Recording", "the module runs step by step, without functions: no such machine"),
    ],
)
@each_rank(1)
def test_what_is_not_compiled_runs_as_it_is_with_one_warning(place: str, says: str):
    def fail(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no such machine")

    module, x = stack(2), batch()
    plain = copy.deepcopy(module)
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing if place == "Recording" else import_module("torch._inductor.compile_fx"), place, fail)
        warnings.simplefilter("default")
        worst = difference(plain, shard(module, [x], "a=1", compile=True), [x])
    assert worst < 1e-12, "the numbers are right"
    assert [str(one.message) for one in caught if "the module" in str(one.message)] == [says]


@local("batch seq _ -> batch seq _")
def damped(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    while float(y.detach().abs().max()) > 1:
        y = torch.where(y.abs() > 1, y * 0.5, y)
    return y


class Damped(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return damped(super().forward(x))


@each_rank(2, replaced=[(functions, "compiler_of", as_they_are)])
def test_a_function_that_the_user_marks_is_called_as_it_is():
    torch.manual_seed(0)
    module, x = Damped().double(), batch()
    plain = copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*without being compiled")
        assert difference(plain, shard(module, [x], "a=2", compile=True), [x]) < 1e-12


def most_values(layers: int) -> int:
    """How many values there are at most at once in the backward pass, besides gradients of parameters."""
    passes = cast(ShardedModule, shard(stack(layers), [batch()], "a=1")).autoshard.first.program.trained
    alive, most = set[str](), 0
    for step in passes.backward:
        alive |= {*step.writes} - {*passes.gradients}
        most = max(most, len(alive))
        alive -= {*step.drops}
    return most


@each_rank(1)
def test_gradients_of_activations_are_not_kept_until_the_end_of_backward():
    assert most_values(3) == most_values(6)
