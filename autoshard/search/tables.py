"""The tables of prices whose least sum is the best cut of a block.

One variable per forward operation, one per tensor that is delivered (the layout in which all its readers take it, and
how what they send back is pending), one per end of the block where it is free, one per operation whose weights may rest
in pieces.
"""

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from autoshard.graph.block import Saved
from autoshard.graph.op import Op
from autoshard.layout.layout import Layout
from autoshard.search.factors import Factor
from autoshard.search.neighbours import Neighbours, states_at
from autoshard.search.op_prices import (
    compute_s,
    gathered_s,
    kept_bytes,
    pending_of,
    reduction_s,
    ring_s,
    state_bytes,
    weights_of,
)
from autoshard.search.passage import Passage
from autoshard.search.problem import Atoms, OpChoice, OperatorProblem, subsets

IN, OUT = "boundary in", "boundary out"


class Tables:
    """The variables of a problem, what each may be, and the factors between them; ends without a boundary are free."""

    def __init__(self, problem: OperatorProblem, *, free_ends: bool = False) -> None:
        self.problem = problem
        self.free_ends = free_ends
        self.neighbours = Neighbours(problem)
        self.ops, self.choices = self.neighbours.ops, self.neighbours.choices
        self.passages = [
            Passage(self.neighbours, deliver, self._makers(deliver)) for deliver in self.neighbours.delivers
        ]

    @property
    def sizes(self) -> dict[str, int]:
        """How many values each variable has."""
        found = {name: len(values) for name, values in self.choices.items()}
        found |= {passage.deliver.name: len(passage.values) for passage in self.passages}
        found |= {self.rest_name(op): len(self.rests) for op in self.ops if self._may_rest(op)}
        return found | {name: len(self.boundaries) for name, there in self._ends() if there}

    def factors(self) -> list[Factor]:
        """Return all tables, with a byte's price in each."""
        found = [*self._op_factors(), *self._passage_factors(), self._end_factor()]
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
        return tuple(layout for layout in self.neighbours.states(dims, "bf16").layouts if not layout.sums)

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

    def _op_factors(self) -> Iterator[Factor]:
        for op in self.ops:
            choices = self.choices[op.name]
            time_s = compute_s(self.problem, op, choices) + ring_s(self.problem, op, choices)
            weight = sum(
                (kept_bytes(self.problem, entry, choices) for entry in self._own_saves(op)), np.zeros(len(choices))
            )
            yield Factor(variables=(op.name,), table=time_s, weight=weight)
            yield from self._weight_factors(op)

    def _own_saves(self, op: Op) -> list[Saved]:
        """Return what is kept as the operation is cut: copies of kernels, and results that nobody has delivered."""
        delivered = {deliver.inputs[0] for deliver in self.neighbours.delivers}
        return [entry for entry in self.problem.block.saved if entry.op == op.name and entry.storage not in delivered]

    def _weight_factors(self, op: Op) -> Iterator[Factor]:
        """Price how an operation's weights rest, and the reduction of their gradients."""
        problem, choices = self.problem, self.choices[op.name]
        weights = weights_of(problem, op)
        rests = self.rests if self._may_rest(op) else ((),)
        time_s, held = np.zeros((len(choices), len(rests))), np.zeros((len(choices), len(rests)))
        for weight in weights:
            dims = problem.block.tensors[weight].dims
            for row, choice in enumerate(choices):
                pending = pending_of(choice, dims)
                for column, rest in enumerate(rests):
                    held[row, column] += state_bytes(problem, weight, choice, rest)
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

    def _passage_factors(self) -> Iterator[Factor]:
        for passage in self.passages:
            table, weight = passage.table(), passage.kept()
            if passage.maker is None and not self.free_ends:
                yield Factor(
                    variables=(passage.deliver.name,), table=table[0], weight=None if weight is None else weight[0]
                )
            else:
                maker = IN if passage.maker is None else passage.maker.name
                yield Factor(variables=(maker, passage.deliver.name), table=table, weight=weight)
            yield from passage.fits()

    def _end_factor(self) -> Factor:
        """Price the way of the block's result to the boundary, and of the gradient that comes for it."""
        result = self.problem.block.carry_out or "loss"
        tensor, maker = self.problem.block.tensors[result], self.neighbours.maker[result]
        choices = self.choices[maker.name]
        states = self.neighbours.states(tensor.dims, tensor.dtype)
        made = states_at(states, [self.neighbours.made(maker, result, choice) for choice in choices])
        taken = states_at(states, [choice.layout(tensor.dims) for choice in choices])
        cuts = OpChoice(cuts=self.problem.boundary).layout(tensor.dims)
        free = self.free_ends and self.problem.block.carry_out is not None
        edges = states_at(states, self.boundaries if free else [cuts])
        table = states.price[np.ix_(made, edges)] + states.price[np.ix_(edges, taken)].T
        idle = np.array([not choice.passed_back for choice in choices])
        table = np.where(idle[:, None], table, np.inf)
        if free:
            return Factor(variables=(maker.name, OUT), table=table)
        return Factor(variables=(maker.name,), table=table[:, 0])
