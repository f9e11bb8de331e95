"""Gradient accumulation and the step phase: norm, clip, AdamW."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.graph.op import Array, Call, OpKind, Output, Tensor

_NORM_FLOOR = 1e-6  # cited: torch.nn.utils.clip_grad_norm_ adds it to the norm before dividing
_ADAMW_FLOPS = 15  # derived: two moments (3 each), two corrections, root, division, decay, update


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate(OpKind):
    """A micro-batch's gradient added to the sum so far (first input), in the sum's format."""

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        """Keep the sum's dims and dtype."""
        assert inputs[0].dims == inputs[1].dims, f"{inputs[1]} is not a gradient for {inputs[0]}"
        return (Output(dims=inputs[0].dims, dtype=inputs[0].dtype),)

    def linear_through(self) -> Mapping[int, tuple[int, ...]]:
        """Sums may stay pending from micro-batch to micro-batch."""
        return {0: (0,), 1: (0,)}

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Add."""
        return (arrays[0] + arrays[1],)


@dataclass(frozen=True, slots=True, kw_only=True)
class SquareSum(OpKind):
    """The sum of squares of a gradient: its share of the norm."""

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        """Give one number in FP32."""
        return (Output(dims=(), dtype="fp32"),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Square and sum."""
        return (np.sum(arrays[0] ** 2),)

    def vector_flops(self, call: Call) -> int:
        """A product and an addition per element."""
        return 2 * call.elements(call.inputs[0].dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipScale(OpKind):
    """The factor that brings the whole gradient's norm down to the limit, and the norm itself."""

    limit: float

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        """Give the factor and the norm."""
        return (Output(dims=(), dtype="fp32"), Output(dims=(), dtype="fp32", suffix="norm"))

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Take the root of all squares; never scale up."""
        norm = np.sqrt(sum(arrays, np.float64(0)))
        return np.minimum(1.0, self.limit / (norm + _NORM_FLOOR)), norm


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(OpKind):
    """One update: inputs are weight, both moments, gradient, clip factor, learning rate, step number."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1

    @property
    def label(self) -> str:
        """One word, as everybody writes it."""
        return "adamw"

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        """Give the new weight and moments."""
        weight, first, second = inputs[:3]
        return (
            Output(dims=weight.dims, dtype=weight.dtype),
            Output(dims=first.dims, dtype=first.dtype, suffix="moment1"),
            Output(dims=second.dims, dtype=second.dtype, suffix="moment2"),
        )

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Update as torch.optim.AdamW does."""
        weight, first, second, gradient, clip, rate, step = arrays
        gradient = gradient * clip
        first = self.beta1 * first + (1 - self.beta1) * gradient
        second = self.beta2 * second + (1 - self.beta2) * gradient**2
        size = np.sqrt(second / (1 - self.beta2**step)) + self.eps
        decayed = weight * (1 - rate * self.decay)
        return decayed - rate * (first / (1 - self.beta1**step)) / size, first, second

    def vector_flops(self, call: Call) -> int:
        """A dozen operations per weight."""
        return _ADAMW_FLOPS * call.elements(call.inputs[0].dims)
