import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.blocks.elimination import CostFactor


@dataclass(frozen=True, kw_only=True)
class Instance:
    sizes: Mapping[str, int]
    factors: Sequence[CostFactor]


def random_instance(seed: int, most_variables: int = 6, most_values: int = 4) -> Instance:
    """Random variables, pairs and triples of them; some places of the tables are forbidden, never all."""
    rng = np.random.default_rng(seed)
    names = [f"v{number}" for number in range(rng.integers(2, most_variables + 1))]
    sizes = {name: int(rng.integers(1, most_values + 1)) for name in names}
    allowed = {name: int(rng.integers(size)) for name, size in sizes.items()}
    factors: list[CostFactor] = []
    scopes = [tuple(rng.choice(names, size=min(len(names), count), replace=False)) for count in (2, 2, 2, 3, 3)]
    for scope in [*((name,) for name in names), *scopes]:
        shape = [sizes[name] for name in scope]
        table = rng.integers(0, 40, shape).astype(float)
        table[rng.random(shape) < 0.15] = np.inf
        place = tuple(allowed[name] for name in scope)
        table[place] = 20.0
        weight = None if rng.random() < 0.3 else rng.integers(0, 40, shape).astype(float)
        factors.append(CostFactor(variables=tuple(str(name) for name in scope), table=table, weight=weight))
    return Instance(sizes=sizes, factors=factors)


def total(factors: Sequence[CostFactor], choices: Mapping[str, int]) -> tuple[float, float]:
    cost = weight = 0.0
    for factor in factors:
        place = tuple(choices[name] for name in factor.variables)
        cost += factor.table[place]
        weight += 0.0 if factor.weight is None else factor.weight[place]
    return cost, weight


def every(instance: Instance, fixed: Mapping[str, int] | None = None) -> list[tuple[float, float]]:
    """What all choices cost and weigh, or those in which some variables have fixed values."""
    only = {name: (value,) for name, value in (fixed or {}).items()}
    ways = itertools.product(*(only.get(name, range(size)) for name, size in instance.sizes.items()))
    return [total(instance.factors, dict(zip(instance.sizes, way, strict=True))) for way in ways]


def binding_limit(instance: Instance, share: float) -> float:
    """A limit between the least weight and that of the cheapest choices."""
    found = [way for way in every(instance) if math.isfinite(way[0])]
    least, cheapest = min(weight for _, weight in found), min(found)[1]
    return least + share * (cheapest - least)
