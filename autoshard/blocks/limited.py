"""Minimisation under a limit: a price per unit of weight gives bounds, and branching closes the gap.

With any price the least sum of cost and priced weight, less the price of the limit, is a lower bound of the cost of all
choices that keep to the limit. The best price comes from a walk along the lower hull of (weight, cost) points. The same
sums say which values no better choices can have; few are left. Where a gap remains, the values of one variable are
split in two, and each half is reduced and bounded in the same way, the lowest bound first.
"""

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.blocks.elimination import CostFactor, Elimination, Table, eliminate

MOST_SPLITS = 200  # measured: no block of a model has needed 20
_TOLERANCE = 1e-9  # costs that differ by less are ties
_SHARES = (1.0, 0.5, 2.0, 0.0)  # of the best price: each leaves out other values


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedMinimum:
    """The cheapest choices that were found within a limit; no choices cost less than ``bound``.

    If nothing fits, these are the lightest choices and ``fits`` is false.
    """

    cost: float
    weight: float
    choices: Mapping[str, int]
    bound: float
    fits: bool = True

    @property
    def gap(self) -> float:
        """How much cheaper the optimum could be at most, as a share of the cost that was found."""
        return 0.0 if self.cost <= self.bound * (1 + _TOLERANCE) else 1 - self.bound / self.cost


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """A choice for every variable, by its number among all values, with its cost and weight."""

    cost: float
    weight: float
    choices: Mapping[str, int]

    @property
    def worst(self) -> float:
        """The cost below which other choices are better."""
        return self.cost * (1 - _TOLERANCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """A lower bound of the choices within a limit, the price that gives it, and the best point seen on the way.

    ``edge`` holds the heavy and the light end of the hull's edge over the limit; None where the point is proven best.
    """

    best: _Point
    bound: float
    price: float = 0.0
    edge: tuple[_Point, _Point] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subproblem:
    """Factors over some values of each variable, and the numbers of these among all values."""

    numbers: Mapping[str, NDArray[np.intp]]
    factors: tuple[CostFactor, ...]

    def priced(self, price: float) -> Elimination:
        """Minimise cost and priced weight."""
        return self._eliminated(
            [one.table if one.weight is None or not price else one.table + price * one.weight for one in self.factors]
        )

    def weighed(self) -> Elimination:
        """Minimise weight; what is forbidden stays forbidden."""
        weights = [np.zeros(one.table.shape) if one.weight is None else one.weight for one in self.factors]
        allowed = [np.isfinite(one.table) for one in self.factors]
        return self._eliminated([np.where(*each, np.inf) for each in zip(allowed, weights, strict=True)])

    def point(self, found: Elimination) -> _Point:
        """Return the best choices of an elimination with their cost and weight."""
        values, cost, weight = found.choices(), 0.0, 0.0
        for factor in self.factors:
            place = tuple(values[name] for name in factor.variables)
            cost += float(factor.table[place])
            weight += 0.0 if factor.weight is None else float(factor.weight[place])
        choices = {name: int(self.numbers[name][value]) for name, value in values.items()}
        return _Point(cost=cost, weight=weight, choices=choices)

    def where(self, kept: Mapping[str, NDArray[np.bool_]]) -> "_Subproblem":
        """Return the same with fewer values of some variables, those that ``kept`` marks."""
        numbers = {name: values[kept[name]] if name in kept else values for name, values in self.numbers.items()}
        return _Subproblem(numbers=numbers, factors=tuple(_where(factor, kept) for factor in self.factors))

    def weights(self, name: str, at: _Point) -> Table:
        """Return how the weight depends on one variable where all others are chosen as here."""
        place = {other: int(np.searchsorted(self.numbers[other], at.choices[other])) for other in self.numbers}
        total = np.zeros(len(self.numbers[name]))
        for factor in self.factors:
            if name in factor.variables and factor.weight is not None:
                total += factor.weight[tuple(slice(None) if one == name else place[one] for one in factor.variables)]
        return total

    def halves(self, heavy: _Point, light: _Point) -> Iterator["_Subproblem"]:
        """Yield both parts of a split between two points: of the variable whose values differ most in weight."""
        swings: list[tuple[float, str]] = []
        for name, numbers in self.numbers.items():
            if heavy.choices[name] != light.choices[name]:
                weights = self.weights(name, light)
                ends = (weights[numbers == point.choices[name]].item() for point in (heavy, light))
                swings.append((abs(next(ends) - next(ends)), name))
        _, name = max(swings)
        weights, own = self.weights(name, light), self.numbers[name] == heavy.choices[name]
        middle = (weights[own] + weights[self.numbers[name] == light.choices[name]]) / 2
        upper = weights > middle
        mask = upper if upper.any() and not upper.all() else own
        yield from (self.where({name: mask}), self.where({name: ~mask}))

    def _eliminated(self, tables: Sequence[Table]) -> Elimination:
        sizes = {name: len(numbers) for name, numbers in self.numbers.items()}
        pairs = zip(self.factors, tables, strict=True)
        return eliminate(sizes, [CostFactor(variables=one.variables, table=table) for one, table in pairs])


def minimise_within(
    sizes: Mapping[str, int], factors: Sequence[CostFactor], limit: float, *, most_splits: int = MOST_SPLITS
) -> LimitedMinimum:
    """Return the least cost whose weight is at most the limit; exact unless that needs more splits than allowed.

    >>> cost, weight = np.array([1.0, 2.0, 5.0]), np.array([9.0, 4.0, 3.0])
    >>> minimise_within({"a": 3}, [CostFactor(variables=("a",), table=cost, weight=weight)], 6.0)
    LimitedMinimum(cost=2.0, weight=4.0, choices={'a': 1}, bound=2.0, fits=True)
    """
    limit += _TOLERANCE * abs(limit)  # rounding of a sum is no overrun
    whole = _Subproblem(numbers={name: np.arange(size) for name, size in sizes.items()}, factors=tuple(factors))
    first = _bounded(whole, limit)
    best, bound = first.best, first.bound
    if first.edge is not None and bound < best.worst:
        best, bound = _branched(whole, first, limit, most_splits)
    fits = best.weight <= limit
    bound = best.cost if fits and bound >= best.worst else bound
    return LimitedMinimum(cost=best.cost, weight=best.weight, choices=best.choices, bound=float(bound), fits=fits)


def _branched(whole: _Subproblem, first: _Bound, limit: float, most_splits: int) -> tuple[_Point, float]:
    """Return the best point within the limit and a bound of all others, by branch and bound."""
    best, price, floor = first.best, first.price, first.bound
    parts: Iterator[_Subproblem] = iter([whole])
    queue: list[tuple[float, int, _Subproblem, _Bound]] = []  # by bound, then by age
    numbers = itertools.count()
    for split in itertools.count():
        for part in parts:
            left = _narrowed(part, limit, price, best.worst)
            if left is not None:
                found = _bounded(left, limit)
                best = found.best if found.best.weight <= limit and found.best.cost < best.cost else best
                if found.edge is not None:
                    heapq.heappush(queue, (max(floor, found.bound), next(numbers), left, found))
        if not queue or queue[0][0] >= best.worst:
            return best, best.cost
        if split == most_splits:
            return best, queue[0][0]
        floor, _, part, found = heapq.heappop(queue)
        assert found.edge is not None, "what is proven is not queued"
        parts, price = part.halves(*found.edge), found.price
    raise AssertionError("unreachable")


def _bounded(part: _Subproblem, limit: float) -> _Bound:
    """Walk along the hull to its edge over the limit."""
    heavy = part.point(part.priced(0.0))
    if heavy.weight <= limit or not np.isfinite(heavy.cost):
        return _Bound(best=heavy, bound=heavy.cost)
    light = part.point(part.weighed())
    if light.weight > limit:
        return _Bound(best=light, bound=np.inf)
    best = light
    while True:
        price = (light.cost - heavy.cost) / (heavy.weight - light.weight)
        line = heavy.cost + price * heavy.weight
        point = part.point(part.priced(price))
        here = point.cost + price * point.weight
        if point.weight <= limit and point.cost < best.cost:
            best = point
        if here >= line - _TOLERANCE * abs(line):
            return _Bound(best=best, bound=min(here, line) - price * limit, price=price, edge=(heavy, light))
        heavy, light = (point, light) if point.weight > limit else (heavy, point)


def _narrowed(part: _Subproblem, limit: float, price: float, worst: float) -> _Subproblem | None:
    """Leave out the values that no choices within the limit that cost less can have; None if no choices are left."""
    for share in (None, *_SHARES):  # None: by weight alone
        found = part.weighed() if share is None else part.priced(share * price)
        most = limit if share is None else worst + share * price * limit
        part = part.where({name: total <= most for name, total in found.least_totals().items()})
        if not all(map(len, part.numbers.values())):
            return None
    return part


def _where(factor: CostFactor, kept: Mapping[str, NDArray[np.bool_]]) -> CostFactor:
    table, weight = factor.table, factor.weight
    for axis, name in enumerate(factor.variables):
        if name in kept:
            table = table.compress(kept[name], axis=axis)
            weight = None if weight is None else weight.compress(kept[name], axis=axis)
    return CostFactor(variables=factor.variables, table=table, weight=weight)
