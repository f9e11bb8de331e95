from typing import get_args

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.graph.op import DIMS
from autoshard.layout.layout import Collective, CollectiveKind
from autoshard.spec.mesh import ATOMS

COMMON = {
    "dim": st.none() | st.sampled_from(DIMS),
    "atoms": st.lists(st.sampled_from(ATOMS), unique=True, min_size=1).map(tuple),
    "repeat": st.integers(1, 64),
}
collectives = st.builds(Collective, kind=st.sampled_from(get_args(CollectiveKind)), **COMMON) | st.builds(
    Collective, kind=st.just("all_to_all"), to_dim=st.sampled_from(DIMS), **COMMON
)


@given(collectives)
def test_a_collective_reads_back_what_it_prints(collective):
    assert Collective.parse(str(collective)) == collective


def test_a_collective_reads_as_the_design_writes_it():
    assert str(Collective(kind="all_gather", dim="seq", atoms=("kv", "rep"))) == "all_gather seq/tp"
    assert str(Collective(kind="all_reduce", dim=None, atoms=("rep",))) == "all_reduce /rep"


@pytest.mark.parametrize("text", ["", "gather seq/tp", "all_gather seq", "x permute seq/cp", "all_gather seq/"])
def test_what_is_no_collective_is_refused_with_an_example(text):
    with pytest.raises(InputError, match=r"is not a collective\. Write it like 'all_gather seq/tp'"):
        Collective.parse(text)


def test_impossible_collectives_are_refused_all_at_once():
    with pytest.raises(InputError) as caught:
        Collective(kind="permute", dim="seq", atoms=(), repeat=0, to_dim="hidden")
    assert len(caught.value.faults) == 3
