"""Optimizers on parts: the numbers of torch's own, in step, groups, hooks and state."""

import copy
from typing import Any, cast

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.errors import InputError
from autoshard.modules.sharded import shard
from tests.modules.test_compiling import batch, stack
from tests.ranks.spawn import each_rank

KINDS: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9},
    torch.optim.Adam: {"lr": 0.1, "amsgrad": True},
    torch.optim.AdamW: {"lr": 0.1, "foreach": True},
    torch.optim.Adamax: {"lr": 0.1},
    torch.optim.NAdam: {"lr": 0.1},
    torch.optim.RAdam: {"lr": 0.1},
    torch.optim.Adagrad: {"lr": 0.1, "initial_accumulator_value": 0.5},
    torch.optim.Adadelta: {"lr": 0.1},
    torch.optim.RMSprop: {"lr": 0.1, "momentum": 0.5, "centered": True},
    torch.optim.Rprop: {"lr": 0.1},
    torch.optim.ASGD: {"lr": 0.1, "t0": 1},
}


def backward(module: torch.nn.Module, x: torch.Tensor) -> None:
    module.zero_grad()
    module(x).square().mean().backward()


@pytest.mark.slow
@each_rank(2)
def test_every_optimizer_gives_the_numbers_of_torch():
    """With hooks, and a schedule that both read."""
    for kind, options in KINDS.items():
        plain, x = stack(2), batch()
        module, calls = shard(copy.deepcopy(plain), [x], "a=2"), list[object]()
        groups, wanted_groups = (
            [{"params": [*layer.parameters()], "lr": lr} for layer, lr in zip(one.children(), (0.05, 0.1), strict=True)]
            for one in (module, plain)
        )
        optimizer = autoshard.sharded_optimizer(kind, groups, **options)
        wanted = cast(Any, kind)(wanted_groups, **options)
        optimizer.register_step_post_hook(lambda *given, calls=calls: calls.append(given))
        schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (optimizer, wanted)]
        for _ in range(3):
            for one, own, schedule in zip((module, plain), (optimizer, wanted), schedules, strict=True):
                backward(one, x)
                own.step()
                schedule.step()
        assert len(calls) == 3 and isinstance(optimizer, kind)
        pairs = zip(module.parameters(), plain.parameters(), strict=True)
        assert max(float((cast(DTensor, one).full_tensor() - own).abs().max()) for one, own in pairs) < 1e-12, kind
        moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        assert all(isinstance(value, DTensor) for value in moments)


@each_rank(2)
def test_the_state_is_saved_and_loaded_as_that_of_torch():
    """After two steps, where others were taken before; one more step of both is the same."""
    plain, x = stack(2), batch()
    modules = [shard(copy.deepcopy(plain), [x], "a=2") for _ in range(2)]
    optimizers = [autoshard.sharded_optimizer(torch.optim.AdamW, one.parameters(), lr=0.1) for one in modules]
    for number in (0, 0, 1, 1, 1):
        backward(modules[number], x)
        optimizers[number].step()
    modules[1].load_state_dict(modules[0].state_dict())
    state = copy.deepcopy(get_optimizer_state_dict(modules[0], optimizers[0]))  # of which torch copies nothing
    set_optimizer_state_dict(modules[1], optimizers[1], state)
    for module, optimizer in zip(modules, optimizers, strict=True):
        backward(module, x)
        optimizer.step()
    pairs = zip(*(one.parameters() for one in modules), strict=True)
    assert all(
        torch.equal(cast(DTensor, one).full_tensor(), cast(DTensor, other).full_tensor()) for one, other in pairs
    )


@each_rank(2)
def test_a_closure_is_called_before_the_step():
    """It computes gradients of the parameters themselves."""
    module, x = shard(stack(1), [batch()], "a=2"), batch()
    optimizer = autoshard.sharded_optimizer(torch.optim.SGD, module.parameters(), lr=0.1)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = module(x).square().mean()
        found.backward()
        return found

    first = float(cast(Any, optimizer).step(loss))
    assert float(cast(Any, optimizer).step(loss)) < first


def test_an_optimizer_that_needs_whole_parameters_is_refused():
    with pytest.raises(InputError, match="kind: is LBFGS, which may need whole parameters; these do not: SGD, Adam"):
        autoshard.sharded_optimizer(torch.optim.LBFGS, stack(1).parameters())
