import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.blocks.elimination import CostFactor
from autoshard.blocks.limited import minimise_within
from tests.blocks.factor_cases import Instance, binding_limit, every, random_instance, total


@given(seed=st.integers(0, 2**32 - 1), share=st.floats(-0.2, 1.2))
def test_any_limit_is_answered_as_by_trying_everything(seed: int, share: float) -> None:
    instance = random_instance(seed)
    limit = binding_limit(instance, share) + 0.5
    fitting = [cost for cost, weight in every(instance) if weight <= limit and math.isfinite(cost)]
    found = minimise_within(instance.sizes, instance.factors, limit)
    assert found.fits == bool(fitting)
    if fitting:
        assert found.gap == 0 and found.weight <= limit + 1e-6
        assert found.cost == pytest.approx(min(fitting))
        assert total(instance.factors, found.choices) == (pytest.approx(found.cost), pytest.approx(found.weight))


@given(seed=st.integers(0, 2**32 - 1))
def test_what_fits_nowhere_is_answered_with_the_lightest(seed: int) -> None:
    instance = random_instance(seed)
    least = min(weight for cost, weight in every(instance) if math.isfinite(cost))
    found = minimise_within(instance.sizes, instance.factors, least - 1)
    assert not found.fits and found.weight == least


@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0, 1), most=st.integers(0, 2))
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
