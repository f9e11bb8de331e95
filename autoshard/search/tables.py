"""The tables of prices whose least sum is the best cut of a block.

One variable per forward operation, one per tensor that is delivered (the layout in which all its readers take it, and
how what they send back is pending), one per end of the block where it is free, one per operation whose weights may rest
in pieces.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.errors import InputError
from autoshard.graph.block import Saved
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.op import Differentiable, Dims, Op
from autoshard.layout.layout import Layout
from autoshard.layout.legal import cut_operations
from autoshard.layout.redistribute import only_gathers
from autoshard.layout.states import Pending, Ways, all_layouts
from autoshard.search.factors import Factor
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
from autoshard.search.problem import Atoms, OpChoice, OperatorProblem, all_choices, made_layout, subsets
from autoshard.spec.workload import Dtype

IN, OUT = "boundary in", "boundary out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A layout that a tensor is delivered in, and the layout of what is sent back for it."""

    taken: Layout
    sent: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRule:
    """Through which sums an operation lets pass: its first input's, its result's gradient's; and on to which inputs."""

    forward: bool
    backward: bool
    into: frozenset[int]  # inputs whose gradients await what passed forward

    @classmethod
    def of(cls, op: Op, problem: OperatorProblem) -> "PassRule":
        """Read it off the kind and the kinds of its gradient."""
        assert isinstance(op.kind, Differentiable), f"{op.name}: {op.kind.label} stands in a forward pass"
        inputs = [problem.block.tensors[name] for name in op.inputs]
        roles = ("activation", "parameter")
        needed = [number for number, one in enumerate(inputs) if one.role in roles and one.dtype != "int64"]
        steps = [(step.kind, step) for step in op.kind.gradient(inputs, needed) if step.kind is not None]
        linear = [step for kind, step in steps if 0 in kind.linear_through() and step.reads[0] == "d0"]
        readers = [step for _, step in steps if "d0" in step.reads]
        into = {
            step.gives[output]
            for kind, step in steps
            for read, outputs in kind.linear_through().items()
            for output in outputs
            if step.reads[read] == "in0"
        }
        return cls(
            forward=0 in op.kind.linear_through() and inputs[0].role == "activation",
            backward=bool(linear) and len(linear) == len(readers),
            into=frozenset(number for number in into if number is not None),
        )


class Tables:
    """The variables of a problem, what each may be, and the factors between them; ends without a boundary are free."""

    def __init__(self, problem: OperatorProblem, *, free_ends: bool = False) -> None:
        self.problem = problem
        self.free_ends = free_ends
        block = problem.block
        self.ops = cut_operations(block)
        self.delivers = [op for op in block.select("micro_batch", "F") if isinstance(op.kind, Deliver)]
        self._rules = {op.name: PassRule.of(op, problem) for op in self.ops}
        self._readers = {
            deliver.outputs[0]: [op for op in self.ops if deliver.outputs[0] in op.inputs] for deliver in self.delivers
        }
        alone = {name for name, readers in self._readers.items() if len(readers) == 1}
        self.choices = {
            op.name: all_choices(
                problem,
                op,
                forward=self._rules[op.name].forward and op.inputs[0] in alone,
                backward=self._rules[op.name].backward,
            )
            for op in self.ops
        }
        self._maker = {name: op for op in self.ops for name in op.outputs}
        self._ways: dict[tuple[Dims, Dtype, Pending], Ways] = {}
        self.delivered = {op.name: self._deliveries(op) for op in self.delivers}

    @property
    def sizes(self) -> dict[str, int]:
        """How many values each variable has."""
        found = {name: len(values) for name, values in (*self.choices.items(), *self.delivered.items())}
        found |= {self.rest_name(op): len(self.rests) for op in self.ops if self._may_rest(op)}
        return found | {name: len(self.boundaries) for name, there in self._ends() if there}

    def factors(self) -> list[Factor]:
        """Return all tables, with a byte's price in each."""
        found = [*self._op_factors(), *self._deliver_factors(), self._end_factor()]
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
        delivered = {deliver.inputs[0] for deliver in self.delivers}
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

    def _deliveries(self, deliver: Op) -> tuple[Delivery, ...]:
        """List what a tensor may be delivered as: what all its readers can take, with all that may be sent back."""
        tensor = deliver.outputs[0]
        dims = self.problem.block.tensors[tensor].dims
        ways: dict[Layout, set[frozenset[str]]] | None = None
        for reader in self._readers[tensor]:
            mine: dict[Layout, set[frozenset[str]]] = {}
            for choice in self.choices[reader.name]:
                sends = self._sends(reader, choice, tensor, dims) if self._has_gradient(deliver) else frozenset[str]()
                mine.setdefault(self._wanted(reader, choice, tensor), set()).add(sends)
            ways = mine if ways is None else _both(ways, mine)
        if not ways:
            names = ", ".join(reader.name for reader in self._readers[tensor])
            raise InputError.of(
                "pins", f"{names} read {tensor} in different layouts; pin them to one, or fewer of them"
            )
        found = ((layout, sent) for layout, all_sent in ways.items() for sent in all_sent)
        made = (
            Delivery(taken=layout, sent=Layout(dims=layout.dims, sums=tuple(sorted(sent)))) for layout, sent in found
        )
        return tuple(sorted(made, key=str))

    def _wanted(self, reader: Op, choice: OpChoice, tensor: str) -> Layout:
        """Return how an operation reads a tensor: a sum may be pending where it lets one pass."""
        passes = self._rules[reader.name].forward and reader.inputs[0] == tensor
        return choice.layout(self.problem.block.tensors[tensor].dims, choice.passed if passes else ())

    def _deliver_factors(self) -> Iterator[Factor]:
        for deliver in self.delivers:
            maker = self._maker.get(deliver.inputs[0])
            if maker is not None:
                yield self._way(deliver, (maker.name, deliver.name), maker, list(self.choices[maker.name]))
            elif self.free_ends:
                edges = [OpChoice(cuts=dict(layout.dims)) for layout in self.boundaries]
                yield self._way(deliver, (IN, deliver.name), None, edges)
            else:
                edge = self._way(deliver, (IN, deliver.name), None, [OpChoice(cuts=self.problem.boundary)])
                weight = None if edge.weight is None else edge.weight[0]
                yield Factor(variables=(deliver.name,), table=edge.table[0], weight=weight)
            for reader in self._readers[deliver.outputs[0]]:
                yield self._fits(deliver, reader)
                if maker is not None and self._rules[reader.name].forward and reader.inputs[0] == deliver.outputs[0]:
                    yield self._passes(maker, reader, deliver)

    def _way(self, deliver: Op, variables: tuple[str, str], maker: Op | None, choices: list[OpChoice]) -> Factor:
        """Price the way of a tensor from how it is made to how it is delivered, and of its gradient back."""
        source = self.problem.block.tensors[deliver.inputs[0]]
        made = [self._made(maker, source.name, choice) for choice in choices]
        pending: Pending = "maxima" if any(layout.maxima for layout in made) else "sums"
        goals = [_renamed(one.taken, deliver) for one in self.delivered[deliver.name]]
        forward = self._ways_of(source.dims, source.dtype, pending).between(made, goals)
        table = forward
        if self._read_later(deliver):
            table = table + np.where(self._again(made, goals), forward, 0.0)
        if self._has_gradient(deliver):
            table = table + self._way_back(deliver, choices)
        if maker is not None and self._counts_slots(maker, deliver):
            plain = [choice.layout(source.dims).dims for choice in choices]
            alike = [[goal.dims == dims for goal in goals] for dims in plain]
            table = np.where(alike, table, np.inf)
        return Factor(variables=variables, table=table, weight=self._kept(deliver, made))

    def _way_back(self, deliver: Op, choices: list[OpChoice]) -> Any:
        """Price the way of a gradient from how its readers send it to how the maker's own gradient takes it."""
        source = self.problem.block.tensors[deliver.inputs[0]]
        sent = [_renamed(one.sent, deliver) for one in self.delivered[deliver.name]]
        taken = [choice.layout(source.dims, choice.passed_back) for choice in choices]
        price = self._ways_of(source.dims, source.dtype).between(sent, taken).T
        if not any(choice.passed_back for choice in choices):
            return price
        # What may stay pending does: the program that is lowered knows no other.
        due = [[set(layout.sums) - choice.busy == set(choice.passed_back) for layout in sent] for choice in choices]
        return np.where(due, price, np.inf)

    def _kept(self, deliver: Op, made: Sequence[Layout]) -> Any:
        """Return the memory that a tensor needs from forward to backward, as it is made or as it is delivered."""
        source = self.problem.block.tensors[deliver.inputs[0]]
        saved = [entry for entry in self.problem.block.saved if entry.storage == source.name]
        if not saved:
            return None
        dtype = saved[0].tensor.dtype
        goals = [_renamed(one.taken, deliver) for one in self.delivered[deliver.name]]
        here = np.array([self.problem.local_bytes(layout, dtype) for layout in made], float)[:, None]
        there = np.array([self.problem.local_bytes(goal, dtype) for goal in goals], float)[None]
        stays = np.array([not (layout.sums or layout.maxima) for layout in made])[:, None]
        if not self._read_later(deliver):
            return np.where(stays, here, there)
        twice = [[self._reads_own(source.name) and layout.dims != goal.dims for goal in goals] for layout in made]
        return np.where(self._again(made, goals), here, there + np.where(stays & np.array(twice), here, 0.0))

    def _again(self, made: Sequence[Layout], goals: Sequence[Layout]) -> Any:
        """Say where what was gathered is not kept, so that backward gathers it again."""
        return np.array(
            [[not self.problem.keeps_gathered and only_gathers(one, goal) for goal in goals] for one in made]
        )

    def _reads_own(self, tensor: str) -> bool:
        """Whether a gradient reads what its own forward operation made."""
        maker = self._maker.get(tensor)
        later = self.problem.block.select("micro_batch", "IW")
        return maker is not None and any(op.source == maker.name and tensor in op.inputs for op in later)

    def _counts_slots(self, maker: Op, deliver: Op) -> bool:
        """Whether a tensor holds numbers that mean something only under the cut under which they were counted."""
        readers = self._readers[deliver.outputs[0]]
        tied = {dim for dim, _ in maker.kind.tied_dims()}
        counted = any(tied & {dim for dim, _ in reader.kind.tied_dims()} for reader in readers)
        return counted and self.problem.block.tensors[deliver.inputs[0]].dtype == "int64"

    def _read_later(self, deliver: Op) -> bool:
        later = (op for op in self.problem.block.select("micro_batch", "IW"))
        return any(deliver.outputs[0] in op.inputs for op in later)

    def _has_gradient(self, deliver: Op) -> bool:
        return any(op.source == deliver.name and op.pass_ != "F" for op in self.problem.block.ops)

    def _fits(self, deliver: Op, reader: Op) -> Factor:
        """Return 0 where a reader can take what is delivered and send back what is waited for, infinity elsewhere."""
        tensor = deliver.outputs[0]
        dims = self.problem.block.tensors[tensor].dims
        delivered, choices = self.delivered[deliver.name], self.choices[reader.name]
        number = {layout: index for index, layout in enumerate(dict.fromkeys(one.taken for one in delivered))}
        taken = np.array([number[one.taken] for one in delivered])
        wanted = np.array([number.get(self._wanted(reader, choice, tensor), -1) for choice in choices])
        fits = taken[:, None] == wanted[None]
        if self._has_gradient(deliver):
            gathered = np.array([self._mask(one.sent.sums) for one in delivered])
            sends = np.array([self._mask(self._sends(reader, choice, tensor, dims)) for choice in choices])
            fits &= (sends[None] & ~gathered[:, None]) == 0
        return Factor(variables=(deliver.name, reader.name), table=np.where(fits, 0.0, np.inf))

    def _sends(self, reader: Op, choice: OpChoice, tensor: str, dims: Dims) -> frozenset[str]:
        """Return what the gradient that a reader sends back awaits."""
        rule = self._rules[reader.name]
        waits = choice.lost(dims) | set(choice.passed_back)
        return waits | set(choice.passed) if reader.inputs.index(tensor) in rule.into else waits

    def _passes(self, maker: Op, reader: Op, deliver: Op) -> Factor:
        """Return infinity where a sum that may pass through a reader is not passed: the lowered program always does."""
        made = [self._made(maker, deliver.inputs[0], choice) for choice in self.choices[maker.name]]
        takes = self.choices[reader.name]
        passes = [[set(layout.sums) - one.busy == set(one.passed) for one in takes] for layout in made]
        return Factor(variables=(maker.name, reader.name), table=np.where(passes, 0.0, np.inf))

    def _mask(self, atoms: Sequence[str] | frozenset[str]) -> int:
        return sum(1 << place for place, atom in enumerate(self.problem.real_atoms) if atom in atoms)

    def _made(self, maker: Op | None, tensor: str, choice: OpChoice) -> Layout:
        """Return how a tensor leaves the operation that makes it, or the block before."""
        tensors = self.problem.block.tensors
        return choice.layout(tensors[tensor].dims) if maker is None else made_layout(maker, tensors, tensor, choice)

    def _end_factor(self) -> Factor:
        """Price the way of the block's result to the boundary, and of the gradient that comes for it; a loss stays."""
        result = self.problem.block.carry_out or "loss"
        tensor, maker = self.problem.block.tensors[result], self._maker[result]
        choices = self.choices[maker.name]
        ways = self._ways_of(tensor.dims, tensor.dtype)
        made = [self._made(maker, result, choice) for choice in choices]
        taken = [choice.layout(tensor.dims) for choice in choices]
        free = self.free_ends and self.problem.block.carry_out is not None
        edges = self.boundaries if free else [OpChoice(cuts=self.problem.boundary).layout(tensor.dims)]
        table = ways.between(made, edges) + ways.between(edges, taken).T
        idle = np.array([not choice.passed_back for choice in choices])
        table = np.where(idle[:, None], table if self.problem.block.carry_out else 0.0, np.inf)
        if free:
            return Factor(variables=(maker.name, OUT), table=table)
        return Factor(variables=(maker.name,), table=table[:, 0])

    def _ways_of(self, dims: Dims, dtype: Dtype, pending: Pending = "sums") -> Ways:
        key = (dims, dtype, pending)
        if key not in self._ways:
            self._ways[key] = Ways(dims, self.problem.atoms, self.problem.price(dtype), pending)
        return self._ways[key]


def _both(
    ones: dict[Layout, set[frozenset[str]]], others: dict[Layout, set[frozenset[str]]]
) -> dict[Layout, set[frozenset[str]]]:
    """Return the layouts that two readers can take, with what may be pending in what they send back together."""
    return {
        layout: {mine | its for mine in sent for its in others[layout]}
        for layout, sent in ones.items()
        if layout in others
    }


def _renamed(layout: Layout, deliver: Op) -> Layout:
    """Return a layout in the maker's names of the dims."""
    back = {new: old for old, new in deliver.kind.rename} if isinstance(deliver.kind, Deliver) else {}
    return Layout(dims=tuple((back.get(dim, dim), cut) for dim, cut in layout.dims), sums=layout.sums)
