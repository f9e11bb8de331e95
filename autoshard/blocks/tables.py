"""The tables of prices whose least sum is the best cut of a block.

One variable per forward operation, one per tensor that is delivered (in which layout, who takes it as it was made, and
how what they send back is pending) or one for each of its two readers, one per end of the block where it is free, one
per operation whose weights may rest in pieces.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from autoshard.blocks.factors import Factor
from autoshard.blocks.mixtures import Rows, mixtures
from autoshard.blocks.neighbours import Neighbours
from autoshard.blocks.op_prices import (
    compute_s,
    gathered_s,
    kept_bytes,
    pending_of,
    reduction_s,
    ring_s,
    state_bytes,
    weights_of,
)
from autoshard.blocks.pairs import pair_tables
from autoshard.blocks.passage import Delivery, Passage
from autoshard.blocks.problem import Atoms, OpChoice, OperatorProblem, subsets
from autoshard.errors import InputError
from autoshard.graph.block import Saved
from autoshard.graph.op import Op
from autoshard.layout.layout import Layout
from autoshard.layout.states import all_layouts

IN, OUT = "boundary in", "boundary out"
_SMALL = 1 << 13  # measured: of fewer combinations, a table is made faster than those are found that matter
_LARGE = 1 << 26  # measured: cells of a table from which a layer on three atoms takes more than some seconds


class Tables:
    """The variables of a problem, what each may be, and the factors between them; ends without a boundary are free.

    ``like`` holds tables of a problem with the same block, choices and boundary: what no size changes is used again.
    """

    def __init__(
        self,
        problem: OperatorProblem,
        *,
        free_ends: bool = False,
        weights: Mapping[str, Layout] = MappingProxyType({}),
        like: "Tables | None" = None,
    ) -> None:
        self.problem = problem
        self.free_ends = free_ends
        self.neighbours: Neighbours = like.neighbours.priced(problem) if like else Neighbours(problem, weights)
        self.ops, self.choices = self.neighbours.ops, self.neighbours.choices
        self._own = {op.name: self._op_factors(op) for op in self.ops}
        self.passages: list[Passage] = [
            like.passages[number].priced(self.neighbours)
            if like
            else Passage(self.neighbours, deliver, self._makers(deliver))
            for number, deliver in enumerate(self.neighbours.delivers)
        ]
        self._taken: dict[str, int] = {}
        self._between: dict[str, list[Factor]] = {}
        for passage in self.passages:
            if not passage.possible:
                readers = ", ".join(reader.name for reader in passage.readers)
                message = f"{readers} read {passage.tensor} in different layouts; pin them to one, or fewer of them"
                raise InputError.of("pins", message)
        for passage in reversed(self.passages):  # what readers do with what they make is known then
            self._settle(passage)

    @property
    def sizes(self) -> dict[str, int]:
        """How many values each variable has."""
        found = {name: len(values) for name, values in self.choices.items()}
        found |= self._taken
        found |= {self.rest_name(op): len(self.rests) for op in self.ops if self._may_rest(op)}
        return found | {name: len(self.boundaries) for name, there in self._ends() if there}

    def factors(self) -> list[Factor]:
        """Return all tables, with a byte's price in each."""
        own = [factor for op in self.ops for factor in self._own[op.name]]
        between = [factor for passage in self.passages for factor in self._between[passage.deliver.name]]
        found = [*own, *between, self._end]
        price = self.problem.second_per_byte
        return [
            Factor(variables=one.variables, table=one.table + price * one.weight, weight=one.weight)
            if price and one.weight is not None
            else one
            for one in found
        ]

    @cached_property
    def boundaries(self) -> tuple[Layout, ...]:
        """The layouts in which blocks may hand the hidden state on."""
        dims = next(self.problem.block.tensors[name].dims for name in self._carried())
        return tuple(layout for layout in all_layouts(dims, self.problem.real_atoms) if not layout.sums)

    @cached_property
    def rests(self) -> tuple[Atoms, ...]:
        """The atoms over which weights may rest in pieces."""
        return tuple(subsets(self.problem.real_atoms))

    @staticmethod
    def rest_name(op: Op) -> str:
        """Return the name of the variable that says how an operation's weights rest."""
        return f"rest of {op.name}"

    def _carried(self) -> list[str]:
        return [name for name in (self.problem.block.carry_in, self.problem.block.carry_out) if name]

    def _ends(self) -> list[tuple[str, bool]]:
        block = self.problem.block
        return [(IN, self.free_ends and bool(block.carry_in)), (OUT, self.free_ends and bool(block.carry_out))]

    def _may_rest(self, op: Op) -> bool:
        return self.problem.cuts_rest and bool(weights_of(self.problem, op))

    # what an operation costs by itself

    def _op_factors(self, op: Op) -> list[Factor]:
        choices = self.choices[op.name]
        time_s = compute_s(self.problem, op, choices) + ring_s(self.problem, op, choices)
        weight = sum(
            (kept_bytes(self.problem, entry, choices) for entry in self._own_saves(op)), np.zeros(len(choices))
        )
        return [Factor(variables=(op.name,), table=time_s, weight=weight), *self._weight_factors(op)]

    def _own_saves(self, op: Op) -> list[Saved]:
        """Return what is kept as the operation is cut: copies of kernels, and results that nobody has delivered."""
        delivered = {deliver.inputs[0] for deliver in self.neighbours.delivers}
        return [entry for entry in self.problem.block.saved if entry.op == op.name and entry.storage not in delivered]

    def _weight_factors(self, op: Op) -> Iterator[Factor]:
        """Price how an operation's weights rest, and the reduction of their gradients."""
        problem, choices = self.problem, self.choices[op.name]
        weights, weighs = weights_of(problem, op), problem.state_bytes_per_weight > 0
        rests = self.rests if self._may_rest(op) else ((),)
        time_s, held = np.zeros((len(choices), len(rests))), np.zeros((len(choices), len(rests)))
        for weight in weights:
            dims = problem.block.tensors[weight].dims
            for row, choice in enumerate(choices):
                pending = pending_of(choice, dims)
                for column, rest in enumerate(rests):
                    held[row, column] += state_bytes(problem, weight, choice, rest) if weighs else 0.0
                    if rest:
                        possible = set(rest) <= pending
                        time_s[row, column] += gathered_s(problem, weight, choice, rest) if possible else np.inf
                    else:
                        time_s[row, column] += reduction_s(problem, weight, choice.cuts, sorted(pending))
        if self._may_rest(op):
            yield Factor(variables=(op.name, self.rest_name(op)), table=time_s, weight=held)
        elif weights:
            yield Factor(variables=(op.name,), table=time_s[:, 0], weight=held[:, 0])

    # what lies between operations

    def _makers(self, deliver: Op) -> list[OpChoice]:
        """Return what the maker of a tensor may choose, be it the block before."""
        maker = self.neighbours.maker.get(deliver.inputs[0])
        if maker is not None:
            return list(self.choices[maker.name])
        if self.free_ends:
            return [OpChoice(cuts=dict(layout.dims)) for layout in self.boundaries]
        return [OpChoice(cuts=self.problem.boundary)]

    def _settle(self, passage: Passage) -> None:
        """Decide what readers may take of a tensor, and price it: one variable for all of them, or one for each."""
        deliver, readers = passage.deliver.name, passage.readers
        values = self._values(passage)
        if values is None:
            takes = {f"{deliver} to {reader.name}": passage.sides([reader.name]) for reader in readers}
            table, weight = pair_tables(passage)
            fits = [passage.fits(*one) for one in zip(takes, readers, takes.values(), strict=True)]
        else:
            takes = {deliver: values}
            table, weight = passage.table(values), passage.kept(values)
            fits = [passage.fits(deliver, reader, [value.of(reader.name) for value in values]) for reader in readers]
        self._taken |= {name: len(values) for name, values in takes.items()}
        self._between[deliver] = [self._way(passage, tuple(takes), table, weight), *fits, *passage.passes()]

    def _values(self, passage: Passage) -> tuple[Delivery, ...] | None:
        """Return what a tensor may be delivered as; None if two readers had better have a variable each."""
        if not passage.groups:
            return passage.plain
        takes = [len(passage.sides([reader.name])) for reader in passage.readers]
        pair, limited = len(takes) == 2, math.isfinite(self.problem.memory_limit_bytes)
        if pair and math.prod(takes) <= _SMALL:
            return None
        rows = {reader.name: self._rows(reader) for reader in passage.readers}
        most = _LARGE // (max(takes) * max(len(self.choices[reader.name]) for reader in passage.readers))
        values = (*passage.plain, *mixtures(passage, rows, limited=limited))
        if limited and not pair and len(values) > most:
            values = (*passage.plain, *mixtures(passage, rows))
        return None if pair and len(values) > most else values

    def _way(self, passage: Passage, takes: tuple[str, ...], table: Any, weight: Any) -> Factor:
        if passage.maker is None and not self.free_ends:
            return Factor(variables=takes, table=table[0], weight=None if weight is None else weight[0])
        maker = IN if passage.maker is None else passage.maker.name
        return Factor(variables=(maker, *takes), table=table, weight=weight)

    def _rows(self, op: Op) -> list[Rows]:
        """Return the tables of an operation by itself and with those who read what it makes, a row per choice."""
        settled = [self._between.get(passage.deliver.name, []) for passage in self.passages if passage.maker == op]
        ways = [factor for factors in settled for factor in factors if factor.variables[0] == op.name]
        found = [*self._own[op.name], *ways, *([self._end] if self._end.variables[0] == op.name else [])]
        price = self.problem.second_per_byte
        return [
            Rows(table=one.table if one.weight is None else one.table + price * one.weight, weight=one.weight)
            for one in found
        ]

    @cached_property
    def _end(self) -> Factor:
        """Price the way of the block's result to the boundary, and of the gradient that comes for it; a loss stays."""
        result = self.problem.block.carry_out or "loss"
        tensor, maker = self.problem.block.tensors[result], self.neighbours.maker[result]
        choices = self.choices[maker.name]
        ways = self.neighbours.ways(tensor.dims, tensor.dtype)
        made = [self.neighbours.made(maker, result, choice) for choice in choices]
        taken = [choice.layout(tensor.dims) for choice in choices]
        free = self.free_ends and self.problem.block.carry_out is not None
        edges = self.boundaries if free else [OpChoice(cuts=self.problem.boundary).layout(tensor.dims)]
        table = ways.between(made, edges) + ways.between(edges, taken).T
        idle = np.array([not choice.passed_back for choice in choices])
        table = np.where(idle[:, None], table if self.problem.block.carry_out else 0.0, np.inf)
        if free:
            return Factor(variables=(maker.name, OUT), table=table)
        return Factor(variables=(maker.name,), table=table[:, 0])
