"""The weights before the first step: drawn by name, so that every rank draws the same."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from autoshard.engine.programs import tied_instances
from autoshard.graph.block import OpGraph
from autoshard.graph.kinds.norm import Norm
from autoshard.graph.kinds.pointwise import Add
from autoshard.graph.op import Array

_SCALE = 0.02  # cited: the standard deviation of GPT-2's weights (Radford et al. 2019); Llama's are drawn likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialWeights:
    """Whole weights of a model by name, as in ``OpGraph.instances``: norms do nothing, biases are zero."""

    graph: OpGraph
    seed: int

    def __call__(self, name: str) -> Array:
        """Draw a weight; tied ones are drawn as the one that they share their values with."""
        name = tied_instances(self.graph).get(name, name)
        kind, _, parameter = name.split(".", 2)
        shape, forward = _shape(self.graph, name), self.graph.block(kind).select("micro_batch", "F")
        op = next(op for op in forward if parameter in op.inputs)
        if isinstance(op.kind, Norm | Add):
            return np.full(shape, float(isinstance(op.kind, Norm) and parameter == op.inputs[1]))
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())]).normal(scale=_SCALE, size=shape)


def no_weights(graph: OpGraph) -> Callable[[str], Array]:
    """Return what gives whole weights of the right shapes by name, all zero, and of a few bytes."""
    return lambda name: no_memory(_shape(graph, name), np.float64)


def no_memory(shape: Sequence[int], dtype: type[np.generic]) -> Array:
    """Return an array in which every element is the same zero.

    >>> whole = no_memory((10**6, 10**6), np.int64)
    >>> whole.strides, int(whole[-1, -1])
    ((0, 0), 0)
    """
    return as_strided(np.zeros(1, dtype), shape, [0] * len(shape))


def _shape(graph: OpGraph, name: str) -> tuple[int, ...]:
    kind, _, parameter = name.split(".", 2)
    tensor = next(one for one in graph.block(kind).parameters if one.name == parameter)
    return tuple(graph.sizes[dim] for dim in tensor.dims)
