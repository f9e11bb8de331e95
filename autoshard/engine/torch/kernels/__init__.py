"""The operations of the graph as torch computes them; importing this registers them all."""

from autoshard.engine.torch.kernels import attention, experts, indexing, norms, optimizer, pointwise, products
from autoshard.engine.torch.kernels.kernel import Kernel, Local, kernel

__all__ = [
    "Kernel", "Local", "attention", "experts", "indexing", "kernel", "norms", "optimizer", "pointwise", "products",
]  # fmt: skip
