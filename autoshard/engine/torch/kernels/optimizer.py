"""Gradient sums, the norm's squares, and AdamW; what is a rank's own for the whole run is updated in place."""

from typing import Any

import torch

from autoshard.engine.torch.formats import wide
from autoshard.engine.torch.kernels.kernel import Kernel, Local, kernel
from autoshard.graph.kinds.optimizer import Accumulate, AdamW, SquareSum
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
        scaled = gradient * clip
        first.lerp_(scaled, 1 - kind.beta1)
        second.mul_(kind.beta2).addcmul_(scaled, scaled, value=1 - kind.beta2)
        size = (second / (1 - kind.beta2**step)).sqrt_().add_(kind.eps)
        weight.mul_(1 - rate * kind.decay).addcdiv_(first, size, value=-rate / (1 - kind.beta1**step))
        return weight, first, second

    return run
