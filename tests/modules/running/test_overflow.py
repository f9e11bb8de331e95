"""Gradients in FP16 that overflow in the part of one rank: all ranks leave the step out, or none."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.modules.running.optimizer import sharded_optimizer
from autoshard.modules.sharded import shard
from tests.ranks.spawn import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Layers(nn.Module):
    """The first gradient is that of a weight that no rank cuts: by it alone GradScaler decides whom to ask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 4), nn.Linear(4, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).square())


def stepped(widest: float, is_sharded: bool) -> tuple[float, bool, bool]:
    """Return the scale after a step, whether weights changed, and whether this rank's own gradients were finite."""
    torch.manual_seed(0)
    module = Layers()
    with torch.no_grad():
        module.up.weight[:2] *= widest
        module.down.weight *= 1e-4
    x, pins = torch.randn(16, 8), {"up.weight": "[/tp, _]", "up.bias": "[/tp]", "down.weight": "[_, /tp]"}
    sharded: Any = shard(module, [x], "tp=2", pins=pins)
    rate: dict[str, Any] = {"lr": 1e-3}
    weights = sharded.parameters()
    optimizer = sharded_optimizer(torch.optim.SGD, weights, **rate) if is_sharded else torch.optim.SGD(weights, **rate)
    before = [weight.full_tensor().clone() for weight in sharded.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = sharded(x).float().sum()
    assert bool(loss.isfinite())
    scaler.scale(loss).backward()
    gradient: Any = sharded.down.weight.grad
    assert isinstance(gradient, DTensor) and isinstance(sharded.norm.weight.grad, DTensor)
    finite = bool(gradient.to_local().isfinite().all())
    scaler.step(optimizer)
    scaler.update()
    after = [weight.full_tensor() for weight in sharded.parameters()]
    return scaler.get_scale(), not all(map(torch.equal, before, after)), finite


@pytest.mark.parametrize("is_sharded", [False, True])
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(is_sharded: bool):
    assert on_ranks(2, stepped, 1.0, is_sharded) == [(1024.0, True, True)] * 2
    assert on_ranks(2, stepped, 60.0, is_sharded) == [(512.0, False, False), (512.0, False, True)]
