"""Normalisation over one dim, softmax, and their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autoshard.graph.kinds.pointwise import Reduce
from autoshard.graph.op import (
    Array,
    Call,
    Differentiable,
    Dims,
    GradientStep,
    OpKind,
    Output,
    Tensor,
    aligned,
    axis_of,
)

_NORM_FLOPS = 4  # derived: square, accumulate, scale by the statistic, scale by the weight


def _statistics(call: Call, x: Array, kind: str, over: str, eps: float) -> tuple[Array, Array]:
    """Return the input freed of its mean (layer norm only) and the reciprocal of its size."""
    axis = axis_of(call.inputs[0], over)
    centred = x - x.mean(axis=axis, keepdims=True) if kind == "layer" else x
    scale = 1 / np.sqrt((centred**2).mean(axis=axis, keepdims=True) + eps)
    return centred, scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm(Differentiable):
    """RMS norm or layer norm over one dim: inputs are the tensor, a weight, and for layer norm a bias."""

    function: Literal["rms", "layer"]
    over: str
    eps: float

    @property
    def label(self) -> str:
        """Which norm it is."""
        return f"{self.function}_norm"

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        """Give the normalised tensor and, in FP32, the statistic that backward needs."""
        tensor = inputs[0]
        rest = tuple(dim for dim in tensor.dims if dim != self.over)
        return (Output(dims=tensor.dims, dtype=tensor.dtype), Output(dims=rest, dtype="fp32", suffix="stat"))

    def whole_dims(self) -> Dims:
        """The dim that is normalised over."""
        return (self.over,)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Normalise, then scale by the weight and shift by the bias."""
        x, weight = arrays[0], arrays[1]
        centred, scale = _statistics(call, x, self.function, self.over, self.eps)
        result = centred * scale * aligned(weight, (self.over,), call.inputs[0].dims)
        if len(arrays) > 2:
            result = result + aligned(arrays[2], (self.over,), call.inputs[0].dims)
        return result, scale.squeeze(axis_of(call.inputs[0], self.over))

    def vector_flops(self, call: Call) -> int:
        """A few operations per element."""
        return _NORM_FLOPS * call.elements(call.inputs[0].dims)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Recover the normalised input from input and statistic, for input, weight and bias in turn."""
        steps: list[GradientStep] = []
        rule = NormGradient(function=self.function, over=self.over)
        if 0 in needed:
            steps.append(GradientStep(kind=rule, reads=("d0", "in0", "out1", "in1"), gives=(0,)))
        if 1 in needed:
            weight_rule = NormWeightGradient(function=self.function, over=self.over)
            steps.append(GradientStep(kind=weight_rule, reads=("d0", "in0", "out1"), gives=(1,)))
        if 2 in needed:
            rest = tuple(dim for dim in inputs[0].dims if dim != self.over)
            steps.append(GradientStep(kind=Reduce(function="sum", over=rest), reads=("d0",), gives=(2,)))
        return tuple(steps)


def _normalised(call: Call, x: Array, stat: Array, function: str, over: str) -> Array:
    """Rebuild the normalised input; ``call`` has the upstream gradient first and the input second."""
    tensor = call.inputs[1]
    rest = tuple(dim for dim in tensor.dims if dim != over)
    centred = x - x.mean(axis=axis_of(tensor, over), keepdims=True) if function == "layer" else x
    return centred * aligned(stat, rest, tensor.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormGradient(OpKind):
    """The gradient of a norm's input."""

    function: Literal["rms", "layer"]
    over: str

    @property
    def label(self) -> str:
        """Which norm's gradient it is."""
        return f"{self.function}_norm_gradient"

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        """Keep dims and dtype of the input."""
        return (Output(dims=inputs[1].dims, dtype=inputs[1].dtype),)

    def whole_dims(self) -> Dims:
        """The dim that is normalised over."""
        return (self.over,)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Project out what the statistics absorb, then scale."""
        upstream, x, stat, weight = arrays
        tensor = call.inputs[1]
        axis = axis_of(tensor, self.over)
        rest = tuple(dim for dim in tensor.dims if dim != self.over)
        normalised = _normalised(call, x, stat, self.function, self.over)
        slope = upstream * aligned(weight, (self.over,), tensor.dims)
        projected = slope - normalised * (slope * normalised).mean(axis=axis, keepdims=True)
        if self.function == "layer":
            projected = projected - slope.mean(axis=axis, keepdims=True)
        return (projected * aligned(stat, rest, tensor.dims),)

    def vector_flops(self, call: Call) -> int:
        """A few operations per element."""
        return 2 * _NORM_FLOPS * call.elements(call.inputs[1].dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormWeightGradient(OpKind):
    """The gradient of a norm's weight: upstream gradient times normalised input, summed over all else."""

    function: Literal["rms", "layer"]
    over: str

    @property
    def label(self) -> str:
        """Which norm's gradient it is."""
        return f"{self.function}_norm_weight_gradient"

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        """Give a vector along the normalised dim."""
        return (Output(dims=(self.over,), dtype=inputs[1].dtype),)

    def whole_dims(self) -> Dims:
        """A layer norm's mean needs the whole dim."""
        return (self.over,)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Multiply and sum."""
        upstream, x, stat = arrays
        tensor = call.inputs[1]
        product = upstream * _normalised(call, x, stat, self.function, self.over)
        rest = tuple(axis for axis, dim in enumerate(tensor.dims) if dim != self.over)
        return (product.sum(axis=rest),)

    def vector_flops(self, call: Call) -> int:
        """Rebuild, multiply, accumulate."""
        return 3 * call.elements(call.inputs[1].dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax(Differentiable):
    """Exponentials that sum to one along a dim."""

    over: str

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        """Keep dims and dtype."""
        return (Output(dims=inputs[0].dims, dtype=inputs[0].dtype),)

    def whole_dims(self) -> Dims:
        """The dim that is normalised over."""
        return (self.over,)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Subtract the maximum, exponentiate, divide by the sum."""
        axis = axis_of(call.inputs[0], self.over)
        powers = np.exp(arrays[0] - arrays[0].max(axis=axis, keepdims=True))
        return (powers / powers.sum(axis=axis, keepdims=True),)

    def vector_flops(self, call: Call) -> int:
        """Maximum, exponential, sum, division."""
        return 4 * call.elements(call.inputs[0].dims)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Read the result: the slope of a softmax is written in its own values."""
        return (GradientStep(kind=SoftmaxGradient(over=self.over), reads=("d0", "out0"), gives=(0,)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxGradient(OpKind):
    """The gradient of a softmax's input."""

    over: str

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        """Keep dims and dtype."""
        return (Output(dims=inputs[1].dims, dtype=inputs[1].dtype),)

    def whole_dims(self) -> Dims:
        """The dim that is normalised over."""
        return (self.over,)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Multiply by the probabilities after subtracting the mean gradient under them."""
        upstream, probability = arrays
        axis = axis_of(call.inputs[1], self.over)
        return (probability * (upstream - (upstream * probability).sum(axis=axis, keepdims=True)),)

    def vector_flops(self, call: Call) -> int:
        """Product, sum, difference, product."""
        return 4 * call.elements(call.inputs[1].dims)
