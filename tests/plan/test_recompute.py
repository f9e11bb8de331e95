import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.plan.recompute import Recompute, parse_stages, stages_text

NAMES = st.sampled_from(["attend", "act", "CoreAttention", "mlp_act", "x.y-z"])
RECOMPUTES = st.one_of(
    st.just(Recompute()),
    st.builds(Recompute, kind=st.just("full"), num_layers=st.none() | st.integers(1, 10**6)),
    st.builds(Recompute, kind=st.just("selective"), ops=st.lists(NAMES, min_size=1, max_size=4).map(tuple)),
)


@given(RECOMPUTES)
def test_the_text_form_round_trips(recompute):
    assert Recompute.parse(str(recompute)) == recompute


@given(st.lists(RECOMPUTES, min_size=1, max_size=12).map(tuple))
def test_a_list_per_stage_round_trips(stages):
    assert parse_stages(stages_text(stages)) == stages


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


def test_full_for_some_layers_means_the_first_ones():
    layers = [str(Recompute.parse("full:2").of_layer(index)) for index in range(4)]
    assert layers == ["full", "full", "none", "none"]
    assert str(Recompute.parse("selective[act]").of_layer(9)) == "selective[act]"
