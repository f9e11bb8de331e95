"""Operations of a user's code that match no other kind: their shape and their work are known, their function is not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from autoshard.graph.op import Array, Call, Differentiable, Dims, GradientStep, OpKind, Output, Tensor, aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque(Differentiable):
    """Functions of a user's own code, of which a plan knows what may be cut and how much they compute.

    A dim that is not ``whole`` may be cut: each part of the result needs that part of the inputs only. Numbers are
    those of a stand-in that mixes its inputs along the whole dims and nowhere else, so that a proof of a plan shows
    that the layouts are right for every such function.
    """

    label_form: ClassVar[str] = "{0.does}"

    does: str  # div.tanh.mul
    dims: Dims  # of the result
    whole: Dims = ()
    num_functions: int = 1  # an operation of each for every element of the largest tensor
    products: tuple[Dims, ...] = ()  # a multiplication and an addition for every combination of these dims

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        lost = {dim for tensor in inputs for dim in tensor.dims} - {*self.dims, *self.whole}
        assert not lost, f"{self.does} sums over {sorted(lost)}, which it does not keep whole"
        return (Output(dims=self.dims, dtype=inputs[0].dtype),)

    def whole_dims(self) -> Dims:
        return self.whole

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        pairs = zip(call.inputs, arrays, strict=True)
        total = sum(aligned(_mixed(array, tensor, self), _left(tensor, self), self.dims) for tensor, array in pairs)
        return (np.tanh(np.broadcast_to(total, [call.sizes[dim] for dim in self.dims])),)

    def matrix_flops(self, call: Call) -> int:
        return sum(2 * call.elements(dims) for dims in self.products)

    def vector_flops(self, call: Call) -> int:
        return self.num_functions * OpKind.vector_flops(self, call)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """One operation gives the gradients of all inputs."""
        kind = OpaqueGradient(function=self, needed=tuple(needed))
        reads = ("d0", *(f"in{number}" for number in range(len(inputs))))
        return (GradientStep(kind=kind, reads=reads, gives=tuple(needed)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueGradient(OpKind):
    """The gradients of the inputs of an opaque operation."""

    label_form: ClassVar[str] = "{0.function.does}_gradient"

    function: Opaque
    needed: tuple[int, ...]

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        needed_inputs = [inputs[1 + number] for number in self.needed]
        return tuple(
            Output(dims=tensor.dims, dtype=tensor.dtype, suffix=f"in{number}" if place else "")
            for place, (number, tensor) in enumerate(zip(self.needed, needed_inputs, strict=True))
        )

    def whole_dims(self) -> Dims:
        return self.function.whole

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Apply the chain rule to the stand-in."""
        upstream, *inputs = arrays
        forward = Call(inputs=call.inputs[1:], outputs=call.inputs[:1], sizes=call.sizes)
        (result,) = self.function.evaluate(forward, *inputs)
        slope, gradients = upstream * (1 - result**2), list[Array]()
        for number in self.needed:
            tensor = call.inputs[1 + number]
            result_dims, over = _left(tensor, self.function), self.function.dims
            summed = slope.sum(axis=tuple(axis for axis, dim in enumerate(over) if dim not in result_dims))
            kept_dims = tuple(dim for dim in over if dim in result_dims)
            spread = np.broadcast_to(aligned(summed, kept_dims, tensor.dims), inputs[number].shape) / _lost(
                tensor, call, over
            )
            gradients.append(_mixed(spread, tensor, self.function, gathered=True))
        return tuple(gradients)

    def matrix_flops(self, call: Call) -> int:
        """Each input's gradient takes as many products as the result."""
        return 2 * sum(2 * call.elements(dims) for dims in self.function.products)

    def vector_flops(self, call: Call) -> int:
        return 2 * self.function.num_functions * OpKind.vector_flops(self, call)


def _left(tensor: Tensor, kind: Opaque) -> Dims:
    """Return the dims of an input that the result has."""
    return tuple(dim for dim in tensor.dims if dim in kind.dims)


def _lost(tensor: Tensor, call: Call, result_dims: Dims) -> int:
    """Return the count of numbers in a mean of the stand-in: the product of the dims that the result lacks."""
    return call.elements([dim for dim in tensor.dims if dim not in result_dims])


def _mixed(array: Array, tensor: Tensor, kind: Opaque, *, gathered: bool = False) -> Array:
    """Add to every number the mean along the whole dims; then take the mean along those that the result lacks.

    Both are their own gradients, but for the dims that the result lacks, which ``gathered`` leaves as they are.
    """
    whole = tuple(axis for axis, dim in enumerate(tensor.dims) if dim in kind.whole)
    mixed = array + array.mean(axis=whole, keepdims=True) if whole else array
    lost = () if gathered else tuple(axis for axis, dim in enumerate(tensor.dims) if dim not in kind.dims)
    return mixed.mean(axis=lost) if lost else mixed
