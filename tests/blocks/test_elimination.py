"""Sums of small tables are minimised as by trying everything, with and without a limit."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from autoshard.blocks import elimination
from autoshard.blocks.elimination import CostFactor, descended, eliminate
from autoshard.blocks.limited import minimise_within

SEEDS = st.integers(0, 2**32 - 1)


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


@given(seed=SEEDS)
def test_elimination_finds_what_trying_everything_finds(seed: int) -> None:
    instance = random_instance(seed)
    found = eliminate(instance.sizes, instance.factors)
    assert found.cost == pytest.approx(min(cost for cost, _ in every(instance)))
    assert total(instance.factors, found.choices())[0] == pytest.approx(found.cost)
    again = eliminate(instance.sizes, instance.factors[::-1])
    assert (again.cost, again.choices()) == (found.cost, found.choices())


@given(seed=SEEDS)
def test_the_least_total_with_a_value_is_that_of_trying_everything(seed: int) -> None:
    instance = random_instance(seed)
    totals = eliminate(instance.sizes, instance.factors).least_totals()
    for name, size in instance.sizes.items():
        for value in range(size):
            assert totals[name][value] == pytest.approx(min(cost for cost, _ in every(instance, {name: value})))


@given(seed=SEEDS, cells=st.integers(1, 20))
def test_tables_made_piece_by_piece_change_nothing(seed: int, cells: int) -> None:
    instance = random_instance(seed)
    whole = eliminate(instance.sizes, instance.factors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elimination, "_CELLS", cells)
        found = eliminate(instance.sizes, instance.factors)
        assert (found.cost, found.choices()) == (whole.cost, whole.choices())
        totals = found.least_totals()
    assert {name: table.tolist() for name, table in totals.items()} == {
        name: table.tolist() for name, table in whole.least_totals().items()
    }


@given(seed=SEEDS, cells=st.integers(4, 40))
def test_minimised_in_parts_there_is_a_bound_and_choices_are_near_it(seed: int, cells: int) -> None:
    instance = random_instance(seed)
    optimum = min(cost for cost, _ in every(instance))
    found = eliminate(instance.sizes, instance.factors, (0, cells))
    start = found.choices()
    better = descended(start, instance.factors)
    assert found.cost <= optimum + 1e-9
    assert optimum - 1e-9 <= total(instance.factors, better)[0] <= total(instance.factors, start)[0] + 1e-9
    assert not found.is_exact or found.cost == pytest.approx(optimum)
    answer = minimise_within(instance.sizes, instance.factors, math.inf, cells=(0, cells))
    assert answer.bound <= optimum + 1e-9 and answer.cost == pytest.approx(total(instance.factors, answer.choices)[0])


@given(seed=SEEDS, share=st.floats(0, 1))
@example(seed=135502, share=1.0)  # what is minimised in parts may be lighter and cheaper than what is not priced
@example(seed=495185, share=0.0)  # or forbidden
@example(seed=870446, share=0.3552756245891855)
def test_a_limit_is_kept_and_the_bound_is_true_in_parts(seed: int, share: float) -> None:
    instance = random_instance(seed)
    limit = binding_limit(instance, share)
    optimum = min(cost for cost, weight in every(instance) if weight <= limit)
    found = minimise_within(instance.sizes, instance.factors, limit, cells=(0, 8))
    assert found.bound <= optimum + 1e-6
    assert not found.fits or (found.weight <= limit + 1e-6 and found.cost >= optimum - 1e-6)


def test_parts_leave_a_few_percent_where_tables_are_a_hundredth() -> None:
    instance = entangled(3, 60, 12)
    exact = eliminate(instance.sizes, instance.factors).cost
    found = eliminate(instance.sizes, instance.factors, (0, 200))
    assert not found.is_exact and 0.85 * exact < found.cost < exact
    assert exact < total(instance.factors, descended(found.choices(), instance.factors))[0] < 1.06 * exact


def test_no_piece_of_a_joint_table_is_large_however_few_values_its_first_axes_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elimination, "_CELLS", 1 << 6)
    made, joined = list[int](), elimination._joined

    def noted(*args: Any) -> CostFactor:
        factor = joined(*args)
        made.append(factor.table.size)
        return factor

    monkeypatch.setattr(elimination, "_joined", noted)
    names = [f"v{number}" for number in range(12)]
    table = np.random.default_rng(0).random([2] * 12)
    result = eliminate(dict.fromkeys(names, 2), [CostFactor(variables=tuple(names), table=table)])
    assert result.cost == table.min() and max(made) <= 1 << 7
    assert all(totals.min() == table.min() for totals in result.least_totals().values())


def test_a_variable_in_no_factor_takes_its_first_value() -> None:
    alone = eliminate({"a": 2, "b": 3}, [CostFactor(variables=("a",), table=np.array([2.0, 1.0]))])
    assert (alone.cost, alone.choices()) == (1.0, {"a": 1, "b": 0})


def test_more_variables_without_a_choice_than_an_array_has_axes_are_minimised() -> None:
    names = [f"v{number}" for number in range(80)]
    factors = [CostFactor(variables=("a", name), table=np.array([[3.0], [1.0]])) for name in names]
    hub = CostFactor(variables=("a", "b"), table=np.array([[0.0, 5.0], [7.0, 2.0]]))
    found = eliminate({"a": 2, "b": 2, **dict.fromkeys(names, 1)}, [*factors, hub])
    assert (found.cost, found.choices()) == (82.0, {"a": 1, "b": 1, **dict.fromkeys(names, 0)})


@given(seed=SEEDS, share=st.floats(-0.2, 1.2))
def test_any_limit_is_answered_as_by_trying_everything(seed: int, share: float) -> None:
    instance = random_instance(seed)
    limit = binding_limit(instance, share) + 0.5
    fitting = [cost for cost, weight in every(instance) if weight <= limit and math.isfinite(cost)]
    found = minimise_within(instance.sizes, instance.factors, limit)
    assert found.fits == bool(fitting)
    if not fitting:
        assert found.weight == min(weight for cost, weight in every(instance) if math.isfinite(cost))
    else:
        assert found.gap == 0 and found.weight <= limit + 1e-6
        assert found.cost == pytest.approx(min(fitting))
        assert total(instance.factors, found.choices) == (pytest.approx(found.cost), pytest.approx(found.weight))


@given(seed=SEEDS, share=st.floats(0, 1), most=st.integers(0, 2))
def test_with_few_splits_the_gap_is_told_and_true(seed: int, share: float, most: int) -> None:
    instance = random_instance(seed, most_variables=8)
    limit = binding_limit(instance, share)
    found = minimise_within(instance.sizes, instance.factors, limit, most_splits=most)
    optimum = min(cost for cost, weight in every(instance) if weight <= limit)
    assert found.fits and found.bound <= optimum + 1e-6 <= found.cost + 2e-6
    assert found.gap == pytest.approx(0 if found.cost <= found.bound * (1 + 1e-9) else 1 - found.bound / found.cost)


def entangled(seed: int, count: int, size: int) -> Instance:
    """A long band of variables in which what is cheap is heavy."""
    rng = np.random.default_rng(seed)
    names = [f"v{number:02}" for number in range(count)]
    weights = {name: rng.integers(1, 10**6, size).astype(float) for name in names}
    factors = [CostFactor(variables=(name,), table=1e6 - weights[name], weight=weights[name]) for name in names]
    for step in (1, 3):
        pairs = zip(names, names[step:], strict=False)
        factors += [CostFactor(variables=pair, table=rng.random((size, size)) * 3e5) for pair in pairs]
    return Instance(sizes=dict.fromkeys(names, size), factors=factors)


@pytest.mark.parametrize("share", [0.001, 0.95])
def test_few_splits_leave_little_of_deep_and_shallow_limits_of_many_variables(share: float) -> None:
    instance = entangled(3, 60, 12)
    heaviest = minimise_within(instance.sizes, instance.factors, math.inf).weight
    least = minimise_within(instance.sizes, instance.factors, 1.0).weight
    limit = least + share * (heaviest - least)
    found = minimise_within(instance.sizes, instance.factors, limit, most_splits=5)
    assert found.fits and found.gap <= 0.003 and found.weight <= limit * (1 + 1e-9)


def test_few_splits_do_leave_gaps() -> None:
    gaps = []
    for seed in range(40):
        instance = random_instance(seed, most_variables=8)
        limit = binding_limit(instance, 0.4)
        gaps.append(minimise_within(instance.sizes, instance.factors, limit, most_splits=0).gap)
    assert max(gaps) > 0
