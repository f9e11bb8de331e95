"""Element-wise operations, sums over dims, and their gradients."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from autoshard.graph.op import Array, Call, Differentiable, Dims, GradientStep, OpKind, Output, Tensor, aligned
from autoshard.spec.workload import Dtype

Function = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "exp", "log", "negate"]
_GELU_SLOPE = math.sqrt(2 / math.pi)  # derived: the tanh form of GELU matches the slope of erf at zero
_GELU_CUBIC = 0.044715  # cited: Hendrycks and Gimpel, Gaussian Error Linear Units (arXiv 1606.08415)
CAP_FLOPS = 3  # derived: a product on either side of a tanh
CAP_SLOPE_FLOPS = 4  # derived: a product, a square, a difference, and the product with the gradient


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(x / 2))  # cannot overflow, unlike 1 / (1 + exp(-x))


def _gelu_inner(x: Array) -> Array:
    return np.tanh(_GELU_SLOPE * (x + _GELU_CUBIC * x**3))


def _gelu_tanh_slope(x: Array) -> Array:
    inner = _gelu_inner(x)
    return 0.5 * (1 + inner) + 0.5 * x * (1 - inner**2) * _GELU_SLOPE * (1 + 3 * _GELU_CUBIC * x**2)


_VALUES: Mapping[Function, Callable[[Array], Array]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + _gelu_inner(x)),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": _sigmoid,
    "exp": np.exp,
    "log": np.log,
    "negate": np.negative,
}
_SLOPES: Mapping[Function, Callable[[Array], Array]] = {
    "silu": lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x))),
    "gelu": lambda x: 0.5 * (1 + _erf(x / math.sqrt(2))) + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi),
    "gelu_tanh": _gelu_tanh_slope,
    "relu": lambda x: (x > 0).astype(x.dtype),
    "relu2": lambda x: 2 * np.maximum(x, 0),
    "sigmoid": lambda x: _sigmoid(x) * (1 - _sigmoid(x)),
    "log": lambda x: 1 / x,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unary(Differentiable):
    """A function of each element."""

    engines: ClassVar[tuple[str, ...]] = ("torch", "nxd")
    by_token: ClassVar[bool | None] = True
    label_form: ClassVar[str] = "{0.function}"

    function: Function

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        return (_VALUES[self.function](arrays[0]),)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Multiply by the slope; where the result gives the slope, read the result instead of the input."""
        if self.function == "exp":
            return (GradientStep(kind=Multiply(), reads=("d0", "out0"), gives=(0,)),)
        if self.function == "negate":
            return (GradientStep(kind=Unary(function="negate"), reads=("d0",), gives=(0,)),)
        return (GradientStep(kind=UnaryGradient(function=self.function), reads=("d0", "in0"), gives=(0,)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnaryGradient(OpKind):
    """The gradient of a function of each element: slope at the input times the gradient of the result."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    by_token: ClassVar[bool | None] = True
    owns_result: ClassVar[bool] = True
    label_form: ClassVar[str] = "{0.function}_gradient"

    function: Function

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        assert inputs[0].dims == inputs[1].dims, f"{inputs[0]} is not a gradient for {inputs[1]}"
        return (Output(dims=inputs[1].dims, dtype=inputs[1].dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        return (arrays[0] * _SLOPES[self.function](arrays[1]),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiply(Differentiable):
    """The element-wise product of two tensors; the second is repeated along the dims it lacks."""

    engines: ClassVar[tuple[str, ...]] = ("torch", "nxd")
    by_token: ClassVar[bool | None] = True
    owns_result: ClassVar[bool] = True

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        left, right = inputs
        assert set(right.dims) <= set(left.dims), f"cannot multiply {left} by {right}"
        return (Output(dims=left.dims, dtype=left.dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        left, right = call.inputs
        return (arrays[0] * aligned(arrays[1], right.dims, left.dims),)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Each factor's gradient is the other factor times the upstream gradient, summed where it was repeated."""
        steps = [GradientStep(kind=Multiply(), reads=("d0", f"in{1 - i}"), gives=(i,)) for i in needed]
        over = tuple(dim for dim in inputs[0].dims if dim not in inputs[1].dims)
        if over and 1 in needed:
            steps[-1] = replace(steps[-1], gives=(None,))
            summed = Reduce(function="sum", over=over)
            steps.append(GradientStep(kind=summed, reads=(f"step{len(steps) - 1}",), gives=(1,)))
        return tuple(steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleBy(Differentiable):
    """A tensor times a number."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    by_token: ClassVar[bool | None] = True
    owns_result: ClassVar[bool] = True

    factor: float

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        return (arrays[0] * self.factor,)

    def linear_through(self) -> Mapping[int, tuple[int, ...]]:
        return {0: (0,)}

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Scale the gradient likewise."""
        return (GradientStep(kind=self, reads=("d0",), gives=(0,)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftCap(Differentiable):
    """A tensor squeezed between a number and its negative: cap * tanh(x / cap), in a format that may be wider."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    by_token: ClassVar[bool | None] = True
    owns_result: ClassVar[bool] = True
    flops_per_element: ClassVar[int] = CAP_FLOPS

    cap: float
    dtype: Dtype

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=inputs[0].dims, dtype=self.dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        return (self.cap * np.tanh(arrays[0] / self.cap),)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """The result says the slope."""
        kind = SoftCapGradient(cap=self.cap, dtype=inputs[0].dtype)
        return (GradientStep(kind=kind, reads=("d0", "out0"), gives=(0,)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftCapGradient(OpKind):
    """The gradient of what was capped: inputs are that of the result, and the result."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    by_token: ClassVar[bool | None] = True
    owns_result: ClassVar[bool] = True
    flops_per_element: ClassVar[int] = CAP_SLOPE_FLOPS

    cap: float
    dtype: Dtype

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=inputs[1].dims, dtype=self.dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        return (arrays[0] * (1 - (arrays[1] / self.cap) ** 2),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedGlu(Differentiable):
    """(up + 1) * gate * sigmoid(slope * gate): inputs are gate, at most the limit, and up, between it and its negative.

    What is clamped passes no gradient.
    """

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    by_token: ClassVar[bool | None] = True
    owns_result: ClassVar[bool] = True
    flops_per_element: ClassVar[int] = 8  # derived: three bounds, a sigmoid (2) of a product, a sum, two products

    limit: float
    slope: float

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        gate, up = inputs
        assert gate.dims == up.dims, f"{gate} is no gate of {up}"
        return (Output(dims=up.dims, dtype=up.dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        gate, up = np.minimum(arrays[0], self.limit), np.clip(arrays[1], -self.limit, self.limit)
        return ((up + 1) * gate * _sigmoid(self.slope * gate),)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        kind = ClampedGluGradient(limit=self.limit, slope=self.slope)
        return (GradientStep(kind=kind, reads=("d0", "in0", "in1"), gives=(0, 1)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedGluGradient(OpKind):
    """The gradients of gate and up: inputs are the gradient of what is made of them, and both."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    by_token: ClassVar[bool | None] = True
    owns_result: ClassVar[bool] = True
    flops_per_element: ClassVar[int] = 16  # derived: the forward pass again, the slope of the gate, five products

    limit: float
    slope: float

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        _, gate, up = inputs
        return (
            Output(dims=gate.dims, dtype=gate.dtype, suffix="gate"),
            Output(dims=up.dims, dtype=up.dtype, suffix="up"),
        )

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        upstream, stated_gate, stated_up = arrays
        gate, up = np.minimum(stated_gate, self.limit), np.clip(stated_up, -self.limit, self.limit)
        share = _sigmoid(self.slope * gate)
        d_gate = upstream * (up + 1) * share * (1 + self.slope * gate * (1 - share))
        d_up = upstream * gate * share
        return d_gate * (stated_gate <= self.limit), d_up * (np.abs(stated_up) <= self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Add(Differentiable):
    """A signed sum of two tensors; the second is repeated along the dims it lacks, as a bias is."""

    engines: ClassVar[tuple[str, ...]] = ("torch", "nxd")
    by_token: ClassVar[bool | None] = True

    sign: Literal[1, -1] = 1

    @property
    def label(self) -> str:
        return "add" if self.sign == 1 else "subtract"

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        left, right = inputs
        assert set(right.dims) <= set(left.dims), f"cannot repeat {right} along {left}"
        return (Output(dims=left.dims, dtype=left.dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        left, right = call.inputs
        return (arrays[0] + self.sign * aligned(arrays[1], right.dims, left.dims),)

    def starts_at(self, index: int) -> float | None:
        """A bias starts at zero."""
        return 0.0

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """The first gets the gradient as it is; the second summed over the dims that it lacks, and signed."""
        steps: list[GradientStep] = []
        if 0 in needed:
            steps.append(GradientStep(kind=None, reads=("d0",), gives=(0,)))
        if 1 in needed:
            over = tuple(dim for dim in inputs[0].dims if dim not in inputs[1].dims)
            last = 1 if self.sign == 1 else None
            read = f"step{len(steps)}"
            summed = Reduce(function="sum", over=over) if over else None
            steps.append(GradientStep(kind=summed, reads=("d0",), gives=(last,)))
            if self.sign == -1:
                steps.append(GradientStep(kind=Unary(function="negate"), reads=(read,), gives=(1,)))
        return tuple(steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce(Differentiable):
    """The sum or the maximum over some dims.

    A maximum passes no gradient: it only keeps exponentials in range, and the result does not depend on it.
    """

    engines: ClassVar[tuple[str, ...]] = ("torch", "nxd")
    by_token: ClassVar[bool | None] = True
    label_form: ClassVar[str] = "{0.function}"

    function: Literal["sum", "max"]
    over: Dims

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        (tensor,) = inputs
        return (Output(dims=tuple(d for d in tensor.dims if d not in self.over), dtype=tensor.dtype),)

    def linear_through(self) -> Mapping[int, tuple[int, ...]]:
        return {0: (0,)} if self.function == "sum" else {}

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        axes = tuple(call.inputs[0].dims.index(dim) for dim in self.over)
        return (arrays[0].sum(axis=axes) if self.function == "sum" else arrays[0].max(axis=axes, initial=-np.inf),)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Repeat the gradient of a sum along the dims that were summed."""
        if self.function == "max":
            return ()
        return (GradientStep(kind=Repeat(dims=inputs[0].dims), reads=("d0",), gives=(0,)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat(OpKind):
    """A tensor repeated along the dims that it lacks."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    by_token: ClassVar[bool | None] = True
    flops_per_element: ClassVar[int] = 0

    dims: Dims

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=self.dims, dtype=inputs[0].dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        shape = [call.sizes[dim] for dim in self.dims]
        return (np.broadcast_to(aligned(arrays[0], call.inputs[0].dims, self.dims), shape),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast(Differentiable):
    """The same numbers in another format."""

    engines: ClassVar[tuple[str, ...]] = ("torch", "nxd")
    by_token: ClassVar[bool | None] = True
    label_form: ClassVar[str] = "to_{0.dtype}"

    dtype: Dtype

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=inputs[0].dims, dtype=self.dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Numpy evaluation is exact: every float format is computed in float64."""
        return arrays

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        return (GradientStep(kind=Cast(dtype=inputs[0].dtype), reads=("d0",), gives=(0,)),)
