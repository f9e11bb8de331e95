"""What users' modules and loops do beside layers: hooks, losses of several results, copies, buffers of any form."""

import copy
import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoshard.errors import InputError
from autoshard.modules.sharded import shard
from tests.ranks.spawn import each_rank, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), 1.0

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(torch.tanh(self.a(x))) / self.scale


class WithLoss(Layers):
    """Returns numbers and a loss of its own, as a mixture of experts does."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, y.pow(2).mean()


def made(kind: type[nn.Module] = Layers) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def batch() -> torch.Tensor:
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def worst(plain: nn.Module, module: nn.Module, loss: Callable[[Any], torch.Tensor] = torch.sum) -> float:
    """Return the largest difference of losses and of gradients."""
    losses = [loss(one(batch())) for one in (plain, module)]
    for one in losses:
        one.backward()  # pyright: ignore[reportUnknownMemberType]
    pairs = zip(plain.parameters(), module.parameters(), strict=True)
    return max(
        float((losses[0] - losses[1]).detach().abs()),
        *(
            float((one.grad - cast(Any, own.grad).full_tensor()).abs().max())
            for one, own in pairs
            if one.grad is not None
        ),
    )


def both(kind: type[nn.Module] = Layers, prepare: Callable[[Any], object] = id, **options: Any) -> tuple[Any, Any]:
    plain, module = made(kind), made(kind)
    for one in (plain, module):
        prepare(one)
    return plain, shard(module, [batch()], "data=2", **options)


def times_2(_: nn.Module, __: Any, found: torch.Tensor) -> torch.Tensor:
    return found * 2


def twice(module: Layers) -> None:
    module.register_forward_hook(times_2)


def twice_inside(module: Layers) -> None:
    module.a.register_forward_hook(times_2)


def gradient_times_3(module: Layers) -> None:
    module.a.weight.register_hook(lambda gradient: gradient * 3)


@each_rank(2)
def test_hooks_are_called_as_in_the_plain_module():
    for hook in (twice, twice_inside, gradient_times_3):
        assert worst(*both(prepare=hook)) < 1e-12, hook
    plain, module = both()
    assert worst(plain, module) < 1e-12
    for one in (plain, module):
        twice_inside(one)
        one.zero_grad()
    assert worst(plain, module) < 1e-12


def backward_hook(module: Layers) -> None:
    module.b.register_full_backward_hook(lambda *_: None)


class Hooked(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.a(x)
        y.register_hook(lambda gradient: gradient * 7)
        return self.b(y)


class Checkpointed(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        return self.b(checkpoint(self.a, self.b(x), use_reentrant=True))


@each_rank(2)
def test_what_backward_would_leave_out_is_refused_with_its_place():
    cases: list[tuple[type[Layers], Callable[[Any], object], str]] = [
        (Layers, backward_hook, "module: b: has a hook of its backward pass"),
        (Hooked, id, "y.register_hook(lambda gradient: gradient * 7): the hook of a tensor would not be called"),
        (Checkpointed, id, "use_reentrant=True)): CheckpointFunction has a backward pass of its own, which is not "
                           "traced; give checkpoint use_reentrant=False"),
    ]  # fmt: skip
    for kind, prepare, says in cases:
        with pytest.raises(InputError, match=re.escape(says)):
            both(kind, prepare)
    _, module = both()
    with pytest.raises(InputError, match="module: is sharded already"):
        shard(module, [batch()], "data=2")


class Around(nn.Module):
    """Puts a checkpoint around a module, which keeps its values itself when it is sharded."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        result: Any = checkpoint(self.inner, x, use_reentrant=False)
        return result


class Curved(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.gelu(super().forward(x))


@each_rank(2)
def test_a_checkpoint_may_be_around_a_sharded_module():
    plain, module = both(Curved)
    assert worst(Around(plain), Around(module)) < 1e-12


def of_both(found: Any) -> torch.Tensor:
    return found[0].abs().mean() + found[1]


@each_rank(2)
def test_gradients_begin_at_all_results_that_are_named():
    assert worst(*both(WithLoss, results=["0", "1"]), of_both) < 1e-12


@each_rank(2)
def test_a_loss_of_a_result_without_a_gradient_is_refused_with_the_remedy():
    _, module = both(WithLoss)
    with pytest.raises(RuntimeError, match=r"begin at 1, not at 0; shard it with results=\['1', '0'\]"):
        of_both(module(batch())).backward()  # pyright: ignore[reportUnknownMemberType]


@each_rank(2)
def test_gradients_of_gradients_are_refused():
    _, module = both()
    x = batch().requires_grad_()
    with pytest.raises(RuntimeError, match="no gradients of gradients; leave create_graph=True out"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).pow(2).mean()


@each_rank(2)
def test_a_loss_may_be_a_sum_over_parts_of_the_batch():
    module, x = made(Mean), torch.ones(1024, 512, dtype=torch.float64)
    wanted = module(x)
    sharded: Any = shard(module, [x], "data=2")
    (tensor,) = sharded.autoshard.first.traced.block.gives
    assert sharded.autoshard.first.program.program.results[tensor].layout.sums, "the solver cuts the batch"
    assert float((sharded(x) - wanted).detach().abs()) < 1e-12


@each_rank(2)
def test_a_number_that_a_module_has_may_change():
    plain, module = both()
    for one in (plain, module):
        one.scale = 0.5
    assert worst(plain, module) < 1e-12


@each_rank(2)
def test_a_copy_has_weights_of_its_own():
    plain, module = both()
    other = copy.deepcopy(module)
    with torch.no_grad():
        module.a.weight.zero_()
    assert worst(plain, other) < 1e-12


class Masked(nn.Module):
    """Buffers that lie in memory in every way, with other numbers on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.a, whole = nn.Linear(6, 6), torch.arange(96.0).reshape(8, 12) + dist.get_rank()
        for name, one in {
            "sliced": whole[:, ::2],
            "left": whole[:, :6],
            "turned": whole[:6].T[:8, :6],
            "wide": whole[0, :6].expand(8, 6),
            "short": torch.full((8, 6), dist.get_rank(), dtype=torch.int16),
        }.items():
            self.register_buffer(name, one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.buffers():
            x = x + x * one
        return self.a(x)


def buffers_of_ranks() -> dict[str, list[float]]:
    module = shard(Masked(), [torch.ones(8, 6)], "data=2")
    return {name: one.double().flatten().tolist() for name, one in module.named_buffers()}


def test_all_ranks_have_the_buffers_of_the_first_one():
    first, second = on_ranks(2, buffers_of_ranks)
    whole = torch.arange(96.0).reshape(8, 12)
    assert first == second
    assert first["sliced"] == whole[:, ::2].flatten().tolist() and first["short"] == [0.0] * 48
    assert first["wide"] == whole[0, :6].repeat(8).tolist()
