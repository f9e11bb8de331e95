"""Gradient accumulation and the step phase: norm, clip, and the optimizers that a workload may name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from autoshard.graph.op import Array, Call, OpKind, Output, Tensor, Update
from autoshard.spec.training import AdamWConstants
from autoshard.spec.workload import Optimizer

_NORM_FLOOR = 1e-6  # cited: torch.nn.utils.clip_grad_norm_ adds it to the norm before dividing
_USUAL = AdamWConstants()


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate(OpKind):
    """A micro-batch's gradient added to the sum so far (first input), in the sum's format."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        assert inputs[0].dims == inputs[1].dims, f"{inputs[1]} is not a gradient for {inputs[0]}"
        return (Output(dims=inputs[0].dims, dtype=inputs[0].dtype),)

    def linear_through(self) -> Mapping[int, tuple[int, ...]]:
        """Sums may stay pending from micro-batch to micro-batch."""
        return {0: (0,), 1: (0,)}

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        return (arrays[0] + arrays[1],)


@dataclass(frozen=True, slots=True, kw_only=True)
class SquareSum(OpKind):
    """The sum of squares of a gradient: its share of the norm."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    flops_per_element: ClassVar[int] = 2  # derived: a product and an addition

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=(), dtype="fp32"),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        return (np.sum(arrays[0] ** 2),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipScale(OpKind):
    """The factor that brings the whole gradient's norm down to the limit, and the norm itself."""

    limit: float

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=(), dtype="fp32"), Output(dims=(), dtype="fp32", suffix="norm"))

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Take the root of all squares; never scale up."""
        norm = np.sqrt(sum(arrays, np.float64(0)))
        return np.minimum(1.0, self.limit / (norm + _NORM_FLOOR)), norm


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Update):
    """One update by gradients and their squares, averaged over steps, with decay of the weights."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    label_form: ClassVar[str] = "adamw"
    # derived: two moments (3 each), two corrections, root, division, decay, update
    flops_per_element: ClassVar[int] = 15
    num_moments: ClassVar[int] = 2
    scalars: ClassVar[tuple[str, ...]] = ("clip", "learning_rate", "step_number")

    beta1: float = _USUAL.beta1
    beta2: float = _USUAL.beta2
    eps: float = _USUAL.eps
    decay: float = _USUAL.weight_decay

    def without_decay(self) -> "AdamW":
        return replace(self, decay=0.0)

    def with_constants(self, constants: AdamWConstants) -> "AdamW":
        """Take the constants of a run; what does not decay still does not."""
        decay = constants.weight_decay if self.decay else 0.0
        return AdamW(beta1=constants.beta1, beta2=constants.beta2, eps=constants.eps, decay=decay)

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return tuple(
            Output(dims=tensor.dims, dtype=tensor.dtype, suffix=suffix)
            for tensor, suffix in zip(inputs, ("", "moment1", "moment2"), strict=False)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd(Update):
    """One update by the gradient alone: no momentum, no decay."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    flops_per_element: ClassVar[int] = 2  # derived: a product with rate times clip, a difference
    num_moments: ClassVar[int] = 0
    scalars: ClassVar[tuple[str, ...]] = ("clip", "learning_rate")

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Update as torch.optim.SGD does by default."""
        weight, gradient, clip, rate = arrays
        return (weight - rate * (gradient * clip),)


UPDATES: Mapping[Optimizer, Update] = {"adamw": AdamW(), "sgd": Sgd()}
