"""Who makes and who reads every tensor of a block, and in which layouts each choice does so."""

from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.blocks.choices import OpChoice, PassRule, made_layout, op_cuts, subsets
from autoshard.blocks.problem import OperatorProblem
from autoshard.graph.kinds.linear import Collect, Deliver
from autoshard.graph.op import Dims, Op
from autoshard.layout.change_prices import ChangePrices, Matrix, Pending
from autoshard.layout.layout import Layout
from autoshard.layout.legal import cut_operations
from autoshard.spec.workload import Dtype

ChangesByTensor = dict[tuple[Dims, Dtype, Pending], ChangePrices]


class Dataflow:
    """The operations of a block with their choices, and the delivers between them.

    ``changes`` are the prices of changes of problems that differ in blocks and choices only.
    """

    def __init__(self, problem: OperatorProblem, changes: ChangesByTensor | None = None) -> None:
        block, atoms = problem.block, problem.real_atoms
        self.problem, self._atoms = problem, atoms
        self.ops = cut_operations(block)
        self.delivers = [op for op in block.select("micro_batch", "F") if isinstance(op.kind, Deliver)]
        self.rules = {op.name: PassRule.of(op, block) for op in self.ops}
        self.maker = {name: op for op in self.ops for name in op.outputs}
        self.readers = {
            deliver.outputs[0]: [op for op in self.ops if deliver.outputs[0] in op.inputs] for deliver in self.delivers
        }
        self.delivered = {deliver.inputs[0] for deliver in self.delivers}
        self.steps: dict[str, list[Op]] = defaultdict(list)  # operations and their gradients
        for op in block.select("micro_batch"):
            self.steps[op.source].append(op)
        alone = {name for name, readers in self.readers.items() if len(readers) == 1}
        self.choices: dict[str, tuple[OpChoice, ...]] = {}
        for op in (free_op for free_op in self.ops if free_op.name not in problem.tied):
            rule, listed = self.rules[op.name], problem.allowed.get(op.name)
            cuts = op_cuts(block, op, atoms) if listed is None else listed
            forward = rule.forward and op.inputs[0] in alone
            choices: list[OpChoice] = []
            for choice_cuts in cuts:  # with every set of sums over its idle atoms that may pass through
                idle = tuple(atom for atom in atoms if atom not in OpChoice(cuts=choice_cuts).busy)
                ahead, back = (tuple(subsets(idle)) if passes else ((),) for passes in (forward, rule.backward))
                choices += [
                    OpChoice(cuts=choice_cuts, passed=passed, passed_back=passed_back)
                    for passed in ahead
                    for passed_back in back
                ]
            self.choices[op.name] = tuple(choices)
        self.choices |= {name: self.choices[like] for name, like in problem.tied.items()}
        back = {op.source for op in block.ops if isinstance(op.kind, Collect)}
        self.has_gradient = {deliver.outputs[0]: deliver.name in back for deliver in self.delivers}
        self._changes = ChangesByTensor() if changes is None else changes

    def change_s(
        self, dims: Dims, dtype: Dtype, befores: Sequence[Layout], afters: Sequence[Layout], pending: Pending = "sums"
    ) -> Matrix:
        """Return the seconds from each old layout of a tensor to each new layout: [before, after], and columns."""
        key = (dims, dtype, pending)
        if key not in self._changes:
            prices = self.problem.prices(dtype)
            self._changes[key] = ChangePrices(dims, self._atoms, prices, pending)
        return self._changes[key].between(befores, afters)

    def made(self, maker: Op | None, tensor: str) -> list[Layout]:
        """Return how a tensor leaves the operation that makes it, for each of its choices, or the block before."""
        tensors = self.problem.block.tensors
        if maker is None:
            return [OpChoice(cuts=self.problem.boundary).layout(tensors[tensor].dims)]
        return [made_layout(maker, tensors, tensor, choice) for choice in self.choices[maker.name]]

    def wanted(self, reader: Op, choice: OpChoice, tensor: str) -> Layout:
        """Return how an operation reads a tensor: a sum may be pending where it lets one pass."""
        passes = self.rules[reader.name].forward and reader.inputs[0] == tensor
        return choice.layout(self.problem.block.tensors[tensor].dims, choice.passed if passes else ())

    def sends(self, reader: Op, choice: OpChoice, tensor: str) -> frozenset[str]:
        """Return the atoms over which a sum is pending in the gradient that a reader sends back."""
        if not self.has_gradient[tensor]:
            return frozenset()
        pending = choice.awaited(self.problem.block.tensors[tensor].dims)
        return pending | set(choice.passed) if reader.inputs.index(tensor) in self.rules[reader.name].into else pending

    def counts_slots(self, tensor: str) -> bool:
        """Whether a tensor holds slot numbers, which are valid only under the cut under which they were counted."""
        maker = self.maker.get(tensor)
        if maker is None or self.problem.block.tensors[tensor].dtype != "int64":
            return False
        tied = {dim for dim, _ in maker.kind.tied_dims()}
        delivered = [deliver.outputs[0] for deliver in self.delivers if deliver.inputs[0] == tensor]
        readers = [reader for name in delivered for reader in self.readers[name]]
        return any(tied & {dim for dim, _ in reader.kind.tied_dims()} for reader in readers)

    def mask(self, atoms: Collection[str]) -> int:
        """Return atoms as a number, a bit each."""
        return sum(1 << place for place, atom in enumerate(self._atoms) if atom in atoms)


def numbered(values: Sequence[object]) -> NDArray[np.intp]:
    """Return a number per value, alike for equal ones.

    >>> numbered(["b", "a", "b"])
    array([0, 1, 0])
    """
    number = {value: index for index, value in enumerate(dict.fromkeys(values))}
    return np.array([number[value] for value in values], np.intp)
