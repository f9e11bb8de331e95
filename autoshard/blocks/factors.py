"""Exact minimisation of a sum of tables over a few variables each: variable elimination."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

Table = Any  # numpy array, one axis per variable

_CELLS = 1 << 17  # of a joint table that is there in one go; measured: those that stay in a cache are the fastest


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A cost that depends on some variables, an axis of ``table`` each; ``weight`` is what a limit counts, likewise."""

    variables: tuple[str, ...]
    table: Table
    weight: Table | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimum:
    """The least total cost and the choice of every variable that reaches it."""

    cost: float
    choices: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A variable minimised away: the factors that it stood in, and their least sum for each choice of its neighbours.

    The sum itself is made anew wherever it is asked for: all of them together fill far more memory than the factors.
    """

    variables: tuple[str, ...]  # its own first, then its neighbours
    factors: tuple[Factor, ...]
    least: Table

    def columns(self, choices: Mapping[str, Table]) -> Table:
        """Return the sum for every value of the variable: a column for each place in the lists of choices."""
        total: Table = 0.0
        for factor in self.factors:
            own = factor.variables.index(self.variables[0])
            others = [choices[name] for name in factor.variables if name != self.variables[0]]
            part = np.moveaxis(factor.table, own, 0)[(slice(None), *others)]
            total = total + (part if others else part[:, None])
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Elimination:
    """What is left when variables were minimised away: a step for each, in order, and the rest of the factors."""

    steps: tuple[Step, ...]
    rest: tuple[Factor, ...]

    @property
    def cost(self) -> float:
        """The least total cost, if every variable was eliminated."""
        return float(sum(factor.table for factor in self.rest))

    def choices(self, kept: Mapping[str, int] | None = None) -> dict[str, int]:
        """Return the best choice of every variable, given those of the variables that were kept."""
        found = dict(kept or {})
        for step in reversed(self.steps):
            here = {name: np.array([found[name]]) for name in step.variables[1:]}
            found[step.variables[0]] = int(np.argmin(step.columns(here)))
        return dict(sorted(found.items()))


def minimise(sizes: Mapping[str, int], factors: Sequence[Factor]) -> Minimum:
    """Return the least sum of all factors, and where it is reached; of equals the lowest numbers win.

    >>> cost = Factor(variables=("a", "b"), table=np.array([[3.0, 1.0], [2.0, 5.0]]))
    >>> minimise({"a": 2, "b": 2}, [cost])
    Minimum(cost=1.0, choices={'a': 0, 'b': 1})
    """
    found = eliminate(sizes, factors)
    return Minimum(cost=found.cost, choices=found.choices())


def eliminate(sizes: Mapping[str, int], factors: Sequence[Factor], keep: Collection[str] = ()) -> Elimination:
    """Minimise one variable after the other away, always the one whose neighbours' joint table is smallest.

    The order depends on the variables of the factors alone, so that it is the same whatever the tables hold.
    """
    pending = list(factors)
    steps: list[Step] = []
    for variable in _order(tuple(sizes.items()), tuple(factor.variables for factor in factors), frozenset(keep)):
        mine = [factor for factor in pending if variable in factor.variables]
        mine = mine or [Factor(variables=(variable,), table=np.zeros(sizes[variable]))]
        pending = [factor for factor in pending if variable not in factor.variables]
        variables = (variable, *_neighbours(variable, mine))
        parts = [part.table.min(axis=0) for _, part in pieces(variables, sizes, mine)]
        least = parts[0] if len(parts) == 1 else np.concatenate(parts)
        steps.append(Step(variables=variables, factors=tuple(mine), least=least))
        pending.append(Factor(variables=variables[1:], table=least))
    return Elimination(steps=tuple(steps), rest=tuple(pending))


@lru_cache(maxsize=64)  # problems of one block ask for the same order again and again
def _order(
    sizes: tuple[tuple[str, int], ...], scopes: tuple[tuple[str, ...], ...], keep: frozenset[str]
) -> tuple[str, ...]:
    """Return the variables in the order of their elimination, of equals the first by name."""
    size = dict(sizes)
    around = {name: {name} for name in size}
    for scope in scopes:
        for name in scope:
            around[name].update(scope)
    joint = {name: prod(size[other] for other in others) for name, others in around.items() if name not in keep}
    found: list[str] = []
    while joint:
        variable = min(joint, key=lambda name: (joint[name], name))
        others = around.pop(variable) - {variable}
        del joint[variable]
        for name in others:
            around[name] = (around[name] | others) - {variable}
            if name in joint:
                joint[name] = prod(size[other] for other in around[name])
        found.append(variable)
    return tuple(found)


def joined(variables: Sequence[str], sizes: Mapping[str, int], factors: Sequence[Factor]) -> Factor:
    """Add up factors into one table with an axis for each of these variables, in their order."""
    total = np.zeros([sizes[name] for name in variables])
    for factor in factors:
        order = [name for name in variables if name in factor.variables]
        table = factor.table.transpose([factor.variables.index(name) for name in order])
        total += table.reshape([sizes[name] if name in factor.variables else 1 for name in variables])
    return Factor(variables=tuple(variables), table=total)


def pieces(
    variables: Sequence[str], sizes: Mapping[str, int], factors: Sequence[Factor]
) -> Iterator[tuple[slice, Factor]]:
    """Yield the joint table cut along its second axis, piece by piece, so that it need never be there as a whole."""
    if len(variables) == 1:
        yield slice(None), joined(variables, sizes, factors)
        return
    cut = variables[1]
    step = max(1, _CELLS * sizes[cut] // prod(sizes[name] for name in variables))
    for start in range(0, sizes[cut], step):
        part = slice(start, min(start + step, sizes[cut]))
        here = [_cut(factor, cut, part) for factor in factors]
        yield part, joined(variables, {**sizes, cut: part.stop - start}, here)


def _cut(factor: Factor, name: str, part: slice) -> Factor:
    """Return what a factor holds for some of a variable's values."""
    if name not in factor.variables:
        return factor
    place = tuple(part if one == name else slice(None) for one in factor.variables)
    return Factor(variables=factor.variables, table=factor.table[place])


def _neighbours(variable: str, factors: Sequence[Factor]) -> list[str]:
    found = {name for factor in factors if variable in factor.variables for name in factor.variables}
    return sorted(found - {variable})
