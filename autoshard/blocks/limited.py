"""Minimisation under a limit: a price per unit of weight gives bounds, and branching closes the gap.

With any price the least sum of cost and priced weight, less the price of the limit, is a lower bound of the cost of all
choices that keep to the limit. The best price comes from a walk along the lower hull of (weight, cost) points. The same
sums say which values no better choices can have; few are left. Where a gap remains, the values of one variable are
split in two, and each half is reduced and bounded in the same way, the lowest bound first.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.blocks.elimination import CELLS, CostFactor, Elimination, Table, descended, eliminate

MOST_SPLITS = 200  # measured: no block of a model has needed 20
_TOLERANCE = 1e-9  # costs that differ by less are ties
_SHARES = (1.0, 0.5, 2.0, 0.0)  # of the best price: each leaves out other values


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedMinimum:
    """The cheapest choices that the search found within a limit; no choices cost less than ``bound``.

    If nothing fits, these are the lightest choices and ``fits`` is false; likewise where sums are not minimised exactly
    and nothing allowed was found: then ``bound`` is finite.
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
    """A choice for every variable, by its number among all values, with its cost and weight.

    No choices have a sum of cost and priced weight below ``least``: where it ``is_exact``, these have just that.
    """

    cost: float
    weight: float
    choices: Mapping[str, int]
    least: float
    is_exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """A lower bound of the choices within a limit, the price that gives it, and the best point seen on the way.

    ``edge`` holds the heavy and the light end of the hull's edge over the limit; None where no price is needed, or
    sums are not minimised exactly, so that branching could leave out nothing.
    """

    best: _Point
    bound: float
    price: float = 0.0
    edge: tuple[_Point, _Point] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subproblem:
    """Factors over some values of each variable, and the numbers of these among all values."""

    numbers: Mapping[str, NDArray[np.intp]]
    factors: Sequence[CostFactor]
    cells: tuple[int, int]

    def priced(self, price: float | None) -> list[CostFactor]:
        """Return cost and priced weight; without a price weight alone, where what is forbidden stays forbidden."""
        priced: list[CostFactor] = []
        for factor in self.factors:
            table, weight = factor.table, factor.weight
            if price is None:
                table = np.where(np.isfinite(table), 0.0 if weight is None else weight, np.inf)
            elif price and weight is not None:
                table = table + price * weight
            priced.append(CostFactor(variables=factor.variables, table=table))
        return priced

    def minimised(self, price: float | None) -> Elimination:
        """Minimise cost and priced weight."""
        priced = self.priced(price)
        return eliminate({name: len(values) for name, values in self.numbers.items()}, priced, self.cells)

    def point(self, price: float | None) -> _Point:
        """Return the choices that minimise with a price, with their cost and weight."""
        elimination = self.minimised(price)
        values, cost, weight = elimination.choices(), 0.0, 0.0
        if not elimination.is_exact:
            values = descended(values, self.priced(price))
        for factor in self.factors:
            place = tuple(values[name] for name in factor.variables)
            cost += float(factor.table[place])
            weight += 0.0 if factor.weight is None else float(factor.weight[place])
        choices = {name: int(self.numbers[name][value]) for name, value in values.items()}
        return _Point(cost=cost, weight=weight, choices=choices, least=elimination.cost, is_exact=elimination.is_exact)

    def where(self, masks: Mapping[str, NDArray[np.bool_]]) -> "_Subproblem":
        """Return the subproblem with only the values that ``masks`` mark, of the variables that they name."""

        def marked(table: Table, variables: Sequence[str]) -> Table:
            for axis, name in enumerate(variables):
                table = table.compress(masks[name], axis=axis) if name in masks else table
            return table

        factors = [
            CostFactor(
                variables=factor.variables,
                table=marked(factor.table, factor.variables),
                weight=None if factor.weight is None else marked(factor.weight, factor.variables),
            )
            for factor in self.factors
        ]
        numbers = {name: values[masks[name]] if name in masks else values for name, values in self.numbers.items()}
        return replace(self, numbers=numbers, factors=factors)

    def halves(self, heavy: _Point, light: _Point) -> Iterator["_Subproblem"]:
        """Yield both parts of a split between two points: of the variable whose values differ most in weight."""
        place = {name: int(np.searchsorted(numbers, light.choices[name])) for name, numbers in self.numbers.items()}
        swings: list[tuple[float, str]] = []
        masks: dict[str, NDArray[np.bool_]] = {}
        for name, numbers in self.numbers.items():
            if heavy.choices[name] != light.choices[name]:
                weights = np.zeros(len(numbers))  # by value of this variable, all other variables as at the light point
                for factor in self.factors:
                    if name in factor.variables and factor.weight is not None:
                        weights += factor.weight[
                            tuple(slice(None) if variable == name else place[variable] for variable in factor.variables)
                        ]
                first = numbers == heavy.choices[name]
                ends = weights[first].item(), weights[place[name]].item()
                upper = weights > sum(ends) / 2
                masks[name] = upper if upper.any() and not upper.all() else first
                swings.append((abs(ends[0] - ends[1]), name))
        _, name = max(swings)
        yield from (self.where({name: masks[name]}), self.where({name: ~masks[name]}))


def minimise_within(
    sizes: Mapping[str, int],
    factors: Sequence[CostFactor],
    limit: float,
    *,
    most_splits: int = MOST_SPLITS,
    cells: tuple[int, int] = CELLS,
) -> LimitedMinimum:
    """Return the least cost whose weight is at most the limit; exact unless that needs too many splits or ``cells``.

    >>> cost, weight = np.array([1.0, 2.0, 5.0]), np.array([9.0, 4.0, 3.0])
    >>> minimise_within({"a": 3}, [CostFactor(variables=("a",), table=cost, weight=weight)], 6.0)
    LimitedMinimum(cost=2.0, weight=4.0, choices={'a': 1}, bound=2.0, fits=True)
    """
    limit += _TOLERANCE * abs(limit)  # rounding of a sum is no overrun
    numbers = {name: np.arange(size) for name, size in sizes.items()}
    whole = _Subproblem(numbers=numbers, factors=factors, cells=cells)
    first = _bounded(whole, limit)
    best, bound = first.best, first.bound
    if first.edge is not None and bound < _worst(best):
        best, bound = _branched(whole, first, limit, most_splits)
    fits = best.weight <= limit and bool(np.isfinite(best.cost))
    bound = best.cost if fits and bound >= _worst(best) else bound
    return LimitedMinimum(cost=best.cost, weight=best.weight, choices=best.choices, bound=float(bound), fits=fits)


def _worst(best: _Point) -> float:
    """Return the cost below which other choices are better."""
    return best.cost * (1 - _TOLERANCE)


def _branched(whole: _Subproblem, first: _Bound, limit: float, most_splits: int) -> tuple[_Point, float]:
    """Return the best point within the limit and a bound of all other points, by branch and bound."""
    best, price, floor = first.best, first.price, first.bound
    parts: Iterable[_Subproblem] = [whole]
    queue: list[tuple[float, int, _Subproblem, _Bound]] = []  # by bound, then by age
    numbers = itertools.count()
    for split in itertools.count():
        for part in parts:
            narrowed = _narrowed(part, limit, price, _worst(best))
            if narrowed is not None:
                bounded = _bounded(narrowed, limit)
                best = bounded.best if bounded.best.weight <= limit and bounded.best.cost < best.cost else best
                if bounded.edge is not None:
                    heapq.heappush(queue, (max(floor, bounded.bound), next(numbers), narrowed, bounded))
        if not queue or queue[0][0] >= _worst(best):
            return best, best.cost
        if split == most_splits:
            return best, queue[0][0]
        floor, _, part, bounded = heapq.heappop(queue)
        assert bounded.edge is not None, "what is proven is not queued"
        parts, price = part.halves(*bounded.edge), bounded.price
    raise AssertionError("unreachable")


def _bounded(part: _Subproblem, limit: float) -> _Bound:
    """Walk along the hull to its edge over the limit."""
    heavy = part.point(0.0)
    if heavy.weight <= limit or not np.isfinite(heavy.cost):
        return _Bound(best=heavy, bound=heavy.cost if heavy.is_exact else heavy.least)
    light = best = part.point(None)
    if light.weight > limit or not np.isfinite(light.cost):  # what is not minimised exactly may be forbidden
        return _Bound(best=light, bound=np.inf if light.is_exact else heavy.least)
    bound = heavy.least
    while light.cost > heavy.cost:
        price = (light.cost - heavy.cost) / (heavy.weight - light.weight)
        line = heavy.cost + price * heavy.weight
        point = part.point(price)
        here = point.cost + price * point.weight
        if point.weight <= limit and point.cost < best.cost:
            best = point
        bound = max(bound, min(here if point.is_exact else point.least, line) - price * limit)
        if here >= line - _TOLERANCE * abs(line):
            edge = (heavy, light) if point.is_exact else None
            return _Bound(best=best, bound=bound, price=price, edge=edge)
        heavy, light = (point, light) if point.weight > limit else (heavy, point)
    return _Bound(best=best, bound=bound)  # one that is lighter costs no more: neither was minimised exactly


def _narrowed(part: _Subproblem, limit: float, price: float, worst: float) -> _Subproblem | None:
    """Leave out the values that no choices within the limit that cost less can have; None if no choices are left."""
    for share in (None, *_SHARES):  # None: by weight alone
        most = limit if share is None else worst + share * price * limit
        totals = part.minimised(None if share is None else share * price).least_totals()
        part = part.where({name: total <= most for name, total in totals.items()})
        if not all(map(len, part.numbers.values())):
            return None
    return part
