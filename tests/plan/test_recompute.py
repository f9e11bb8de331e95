import itertools

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.plan.recompute import (
    MAX_ITEMS,
    Recompute,
    compress,
    expand,
    parse_stages,
    split_outside_brackets,
    stages_text,
)

NAMES = st.sampled_from(["attend", "act", "CoreAttention", "mlp_act", "x.y-z"])
RECOMPUTES = st.one_of(
    st.just(Recompute()),
    st.builds(Recompute, kind=st.just("full"), num_layers=st.none() | st.integers(1, 10**6)),
    st.builds(Recompute, kind=st.just("selective"), ops=st.lists(NAMES, min_size=1, max_size=4).map(tuple)),
)


@given(st.lists(RECOMPUTES, min_size=1, max_size=12).map(tuple))
def test_text_forms_round_trip_and_no_run_is_written_twice(stages):
    assert all(Recompute.parse(str(one)) == one for one in stages)
    assert parse_stages(stages_text(stages)) == stages
    runs = [run.partition("*")[0] for run in split_outside_brackets(stages_text(stages), "/")]
    assert all(one != other for one, other in itertools.pairwise(runs))


@given(st.lists(st.sampled_from(["9", "10", "full:4", "selective[a,b]"]), min_size=1, max_size=20))
def test_lists_round_trip(items):
    assert expand(compress(items)) == tuple(items)


@pytest.mark.parametrize("text", ["", "9//9", "9/", "*3", "9*0"])
def test_empty_items_are_refused(text):
    with pytest.raises(InputError, match="empty item"):
        expand(text)


def test_a_mistyped_repeat_does_not_fill_the_memory():
    with pytest.raises(InputError, match=str(MAX_ITEMS)):
        expand("9*999999999")


def test_separators_inside_brackets_do_not_split():
    assert split_outside_brackets("a[b,c],d(e,f)],g", ",") == ["a[b,c]", "d(e,f)]", "g"]


def test_selective_is_a_set():
    assert Recompute.parse("selective[b, a,b]") == Recompute.parse("selective[a,b]")


@pytest.mark.parametrize(
    "text",
    ["", "some", "full:", "full:0", "full:-1", "full:x", "none:1", "selective", "selective[]",
     "selective[a,]", "selective[a", "selective[3]", "selective[a]:2", "full[a]"],
)  # fmt: skip
def test_text_that_is_no_recompute_is_refused(text):
    with pytest.raises(InputError):
        Recompute.parse(text)


@pytest.mark.parametrize(
    "values",
    [{"kind": "none", "ops": ("a",)}, {"kind": "selective"}, {"kind": "none", "num_layers": 1},
     {"kind": "selective", "ops": ("a",), "num_layers": 2}],
)  # fmt: skip
def test_mixtures_are_refused(values):
    with pytest.raises(InputError):
        Recompute(**values)
