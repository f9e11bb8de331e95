"""Modules as strangers write them: names, hooks, functions of functions, and what is refused in a sentence."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import ctc_loss, linear, relu
from transformers import LlamaConfig, LlamaForCausalLM

from autoshard.errors import InputError
from autoshard.modules.capture import capture
from autoshard.modules.shard import shard_module
from autoshard.modules.state.tree import ModuleTree
from tests.modules.modules import Own, numbers

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*weight_norm", "ignore:The .grad"
)


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
        (lambda own, x: own.a(x.add_(1)), "module: changes its input .* in place; let it change a clone"),
        (lambda own, x: None, "module: returns no tensor that follows from a parameter"),
    ],
)
def test_what_no_program_holds_is_refused_with_a_remedy(function: Callable[..., Any], says: str):
    with pytest.raises(InputError, match=says):
        shard_module(Own(function), [torch.randn(6, 8)], "local", "data=2,model=2")
