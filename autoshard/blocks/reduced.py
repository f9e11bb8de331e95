"""What is left of the choices when bounds leave values out: the least total that each value can be part of."""

from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.blocks.factors import Elimination, Factor, Step, Table, pieces
from autoshard.blocks.part import Part

_SHARES = (1.0, 0.5, 2.0, 0.0)  # of the best price: each leaves out other values


def narrowed(part: Part, limit: float, price: float, worst: float) -> Part | None:
    """Return what is left without the values that no choices within the limit that cost less can have, if anything."""
    left = _where(part, part.weighed(), limit)
    for share in _SHARES:
        left = left and _where(left, left.priced(share * price), worst + share * price * limit)
    return left


def _where(part: Part, found: Elimination, most: float) -> Part | None:
    totals = least_with(part.sizes, found)
    left = part.where({name: total <= most for name, total in totals.items()})
    return left if all(left.sizes.values()) else None


def least_with(sizes: Mapping[str, int], found: Elimination) -> dict[str, Table]:
    """Return, for every value of every variable, the least total of all choices that it is one of.

    >>> cost = Factor(variables=("a", "b"), table=np.array([[3.0, 1.0], [2.0, 5.0]]))
    >>> part = Part.whole({"a": 2, "b": 2}, [cost])
    >>> least_with(part.sizes, part.priced(0.0))
    {'b': array([2., 1.]), 'a': array([1., 2.])}
    """
    made_by = {id(step.least): step for step in found.steps}
    outside: dict[str, Factor] = {}  # of a step: what all that is in none of its factors costs at least
    totals: dict[str, Table] = {}
    for step in reversed(found.steps):
        own = step.variables[0]
        rest = outside.pop(own, None) or Factor(variables=(), table=np.array(found.cost - step.least))
        children = [made_by[id(one.table)] for one in step.factors if id(one.table) in made_by]
        scopes = [(own,), *(child.variables[1:] for child in children)]
        totals[own], *sums = _reduced(step, sizes, rest, scopes)
        for child, total in zip(children, sums, strict=True):
            possible = np.isfinite(child.least)
            less = np.where(possible, total - np.where(possible, child.least, 0.0), np.inf)
            outside[child.variables[0]] = Factor(variables=child.variables[1:], table=less)
    return totals


def _reduced(step: Step, sizes: Mapping[str, int], rest: Factor, scopes: Sequence[tuple[str, ...]]) -> list[Table]:
    """Return the least sums of a step and what is outside it, a table for each scope."""
    found = [np.full([sizes[name] for name in scope], np.inf) for scope in scopes]
    for part, joint in pieces(step.variables, sizes, [*step.factors, rest]):
        for table, scope in zip(found, scopes, strict=True):
            here = table[tuple(part if name in step.variables[1:2] else slice(None) for name in scope)]
            np.minimum(here, _minimum(joint, scope), out=here)
    return found


def _minimum(joint: Factor, scope: tuple[str, ...]) -> Table:
    gone = tuple(axis for axis, name in enumerate(joint.variables) if name not in scope)
    left = [name for name in joint.variables if name in scope]
    return joint.table.min(axis=gone).transpose([left.index(name) for name in scope])
