"""The weights before the first step: their numbers follow from name and place, so each rank draws its part alone."""

import math
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from autoshard.engine.programs import tied_instances
from autoshard.graph.block import OpGraph
from autoshard.graph.op import Array
from autoshard.plan.plan import Plan

_SCALE = 0.02  # cited: the standard deviation of GPT-2's weights (Radford et al. 2019); Llama's are drawn likewise
_CHUNK = 1 << 16  # elements in storage order that one generator draws; who wants some of them draws all


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialWeights:
    """Whole weights of a model by name, as in ``OpGraph.instances``: norms do nothing, biases are zero."""

    graph: OpGraph
    seed: int
    threads: int = 1  # that draw

    @classmethod
    def of(cls, plan: Plan, graph: OpGraph, seed: int) -> "InitialWeights":
        """Return the weights of a run, which a rank draws on its share of the processors of its machine."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ranks = min(plan.mesh.num_ranks, plan.cluster.ranks_per_node)
        return cls(graph=graph, seed=seed, threads=max(1, cores // ranks))

    def __call__(self, name: str) -> Any:
        """Return a weight, any part of which can be read; for a tied weight, the one that it shares its values with."""
        name = tied_instances(self.graph).get(name, name)
        _, _, parameter = name.split(".", 2)
        shape, forward = _shape(self.graph, name), self.graph.block_of(name).select("micro_batch", "F")
        op = next(op for op in forward if parameter in op.inputs)
        value = op.kind.starts_at(op.inputs.index(parameter))
        if isinstance(value, tuple):
            return np.linspace(*value, math.prod(shape), dtype=np.float32).reshape(shape)
        if value is not None:
            return np.broadcast_to(np.float32(value), shape)
        return DrawnWeight(shape=shape, seeds=(self.seed, zlib.crc32(name.encode())), threads=self.threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnWeight:
    """A whole weight without memory: each part is drawn when it is read, in FP32, with the same numbers on any rank."""

    shape: tuple[int, ...]
    seeds: tuple[int, int]  # of the run, and of the weight's name
    threads: int = 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """The number format of every part: FP32."""
        return np.dtype(np.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Draw all of it."""
        return np.asarray(self[()], dtype=dtype)

    def __getitem__(self, box: tuple[slice, ...]) -> Array:
        """Draw a box; dims that are not named are whole."""
        whole = (slice(None),) * (len(self.shape) - len(box))
        bounds = [part.indices(size)[:2] for part, size in zip((*box, *whole), self.shape, strict=True)]
        drawn = np.empty([max(stop - start, 0) for start, stop in bounds], dtype=self.dtype)
        cut = [
            number for number, (bound, size) in enumerate(zip(bounds, self.shape, strict=True)) if bound != (0, size)
        ]
        last = cut[-1] if cut else 0  # all behind it is whole: what lies together in storage is taken together
        strides = [math.prod(self.shape[number + 1 :]) for number in range(len(self.shape))]
        runs = drawn.reshape(*drawn.shape[:last], math.prod(drawn.shape[last:]))
        for place in np.ndindex(runs.shape[:-1]):
            at = [start + number for (start, _), number in zip(bounds, (*place, 0), strict=False)]
            self._draw(sum(index * stride for index, stride in zip(at, strides, strict=False)), runs[place])
        return drawn

    def _draw(self, first: int, into: Array) -> None:
        """Fill a run of elements, the first of which has this number in storage order."""
        starts = range(first - first % _CHUNK, first + len(into), _CHUNK)
        if self.threads == 1 or len(starts) <= self.threads:
            for start in starts:
                self._draw_chunk(start, first, into)
            return
        with ThreadPoolExecutor(self.threads) as pool:  # numpy draws without Python's lock
            for _ in pool.map(lambda start: self._draw_chunk(start, first, into), starts):
                pass

    def _draw_chunk(self, start: int, first: int, into: Array) -> None:
        """Fill the part of a run that lies in the chunk with this start."""
        low, high = max(start, first), min(start + _CHUNK, first + len(into))
        into[low - first : high - first] = _drawn(*self.seeds, start // _CHUNK)[low - start : high - start]


@lru_cache(maxsize=8)  # runs that are shorter than a chunk follow each other
def _drawn(seed: int, name: int, chunk: int) -> Array:
    return np.random.default_rng([seed, name, chunk]).standard_normal(_CHUNK, dtype=np.float32) * np.float32(_SCALE)


def no_weights(graph: OpGraph) -> Callable[[str], Array]:
    """Return a function from names to whole weights of the right shapes, all zero, which take a few bytes."""
    return lambda name: no_memory(_shape(graph, name), np.float64)


def no_memory(shape: Sequence[int], dtype: type[np.generic]) -> Array:
    """Return an array in which every element is the same zero."""
    return as_strided(np.zeros(1, dtype), shape, [0] * len(shape))


def _shape(graph: OpGraph, name: str) -> tuple[int, ...]:
    _, _, parameter = name.split(".", 2)
    tensor = next(weight for weight in graph.block_of(name).parameters if weight.name == parameter)
    return tuple(graph.sizes[dim] for dim in tensor.dims)
