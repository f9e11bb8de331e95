"""Biases of experts: each expert's rows get its own, and tokens those of the experts that they chose.

What an expert adds at its end is added to tokens, behind their sum over experts: there a rank adds it once though
others hold parts of the same expert, and a token has one row, not one for each choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from autoshard.graph.kinds.experts import CHOICES, Routed
from autoshard.graph.op import Array, Call, Differentiable, Dims, GradientStep, OpKind, Output, Tensor

_ROWS: Dims = ("experts", "slots")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftRows(Differentiable):
    """Rows in the slots of experts, each with the bias of its expert added; slots that nobody took get one as well."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    by_expert: ClassVar[bool] = True

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        rows, bias = inputs
        assert (*_ROWS, *bias.dims[1:]) == rows.dims and bias.dims[0] == "experts", f"cannot add {bias} to {rows}"
        return (Output(dims=rows.dims, dtype=rows.dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        rows, bias = arrays
        return (rows + bias[:, None],)

    def starts_at(self, index: int) -> float | None:
        """A bias starts at zero."""
        return 0.0

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Rows get the gradient as it is; a bias the sum over the rows of its expert, of which empty ones have none."""
        steps = (
            GradientStep(kind=None, reads=("d0",), gives=(0,)),
            GradientStep(kind=SumRows(), reads=("d0",), gives=(1,)),
        )
        return tuple(step for step in steps if step.gives[0] in needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SumRows(OpKind):
    """The sum over the rows of each expert."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    by_expert: ClassVar[bool] = True
    owns_result: ClassVar[bool] = True

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        experts, _, *rest = inputs[0].dims
        return (Output(dims=(experts, *rest), dtype=inputs[0].dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        return (arrays[0].sum(axis=1),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenBias(Routed, Differentiable):
    """The biases of the experts of each token, mixed by its weights: inputs are weights, experts, biases.

    Where tokens may be dropped their places come last: an expert that has no slot for a token adds nothing to it.
    """

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    owns_result: ClassVar[bool] = True

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        weight, _, bias, *_ = inputs
        assert weight.dims == CHOICES and bias.dims[0] == "experts", f"cannot mix {bias} by {weight}"
        return (Output(dims=(*CHOICES[:2], *bias.dims[1:]), dtype=weight.dtype),)

    def starts_at(self, index: int) -> float | None:
        """A bias starts at zero."""
        return 0.0

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        weight, expert, bias, *place = arrays
        return ((_counted(weight, place)[..., None] * bias[expert]).sum(axis=2),)

    def vector_flops(self, call: Call) -> int:
        """A product and a sum per choice."""
        return 2 * call.elements((*CHOICES, *call.inputs[2].dims[1:]))

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """One operation gives the gradients of weights and biases."""
        places = ("in3",) if len(inputs) > 3 else ()
        reads = ("d0", "in0", "in1", "in2", *places)
        return (GradientStep(kind=ChosenBiasGradient(), reads=reads, gives=(0, 2)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenBiasGradient(Routed, OpKind):
    """The gradients of the weights of chosen experts and of their biases."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        weight, bias = inputs[1], inputs[3]
        return (
            Output(dims=weight.dims, dtype=weight.dtype, suffix="weight"),
            Output(dims=bias.dims, dtype=bias.dtype, suffix="bias"),
        )

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        upstream, weight, expert, bias, *place = arrays
        d_weight = _counted((bias[expert] * upstream[..., None, :]).sum(axis=-1), place)
        d_bias = np.zeros_like(bias)
        np.add.at(d_bias, expert, _counted(weight, place)[..., None] * upstream[..., None, :])
        return d_weight, d_bias

    def vector_flops(self, call: Call) -> int:
        """For each choice a product and a sum for the weight, and the same for the bias."""
        return 4 * call.elements((*CHOICES, *call.inputs[3].dims[1:]))


def _counted(weight: Array, place: Sequence[Array]) -> Array:
    """Return weights of the choices that found a slot, and zero for others."""
    return np.where(place[0] >= 0, weight, 0.0) if place else weight
