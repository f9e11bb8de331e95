"""What weights begin with: drawn by name, so that every rank finds the same, whatever it holds."""

import zlib
from dataclasses import dataclass

import numpy as np

from autoshard.graph.block import OpGraph
from autoshard.graph.op import Array

_SCALE = 0.02  # cited: the standard deviation of GPT-2's weights (Radford et al. 2019); Llama's are drawn likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialWeights:
    """Whole weights of a model by name, as in ``graph/evaluate``: norms do nothing, biases are zero."""

    graph: OpGraph
    seed: int

    def __call__(self, name: str) -> Array:
        """Draw a weight; tied ones are drawn as the one that they share their values with."""
        kind, _, parameter = name.split(".", 2)
        owner = self.graph.tied.get(f"{kind}.{parameter}")
        if owner:
            return self(owner.replace(".", ".0.", 1))
        tensor = next(one for one in self.graph.block(kind).parameters if one.name == parameter)
        shape = [self.graph.sizes[dim] for dim in tensor.dims]
        if parameter.endswith(".bias"):
            return np.zeros(shape)
        if "norm" in parameter:
            return np.ones(shape)
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())]).normal(scale=_SCALE, size=shape)
