"""Who makes and who reads every tensor of a block, and in which layouts each choice does so."""

import copy
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from autoshard.blocks.pass_rule import PassRule
from autoshard.blocks.problem import OpChoice, OperatorProblem, all_choices, made_layout
from autoshard.graph.kinds.linear import Collect, Deliver
from autoshard.graph.op import Dims, Op
from autoshard.layout.layout import Layout
from autoshard.layout.legal import cut_operations
from autoshard.layout.states import Pending, Ways
from autoshard.spec.workload import Dtype


class Neighbours:
    """The operations of a block with their choices, and the delivers between them; some ``weights`` may be clamped."""

    def __init__(self, problem: OperatorProblem, weights: Mapping[str, Layout] = MappingProxyType({})) -> None:
        block = problem.block
        self.problem = problem
        self.ops = cut_operations(block)
        self.delivers = [op for op in block.select("micro_batch", "F") if isinstance(op.kind, Deliver)]
        self.rules = {op.name: PassRule.of(op, problem) for op in self.ops}
        self.maker = {name: op for op in self.ops for name in op.outputs}
        self.readers = {
            deliver.outputs[0]: [op for op in self.ops if deliver.outputs[0] in op.inputs] for deliver in self.delivers
        }
        alone = {name for name, readers in self.readers.items() if len(readers) == 1}
        self.choices = {
            op.name: tuple(
                choice
                for choice in all_choices(
                    problem,
                    op,
                    forward=self.rules[op.name].forward and op.inputs[0] in alone,
                    backward=self.rules[op.name].backward,
                )
                if all(
                    choice.layout(block.tensors[name].dims) == weights[name] for name in op.inputs if name in weights
                )
            )
            for op in self.ops
        }
        back = {op.source for op in block.ops if isinstance(op.kind, Collect)}
        self.has_gradient = {deliver.outputs[0]: deliver.name in back for deliver in self.delivers}
        self._ways: dict[tuple[Dims, Dtype, Pending], Ways] = {}

    def priced(self, problem: OperatorProblem) -> "Neighbours":
        """Return the same for a problem of other sizes and prices; it must have the same block and choices."""
        again = copy.copy(self)
        again.problem, again._ways = problem, {}
        return again

    def ways(self, dims: Dims, dtype: Dtype, pending: Pending = "sums") -> Ways:
        """Return the prices between all layouts of such a tensor."""
        key = (dims, dtype, pending)
        if key not in self._ways:
            problem = self.problem
            self._ways[key] = Ways(dims, problem.atoms, problem.price(dtype), problem.prices(dtype), pending)
        return self._ways[key]

    def made(self, maker: Op | None, tensor: str, choice: OpChoice) -> Layout:
        """Return how a tensor leaves the operation that makes it, or the block before."""
        tensors = self.problem.block.tensors
        return choice.layout(tensors[tensor].dims) if maker is None else made_layout(maker, tensors, tensor, choice)

    def wanted(self, reader: Op, choice: OpChoice, tensor: str) -> Layout:
        """Return how an operation reads a tensor: a sum may be pending where it lets one pass."""
        passes = self.rules[reader.name].forward and reader.inputs[0] == tensor
        return choice.layout(self.problem.block.tensors[tensor].dims, choice.passed if passes else ())

    def sends(self, reader: Op, choice: OpChoice, tensor: str) -> frozenset[str]:
        """Return what the gradient that a reader sends back awaits."""
        if not self.has_gradient[tensor]:
            return frozenset()
        waits = choice.lost(self.problem.block.tensors[tensor].dims) | set(choice.passed_back)
        into = self.rules[reader.name].into
        return waits | set(choice.passed) if reader.inputs.index(tensor) in into else waits

    def delivered(self, tensors: Sequence[str]) -> list[tuple[str, str]]:
        """Return those tensors that are delivered, each with its name after that."""
        return [(one.inputs[0], one.outputs[0]) for one in self.delivers if one.inputs[0] in tensors]

    def counts_slots(self, tensor: str) -> bool:
        """Whether a tensor holds numbers that mean something only under the cut under which they were counted."""
        maker = self.maker.get(tensor)
        if maker is None or self.problem.block.tensors[tensor].dtype != "int64":
            return False
        tied = {dim for dim, _ in maker.kind.tied_dims()}
        readers = [reader for _, name in self.delivered([tensor]) for reader in self.readers[name]]
        return any(tied & {dim for dim, _ in reader.kind.tied_dims()} for reader in readers)

    def mask(self, atoms: Collection[str]) -> int:
        """Return atoms as a number, a bit each."""
        return sum(1 << place for place, atom in enumerate(self.problem.real_atoms) if atom in atoms)


def numbers(values: Sequence[object]) -> Any:
    """Return a number per value, alike for equal ones.

    >>> numbers(["b", "a", "b"])
    array([0, 1, 0])
    """
    number = {value: index for index, value in enumerate(dict.fromkeys(values))}
    return np.array([number[value] for value in values], int)
