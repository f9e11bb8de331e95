"""Placements: permutations of the ranks of a node, and their text."""

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.spec.placement import Placement, PlacementRule


@given(st.integers(1, 70).flatmap(lambda size: st.permutations(range(size))))
def test_any_permutation_survives_its_text(order: list[int]):
    placement = Placement(local_ranks=tuple(order))
    assert Placement.parse(str(placement)) == placement


@given(st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_strided_placements_survive_their_text(rows: int, columns: int, downwards: bool):
    order = [row * columns + column for column in range(columns) for row in range(rows)]
    placement = Placement(local_ranks=tuple(reversed(order) if downwards else order))
    assert Placement.parse(str(placement)) == placement


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (range(32), "0-31"),
        ([0], "0"),
        ([1, 0], "1-0"),
        ([3, 2, 1, 0], "3-0"),
        ([0, 2, 1, 3], "0/2-1/3"),
        ([*range(16), *range(48, 64), *range(16, 48)], "0-15/48-63/16-47"),
        ([row * 2 + column for column in range(2) for row in range(4)], "0-6:2/1-7:2"),
        ([6, 4, 2, 0, 7, 5, 3, 1], "6-0:2/7-1:2"),
    ],
)
def test_text_is_the_longest_runs_from_left_to_right(ranks: list[int], text: str):
    assert str(Placement(local_ranks=tuple(ranks))) == text


def test_a_linear_placement_knows_that_it_is():
    assert str(Placement.linear(8)) == "0-7"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a run"),
        ("0-3/", "not a run"),
        ("a", "not a run"),
        ("0 - 3", "not a run"),
        ("-1", "not a run"),
        ("٣", "not a run"),
        ("0-3:0", "never reach"),
        ("0-3:2", "never reach"),
        ("0-3/3", "not a permutation"),
        ("1-3", "not a permutation"),
        ("0-99999999", "more than 4096"),
        ("0-4095/4096", "more than 4096"),
    ],
)
def test_wrong_text_is_refused(text: str, says: str):
    with pytest.raises(InputError, match=says):
        Placement.parse(text)


def test_an_empty_placement_and_a_rule_without_source_are_refused():
    with pytest.raises(InputError, match="at least one rank"):
        Placement(local_ranks=())
    with pytest.raises(InputError) as caught:
        PlacementRule(name="", tp=0, placement=Placement.linear(2), source=" ")
    assert [fault.where for fault in caught.value.faults] == ["name", "tp", "source"]
