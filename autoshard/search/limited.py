"""Minimisation under a limit: a price per unit of weight gives a bound, Pareto labels close the gap.

With any price the cheapest sum of cost and priced weight, less the price of the limit, is no more than the cost of
anything that keeps to the limit. The best price comes from a walk along the lower hull of (weight, cost) points. What
gap is left, labels close: partial choices in the reverse order of elimination, whose tables tell exactly what each
adds to cost and weight; those that cannot lead to anything better are dropped, and those that others dominate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.search.factors import Elimination, Factor, Table, eliminate

MOST_LABELS = 200_000  # measured: a Llama layer on 8x8x4 ranks in 5 s
_ROUNDS = (200, 5_000)  # labels of the first rounds, measured: their incumbents make the last one short
_SMALL = 1 << 22  # derived: cells of tables of which another 32 MB do no harm
_CELLS = 1 << 20  # of a table of bounds that is looked at in one go
_TOLERANCE = 1e-9  # costs that differ by less are ties


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedMinimum:
    """The cheapest choices found within a limit; no choice costs less than ``bound``.

    If nothing fits, these are the lightest choices and ``fits`` is false.
    """

    cost: float
    weight: float
    choices: Mapping[str, int]
    bound: float
    fits: bool = True

    @property
    def gap(self) -> float:
        """How much cheaper than what was found the optimum could be at most, as a share of what was found."""
        return 0.0 if self.cost <= self.bound * (1 + _TOLERANCE) else 1 - self.bound / self.cost


def minimise_within(
    sizes: Mapping[str, int], factors: Sequence[Factor], limit: float, *, most_labels: int = MOST_LABELS
) -> LimitedMinimum:
    """Return the least cost whose weight is at most the limit; exact unless that needs more labels than allowed.

    >>> cost, weight = np.array([1.0, 2.0, 5.0]), np.array([9.0, 4.0, 3.0])
    >>> minimise_within({"a": 3}, [Factor(variables=("a",), table=cost, weight=weight)], 6.0)
    LimitedMinimum(cost=2.0, weight=4.0, choices={'a': 1}, bound=2.0, fits=True)
    """
    limit += _TOLERANCE * abs(limit)  # what a sum was rounded by is no overrun
    fastest = _Point.of(sizes, factors, 0.0)
    if fastest.weight <= limit or not np.isfinite(fastest.cost):
        return fastest.result(bound=fastest.cost)
    lightest = _Point.lightest(sizes, factors)
    if lightest.weight > limit:
        return lightest.result(bound=np.inf, fits=False)
    best, dual, price = _walk(sizes, factors, limit, fastest, lightest)
    labels = _Labels(sizes, factors, limit, price)
    for most in (*(few for few in _ROUNDS if few < most_labels), most_labels):
        best, bound = labels.improved(best, most)
        if max(dual, bound) >= best.cost * (1 - _TOLERANCE):
            return best.result(bound=best.cost)
        dual = max(dual, bound)
    return best.result(bound=dual)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    cost: float
    weight: float
    choices: Mapping[str, int]

    @classmethod
    def of(cls, sizes: Mapping[str, int], factors: Sequence[Factor], price: float) -> "_Point":
        """Return the choices that are cheapest when weight has a price."""
        choices = eliminate(sizes, [_priced(factor, price) for factor in factors]).choices()
        return cls.at(choices, factors)

    @classmethod
    def lightest(cls, sizes: Mapping[str, int], factors: Sequence[Factor]) -> "_Point":
        """Return choices of least weight."""
        return cls.at(eliminate(sizes, [_weights(factor) for factor in factors]).choices(), factors)

    @classmethod
    def at(cls, choices: Mapping[str, int], factors: Sequence[Factor]) -> "_Point":
        cost = weight = 0.0
        for factor in factors:
            place = tuple(choices[name] for name in factor.variables)
            cost += float(factor.table[place])
            weight += 0.0 if factor.weight is None else float(factor.weight[place])
        return cls(cost=cost, weight=weight, choices=choices)

    def result(self, *, bound: float, fits: bool = True) -> LimitedMinimum:
        """Return this as an answer."""
        return LimitedMinimum(cost=self.cost, weight=self.weight, choices=self.choices, bound=float(bound), fits=fits)


def _priced(factor: Factor, price: float) -> Factor:
    table = factor.table if factor.weight is None or not price else factor.table + price * factor.weight
    return Factor(variables=factor.variables, table=table)


def _weights(factor: Factor) -> Factor:
    """Return a factor's weight as its cost; what may not be, may still not be."""
    weight: Table = np.zeros(factor.table.shape) if factor.weight is None else factor.weight
    return Factor(variables=factor.variables, table=np.where(np.isfinite(factor.table), weight, np.inf))


def _walk(
    sizes: Mapping[str, int], factors: Sequence[Factor], limit: float, heavy: _Point, light: _Point
) -> tuple[_Point, float, float]:
    """Walk to the hull's edge over the limit; return the cheapest point that fits, the bound and the price there."""
    best = light
    while True:
        price = (light.cost - heavy.cost) / (heavy.weight - light.weight)
        line = heavy.cost + price * heavy.weight
        point = _Point.of(sizes, factors, price)
        if point.weight <= limit and point.cost < best.cost:
            best = point
        if point.cost + price * point.weight >= line - _TOLERANCE * abs(line):
            return best, line - price * limit, price
        if point.weight > limit:
            heavy = point
        else:
            light = point


class _Labels:
    """Partial choices, variable by variable in the reverse order of elimination, each with bounds.

    The bounds are the least that can still come of a label: cost with weight priced, less the limit's price; where
    tables are small, cost alone; and last weight.
    """

    def __init__(self, sizes: Mapping[str, int], factors: Sequence[Factor], limit: float, price: float) -> None:
        self._factors, self._limit, self._sizes, self._price = factors, limit, sizes, price
        priced = eliminate(sizes, [_priced(factor, price) for factor in factors])
        self._variables = [joint.variables for joint in reversed(priced.joints)]
        small = sum(joint.table.size for joint in priced.joints) <= _SMALL
        least, self._regrets = [priced.cost - price * limit], [_regrets(priced)]
        del priced
        for tables in ([_priced(factor, 0.0) for factor in factors], [_weights(factor) for factor in factors])[
            not small :
        ]:
            found = eliminate(sizes, tables)
            least.append(found.cost)
            self._regrets.append(_regrets(found))
        self._least = np.array(least)[:, None]

    def improved(self, best: _Point, most: int) -> tuple[_Point, float]:
        """Return the best choices, at least as good as those given, and a bound below the cost of all."""
        bounds, held = self._least, dict[str, Table]()
        history: list[tuple[str, Table, Table]] = []
        dropped = np.inf
        for depth, (variable, *_) in enumerate(self._variables):
            bounds, parents, values = self._expanded(depth, bounds, held, best.cost)
            held = {name: column[parents] for name, column in held.items()} | {variable: values}
            held = {name: held[name] for name in self._needed(depth) if name in held}
            # Of one key, what was spent so far is ordered as this is.
            spent = bounds[0] - self._price * bounds[-1]
            kept = _undominated(self._keys(held, len(values)), spent, bounds[-1])
            if len(kept) > most:
                kept = kept[np.argsort(bounds[:-1, kept].max(axis=0), kind="stable")]
                dropped = min(dropped, float(bounds[:-1, kept[most]].max()))
                kept = kept[:most]
            bounds, held = bounds[:, kept], {name: column[kept] for name, column in held.items()}
            history.append((variable, parents[kept], values[kept]))
        if bounds.shape[1]:
            found = _Point.at(_traced(history, int(np.argmin(bounds[0] - self._price * bounds[-1]))), self._factors)
            best = found if found.weight <= self._limit and found.cost < best.cost else best
        return best, min(best.cost, dropped)

    def _expanded(
        self, depth: int, bounds: Table, held: Mapping[str, Table], worst: float
    ) -> tuple[Table, Table, Table]:
        """Return bounds, parents and values of all labels with one more variable that may still be best."""
        regrets = [tables[depth] for tables in self._regrets]
        others = self._variables[depth][1:]
        step = max(1, _CELLS // len(regrets[0]))
        found: list[tuple[Table, Table, Table]] = [(bounds[:, :0], np.zeros(0, int), np.zeros(0, int))]
        for start in range(0, bounds.shape[1], step):
            part = slice(start, start + step)
            place = (slice(None), *(held[name][part] for name in others))
            more = [bound[part] + _columns(table[place]) for bound, table in zip(bounds, regrets, strict=True)]
            fits = more[-1] <= self._limit
            for bound in more[:-1]:
                fits &= bound < worst * (1 - _TOLERANCE)
            values, parents = np.nonzero(fits)
            found.append((np.stack([one[values, parents] for one in more]), parents + start, values))
        bounds, parents, values = (np.concatenate([one[number] for one in found], axis=-1) for number in range(3))
        return bounds, parents, values

    def _needed(self, depth: int) -> list[str]:
        """Return the chosen variables on which later tables depend."""
        chosen = [variables[0] for variables in self._variables[: depth + 1]]
        later = {name for variables in self._variables[depth + 1 :] for name in variables[1:]}
        return [name for name in chosen if name in later]

    def _keys(self, held: Mapping[str, Table], count: int) -> Table:
        """Return a number for each label, alike where all that matters later is alike."""
        keys = np.zeros(count, int)
        for name, column in held.items():
            keys = keys * self._sizes[name] + column
        return keys


def _columns(table: Table) -> Table:
    """Return a table with a column per label, also where the labels make no difference."""
    return table[:, None] if table.ndim == 1 else table


def _undominated(keys: Table, costs: Table, weights: Table) -> Table:
    """Return the labels for which no other of the same key is at least as cheap and as light, in their order."""
    order = np.lexsort((costs, weights, keys))
    _, ranks = np.unique(costs[order], return_inverse=True)
    _, groups = np.unique(keys[order], return_inverse=True)
    lowered = ranks - groups * (len(ranks) + 1)  # so that each group starts below all before it
    least = np.minimum.accumulate(lowered)
    first = np.concatenate([[True], lowered[1:] < least[:-1]])[: len(order)]
    return np.sort(order[first])


def _traced(history: Sequence[tuple[str, Table, Table]], label: int) -> dict[str, int]:
    """Return the choices that led to a label."""
    choices: dict[str, int] = {}
    for variable, parents, values in reversed(history):
        choices[variable] = int(values[label])
        label = int(parents[label])
    return choices


def _regrets(elimination: Elimination) -> list[Table]:
    """Return how much each choice adds to the least total, given the choices that come before it."""
    found: list[Table] = []
    for joint in reversed(elimination.joints):
        least = joint.table.min(axis=0, keepdims=True)
        found.append(joint.table - np.where(np.isfinite(least), least, 0.0))
    return found
