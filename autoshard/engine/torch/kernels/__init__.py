"""The operations of the graph as torch computes them; importing this registers them all."""

from autoshard.engine.torch.kernels import (
    attention,
    choosing,
    delta,
    dropout,
    elementwise,
    expert_biases,
    fused_attention,
    indexing,
    products,
    router,
    sinks,
)
from autoshard.engine.torch.kernels.kernel import Kernel, KernelContext, Rotations, kernel_of

__all__ = [
    "Kernel",
    "KernelContext",
    "Rotations",
    "attention",
    "choosing",
    "delta",
    "dropout",
    "elementwise",
    "expert_biases",
    "fused_attention",
    "indexing",
    "kernel_of",
    "products",
    "router",
    "sinks",
]
