"""The tables of prices whose least sum is the best cut of a block.

One variable per forward operation; one per tensor that is delivered (how it is taken, and how what readers send back is
pending), or one for each of its readers; one per operation whose weights may rest in pieces.
"""

import numpy as np

from autoshard.blocks.choices import Atoms, subsets
from autoshard.blocks.dataflow import Dataflow
from autoshard.blocks.elimination import CostFactor
from autoshard.blocks.op_prices import (
    compute_s,
    gathered_s,
    kept_bytes,
    reduction_s,
    ring_s,
    state_bytes,
    weights_of,
)
from autoshard.blocks.problem import OperatorProblem
from autoshard.blocks.tensor_edge import TensorEdge
from autoshard.graph.op import Op


class Tables:
    """The variables of a problem with their values, and the factors between them.

    ``like`` holds tables of a problem with the same block, choices and boundary: what no size changes is used again.
    """

    def __init__(self, problem: OperatorProblem, *, like: "Tables | None" = None) -> None:
        self.problem = problem
        self._flow: Dataflow = like._flow.priced(problem) if like else Dataflow(problem)
        self.ops, self.choices = self._flow.ops, self._flow.choices
        self._edges: list[TensorEdge] = (
            [edge.priced(self._flow) for edge in like._edges]
            if like
            else [TensorEdge(self._flow, deliver) for deliver in self._flow.delivers]
        )
        self.rests: tuple[Atoms, ...] = tuple(subsets(problem.real_atoms)) if problem.cuts_rest else ((),)

    @property
    def sizes(self) -> dict[str, int]:
        """How many values each variable has."""
        found = {name: len(values) for name, values in self.choices.items()}
        found |= {name: len(values) for edge in self._edges for name, values in edge.variables.items()}
        rests = [self.rest_name(op) for op in self.ops if weights_of(self.problem, op)]
        return found | (dict.fromkeys(rests, len(self.rests)) if self.problem.cuts_rest else {})

    def factors(self) -> list[CostFactor]:
        """Return all tables."""
        own = [factor for op in self.ops for factor in self._op_factors(op)]
        return [*own, *(factor for edge in self._edges for factor in edge.factors()), self._end()]

    @staticmethod
    def rest_name(op: Op) -> str:
        """Return the name of the variable that says how an operation's weights rest."""
        return f"rest of {op.name}"

    def _op_factors(self, op: Op) -> list[CostFactor]:
        """Price an operation by itself.

        It keeps, as it is cut, copies of its kernel and results that are not delivered.
        """
        choices, block = self.choices[op.name], self.problem.block
        time_s = compute_s(self.problem, op, choices) + ring_s(self.problem, op, choices)
        delivered = {deliver.inputs[0] for deliver in self._flow.delivers}
        weight = np.zeros(len(choices))
        for entry in block.saved:
            if entry.op == op.name and entry.storage not in delivered:
                weight += kept_bytes(self.problem, entry, choices)
        found = [CostFactor(variables=(op.name,), table=time_s, weight=weight)]
        return [*found, self._weight_factor(op)] if weights_of(self.problem, op) else found

    def _weight_factor(self, op: Op) -> CostFactor:
        """Price how an operation's weights rest, and the reduction of their gradients."""
        problem, choices = self.problem, self.choices[op.name]
        time_s, states = np.zeros((2, len(choices), len(self.rests)))
        for weight in weights_of(problem, op):
            dims = problem.block.tensors[weight].dims
            for row, choice in enumerate(choices):
                pending = choice.awaited(dims)
                for column, rest in enumerate(self.rests):
                    if problem.state_bytes_per_weight:
                        states[row, column] += state_bytes(problem, weight, choice, rest)
                    if not rest:
                        time_s[row, column] += reduction_s(problem, weight, choice.cuts, sorted(pending))
                    elif pending.issuperset(rest):
                        time_s[row, column] += gathered_s(problem, weight, choice, rest)
                    else:
                        time_s[row, column] = np.inf
        if problem.cuts_rest:
            return CostFactor(variables=(op.name, self.rest_name(op)), table=time_s, weight=states)
        return CostFactor(variables=(op.name,), table=time_s[:, 0], weight=states[:, 0])

    def _end(self) -> CostFactor:
        """Price the way of the block's result to the boundary, and of the gradient that comes for it; a loss stays."""
        block, flow = self.problem.block, self._flow
        result = block.carry_out or "loss"
        tensor, maker = block.tensors[result], flow.maker[result]
        choices = self.choices[maker.name]
        time_s = np.zeros(len(choices))
        if block.carry_out:
            boundary = flow.made(None, result)
            made, taken = flow.made(maker, result), [choice.layout(tensor.dims) for choice in choices]
            time_s += flow.change_s(tensor.dims, tensor.dtype, made, boundary)[:, 0]
            time_s += flow.change_s(tensor.dims, tensor.dtype, boundary, taken)[0]
        time_s[[bool(choice.passed_back) for choice in choices]] = np.inf
        return CostFactor(variables=(maker.name,), table=time_s)
