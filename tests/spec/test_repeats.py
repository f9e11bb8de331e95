"""Lists in one word round-trip, and brackets protect what they hold."""

from hypothesis import given, strategies as st

from autoshard.spec.repeats import compress, expand_counts, split_outside_brackets


@given(st.lists(st.sampled_from(["9", "10", "full:4", "selective[a,b]"]), min_size=1, max_size=20))
def test_lists_round_trip(items):
    assert expand_counts(compress(items)) == tuple(items)
    assert split_outside_brackets("a[b,c],d(e,f)],g", ",") == ["a[b,c]", "d(e,f)]", "g"]
