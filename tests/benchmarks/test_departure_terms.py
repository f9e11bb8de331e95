"""What a term buys: fits without it have nothing of it, and the table says errors with and without."""

from dataclasses import replace

import pytest

from autoshard.cost.calibration import RATIOS
from benchmarks.departure_terms import TERMS, LeftOut, left_out_of, lines, means, thinned
from benchmarks.pooled import ProgramRows
from tests.benchmarks.departing import departing_rows


@pytest.fixture(scope="module")
def b200() -> ProgramRows:
    """The rows of Llama 70B in three groups: those of DeepSeek would double the time of every fit."""
    (program,) = (rows for rows in departing_rows() if rows.cluster == "b200")
    return replace(program, samples=tuple(sample for sample in program.samples if "llama" in sample.group))


@pytest.mark.thorough
def test_every_term_can_be_taken_away_and_without_it_is_nothing(b200: ProgramRows) -> None:
    whole = b200.rows.prior
    for name, change in TERMS.items():
        changed = change(b200)
        assert len(changed.rows.prior.unknowns) == len(whole.unknowns) - sum(
            one.names == (without,) for one in whole.unknowns for without in changed.without
        )
        assert all(getattr(changed.rows.prior.centre, one) == (one in RATIOS) for one in changed.without), name


@pytest.mark.thorough
def test_what_is_left_out_has_an_error_and_a_regret_in_every_group(b200: ProgramRows) -> None:
    found = left_out_of(b200)
    assert 0 < found.mape < 0.1 and len(found.regrets) == len({one.group for one in b200.samples}) == 3


def test_means_are_of_programs_and_of_groups() -> None:
    small = LeftOut(framework="small", mape=0.1, regrets=(0.0, 0.3))
    large = LeftOut(framework="nanotron", mape=0.3, regrets=(0.6,))
    assert means([small, large]) == pytest.approx((0.2, 0.3))
    *_, cells = lines({"a term": [small, large]})
    assert cells == "| a term | 20.00% | 30.00% | 10.00% | 15.00% |"


@pytest.mark.thorough
def test_small_programs_are_left_out_and_large_programs_are_thinned(b200: ProgramRows) -> None:
    many = replace(b200, samples=b200.samples * 20)
    few = replace(b200, samples=b200.samples[:3])
    assert [len(program.samples) for program in thinned([many, few, b200])] == [40, 12]
