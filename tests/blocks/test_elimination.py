import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.blocks import elimination
from autoshard.blocks.elimination import CostFactor, eliminate
from tests.blocks.factor_cases import every, random_instance, total


@given(seed=st.integers(0, 2**32 - 1))
def test_elimination_finds_what_trying_everything_finds(seed: int) -> None:
    instance = random_instance(seed)
    found = eliminate(instance.sizes, instance.factors)
    assert found.cost == pytest.approx(min(cost for cost, _ in every(instance)))
    assert total(instance.factors, found.choices())[0] == pytest.approx(found.cost)


@given(seed=st.integers(0, 2**32 - 1))
def test_the_order_of_factors_changes_nothing(seed: int) -> None:
    instance = random_instance(seed)
    found, again = (eliminate(instance.sizes, factors) for factors in (instance.factors, instance.factors[::-1]))
    assert (found.cost, found.choices()) == (again.cost, again.choices())


@given(seed=st.integers(0, 2**32 - 1))
def test_the_least_total_with_a_value_is_that_of_trying_everything(seed: int) -> None:
    instance = random_instance(seed)
    totals = eliminate(instance.sizes, instance.factors).least_totals()
    for name, size in instance.sizes.items():
        for value in range(size):
            assert totals[name][value] == pytest.approx(min(cost for cost, _ in every(instance, {name: value})))


@given(seed=st.integers(0, 2**32 - 1), cells=st.integers(1, 20))
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


def test_a_variable_in_no_factor_takes_its_first_value() -> None:
    alone = eliminate({"a": 2, "b": 3}, [CostFactor(variables=("a",), table=np.array([2.0, 1.0]))])
    assert (alone.cost, alone.choices()) == (1.0, {"a": 1, "b": 0})
