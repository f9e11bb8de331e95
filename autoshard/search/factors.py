"""Exact minimisation of a sum of tables over a few variables each: variable elimination."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

Table = Any  # numpy array, one axis per variable


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
class Elimination:
    """What is left when variables were minimised away: one joint table each, in order, and the rest of the factors."""

    joints: tuple[Factor, ...]  # a table per eliminated variable, its own axis first
    rest: tuple[Factor, ...]

    @property
    def cost(self) -> float:
        """The least total cost, if every variable was eliminated."""
        return float(sum(factor.table for factor in self.rest))

    def choices(self, kept: Mapping[str, int] | None = None) -> dict[str, int]:
        """Return the best choice of every variable, given those of the variables that were kept."""
        found = dict(kept or {})
        for joint in reversed(self.joints):
            place = tuple(found[name] for name in joint.variables[1:])
            found[joint.variables[0]] = int(np.argmin(joint.table[(slice(None), *place)]))
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
    joints: list[Factor] = []
    left = sorted(set(sizes) - set(keep))
    while left:
        variable = min(left, key=lambda name: (_joint_size(name, sizes, pending), name))
        mine = [factor for factor in pending if variable in factor.variables]
        pending = [factor for factor in pending if variable not in factor.variables]
        joint = joined((variable, *_neighbours(variable, mine)), sizes, mine)
        joints.append(joint)
        pending.append(Factor(variables=joint.variables[1:], table=joint.table.min(axis=0)))
        left.remove(variable)
    return Elimination(joints=tuple(joints), rest=tuple(pending))


def joined(variables: Sequence[str], sizes: Mapping[str, int], factors: Sequence[Factor]) -> Factor:
    """Add up factors into one table with an axis for each of these variables, in their order."""
    total = np.zeros([sizes[name] for name in variables])
    for factor in factors:
        order = [name for name in variables if name in factor.variables]
        table = factor.table.transpose([factor.variables.index(name) for name in order])
        total += table.reshape([sizes[name] if name in factor.variables else 1 for name in variables])
    return Factor(variables=tuple(variables), table=total)


def _neighbours(variable: str, factors: Sequence[Factor]) -> list[str]:
    found = {name for factor in factors if variable in factor.variables for name in factor.variables}
    return sorted(found - {variable})


def _joint_size(variable: str, sizes: Mapping[str, int], factors: Sequence[Factor]) -> int:
    return reduce(lambda size, name: size * sizes[name], _neighbours(variable, factors), sizes[variable])
