import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import highspy
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autoshard.search.factors import Factor, eliminate, joined, minimise
from autoshard.search.limited import minimise_within

NUM_INSTANCES = 300  # of which at least 100 must have a limit that binds


@dataclass(frozen=True, kw_only=True)
class Instance:
    sizes: Mapping[str, int]
    factors: Sequence[Factor]


def random_instance(seed: int, most_variables: int = 6, most_values: int = 4) -> Instance:
    """Random variables, pairs and triples of them; some places of the tables are forbidden, never all."""
    rng = np.random.default_rng(seed)
    names = [f"v{number}" for number in range(rng.integers(2, most_variables + 1))]
    sizes = {name: int(rng.integers(1, most_values + 1)) for name in names}
    allowed = {name: int(rng.integers(size)) for name, size in sizes.items()}
    factors: list[Factor] = []
    scopes = [tuple(rng.choice(names, size=min(len(names), count), replace=False)) for count in (2, 2, 2, 3, 3)]
    for scope in [*((name,) for name in names), *scopes]:
        shape = [sizes[name] for name in scope]
        table = rng.integers(0, 40, shape).astype(float)
        table[rng.random(shape) < 0.15] = np.inf
        place = tuple(allowed[name] for name in scope)
        table[place] = 20.0
        weight = None if rng.random() < 0.3 else rng.integers(0, 40, shape).astype(float)
        factors.append(Factor(variables=tuple(str(name) for name in scope), table=table, weight=weight))
    return Instance(sizes=sizes, factors=factors)


def total(factors: Sequence[Factor], choices: Mapping[str, int]) -> tuple[float, float]:
    cost = weight = 0.0
    for factor in factors:
        place = tuple(choices[name] for name in factor.variables)
        cost += factor.table[place]
        weight += 0.0 if factor.weight is None else factor.weight[place]
    return cost, weight


def every(instance: Instance) -> list[tuple[float, float]]:
    ways = itertools.product(*(range(size) for size in instance.sizes.values()))
    return [total(instance.factors, dict(zip(instance.sizes, way, strict=True))) for way in ways]


def binding_limit(instance: Instance, share: float) -> float:
    """A limit between the least weight and that of the cheapest choices."""
    found = [way for way in every(instance) if math.isfinite(way[0])]
    least, cheapest = min(weight for _, weight in found), min(found)[1]
    return least + share * (cheapest - least)


@given(seed=st.integers(0, 2**32 - 1))
def test_elimination_finds_what_trying_everything_finds(seed: int) -> None:
    instance = random_instance(seed)
    found = minimise(instance.sizes, instance.factors)
    assert found.cost == pytest.approx(min(cost for cost, _ in every(instance)))
    assert total(instance.factors, found.choices)[0] == pytest.approx(found.cost)


@given(seed=st.integers(0, 2**32 - 1))
def test_the_order_of_factors_changes_nothing(seed: int) -> None:
    instance = random_instance(seed)
    assert minimise(instance.sizes, instance.factors) == minimise(instance.sizes, instance.factors[::-1])


@given(seed=st.integers(0, 2**32 - 1))
def test_variables_that_are_kept_stay_open(seed: int) -> None:
    instance = random_instance(seed)
    kept = sorted(instance.sizes)[0]
    found = eliminate(instance.sizes, instance.factors, keep=(kept,))
    for value, cost in enumerate(joined((kept,), instance.sizes, found.rest).table):
        fixed = np.full(instance.sizes[kept], np.inf)
        fixed[value] = 0.0
        best = minimise(instance.sizes, [*instance.factors, Factor(variables=(kept,), table=fixed)])
        assert cost == pytest.approx(best.cost)
        if math.isfinite(cost):
            assert total(instance.factors, found.choices({kept: value}))[0] == pytest.approx(cost)


@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0, 1))
def test_within_a_limit_too(seed: int, share: float) -> None:
    instance = random_instance(seed)
    limit = binding_limit(instance, share)
    found = minimise_within(instance.sizes, instance.factors, limit)
    assert found.fits and found.gap == 0 and found.weight <= limit + 1e-6
    assert found.cost == pytest.approx(min(cost for cost, weight in every(instance) if weight <= limit))
    assert total(instance.factors, found.choices) == (pytest.approx(found.cost), pytest.approx(found.weight))


@given(seed=st.integers(0, 2**32 - 1))
def test_what_fits_nowhere_is_answered_with_the_lightest(seed: int) -> None:
    instance = random_instance(seed)
    least = min(weight for cost, weight in every(instance) if math.isfinite(cost))
    found = minimise_within(instance.sizes, instance.factors, least - 1)
    assert not found.fits and found.weight == least


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0, 1), most=st.integers(1, 6))
def test_with_few_labels_the_gap_is_told_and_true(seed: int, share: float, most: int) -> None:
    instance = random_instance(seed, most_variables=8)
    limit = binding_limit(instance, share)
    found = minimise_within(instance.sizes, instance.factors, limit, most_labels=most)
    optimum = min(cost for cost, weight in every(instance) if weight <= limit)
    assert found.fits and found.bound <= optimum + 1e-6 <= found.cost + 2e-6
    assert found.gap == pytest.approx(0 if found.cost <= found.bound * (1 + 1e-9) else 1 - found.bound / found.cost)


def test_few_labels_do_leave_gaps() -> None:
    gaps = []
    for seed in range(40):
        instance = random_instance(seed, most_variables=8)
        limit = binding_limit(instance, 0.4)
        gaps.append(minimise_within(instance.sizes, instance.factors, limit, most_labels=1).gap)
    assert max(gaps) > 0


def test_highs_agrees_on_hundreds_of_instances() -> None:
    binding = 0
    for seed in range(NUM_INSTANCES):
        instance = random_instance(seed, most_variables=7, most_values=5)
        loose = minimise_within(instance.sizes, instance.factors, math.inf)
        limit = math.inf if seed % 2 else loose.weight - 1 - seed % 7
        found = minimise_within(instance.sizes, instance.factors, limit)
        optimum = by_highs(instance, limit)
        assert found.fits == (optimum is not None)
        if optimum is not None:
            assert found.gap == 0
            assert found.cost == pytest.approx(optimum, abs=1e-6)
            binding += limit < loose.weight
    assert binding >= 100


def by_highs(instance: Instance, limit: float) -> float | None:
    """The same problem as an integer programme: a column per place of each table, tied to a column per value."""
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("threads", 1)
    model.setOptionValue("mip_rel_gap", 0.0)
    values = {name: [model.addBinary() for _ in range(size)] for name, size in instance.sizes.items()}
    for columns in values.values():
        model.addConstr(sum(columns[1:], columns[0] + 0.0) == 1)
    cost, weight = values[next(iter(values))][0] * 0.0, values[next(iter(values))][0] * 0.0
    for factor in instance.factors:
        places = {place: model.addVariable(0, 1) for place in np.ndindex(*factor.table.shape)}
        for axis, name in enumerate(factor.variables):
            for value, column in enumerate(values[name]):
                model.addConstr(sum((places[p] for p in places if p[axis] == value), column * 0.0) == column)
        for place, column in places.items():
            if not math.isfinite(factor.table[place]):
                model.addConstr(column + 0.0 == 0)
                continue
            cost += float(factor.table[place]) * column
            if factor.weight is not None:
                weight += float(factor.weight[place]) * column
    if math.isfinite(limit):
        model.addConstr(weight <= limit)
    model.minimize(cost)
    optimal = model.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return model.getObjectiveValue() if optimal else None
