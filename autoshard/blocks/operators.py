"""The best cut of every operation of a block: exact, by elimination over tables of prices.

There is one variable per forward operation; one per tensor that is delivered (how it is taken, and how what readers
send back is pending), or one for each of its readers; one per operation whose weights may rest in pieces. Backward is
tied to the forward operation's cuts. Both ends of the block are clamped to the boundary layout. A reader takes a tensor
as it was made, if nothing is pending in it, or as it is delivered, in one layout for all that do not take it as made.
Stated restrictions: several atoms cut a dim in the mesh's order; a sum passes on pending only to the one reader of a
tensor; where readers have very many choices, all of them take the tensor alike.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from autoshard.blocks.choices import Atoms, real_cuts, subsets
from autoshard.blocks.dataflow import Dataflow
from autoshard.blocks.elimination import COLUMN, CostFactor, Table, eliminate
from autoshard.blocks.limited import minimise_within
from autoshard.blocks.parts import PricedPart, PricedParts, choices_of, part_facts
from autoshard.blocks.problem import (
    OperatorProblem,
    gathered_s,
    kept_bytes,
    reduction_s,
    resting_bytes,
    ring_of_s,
    roofline_s,
    weights_of,
)
from autoshard.blocks.tensor_edge import TensorEdge
from autoshard.errors import require
from autoshard.graph.op import Op
from autoshard.layout.layout import Cuts
from autoshard.schedule.waves import Floats, Ints

_AT_ONCE = 256  # columns that are minimised together: each has joint tables of its own in memory
_TIE = 1e-9  # relative: what differs by less counts as equal


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSolution:
    """The cuts of every forward operation, and what they cost together.

    ``gap`` says how much cheaper another solution could be at most, as a share; 0 is proven best. Where nothing keeps
    to the memory limit, ``fits`` is false and these are the cuts that need least. ``rests`` names the atoms over which
    an operation's weights are sharded while no pass reads them, as in FSDP.
    """

    cuts: Mapping[str, Cuts]
    cost_s: float
    kept_bytes: float = 0.0
    gap: float = 0.0
    fits: bool = True
    rests: Mapping[str, Atoms] = field(default_factory=dict[str, Atoms])


def solve(problem: OperatorProblem, priced: PricedParts | None = None) -> OperatorSolution:
    """Find the cheapest sharding of every operation of a block within its memory limit.

    ``priced`` are parts of problems that differ in their blocks only; those of this one join them.
    """
    tables = _Tables(problem, priced)
    minimum = minimise_within(tables.sizes, tables.factors, problem.memory_limit_bytes)
    message = f"no layouts of {problem.block.kind} were found; its tensors are read by too many operations"
    require((math.isfinite(minimum.cost), "block", message))  # where all is exact some way is always left
    tied = problem.tied
    like = {op.name: tied.get(op.name, op.name) for op in tables.flow.ops}
    rests = {name: tables.rests[minimum.choices.get(_rest_name(like_name), 0)] for name, like_name in like.items()}
    return OperatorSolution(
        cuts={name: choices[minimum.choices[like[name]]].cuts for name, choices in tables.flow.choices.items()},
        cost_s=minimum.cost,
        kept_bytes=minimum.weight,
        gap=minimum.gap,
        fits=minimum.fits,
        rests={name: atoms for name, atoms in rests.items() if atoms},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCuts:
    """The cuts of every forward operation that serve some columns of a problem."""

    cuts: Mapping[str, Cuts]
    columns: Ints


def solve_columns(
    problem: OperatorProblem, slack: float, priced: PricedParts, between: Callable[[], None]
) -> tuple[SharedCuts, ...]:
    """Find the cheapest cuts of a block in every column; few serve all columns.

    The cuts of one column serve another column in which they hold no more bytes than that column's own cuts, and cost
    at most the share ``slack`` more. ``between`` is called before each part is priced, and may stop this. ``priced`` as
    in ``solve``.
    """
    tables = _Tables(problem, priced, between)
    count = problem.shape[0]
    names = list(tables.sizes)
    rows, least_s = tables.cheapest(names, count)
    own_bytes, rest, shared = tables.totals(names, rows, np.arange(count))[1], np.arange(count), list[SharedCuts]()
    num_real = problem.stacked([size > 1 for size in problem.atoms.values()]).sum(axis=0)
    while len(rest):
        distinct, first, number = np.unique(rows[rest], axis=0, return_index=True, return_counts=True)
        many = np.lexsort((first, -number, -num_real[rest][first]))[0]
        here = np.broadcast_to(distinct[many], (len(rest), len(names)))
        cost_s, held_bytes = tables.totals(names, here, rest)
        serves = (cost_s <= least_s[rest] * (1 + slack + _TIE)) & (held_bytes <= own_bytes[rest] * (1 + _TIE))
        serves[first[many]] = True  # whatever is rounded
        values = dict[str, int](zip(names, distinct[many].tolist(), strict=True))
        cuts = {name: op_choices[values[name]].cuts for name, op_choices in tables.flow.choices.items()}
        shared.append(SharedCuts(cuts=cuts, columns=rest[serves]))
        rest = rest[~serves]
    return tuple(shared)


Totals = tuple[tuple[Cuts, float], ...]  # cuts of an operation, each with what the block costs with it


class CutTotals:
    """What a block costs with each cut of an operation, all other cuts chosen anew. Memory is not limited here."""

    def __init__(self, problem: OperatorProblem) -> None:
        self._problem, self._tables = problem, _Tables(problem)

    def every(self) -> Mapping[str, Totals]:
        """Return the totals of every operation."""
        return dict(self._of(self._tables))

    def cost_of(self, cuts: Mapping[str, Cuts]) -> float:
        """Return what the block costs with these cuts."""
        fixed: list[CostFactor] = []
        for name, choices in self._tables.flow.choices.items():
            same = [real_cuts(choice.cuts) == real_cuts(cuts[name]) for choice in choices]
            fixed.append(CostFactor(variables=(name,), table=np.where(same, 0.0, np.inf)))
        return eliminate(self._tables.sizes, [*self._tables.factors, *fixed]).cost

    def with_choices(self, name: str, choices: tuple[Cuts, ...]) -> Totals:
        """Return the totals of one operation as if it had other choices; only what touches it is priced again."""
        changed = replace(self._problem, allowed={**self._problem.allowed, name: choices})
        return dict(self._of(_Tables(changed, self._tables.priced)))[name]

    def _of(self, tables: "_Tables") -> Iterator[tuple[str, Totals]]:
        least = eliminate(tables.sizes, tables.factors).least_totals()
        for name, choices in tables.flow.choices.items():
            yield name, tuple((choice.cuts, float(cost_s)) for choice, cost_s in zip(choices, least[name], strict=True))


class _Tables:
    """The variables of a problem with how many values each has, and the factors between them.

    ``between`` is called before each part that is not ``priced`` is.
    """

    def __init__(
        self, problem: OperatorProblem, priced: PricedParts | None = None, between: Callable[[], None] = lambda: None
    ) -> None:
        self.priced = priced or PricedParts()
        self.problem, self.flow = problem, Dataflow(problem, self.priced.changes)
        self.rests: tuple[Atoms, ...] = tuple(subsets(problem.real_atoms)) if problem.cuts_rest else ((),)
        self.sizes = {name: len(values) for name, values in self.flow.choices.items() if name not in problem.tied}
        self.factors: list[CostFactor] = []
        self._between = between
        tied_counts = Counter(problem.tied.get(op.name, op.name) for op in self.flow.ops)
        for op in (candidate for candidate in self.flow.ops if candidate.name in tied_counts):
            self._part(op.name, (op,), partial(self._add_operation, op), tied_counts[op.name])
        for deliver, count in self._edges():
            maker = self.flow.maker.get(deliver.inputs[0])
            ends = (*self.flow.readers[deliver.outputs[0]], *([maker] if maker else []))
            self._part(deliver.name, (deliver, *ends), partial(self._add_edge, deliver), count)
        for name in problem.block.gives:
            self._part(f"{name} at the end", (self.flow.maker[name],), partial(self._add_end, name))

    def _edges(self) -> Iterator[tuple[Op, int]]:
        """Yield one deliver for each group between operations tied to the same operations, and the group's size."""
        tied, block = self.problem.tied, self.problem.block
        groups: dict[object, list[Op]] = defaultdict(list)
        for deliver in self.flow.delivers:
            source = deliver.inputs[0]
            maker = self.flow.maker.get(source)
            where = (tied.get(maker.name, maker.name), maker.outputs.index(source)) if maker else source
            readers = [
                (tied.get(reader.name, reader.name), [name == deliver.outputs[0] for name in reader.inputs])
                for reader in self.flow.readers[deliver.outputs[0]]
            ]
            groups[str((where, readers, deliver.kind, block.tensors[source].dims))].append(deliver)
        return ((delivers[0], len(delivers)) for delivers in groups.values())

    def _part(self, name: str, ops: Sequence[Op], price: Callable[[], None], count: int = 1) -> None:
        """Add the variables and factors of a part of some operations, which may be known.

        A part that occurs several times, between operations tied to the same operations, is priced once.
        """
        key, choices = (name, count, part_facts(self.flow, ops)), choices_of(self.flow, ops)
        part = self.priced.get(key, choices)
        if not part:
            self._between()
            before, start = set(self.sizes), len(self.factors)
            price()
            factors = self.factors[start:]
            if self.problem.tied:
                factors = [factor.repeated(count).renamed(self.problem.tied) for factor in factors]
            del self.factors[start:]
            added = {variable: size for variable, size in self.sizes.items() if variable not in before}
            part = self.priced.parts[key] = PricedPart(choices=choices, sizes=added, factors=factors)
        self.sizes |= part.sizes
        self.factors += part.factors

    def _add_edge(self, deliver: Op) -> None:
        edge = TensorEdge(self.flow, deliver)
        self.sizes |= {name: len(values) for name, values in edge.variables.items()}
        self.factors += edge.factors()

    def _add_operation(self, op: Op) -> None:
        """Price an operation with its gradients, and its weights.

        It keeps, as it is cut, copies of its kernel and results that are not delivered.
        """
        problem, choices = self.problem, self.flow.choices[op.name]
        cuts = [choice.cuts for choice in choices]
        time_s, held_bytes = np.zeros((2, len(choices), *problem.shape))
        for part in problem.block.select("micro_batch"):
            if part.source == op.name:
                time_s += roofline_s(problem, part, cuts)
                if part.kind.ring_dim:
                    time_s += problem.stacked([ring_of_s(problem, part, op_cuts) for op_cuts in cuts])
        for entry in problem.block.saved:
            if entry.op == op.name and entry.storage not in self.flow.delivered:
                held_bytes += kept_bytes(problem, entry, choices)
        self._add((op.name,), time_s, held_bytes)
        if weights_of(problem, op):
            self._add_weights(op)

    def _add_weights(self, op: Op) -> None:
        """Price how an operation's weights rest, and the reduction of their gradients."""
        problem, choices = self.problem, self.flow.choices[op.name]
        time_s, states = np.zeros((2, len(choices), len(self.rests), *problem.shape))
        for weight in weights_of(problem, op):
            dims = problem.block.tensors[weight].dims
            for row, choice in enumerate(choices):
                pending = choice.awaited(dims)
                for column, rest in enumerate(self.rests):
                    if not pending.issuperset(rest):
                        time_s[row, column] = np.inf
                        continue
                    if problem.state_bytes_per_weight:
                        states[row, column] += resting_bytes(problem, weight, choice.layout(dims), rest)
                    if rest:
                        time_s[row, column] += gathered_s(problem, weight, choice, rest)
                    else:
                        time_s[row, column] += reduction_s(problem, weight, choice.cuts, sorted(pending))
        variables = (op.name, _rest_name(op.name))
        if problem.cuts_rest:
            self.sizes[_rest_name(op.name)] = len(self.rests)
        else:
            variables, time_s, states = variables[:1], time_s[:, 0], states[:, 0]
        self._add(variables, time_s, states)

    def _add_end(self, result: str) -> None:
        """Price the way of a result to the boundary, and of the gradient that comes for it; a loss stays."""
        block, flow = self.problem.block, self.flow
        tensor, maker = block.tensors[result], flow.maker[result]
        choices = flow.choices[maker.name]
        time_s = np.zeros((len(choices), *self.problem.shape))
        if tensor.dims:
            boundary = flow.made(None, result)
            maker_layouts, accepted = flow.made(maker, result), [choice.layout(tensor.dims) for choice in choices]
            time_s += flow.change_s(tensor.dims, tensor.dtype, maker_layouts, boundary)[:, 0]
            if f"d.{result}" in block.tensors:
                time_s += flow.change_s(tensor.dims, tensor.dtype, boundary, accepted)[0]
        time_s[[bool(choice.passed_back) for choice in choices]] = np.inf
        self._add((maker.name,), time_s)

    def cheapest(self, names: Sequence[str], count: int) -> tuple[Ints, Floats]:
        """Return the values of these variables that cost least in each column, a row for each, and what they cost."""
        rows, costs = list[Ints](), list[Floats]()
        for first in range(0, count, _AT_ONCE):
            columns = slice(first, min(first + _AT_ONCE, count))
            num_columns = columns.stop - first
            factors = [factor.sliced(COLUMN, columns) for factor in self.factors]
            elimination = eliminate({**self.sizes, COLUMN: num_columns}, factors)
            choices = elimination.choices()
            rows.append(np.array([np.broadcast_to(choices[name], num_columns) for name in names]).T)
            costs.append(np.broadcast_to(elimination.cost, num_columns))
        return np.concatenate(rows), np.concatenate(costs)

    def totals(self, names: Sequence[str], rows: Ints, columns: Ints) -> tuple[Floats, Floats]:
        """Return what the values of these variables, a row for each of some columns, cost, and what they keep."""
        values = {**dict(zip(names, rows.T, strict=True)), COLUMN: columns}
        sums = np.zeros((2, len(columns)))
        for factor in self.factors:
            place = tuple(values[name] for name in factor.variables)
            sums[0] += factor.table[place]
            sums[1] += 0.0 if factor.weight is None else factor.weight[place]
        return sums[0], sums[1]

    def _add(self, variables: tuple[str, ...], table: Table, weight: Table | None = None) -> None:
        columns = (COLUMN,) if self.problem.shape else ()
        self.factors.append(CostFactor(variables=(*variables, *columns), table=table, weight=weight))


def _rest_name(name: str) -> str:
    return f"rest of {name}"
