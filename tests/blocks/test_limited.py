import math
import time

import highspy
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autoshard.blocks import labels
from autoshard.blocks.factors import Factor
from autoshard.blocks.limited import minimise_within
from autoshard.blocks.part import Part
from autoshard.blocks.reduced import least_with
from tests.blocks.factor_cases import Instance, binding_limit, every, random_instance, total

NUM_INSTANCES = 300  # of which at least 100 must have a limit that binds


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


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(-0.2, 1.2), cells=st.integers(1, 50))
def test_any_limit_is_answered_as_by_trying_everything(seed: int, share: float, cells: int) -> None:
    instance = random_instance(seed)
    limit = binding_limit(instance, share) + 0.5
    fitting = [cost for cost, weight in every(instance) if weight <= limit and math.isfinite(cost)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(labels, "_CELLS", cells)  # so that labels come in many pieces
        found = minimise_within(instance.sizes, instance.factors, limit)
    assert found.fits == bool(fitting)
    if fitting:
        assert found.gap == 0 and found.cost == pytest.approx(min(fitting))


@given(seed=st.integers(0, 2**32 - 1), price=st.floats(0, 4))
def test_the_least_total_with_a_value_is_that_of_trying_everything(seed: int, price: float) -> None:
    instance = random_instance(seed)
    part = Part.whole(instance.sizes, instance.factors)
    totals = least_with(part.sizes, part.priced(price))
    for name, size in instance.sizes.items():
        for value in range(size):
            with_it = every(instance, {name: value})
            assert totals[name][value] == pytest.approx(min(cost + price * weight for cost, weight in with_it))


def entangled(seed: int, count: int, size: int) -> Instance:
    """A long band of variables in which what is cheap is heavy."""
    rng = np.random.default_rng(seed)
    names = [f"v{number:02}" for number in range(count)]
    weights = {name: rng.integers(1, 10**6, size).astype(float) for name in names}
    factors = [Factor(variables=(name,), table=1e6 - weights[name], weight=weights[name]) for name in names]
    for step in (1, 3):
        pairs = zip(names, names[step:], strict=False)
        factors += [Factor(variables=pair, table=rng.random((size, size)) * 3e5) for pair in pairs]
    return Instance(sizes=dict.fromkeys(names, size), factors=factors)


@pytest.mark.parametrize("share", [0.001, 0.05, 0.5, 0.95])
def test_deep_and_shallow_limits_of_many_variables_are_closed_in_two_seconds(share: float) -> None:
    instance = entangled(3, 60, 12)
    heaviest = minimise_within(instance.sizes, instance.factors, math.inf).weight
    least = minimise_within(instance.sizes, instance.factors, 1.0).weight
    limit = least + share * (heaviest - least)
    started = time.process_time()
    found = minimise_within(instance.sizes, instance.factors, limit)
    assert found.fits and found.gap == 0 and found.weight <= limit * (1 + 1e-9)
    assert time.process_time() - started < 2


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
