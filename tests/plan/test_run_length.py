import itertools

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.plan.recompute import MAX_ITEMS, compress, expand, split_outside_brackets

ITEMS = st.lists(st.sampled_from(["9", "10", "full:4", "selective[a,b]"]), min_size=1, max_size=20)


@given(ITEMS)
def test_lists_round_trip(items):
    assert expand(compress(items)) == tuple(items)


@given(ITEMS)
def test_no_run_is_written_twice(items):
    runs = [run.partition("*")[0] for run in split_outside_brackets(compress(items), "/")]
    assert all(one != other for one, other in itertools.pairwise(runs))


@pytest.mark.parametrize("text", ["", "9//9", "9/", "*3", "9*0"])
def test_empty_items_are_refused(text):
    with pytest.raises(InputError, match="empty item"):
        expand(text)


def test_a_mistyped_repeat_does_not_fill_the_memory():
    with pytest.raises(InputError, match=str(MAX_ITEMS)):
        expand("9*999999999")


def test_separators_inside_brackets_do_not_split():
    assert split_outside_brackets("a[b,c],d(e,f)],g", ",") == ["a[b,c]", "d(e,f)]", "g"]
