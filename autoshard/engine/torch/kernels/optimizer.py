"""Gradient sums, the norm's squares, and updates; what is a rank's own is updated in place, and clipped in place."""

from typing import Any

import torch
from torch.optim.adamw import adamw

from autoshard.engine.torch.formats import wide
from autoshard.engine.torch.kernels.kernel import Kernel, Local, kernel
from autoshard.graph.kinds.optimizer import Accumulate, AdamW, Sgd, SquareSum
from autoshard.graph.op import Call


@kernel.register
def _accumulate(kind: Accumulate, call: Call, local: Local) -> Kernel:
    return lambda total, gradient: (total.add_(gradient),)


@kernel.register
def _square_sum(kind: SquareSum, call: Call, local: Local) -> Kernel:
    def run(gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = wide(gradient).reshape(-1)
        return (torch.dot(flat, flat),)

    return run


@kernel.register
def _adamw(kind: AdamW, call: Call, local: Local) -> Kernel:
    def run(*given: Any) -> tuple[torch.Tensor, ...]:
        weight, first, second, gradient, clip, rate, step = given
        before = torch.tensor(step - 1.0, device=weight.device)
        adamw(
            [weight], [_clipped(gradient, clip)], [first], [second], [], [before],
            fused=weight.dtype == first.dtype, amsgrad=False, beta1=kind.beta1, beta2=kind.beta2,
            lr=rate, weight_decay=kind.decay, eps=kind.eps, maximize=False,
        )  # fmt: skip
        return weight, first, second

    return run


@kernel.register
def _sgd(kind: Sgd, call: Call, local: Local) -> Kernel:
    def run(*given: Any) -> tuple[torch.Tensor, ...]:
        weight, gradient, clip, rate = given
        return (weight.add_(_clipped(gradient, clip), alpha=-rate),)

    return run


def _clipped(gradient: torch.Tensor, clip: float) -> torch.Tensor:
    """Bring a gradient down where it lies: memory of its own would cost more than the product."""
    return gradient.mul_(clip) if clip < 1.0 else gradient
