"""Candidates, recompute and lists of stages as text."""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.plan.candidate import READERS, Candidate, parse_pins
from autoshard.plan.recompute import Recompute, stages_text
from autoshard.schedule.builders import BUILDERS
from autoshard.spec.cluster import Placement
from autoshard.spec.repeats import MAX_ITEMS, split_outside_brackets

SIZES = st.integers(1, 64)
NAMES = st.sampled_from(["attend", "act", "CoreAttention", "mlp_act", "x.y-z"])
RECOMPUTE = st.one_of(
    st.just(Recompute()),
    st.builds(Recompute, kind=st.just("full"), num_layers=st.none() | st.integers(1, 10**6)),
    st.builds(
        Recompute,
        kind=st.just("selective"),
        ops=st.lists(NAMES, min_size=1, max_size=4).map(tuple),
        offload=st.booleans(),
    ),
    st.builds(Recompute, kind=st.sampled_from(["none", "full"]), offload=st.just(True)),
)
CANDIDATES = st.builds(
    Candidate,
    **dict.fromkeys(("tp", "pp", "cp", "ep", "dp", "vp", "mbs"), SIZES),
    sp=st.sampled_from([None, True, False]),
    zero=st.sampled_from([0, 1, 3]),
    schedule=st.sampled_from([*BUILDERS]),
    recompute=st.lists(RECOMPUTE, min_size=1, max_size=8).map(tuple),
    stages=st.none() | st.lists(SIZES, min_size=1, max_size=8).map(tuple),
    place=st.none() | st.permutations(range(6)).map(lambda p: Placement(local_ranks=tuple(p))),
    kernels=st.sampled_from([None, "nxd", "torch_cuda"]),
    cp_kind=st.sampled_from(["ring", "all_to_all"]),
    cp_order=st.sampled_from(["contiguous", "zigzag"]),
    boundary=st.sampled_from([None, "[batch/dp, seq/cp.tp, hidden]"]),
    lnc=st.sampled_from([None, 1, 2]),
)


@given(CANDIDATES, st.randoms(use_true_random=False))
def test_the_text_form_round_trips_in_any_order_and_holds_what_differs_from_the_default(candidate, random):
    text = str(candidate)
    assert Candidate.parse(text) == candidate and str(Candidate.parse(text)) == text
    pairs = split_outside_brackets(text, ",")
    fields = dataclasses.fields(Candidate)
    expected = [f.name for f in fields if getattr(candidate, f.name) != f.default or f.name in ("tp", "pp", "dp")]
    assert [pair.partition("=")[0] for pair in pairs] == expected
    random.shuffle(pairs)
    assert Candidate.parse(" , ".join(pairs)) == candidate
    runs = [run.partition("*")[0] for run in split_outside_brackets(stages_text(candidate.recompute), "/")]
    assert all(one != other for one, other in itertools.pairwise(runs)), "no run is written twice"


def test_the_full_text_of_the_design_is_read():
    assert list(READERS) == [field.name for field in dataclasses.fields(Candidate)]
    text = (
        "tp=32,pp=8,cp=1,ep=1,dp=2,vp=1,mbs=1,sp=true,zero=1,schedule=1f1b,recompute=selective[attend,act]*7/full:4,"
        "stages=9/10*6/11,place=0-31,kernels=nxd,cp_kind=ring,cp_order=contiguous,"
        "boundary=[batch/dp,seq/cp.tp, hidden],lnc=2"
    )
    candidate = Candidate.parse(text)
    assert str(candidate) == (
        "tp=32,pp=8,dp=2,recompute=selective[act,attend]*7/full:4,stages=9/10*6/11,place=0-31,kernels=nxd,"
        "boundary=[batch/dp, seq/cp.tp, hidden],lnc=2"
    )
    assert candidate.stages == (9, 10, 10, 10, 10, 10, 10, 11)
    assert str(candidate.recompute_of(7)) == "full:4" and candidate.num_ranks == 512


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("tp=8,dp=1,sp=true", "tp=8,dp=1"),
        ("tp=1,dp=1,sp=false", "tp=1,dp=1"),
        ("pp=4,dp=1,recompute=none*2/full*2", "pp=4,dp=1,recompute=none/none/full/full"),
        ("pp=4,dp=1,recompute=selective[b, a,b]*4", "pp=4,dp=1,recompute=selective[a,b]"),
        ("pp=2,dp=1,stages=9/9", "pp=2,dp=1,stages=9*2"),
    ],
)
def test_equal_meanings_print_equally(one, other):
    assert str(Candidate.parse(one)) == str(Candidate.parse(other))
    # Not shortened where the number of stages differs.
    assert str(Candidate.parse("pp=8,dp=1,recompute=full*7")) == "tp=1,pp=8,dp=1,recompute=full*7"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tp", "write key=value"), ("tpp=8", "Did you mean tp"), ("tp=0", "at least 1"), ("tp=8.0", "whole number"),
        ("tp=٣", "whole number"), ("tp=", "whole number"), ("tp=8,tp=9", "given twice"), ("sp=yes", "true, false"),
        ("zero=2", "0, 1, 3"), ("schedule=1f1d", "1f1b"), ("stages=9/0/9", "at least 1"), ("stages=9//9", "empty item"),
        ("stages=9/", "empty item"), ("stages=*3", "empty item"), ("stages=9*0", "empty item"),
        ("stages=9*999999999", str(MAX_ITEMS)), ("place=0-2/9", "not a permutation"), ("place=here", "here"),
        ("kernels=[x]", "not a name"), ("cp_kind=rings", "ring, all_to_all"), ("boundary=[batch", "not a layout"),
        ("boundary=", "not a layout"), (",", "key=value"),
        *((f"recompute={text}", None) for text in ("", "half", "full:", "full:0", "none:1", "selective", "full[a]")),
        *((f"recompute={text}", None) for text in ("full:2+offload", "offload", "none+", "full+offload:2")),
        *((f"recompute=selective[{text}", None) for text in ("", "]", "a,b,]", "3]", "a]:2")),
    ],
)  # fmt: skip
def test_wrong_pairs_are_refused_where_they_stand(text, says):
    with pytest.raises(InputError, match=says) as caught:
        Candidate.parse(text, num_ranks=8)
    assert caught.value.faults[0].where.partition("=")[0] == text.partition("=")[0].strip(",")


def test_all_faults_are_reported_at_once_also_of_values_made_in_python():
    with pytest.raises(InputError) as caught:
        Candidate.parse("tp=x,pp=0,foo=1,mbs=2,mbs=3")
    assert [fault.where for fault in caught.value.faults] == ["tp=x", "pp=0", "foo=1", "mbs=3"]
    with pytest.raises(InputError) as caught:
        Candidate(tp=0, mbs=-1, lnc=0, stages=(3, 0, 1))
    assert [fault.where for fault in caught.value.faults] == ["tp=0", "mbs=-1", "lnc=0", "stages"]
    wrong: list[dict[str, Any]] = [{"recompute": ()}, {"stages": ()}]
    for values in wrong:
        with pytest.raises(InputError, match="must name"):
            Candidate(**values)
    wrong = [{"ops": ("a",)}, {"kind": "selective"}, {"num_layers": 1}]
    wrong.append({"kind": "full", "num_layers": 1, "offload": True})
    for values in wrong:
        with pytest.raises(InputError):
            Recompute(**values)


def test_dp_follows_from_the_number_of_ranks():
    assert Candidate.parse("tp=32,pp=8", num_ranks=512).dp == 2
    assert Candidate.parse("tp=32,pp=8,cp=2,dp=7", num_ranks=512).dp == 7
    with pytest.raises(InputError, match=r"tp=32,pp=3,cp=1: .* is 96 and does not divide the 512 ranks"):
        Candidate.parse("tp=32,pp=3", num_ranks=512)
    with pytest.raises(InputError, match="dp: missing; add dp=N"):
        Candidate.parse("tp=32,pp=3")


def test_pins_are_typed_and_hold_only_what_was_said():
    pins = parse_pins("sp=true, recompute=full:2*2/none,stages=1/2,place=1/0,zero=3")
    recompute = (Recompute(kind="full", num_layers=2),) * 2 + (Recompute(),)
    place = Placement(local_ranks=(1, 0))
    assert pins == {"sp": True, "recompute": recompute, "stages": (1, 2), "place": place, "zero": 3}
    assert parse_pins("") == {} == parse_pins("  ")
