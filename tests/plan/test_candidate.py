import dataclasses

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.plan.candidate import READERS, Candidate, parse_pins
from autoshard.plan.recompute import Recompute, split_outside_brackets
from autoshard.schedule.builders import BUILDERS
from autoshard.spec.cluster import Placement

SIZES = st.integers(1, 64)
RECOMPUTE = st.sampled_from(["none", "full", "full:4", "selective[act,attend]", "selective[attend]"]).map(
    Recompute.parse
)


@st.composite
def candidates(draw):
    return Candidate(
        **{key: draw(SIZES) for key in ("tp", "pp", "cp", "ep", "dp", "vp", "mbs")},
        sp=draw(st.sampled_from([None, True, False])),
        zero=draw(st.sampled_from([0, 1, 3])),
        schedule=draw(st.sampled_from([*BUILDERS])),
        recompute=tuple(draw(st.lists(RECOMPUTE, min_size=1, max_size=8))),
        stages=draw(st.none() | st.lists(SIZES, min_size=1, max_size=8).map(tuple)),
        place=draw(st.none() | st.permutations(range(6)).map(lambda p: Placement(local_ranks=tuple(p)))),
        kernels=draw(st.sampled_from([None, "nxd", "torch_cuda"])),
        cp_kind=draw(st.sampled_from(["ring", "all_to_all"])),
        cp_order=draw(st.sampled_from(["contiguous", "zigzag"])),
        boundary=draw(st.sampled_from([None, "[batch/dp, seq/cp.tp, hidden]"])),
        lnc=draw(st.sampled_from([None, 1, 2])),
    )


@given(candidates(), st.randoms(use_true_random=False))
def test_the_text_form_round_trips_in_any_order_and_holds_what_differs_from_the_default(candidate, random):
    text = str(candidate)
    assert Candidate.parse(text) == candidate and str(Candidate.parse(text)) == text
    pairs = split_outside_brackets(text, ",")
    fields = dataclasses.fields(Candidate)
    expected = [f.name for f in fields if getattr(candidate, f.name) != f.default or f.name in ("tp", "pp", "dp")]
    assert [pair.partition("=")[0] for pair in pairs] == expected
    random.shuffle(pairs)
    assert Candidate.parse(" , ".join(pairs)) == candidate


def test_there_is_a_reader_for_every_key_in_the_order_of_the_text():
    assert list(READERS) == [field.name for field in dataclasses.fields(Candidate)]


def test_the_full_text_of_the_design_is_read():
    text = (
        "tp=32,pp=8,cp=1,ep=1,dp=2,vp=1,mbs=1,sp=true,zero=1,schedule=1f1b,recompute=selective[attend,act]*7/full:4,"
        "stages=9/10*6/11,place=0-31,kernels=nxd,cp_kind=ring,cp_order=contiguous,"
        "boundary=[batch/dp, seq/cp.tp, hidden],lnc=2"
    )
    candidate = Candidate.parse(text)
    assert str(candidate) == (
        "tp=32,pp=8,dp=2,recompute=selective[act,attend]*7/full:4,stages=9/10*6/11,place=0-31,kernels=nxd,"
        "boundary=[batch/dp, seq/cp.tp, hidden],lnc=2"
    )
    assert candidate.stages == (9, 10, 10, 10, 10, 10, 10, 11)
    assert str(candidate.recompute_of(7)) == "full:4"
    assert candidate.num_ranks == 512


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("tp=8,dp=1,sp=true", "tp=8,dp=1"),
        ("tp=1,dp=1,sp=false", "tp=1,dp=1"),
        ("pp=4,dp=1,recompute=full*4", "pp=4,dp=1,recompute=full"),
        ("pp=4,dp=1,recompute=none*2/none*2", "pp=4,dp=1"),
        ("pp=2,dp=1,stages=9/9", "pp=2,dp=1,stages=9*2"),
    ],
)
def test_equal_meanings_print_equally(one, other):
    assert str(Candidate.parse(one)) == str(Candidate.parse(other))
    # Not shortened where the number of stages differs.
    assert str(Candidate.parse("pp=8,dp=1,recompute=full*7")) == "tp=1,pp=8,dp=1,recompute=full*7"


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("tp", "tp", "write key=value"),
        ("tpp=8", "tpp=8", "Did you mean tp"),
        ("tp=0", "tp=0", "at least 1"),
        ("tp=-1", "tp=-1", "at least 1"),
        ("tp=8.0", "tp=8.0", "whole number"),
        ("tp=٣", "tp=٣", "whole number"),
        ("tp=", "tp=", "whole number"),
        ("tp=8,tp=8", "tp=8", "given twice"),
        ("sp=yes", "sp=yes", "true, false"),
        ("zero=2", "zero=2", "0, 1, 3"),
        ("schedule=1f1d", "schedule=1f1d", "1f1b"),
        ("recompute=half", "recompute=half", "not a recompute"),
        ("stages=9/0", "stages=9/0", "at least 1"),
        ("stages=9//9", "stages=9//9", "empty item"),
        ("place=0-2/9", "place=0-2/9", "not a permutation"),
        ("place=here", "place=here", "here"),
        ("kernels=[x]", "kernels=[x]", "not a name"),
        ("cp_kind=rings", "cp_kind=rings", "ring, all_to_all"),
        ("boundary=[batch", "boundary=[batch", "is not a layout"),
        ("boundary=", "boundary=", "is not a layout"),
        (",", "", "key=value"),
    ],
)
def test_wrong_pairs_are_refused_where_they_stand(text, where, says):
    with pytest.raises(InputError, match=says) as caught:
        Candidate.parse(text, num_ranks=8)
    assert caught.value.faults[0].where == where


def test_all_faults_are_reported_at_once():
    with pytest.raises(InputError) as caught:
        Candidate.parse("tp=x,pp=0,foo=1,mbs=2,mbs=3")
    assert [fault.where for fault in caught.value.faults] == ["tp=x", "pp=0", "foo=1", "mbs=3"]


def test_dp_follows_from_the_number_of_ranks():
    assert Candidate.parse("tp=32,pp=8", num_ranks=512).dp == 2
    assert Candidate.parse("tp=32,pp=8,cp=2,dp=7", num_ranks=512).dp == 7
    with pytest.raises(InputError, match=r"tp=32,pp=3,cp=1: .* is 96 and does not divide the 512 ranks"):
        Candidate.parse("tp=32,pp=3", num_ranks=512)
    with pytest.raises(InputError, match="dp: missing; add dp=N"):
        Candidate.parse("tp=32,pp=3")


def test_pins_are_typed_and_hold_only_what_was_said():
    pins = parse_pins("sp=true, recompute=full:2*2/none,stages=1/2,place=1/0,zero=3")
    assert pins == {
        "sp": True,
        "recompute": (Recompute(kind="full", num_layers=2),) * 2 + (Recompute(),),
        "stages": (1, 2),
        "place": Placement(local_ranks=(1, 0)),
        "zero": 3,
    }
    assert parse_pins("") == {} == parse_pins("  ")


def test_values_made_in_python_are_checked_too():
    with pytest.raises(InputError) as caught:
        Candidate(tp=0, mbs=-1, lnc=0, stages=(3, 0))
    assert [fault.where for fault in caught.value.faults] == ["tp=0", "mbs=-1", "lnc=0", "stages=0"]
    with pytest.raises(InputError, match="recompute: must name"):
        Candidate(recompute=())
    with pytest.raises(InputError, match="stages: must name"):
        Candidate(stages=())
