import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.blocks import factors
from autoshard.blocks.factors import Factor, eliminate, joined, minimise
from tests.blocks.factor_cases import every, random_instance, total


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


@given(seed=st.integers(0, 2**32 - 1), cells=st.integers(1, 20))
def test_tables_made_piece_by_piece_change_nothing(seed: int, cells: int) -> None:
    instance = random_instance(seed)
    whole = minimise(instance.sizes, instance.factors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factors, "_CELLS", cells)
        assert minimise(instance.sizes, instance.factors) == whole


def test_a_variable_in_no_factor_takes_its_first_value() -> None:
    alone = minimise({"a": 2, "b": 3}, [Factor(variables=("a",), table=np.array([2.0, 1.0]))])
    assert (alone.cost, alone.choices) == (1.0, {"a": 1, "b": 0})
