"""Minimisation of a sum of tables over a few variables each: variable elimination.

It is exact where the joint tables stay small. Where they would not, a variable is minimised in several parts of its
factors, each for itself (mini-buckets): the sum of these minima is a lower bound, and what the choices cost shows how
much is left open.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]  # an axis per variable
Values = NDArray[np.intp] | int
COLUMN = "~"  # a variable that is never chosen: the number of a question, where many are answered at once; sorts last

_CELLS = 1 << 17  # of a joint table that is held in one piece; measured: those that stay in a cache are the fastest
# The most cells of all joint tables together, which take some seconds, and beyond that of the joint table of a part.
# Measured: models with linear attention, whose joint tables would have 10^12 cells, are solved without a gap.
CELLS = (1 << 30, 1 << 22)
_MOST_AXES = 63  # of an array of numpy, and one for the column
_LEAST = 1e-12  # share of a sum by which a change must lower it, so that rounding leads nowhere


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFactor:
    """A cost that depends on some variables, an axis of ``table`` each; ``weight`` is what a limit counts, likewise."""

    variables: tuple[str, ...]
    table: Table
    weight: Table | None = None

    def repeated(self, count: int) -> "CostFactor":
        """Return the factor with its costs and weights counted ``count`` times."""
        if count == 1:
            return self
        weight = None if self.weight is None else self.weight * count
        return CostFactor(variables=self.variables, table=self.table * count, weight=weight)

    def renamed(self, names: Mapping[str, str]) -> "CostFactor":
        """Return the factor over renamed variables; where two get one name, they have the same value."""
        variables = tuple(names.get(name, name) for name in self.variables)
        if variables == self.variables:
            return self
        distinct = tuple(dict.fromkeys(variables))
        places = [distinct.index(name) for name in variables]

        def joined(table: Table) -> Table:
            einsum: Any = np.einsum  # whose stub knows no lists of axes
            return einsum(table, places, [*range(len(distinct))])

        weight = None if self.weight is None else joined(self.weight)
        return CostFactor(variables=distinct, table=joined(self.table), weight=weight)

    def sliced(self, name: str, values: slice) -> "CostFactor":
        """Return the costs of some of a variable's values."""
        if name not in self.variables:
            return self
        place = tuple(values if variable == name else slice(None) for variable in self.variables)
        return CostFactor(variables=self.variables, table=self.table[place])

    def chosen(self, sizes: Mapping[str, int]) -> "CostFactor":
        """Return the costs over the variables that have a choice."""
        free = tuple(name for name in self.variables if sizes[name] > 1 or name == COLUMN)
        if free == self.variables:
            return self
        return CostFactor(variables=free, table=self.table.reshape([sizes[name] for name in free]))

    def reduced(self, variables: Sequence[str]) -> Table:
        """Return the least costs for each choice of some of its variables, axes in the order given."""
        gone = tuple(axis for axis, name in enumerate(self.variables) if name not in variables)
        remaining = [name for name in self.variables if name in variables]
        return self.table.min(axis=gone).transpose([remaining.index(name) for name in variables])


@dataclass(frozen=True, slots=True, kw_only=True)
class EliminationStep:
    """A variable that was minimised away: its factors, and their least sum for each choice of its neighbours.

    The sum itself is computed anew where it is needed: all of them together fill far more memory than the factors.
    """

    variables: tuple[str, ...]  # its own first, then its neighbours
    factors: tuple[CostFactor, ...]
    least: Table | None  # None where it was minimised in parts

    def best(self, choices: Mapping[str, Values]) -> Values:
        """Return the variable's best value, given the choices of its neighbours."""
        variable, total = self.variables[0], np.zeros(1)
        for factor in self.factors:
            table = np.moveaxis(factor.table, factor.variables.index(variable), -1)
            total = total + table[tuple(choices[name] for name in factor.variables if name != variable)]
        return total.argmin(axis=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elimination:
    """All variables minimised away, a step for each in order, and the least total cost, or a bound below it."""

    sizes: Mapping[str, int]
    steps: tuple[EliminationStep, ...]
    cost: Any  # one for each column, if there are any

    @property
    def is_exact(self) -> bool:
        """Whether the choices cost just this."""
        return all(step.least is not None for step in self.steps)

    def choices(self) -> dict[str, Any]:
        """Return the best choice of every variable, in every column if there are any; of equals the lowest number.

        Where it is not exact they are good choices.
        """
        values: dict[str, Values] = {COLUMN: np.arange(self.sizes.get(COLUMN, 0))}
        for step in reversed(self.steps):
            values[step.variables[0]] = step.best(values)
        del values[COLUMN]
        return {name: values[name] if COLUMN in self.sizes else int(values[name]) for name in sorted(values)}

    def least_totals(self) -> dict[str, Table]:
        """Return, for every value of every variable, the least total of all choices that contain it.

        >>> cost = CostFactor(variables=("a", "b"), table=np.array([[3.0, 1.0], [2.0, 5.0]]))
        >>> eliminate({"a": 2, "b": 2}, [cost]).least_totals()
        {'b': array([2., 1.]), 'a': array([1., 2.])}
        """
        assert self.is_exact, "the least total of a value is not known"
        made_by = {id(step.least): step for step in self.steps}
        outside: dict[str, CostFactor] = {}  # of a step: the least cost of all that is in none of its factors
        totals: dict[str, Table] = {}
        for step in reversed(self.steps):
            variable = step.variables[0]
            rest = outside.pop(variable, None) or CostFactor(variables=(), table=np.array(self.cost - step.least))
            children = [made_by[id(factor.table)] for factor in step.factors if id(factor.table) in made_by]
            scopes = [(variable,), *(child.variables[1:] for child in children)]
            tables = [np.full([self.sizes[name] for name in scope], np.inf) for scope in scopes]
            for values, joint in _pieces(step.variables, self.sizes, [*step.factors, rest]):
                for table, scope in zip(tables, scopes, strict=True):
                    here = table[tuple(values.get(name, slice(None)) for name in scope)]
                    np.minimum(here, joint.reduced(scope), out=here)
            totals[variable], *sums = tables
            for child, total in zip(children, sums, strict=True):
                assert child.least is not None, "all steps are exact"
                possible = np.isfinite(child.least)
                less = np.where(possible, total - np.where(possible, child.least, 0.0), np.inf)
                outside[child.variables[0]] = CostFactor(variables=child.variables[1:], table=less)
        return totals


def eliminate(sizes: Mapping[str, int], factors: Sequence[CostFactor], cells: tuple[int, int] = CELLS) -> Elimination:
    """Minimise one variable after the other away, always the one whose neighbours' joint table is smallest.

    The order depends on the variables of the factors alone, so that it is the same whatever the tables hold. The
    variable ``COLUMN`` stays: there is an answer for each of its values. If all joint tables together have more
    ``cells`` than the first number, those with more than the second are minimised in parts.

    >>> cost = CostFactor(variables=("a", "b"), table=np.array([[3.0, 1.0], [2.0, 5.0]]))
    >>> found = eliminate({"a": 2, "b": 2}, [cost])
    >>> found.cost, found.choices()
    (1.0, {'a': 0, 'b': 1})
    """
    steps: list[EliminationStep] = []
    free = tuple((name, size) for name, size in sizes.items() if name != COLUMN)
    scopes = tuple(tuple(name for name in factor.variables if name != COLUMN) for factor in factors)
    order, needed, widest = _order(free, scopes)
    pending = [factor.chosen(sizes) for factor in factors] if widest > _MOST_AXES else list(factors)
    most = prod(sizes.values()) if needed <= cells[0] else cells[1]
    for variable in order:
        touching = [factor for factor in pending if variable in factor.variables]
        touching = touching or [CostFactor(variables=(variable,), table=np.zeros(sizes[variable]))]
        pending = [factor for factor in pending if variable not in factor.variables]
        parts = _parts(variable, sizes, touching, most)
        least = [_minimised(variable, sizes, part) for part in parts]
        pending += least
        variables = _scope(variable, touching)
        exact = least[0].table if len(least) == 1 else None
        steps.append(EliminationStep(variables=variables, factors=tuple(touching), least=exact))
    cost = sum(factor.table for factor in pending)
    return Elimination(sizes=sizes, steps=tuple(steps), cost=cost if COLUMN in sizes else float(cost))


def descended(choices: Mapping[str, int], factors: Sequence[CostFactor]) -> dict[str, int]:
    """Change one choice at a time as long as that lowers the sum, or leaves fewer that are forbidden."""
    touching: dict[str, list[CostFactor]] = defaultdict(list)
    for factor in factors:
        for name in factor.variables:
            touching[name].append(factor)
    current, waiting = dict(choices), dict.fromkeys(touching)
    while waiting:
        name = next(iter(waiting))
        del waiting[name]
        rows = [
            np.moveaxis(factor.table, factor.variables.index(name), -1)[
                tuple(current[neighbour] for neighbour in factor.variables if neighbour != name)
            ]
            for factor in touching[name]
        ]
        forbidden = np.sum([np.isinf(row) for row in rows], axis=0)
        total = np.sum([np.where(np.isinf(row), 0.0, row) for row in rows], axis=0)
        best = min(range(len(total)), key=lambda value: (forbidden[value], total[value]))
        now = current[name]
        if (forbidden[best], total[best]) < (forbidden[now], total[now] * (1 - _LEAST)):
            current[name] = best
            waiting |= dict.fromkeys(
                neighbour for factor in touching[name] for neighbour in factor.variables if neighbour != name
            )
    return current


def _scope(variable: str, factors: Sequence[CostFactor]) -> tuple[str, ...]:
    return (variable, *sorted({name for factor in factors for name in factor.variables} - {variable}))


def _minimised(variable: str, sizes: Mapping[str, int], factors: Sequence[CostFactor]) -> CostFactor:
    """Return the least sum of factors over a variable, for each choice of its neighbours."""
    variables = _scope(variable, factors)
    least = np.empty([sizes[name] for name in variables[1:]])
    for values, joint in _pieces(variables, sizes, factors):
        least[tuple(values.get(name, slice(None)) for name in variables[1:])] = joint.table.min(axis=0)
    return CostFactor(variables=variables[1:], table=least)


def _parts(
    variable: str, sizes: Mapping[str, int], factors: Sequence[CostFactor], most: int
) -> Sequence[Sequence[CostFactor]]:
    """Return a variable's factors in parts whose joint tables have at most so many cells, all in one if they may be.

    Costs are moved between the parts until each value has the same least cost in all of them. Then the parts agree
    more often on the best value, and the sum of their minima is a higher bound.
    """
    parts: list[list[CostFactor]] = []
    for factor in sorted(factors, key=lambda cost: -cost.table.size):
        joint = ((part, prod(sizes[name] for name in _scope(variable, [*part, factor]))) for part in parts)
        fitting = next((part for part, cells in joint if cells <= most), None)
        if fitting is None:
            parts.append(fitting := [])
        fitting.append(factor)
    if len(parts) == 1:
        return [factors]
    least = np.array([_of_values(variable, sizes, part) for part in parts])
    mean = least.mean(axis=0)
    shifts = np.where(np.isfinite(mean), mean - np.where(np.isfinite(least), least, 0.0), np.inf)
    return [[*part, CostFactor(variables=(variable,), table=shift)] for part, shift in zip(parts, shifts, strict=True)]


def _of_values(variable: str, sizes: Mapping[str, int], factors: Sequence[CostFactor]) -> Table:
    """Return the least sum of factors for each value of a variable."""
    variables = _scope(variable, factors)
    pieces = (joint.reduced((variable,)) for _, joint in _pieces(variables, sizes, factors))
    return np.min([*pieces], axis=0)


@lru_cache(maxsize=64)  # problems of one block ask for the same order again and again
def _order(sizes: tuple[tuple[str, int], ...], scopes: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], int, int]:
    """Return the variables in the order of their elimination, of equals the first by name.

    The cells of all joint tables follow, and the variables of the widest one.
    """
    size = dict(sizes)
    around = {name: {name} for name in size}
    for scope in scopes:
        for name in scope:
            around[name].update(scope)
    joint = {name: prod(size[neighbour] for neighbour in neighbours) for name, neighbours in around.items()}
    order, cells, widest = list[str](), 0, 0
    while joint:
        variable = min(joint, key=lambda name: (joint[name], name))
        cells, widest = cells + joint[variable], max(widest, len(around[variable]))
        neighbours = around.pop(variable) - {variable}
        del joint[variable]
        for name in neighbours:
            around[name] = (around[name] | neighbours) - {variable}
            joint[name] = prod(size[neighbour] for neighbour in around[name])
        order.append(variable)
    return tuple(order), cells, widest


def _pieces(
    variables: Sequence[str], sizes: Mapping[str, int], factors: Sequence[CostFactor]
) -> Iterator[tuple[Mapping[str, slice], CostFactor]]:
    """Yield the sum of factors cut along axes after the first, piece by piece, so that it is never held as a whole."""
    cells, cuts = prod(sizes[name] for name in variables), list[list[tuple[str, slice]]]()
    for name in variables[1:]:
        if cells <= _CELLS:
            break
        step, size = max(1, _CELLS * sizes[name] // cells), sizes[name]
        cuts.append([(name, slice(start, min(start + step, size))) for start in range(0, size, step)])
        cells = cells * step // size
    for piece in product(*cuts):
        here, lengths = factors, {name: values.stop - values.start for name, values in piece}
        for name, values in piece:
            here = [factor.sliced(name, values) for factor in here]
        yield dict(piece), _joined(variables, {**sizes, **lengths}, here)


def _joined(variables: Sequence[str], sizes: Mapping[str, int], factors: Sequence[CostFactor]) -> CostFactor:
    """Add up factors into one table with an axis for each of these variables, in their order."""
    total = np.zeros([sizes[name] for name in variables])
    for factor in factors:
        order = [name for name in variables if name in factor.variables]
        table = factor.table.transpose([factor.variables.index(name) for name in order])
        total += table.reshape([sizes[name] if name in factor.variables else 1 for name in variables])
    return CostFactor(variables=tuple(variables), table=total)
