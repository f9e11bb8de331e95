"""Normalisation over one dim, softmax, and their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from autoshard.graph.kinds.pointwise import Reduce
from autoshard.graph.op import Array, Call, Differentiable, Dims, GradientStep, OpKind, Output, Tensor, aligned

NormFunction = Literal["rms", "layer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm(Differentiable):
    """RMS norm or layer norm over one dim: inputs are the tensor, a weight, and for layer norm a bias.

    Results are the normalised tensor and, in FP32, the statistic that backward needs: the reciprocal of its size.
    """

    engines: ClassVar[tuple[str, ...]] = ("torch", "nxd")
    label_form: ClassVar[str] = "{0.function}_norm"
    flops_per_element: ClassVar[int] = 4  # derived: square, accumulate, scale by the statistic, scale by the weight

    function: NormFunction
    over: str
    eps: float
    offset: float = 0.0  # added to the weight

    def starts_at(self, index: int) -> float | None:
        """A norm that does nothing has a weight of 1, its offset included, and no bias."""
        return 1 - self.offset if index == 1 else 0.0

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        tensor = inputs[0]
        rest = tuple(dim for dim in tensor.dims if dim != self.over)
        return (Output(dims=tensor.dims, dtype=tensor.dtype), Output(dims=rest, dtype="fp32", suffix="stat"))

    def whole_dims(self) -> Dims:
        return (self.over,)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        tensor = call.inputs[0]
        axis = tensor.dims.index(self.over)
        centred = _centred(arrays[0], axis, self.function)
        scale = 1 / np.sqrt((centred**2).mean(axis=axis, keepdims=True) + self.eps)
        weight, *bias = (aligned(array, (self.over,), tensor.dims) for array in arrays[1:])
        return centred * scale * (weight + self.offset) + sum(bias), scale.squeeze(axis)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Recover the normalised input from input and statistic, for input, weight and bias in turn."""
        rest = tuple(dim for dim in inputs[0].dims if dim != self.over)
        rule = NormGradient(function=self.function, over=self.over, offset=self.offset)
        weight_rule = NormWeightGradient(function=self.function, over=self.over)
        steps = (
            GradientStep(kind=rule, reads=("d0", "in0", "out1", "in1"), gives=(0,)),
            GradientStep(kind=weight_rule, reads=("d0", "in0", "out1"), gives=(1,)),
            GradientStep(kind=Reduce(function="sum", over=rest), reads=("d0",), gives=(2,)),
        )
        return tuple(steps[index] for index in range(3) if index in needed)


def _centred(x: Array, axis: int, function: NormFunction) -> Array:
    """Return the input, for layer norm freed of its mean."""
    return x - x.mean(axis=axis, keepdims=True) if function == "layer" else x


@dataclass(frozen=True, slots=True, kw_only=True)
class NormGradient(OpKind):
    """The gradient of a norm's input: inputs are the upstream gradient, the norm's input, its statistic, its weight."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    owns_result: ClassVar[bool] = True
    label_form: ClassVar[str] = "{0.function}_norm_gradient"
    flops_per_element: ClassVar[int] = 8  # derived: rebuild, scale, and project out what the statistics absorb

    function: NormFunction
    over: str
    offset: float = 0.0

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=inputs[1].dims, dtype=inputs[1].dtype),)

    def whole_dims(self) -> Dims:
        return (self.over,)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Project out what the statistics absorb, then scale."""
        upstream, x, stat, weight = arrays
        dims = call.inputs[1].dims
        axis, scale = dims.index(self.over), aligned(stat, call.inputs[2].dims, dims)
        normalised = _centred(x, axis, self.function) * scale
        slope = upstream * aligned(weight + self.offset, (self.over,), dims)
        projected = slope - normalised * (slope * normalised).mean(axis=axis, keepdims=True)
        return (_centred(projected, axis, self.function) * scale,)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormWeightGradient(OpKind):
    """The gradient of a norm's weight: upstream gradient times normalised input, summed over all else."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    label_form: ClassVar[str] = "{0.function}_norm_weight_gradient"
    flops_per_element: ClassVar[int] = 3  # derived: rebuild, multiply, accumulate

    function: NormFunction
    over: str

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=(self.over,), dtype=inputs[1].dtype),)

    def whole_dims(self) -> Dims:
        """A layer norm's mean needs the whole dim."""
        return (self.over,)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        upstream, x, stat = arrays
        dims = call.inputs[1].dims
        normalised = _centred(x, dims.index(self.over), self.function) * aligned(stat, call.inputs[2].dims, dims)
        rest = tuple(axis for axis, dim in enumerate(dims) if dim != self.over)
        return ((upstream * normalised).sum(axis=rest),)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanSquare(Differentiable):
    """The mean of the squares over some dims, in FP32; where ranks hold parts of these dims, a sum is left pending.

    With ``Rescale`` it is an RMS norm over dims that are cut: ranks exchange one number per token, not the tensor.
    """

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    flops_per_element: ClassVar[int] = 2  # derived: square, accumulate

    over: Dims
    count: int  # elements of these dims on all ranks

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=tuple(dim for dim in inputs[0].dims if dim not in self.over), dtype="fp32"),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        axes = tuple(call.inputs[0].dims.index(dim) for dim in self.over)
        return ((arrays[0] ** 2).sum(axis=axes) / self.count,)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        return (GradientStep(kind=MeanSquareGradient(count=self.count), reads=("d0", "in0"), gives=(0,)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanSquareGradient(OpKind):
    """The gradient of what is squared: inputs are the upstream gradient, which lacks dims, and the tensor."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    owns_result: ClassVar[bool] = True

    count: int

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=inputs[1].dims, dtype=inputs[1].dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        upstream, tensor = call.inputs
        return (arrays[1] * aligned(arrays[0], upstream.dims, tensor.dims) * (2 / self.count),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescale(Differentiable):
    """A tensor divided by the root of a mean square, and times a weight; inputs stand in this order.

    It is linear in the tensor, so that it also turns the gradient of its result into that of the tensor.
    """

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    owns_result: ClassVar[bool] = True
    flops_per_element: ClassVar[int] = 2  # derived: times the reciprocal, times the weight

    eps: float

    def starts_at(self, index: int) -> float | None:
        return 1.0

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        dims = call.inputs[0].dims
        square, weight = (aligned(arrays[place], call.inputs[place].dims, dims) for place in (1, 2))
        return (arrays[0] / np.sqrt(square + self.eps) * weight,)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        steps = (
            GradientStep(kind=self, reads=("d0", "in1", "in2"), gives=(0,)),
            GradientStep(kind=RescaleSquareGradient(eps=self.eps), reads=("d0", "in0", "in1", "in2"), gives=(1,)),
            GradientStep(
                kind=RescaleWeightGradient(dims=inputs[2].dims, eps=self.eps), reads=("d0", "in0", "in1"), gives=(2,)
            ),
        )
        return tuple(steps[index] for index in needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RescaleSquareGradient(OpKind):
    """The gradient of the mean square: inputs are the upstream gradient, the tensor, its mean square, the weight."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    flops_per_element: ClassVar[int] = 3  # derived: two products, accumulate

    eps: float

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=inputs[2].dims, dtype=inputs[2].dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        upstream, x, square, weight = arrays
        dims, rest = call.inputs[1].dims, call.inputs[2].dims
        axes = tuple(axis for axis, dim in enumerate(dims) if dim not in rest)
        slope = (upstream * x * aligned(weight, call.inputs[3].dims, dims)).sum(axis=axes)
        return (slope * -0.5 * (square + self.eps) ** -1.5,)


@dataclass(frozen=True, slots=True, kw_only=True)
class RescaleWeightGradient(OpKind):
    """The gradient of the weight: inputs are the upstream gradient, the tensor, and its mean square."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    flops_per_element: ClassVar[int] = 3  # derived: two products, accumulate

    dims: Dims
    eps: float

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=self.dims, dtype=inputs[1].dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        upstream, x, square = arrays
        dims = call.inputs[1].dims
        axes = tuple(axis for axis, dim in enumerate(dims) if dim not in self.dims)
        return ((upstream * x / np.sqrt(aligned(square, call.inputs[2].dims, dims) + self.eps)).sum(axis=axes),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax(Differentiable):
    """Exponentials that sum to one along a dim."""

    engines: ClassVar[tuple[str, ...]] = ("torch", "nxd")
    flops_per_element: ClassVar[int] = 4  # derived: maximum, exponential, sum, division

    over: str

    def whole_dims(self) -> Dims:
        return (self.over,)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        axis = call.inputs[0].dims.index(self.over)
        powers = np.exp(arrays[0] - arrays[0].max(axis=axis, keepdims=True))
        return (powers / powers.sum(axis=axis, keepdims=True),)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Read the result: the slope of a softmax is written in its own values."""
        return (GradientStep(kind=SoftmaxGradient(over=self.over), reads=("d0", "out0"), gives=(0,)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxGradient(OpKind):
    """The gradient of a softmax's input: the probabilities times the upstream gradient less its mean under them."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    flops_per_element: ClassVar[int] = 4  # derived: product, sum, difference, product

    over: str

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=inputs[1].dims, dtype=inputs[1].dtype),)

    def whole_dims(self) -> Dims:
        return (self.over,)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        upstream, probability = arrays
        axis = call.inputs[1].dims.index(self.over)
        return (probability * (upstream - (upstream * probability).sum(axis=axis, keepdims=True)),)
