"""The best cuts of a whole unrolled model: blocks in a row, with the layout between any two of them free.

A block is reduced once to a table of its least cost for every layout that comes in and goes out; a chain of blocks is
then a product of such tables in which sums are minima and products are sums. Memory is not limited here.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from autoshard.blocks.factors import Elimination, eliminate, joined
from autoshard.blocks.operators import OperatorSolution, solution_of
from autoshard.blocks.problem import OperatorProblem
from autoshard.blocks.tables import IN, OUT, Tables
from autoshard.layout.layout import Layout

Ends = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeight:
    """One weight that two blocks of a chain use, so that both must cut it alike: (place in the chain, name) of each."""

    first: tuple[int, str]
    second: tuple[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSolution:
    """The cuts of every block, the layouts between them, and what all of it costs together."""

    blocks: tuple[OperatorSolution, ...]
    boundaries: tuple[Layout, ...]
    cost_s: float


class ReducedBlock:
    """A block with free ends, everything inside minimised away; give the same one twice to use its work twice."""

    def __init__(self, problem: OperatorProblem, weights: Mapping[str, Layout] = MappingProxyType({})) -> None:
        self.tables = Tables(problem, free_ends=True, weights=weights)
        self._factors = self.tables.factors()

    @property
    def boundaries(self) -> tuple[Layout, ...]:
        """The layouts that may come in and go out."""
        return self.tables.boundaries

    @cached_property
    def elimination(self) -> Elimination:
        """The tables by which the choices inside follow from those at the ends."""
        return eliminate(self.tables.sizes, self._factors, keep=(IN, OUT))

    @cached_property
    def matrix(self) -> Any:
        """The least cost: a row per layout that comes in, a column per one that goes out, or one."""
        ends = {name: self.tables.sizes.get(name, 1) for name in (IN, OUT)}
        return joined((IN, OUT), ends, self.elimination.rest).table

    def with_weight(self, weight: str, layout: Layout) -> "ReducedBlock":
        """Return the block when a weight has this layout: from its own tables, which leave out what others dominate."""
        return ReducedBlock(self.tables.problem, {weight: layout})

    def weight_layouts(self, weight: str) -> tuple[Layout, ...]:
        """Return every layout that a weight may have."""
        op = next(op for op in self.tables.ops if weight in op.inputs)
        dims = self.tables.problem.block.tensors[weight].dims
        return tuple(dict.fromkeys(choice.layout(dims) for choice in self.tables.choices[op.name]))

    def cost_s(self, choices: Mapping[str, int]) -> float:
        """Return what these choices cost."""
        places = ((factor.table, tuple(choices[name] for name in factor.variables)) for factor in self._factors)
        return float(sum(table[place] for table, place in places))


def solve_chain(
    blocks: Sequence[ReducedBlock], *, layers_tied: bool = False, shared: SharedWeight | None = None
) -> ChainSolution:
    """Find the cheapest cuts of blocks in a row; with ``layers_tied`` one layout between all of them."""
    if shared is None:
        return _solved(blocks, layers_tied)
    (one, first), (two, second) = shared.first, shared.second
    names = dict(zip(_dims(blocks[two], second), _dims(blocks[one], first), strict=True))
    found: list[ChainSolution] = []
    for layout in blocks[one].weight_layouts(first):
        again = Layout(dims=tuple((dim, dict(layout.dims)[names[dim]]) for dim in names))
        if again in blocks[two].weight_layouts(second):
            clamped = list(blocks)
            clamped[one] = blocks[one].with_weight(first, layout)
            clamped[two] = blocks[two].with_weight(second, again)
            found.append(_solved(clamped, layers_tied))
    return min(found, key=lambda solution: solution.cost_s)


def _dims(block: ReducedBlock, weight: str) -> tuple[str, ...]:
    return block.tables.problem.block.tensors[weight].dims


def _solved(blocks: Sequence[ReducedBlock], layers_tied: bool) -> ChainSolution:
    matrices = [block.matrix for block in blocks]
    path = _tied_path(matrices) if layers_tied else _best_path(matrices)
    solutions: list[OperatorSolution] = []
    for block, ends in zip(blocks, itertools.pairwise(path), strict=True):
        kept = {name: end for name, end in zip((IN, OUT), ends, strict=True) if name in block.tables.sizes}
        numbers = block.elimination.choices(kept)
        costs = OperatorSolution(cuts={}, cost_s=block.cost_s(numbers))
        solutions.append(solution_of(block.tables, numbers, costs))
    between = tuple(blocks[0].boundaries[number] for number in path[1:-1])
    cost_s = sum(solution.cost_s for solution in solutions)
    return ChainSolution(blocks=tuple(solutions), boundaries=between, cost_s=cost_s)


def _best_path(matrices: Sequence[Any]) -> list[int]:
    """Return the cheapest way through the tables: what comes into each, and what goes out of the last."""
    total, origins = matrices[0].min(axis=0), [matrices[0].argmin(axis=0)]
    for matrix in matrices[1:]:
        ways = total[:, None] + matrix
        total = ways.min(axis=0)
        origins.append(ways.argmin(axis=0))
    path = [int(total.argmin())]
    for origin in reversed(origins):
        path.append(int(origin[path[-1]]))
    return path[::-1]


def _tied_path(matrices: Sequence[Any]) -> list[int]:
    """Return the cheapest way on which one layout comes out of every block and into the next."""
    first, *inner, last = matrices
    total = (
        first.min(axis=0) + last.min(axis=1) + sum((matrix.diagonal() for matrix in inner), np.zeros(first.shape[1]))
    )
    same = int(total.argmin())
    return [int(first[:, same].argmin()), *(same for _ in matrices[1:]), int(last[same].argmin())]
