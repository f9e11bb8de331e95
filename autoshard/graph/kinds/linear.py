"""Matrix products, and the identity through which tensors reach their readers."""

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import ClassVar

import numpy as np

from autoshard.graph.op import Array, Call, Differentiable, Dims, GradientStep, OpKind, Output, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Einsum(Differentiable):
    """A product of two tensors, summed over the dims that the output lacks."""

    engines: ClassVar[tuple[str, ...]] = ("torch", "nxd")
    owns_result: ClassVar[bool] = True
    by_expert: ClassVar[bool] = True  # where its first factor has rows of experts
    flops_per_element: ClassVar[int] = 0  # nothing is left for the vector unit

    dims: Dims

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        left, right = inputs
        missing = set(self.dims) - set(left.dims) - set(right.dims)
        assert not missing, f"no input of the product has dims {sorted(missing)}"
        return (Output(dims=self.dims, dtype=left.dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        dims = dict.fromkeys(dim for tensor in call.inputs for dim in tensor.dims)  # fewer than the letters of numpy
        letters = dict(zip(dims, ascii_letters, strict=False))
        left, right, out = ("".join(letters[dim] for dim in t.dims) for t in (*call.inputs, *call.outputs))
        return (np.einsum(f"{left},{right}->{out}", *arrays, optimize=True),)

    def matrix_flops(self, call: Call) -> int:
        """Count a multiplication and an addition for every combination of the dims."""
        dims = {dim for tensor in call.inputs for dim in tensor.dims}
        return 2 * call.elements(sorted(dims))

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Each input's gradient is the product of the output's gradient with the other input."""
        return tuple(
            GradientStep(kind=Einsum(dims=inputs[index].dims), reads=("d0", f"in{1 - index}"), gives=(index,))
            for index in needed
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver(Differentiable):
    """The identity through which a tensor reaches its readers; it alone may change a layout.

    ``rename`` names a dim differently on the other side: keys are made along ``seq`` and read along
    ``kv_seq``. With ``settles`` the gradients of its readers are summed before their layout changes.
    """

    flops_per_element: ClassVar[int] = 0

    rename: tuple[tuple[str, str], ...] = ()
    settles: bool = False

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        (tensor,) = inputs
        return (Output(dims=self.renamed(tensor.dims), dtype=tensor.dtype),)

    def renamed(self, dims: Dims) -> Dims:
        """Return the dims as the readers call them."""
        names = dict(self.rename)
        return tuple(names.get(dim, dim) for dim in dims)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        return arrays

    def traffic_bytes(self, call: Call) -> int:
        """Nothing is moved in memory; what a change of layout sends is the cost of its Collectives."""
        return 0

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Sum what the readers send back; ``d0`` stands for all of it."""
        backward = tuple((new, old) for old, new in self.rename)
        return (GradientStep(kind=Collect(rename=backward, settles=self.settles), reads=("d0",), gives=(0,)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collect(OpKind):
    """The gradient of a deliver: the sum of what all readers send back, with dims renamed back."""

    rename: tuple[tuple[str, str], ...] = ()
    settles: bool = False

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        names = dict(self.rename)
        dims = tuple(names.get(dim, dim) for dim in inputs[0].dims)
        return (Output(dims=dims, dtype=inputs[0].dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        target = call.inputs[0].dims
        total = sum(
            array.transpose([tensor.dims.index(dim) for dim in target])
            for tensor, array in zip(call.inputs, arrays, strict=True)
        )
        return (np.asarray(total),)

    def vector_flops(self, call: Call) -> int:
        """One addition per element for every reader after the first."""
        return (len(call.inputs) - 1) * call.elements(call.inputs[0].dims)

    def traffic_bytes(self, call: Call) -> int:
        """With one reader nothing moves."""
        return 0 if len(call.inputs) == 1 else OpKind.traffic_bytes(self, call)
