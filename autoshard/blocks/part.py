"""The choices that may still be best: all values of all variables, or those that bounds have left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.blocks.factors import Elimination, Factor, Table, eliminate

TOLERANCE = 1e-9  # costs that differ by less are ties


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A choice for every variable, what it costs and what it weighs."""

    cost: float
    weight: float
    choices: Mapping[str, int]

    @property
    def worst(self) -> float:
        """What other choices must cost less than to be better."""
        return self.cost * (1 - TOLERANCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Factors over some values of each variable, and the numbers that these had among all values."""

    numbers: Mapping[str, Table]
    factors: tuple[Factor, ...]

    @classmethod
    def whole(cls, sizes: Mapping[str, int], factors: Sequence[Factor]) -> "Part":
        """Return all choices."""
        return cls(numbers={name: np.arange(size) for name, size in sizes.items()}, factors=tuple(factors))

    @property
    def sizes(self) -> dict[str, int]:
        """How many values each variable has."""
        return {name: len(numbers) for name, numbers in self.numbers.items()}

    def priced(self, price: float) -> Elimination:
        """Minimise cost and priced weight."""
        return eliminate(self.sizes, [_priced(factor, price) for factor in self.factors])

    def weighed(self) -> Elimination:
        """Minimise weight; what may not be, may still not be."""
        return eliminate(self.sizes, [_weights(factor) for factor in self.factors])

    def point(self, found: Elimination) -> Point:
        """Return the best choices that an elimination found."""
        return self.at(found.choices())

    def at(self, values: Mapping[str, int]) -> Point:
        """Return what values of this part cost and weigh, with the numbers that they had among all."""
        cost = weight = 0.0
        for factor in self.factors:
            place = tuple(values[name] for name in factor.variables)
            cost += float(factor.table[place])
            weight += 0.0 if factor.weight is None else float(factor.weight[place])
        choices = {name: int(self.numbers[name][value]) for name, value in values.items()}
        return Point(cost=cost, weight=weight, choices=choices)

    def where(self, kept: Mapping[str, Table]) -> "Part":
        """Return what is left of this when only values are kept for which this says so."""
        numbers = {name: values[kept[name]] for name, values in self.numbers.items()}
        return Part(numbers=numbers, factors=tuple(_where(factor, kept) for factor in self.factors))


def _priced(factor: Factor, price: float) -> Factor:
    table = factor.table if factor.weight is None or not price else factor.table + price * factor.weight
    return Factor(variables=factor.variables, table=table)


def _weights(factor: Factor) -> Factor:
    weight: Table = np.zeros(factor.table.shape) if factor.weight is None else factor.weight
    return Factor(variables=factor.variables, table=np.where(np.isfinite(factor.table), weight, np.inf))


def _where(factor: Factor, kept: Mapping[str, Table]) -> Factor:
    place = np.ix_(*(kept[name] for name in factor.variables))
    weight = None if factor.weight is None else factor.weight[place]
    return Factor(variables=factor.variables, table=factor.table[place], weight=weight)
