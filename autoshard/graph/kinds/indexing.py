"""Reading and writing rows by index: embeddings and the label's logit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from autoshard.graph.op import Array, Call, Differentiable, Dims, GradientStep, OpKind, Output, Tensor

_DOCUMENTS = 4  # drawn for a sequence, on average


def document_positions(positions: Any, *document_starts: Any) -> Any:
    """Return the positions of tokens in the sequence, or in their document where its start is given.

    >>> document_positions(np.arange(4), np.array([[0, 0, 2, 2]])).tolist()
    [[0, 1, 0, 1]]
    """
    return positions - document_starts[0] if document_starts else positions


def random_document_starts(generator: "np.random.Generator", shape: tuple[int, int]) -> Array:
    """Return where the document of each token starts, [sequences, positions], for a few random documents each."""
    begins = generator.random(shape) < min(0.5, _DOCUMENTS / shape[1])
    return np.maximum.accumulate(np.where(begins, np.arange(shape[1]), 0), axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup(Differentiable):
    """Rows of a table (first input) at the given indices (second input), counted from a third if there is one.

    They are multiplied by ``scale``, which engines round to the format of the table, as the models' code does.
    """

    engines: ClassVar[tuple[str, ...]] = ("torch", "nxd")

    scale: float = 1.0

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=(*inputs[-1].dims, *inputs[0].dims[1:]), dtype=inputs[0].dtype),)

    def index_dim(self, call: Call) -> str:
        return call.inputs[0].dims[0]

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        table, *index = arrays
        return (table[document_positions(*index)] * self.scale,)

    def vector_flops(self, call: Call) -> int:
        return call.elements(call.outputs[0].dims) if self.scale != 1 else 0

    def traffic_bytes(self, call: Call) -> int:
        """Only the rows that are read move, not the table."""
        index_bytes = sum(tensor.num_bytes(call.sizes) for tensor in call.inputs[1:])
        return 2 * call.outputs[0].num_bytes(call.sizes) + index_bytes

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Add each row's gradient to the row of the table that it came from."""
        index = (f"in{number}" for number in range(1, len(inputs)))
        kind = ScatterAdd(dims=inputs[0].dims, scale=self.scale)
        return (GradientStep(kind=kind, reads=("d0", *index), gives=(0,)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterAdd(OpKind):
    """A table of zeros to which rows, times ``scale``, are added at the given indices."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)

    dims: Dims
    scale: float = 1.0

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=self.dims, dtype=inputs[0].dtype),)

    def linear_through(self) -> Mapping[int, tuple[int, ...]]:
        return {0: (0,)}

    def index_dim(self, call: Call) -> str:
        return self.dims[0]

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        rows, *index = arrays
        table = np.zeros([call.sizes[dim] for dim in self.dims], dtype=rows.dtype)
        np.add.at(table, document_positions(*index), rows * self.scale)
        return (table,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick(Differentiable):
    """The element at an index along one dim: the label's logit."""

    engines: ClassVar[tuple[str, ...]] = ("torch", "nxd")
    by_token: ClassVar[bool | None] = True
    flops_per_element: ClassVar[int] = 0

    over: str

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        tensor, index = inputs
        rest = tuple(dim for dim in tensor.dims if dim != self.over)
        assert rest == index.dims, f"{index} does not choose along {self.over} of {tensor}"
        return (Output(dims=rest, dtype=tensor.dtype),)

    def index_dim(self, call: Call) -> str:
        return self.over

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        axis = call.inputs[0].dims.index(self.over)
        return (np.take_along_axis(arrays[0], np.expand_dims(arrays[1], axis), axis).squeeze(axis),)

    def traffic_bytes(self, call: Call) -> int:
        """Only what is picked moves."""
        return 2 * call.outputs[0].num_bytes(call.sizes) + call.inputs[1].num_bytes(call.sizes)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Put the gradient back where the element was taken."""
        kind = Place(over=self.over, dims=inputs[0].dims)
        return (GradientStep(kind=kind, reads=("d0", "in1"), gives=(0,)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(OpKind):
    """Zeros, but for the given values at an index along one dim."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    by_token: ClassVar[bool | None] = True
    owns_result: ClassVar[bool] = True
    flops_per_element: ClassVar[int] = 0

    over: str
    dims: Dims

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=self.dims, dtype=inputs[0].dtype),)

    def index_dim(self, call: Call) -> str:
        return self.over

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        axis = self.dims.index(self.over)
        result = np.zeros([call.sizes[dim] for dim in self.dims], dtype=arrays[0].dtype)
        values, index = (np.expand_dims(array, axis) for array in arrays)
        np.put_along_axis(result, index, values, axis)
        return (result,)
