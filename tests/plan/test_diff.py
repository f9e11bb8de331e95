"""Two plans compared: what differs, in which terms, and whether that is known."""

import dataclasses
import math

import pytest
from hypothesis import given, strategies as st

from autoshard.plan.build import build_plan
from autoshard.plan.diff import Breakdown, PlanChange, Term, diff
from autoshard.plan.plan import StageMemory
from tests.plan.cases import ask, plan_of, shaped, with_prediction

ASKED = plan_of(ask(), "tp=32,pp=8")


def predicted(plan=ASKED, parts=None, **changes):
    """A plan whose step takes what its parts take, with an interval of a tenth either way."""
    parts = parts or {"compute": 8.0, "tp": 2.0}
    total = math.fsum(parts.values())
    values = {"step_time_s": total, "low_s": 0.9 * total, "high_s": 1.1 * total, "time_parts": parts}
    return with_prediction(plan, **{**values, **changes})


SECONDS = st.dictionaries(st.sampled_from(["compute", "tp", "bubble", "mine"]), st.floats(0.001, 1e5), min_size=1)
SIZES = st.dictionaries(st.sampled_from(["weights", "activations", "runtime"]), st.integers(0, 2**40), min_size=1)


@st.composite
def predictions(draw):
    """Any plan with made-up numbers."""
    question, candidate = draw(shaped())
    plan = build_plan(candidate, *question.facts)
    memory = tuple(StageMemory(num_weights=1, parts=draw(SIZES)) for _ in range(min(plan.schedule.num_ranks, 2)))
    sent = draw(st.dictionaries(st.sampled_from(["tp", "dp", "pp"]), st.integers(0, 2**40)))
    return predicted(plan, draw(SECONDS), stage_memory=memory, communication_bytes=sent)


def turned(terms):
    return {(term.name, term.b, term.a) for term in terms}


@given(predictions(), predictions())
def test_parts_add_up_and_the_other_way_round_everything_is_negated(a, b):
    there, back = diff(a, b), diff(b, a)
    assert (there.a, there.b) == (back.b, back.a)
    for one, other in ((there.time, back.time), (there.memory, back.memory)):
        assert turned(one.parts) == {(term.name, term.a, term.b) for term in other.parts}
        assert one.total.difference == -other.total.difference
        for side in ("a", "b", "difference"):  # parts add up to their totals
            added, most = math.fsum(getattr(part, side) for part in one.parts), max(one.total.a, one.total.b)
            assert added == pytest.approx(getattr(one.total, side), abs=1e-9 * most)
        shares = [share for share in map(one.share, one.parts) if share is not None]
        assert not shares or math.fsum(shares) == pytest.approx(1)
    for name in ("sent", "question", "choices", "blocks"):
        assert turned(getattr(there, name)) == {(one.name, one.a, one.b) for one in getattr(back, name)}
    assert there.is_within_intervals == back.is_within_intervals
    same = diff(a, a)
    assert same.is_nothing and (same.slower_by, same.is_within_intervals) == (0, True)
    slower, faster = 1 + there.slower_by, 1 + back.slower_by  # each rounded to nine digits after the point
    assert slower * faster == pytest.approx(1, abs=1e-9 * (slower + faster + 1))


def test_slower_is_a_share_of_the_first_per_token():
    a, b = predicted(parts={"compute": 1.0}), predicted(parts={"compute": 1.02})
    assert diff(a, b).slower_by == 0.02  # not 0.020000000000000018, which a bound of 2% would refuse
    found = diff(a, predicted(plan_of(ask(global_batch=2048), "tp=32,pp=8"), {"compute": 1.02}))
    assert not found.same_tokens and found.slower_by == pytest.approx(-0.49)
    assert found.time.total.b / found.time.total.a == pytest.approx(0.51)


def test_a_difference_is_known_only_beyond_both_intervals():
    a = predicted(parts={"compute": 10.0})
    assert diff(a, predicted(parts={"compute": 10.9})).is_within_intervals
    assert not diff(a, predicted(parts={"compute": 11.5})).is_within_intervals
    assert not diff(a, predicted(parts={"compute": 10.9}, low_s=10.8, high_s=11.0)).is_within_intervals
    twice = plan_of(ask(global_batch=2048), "tp=32,pp=8")
    assert diff(a, predicted(twice, {"compute": 20.9})).is_within_intervals


def test_parts_that_cancel_out_have_no_shares():
    parts = Term(name="compute", a=1.0, b=2.0), Term(name="tp", a=2.0, b=1.001)
    assert Breakdown(total=Term(name="total", a=3.0, b=3.001), parts=parts).share(parts[0]) is None


def test_the_fullest_rank_is_compared_with_the_fullest():
    small, large = (StageMemory(num_weights=1, parts={"weights": size}) for size in (2**30, 20 * 2**30))
    found = diff(predicted(stage_memory=(small, *(large,) * 7)), predicted(stage_memory=(small,) * 8))
    assert (found.a.fullest_rank, found.b.fullest_rank, found.a.fits, found.b.fits) == (1, 0, False, True)
    assert found.memory.total.difference == -19 * 2**30


def named(changes):
    return {change.name: (change.a, change.b) for change in changes}


def test_what_is_asked_and_what_is_chosen_stand_apart():
    longer = diff(predicted(), predicted(plan_of(ask(seq_len=4096), "tp=32,pp=8,mbs=2")))
    assert named(longer.question) == {"workload.seq_len": (8192, 4096)}
    assert named(longer.choices) == {"mbs": (1, 2)}
    engine = diff(predicted(), predicted(plan_of(ask(engine="torch"), "tp=32,pp=8,kernels=te,recompute=full")))
    chosen = {"engine": ("nxd", "torch"), "kernels": ("nxd", "te"), "recompute": ("none", "full")}
    assert named(engine.choices).items() >= chosen.items() and not engine.question
    other = diff(predicted(), predicted(plan_of(ask("llama3-8b", "h100-80", 8), "tp=8,pp=8")))
    assert named(other.question) == {  # of another cluster or model the name says enough
        "model.name": ("llama3-70b", "llama3-8b"),
        "cluster.name": ("trn1.32xlarge", "h100-80"),
        "cluster.num_nodes": (16, 8),
    }
    own = dataclasses.replace(ASKED.schedule, actions=ASKED.schedule.action_lists())
    listed = diff(predicted(), predicted(dataclasses.replace(ASKED, schedule=own)))
    assert not listed.question and all(name.startswith("schedule.actions") for name in named(listed.choices))
    assert not listed.is_nothing


def with_cluster(**changes):
    return predicted(dataclasses.replace(ASKED, cluster=dataclasses.replace(ASKED.cluster, **changes)))


def test_logical_cores_and_prices_are_no_other_question_and_sources_no_difference():
    one, two = (plan_of(ask("llama3-8b", "trn2.48xlarge", 1, lnc), "tp=4") for lnc in (1, 2))
    found = diff(predicted(one), predicted(two))
    assert not found.question and named(found.choices)["lnc"] == (1, 2)
    price = diff(predicted(), with_cluster(price_usd_per_node_hour=1.5))
    assert not price.question and named(price.choices) == {"cluster.price_usd_per_node_hour": (21.5, 1.5)}
    assert not price.slower_by and price.a.dollars and price.b.dollars
    assert price.a.dollars.usd_per_step > price.b.dollars.usd_per_step
    first, *links = ASKED.cluster.links
    links = (dataclasses.replace(first, bandwidth_bytes_per_s=1e9), *links)
    edited = diff(predicted(), with_cluster(links=links, sources={**ASKED.cluster.sources, "note": "my own"}))
    assert [change.name for change in edited.question] == ["cluster.links[0].bandwidth_bytes_per_s"]


def test_another_calibration_is_named_once():
    mine = {"calibration": "mine", "calibration.constants": "1", "model": "somewhere"}
    theirs = {"calibration": "theirs", "calibration.constants": "2", "model": "elsewhere"}
    notes = (mine, theirs, {**mine, "calibration.constants": "3"})
    a, b, c = (predicted(dataclasses.replace(ASKED, provenance=note)) for note in notes)
    assert named(diff(a, b).choices) == {"calibration": ("mine", "theirs")}
    assert named(diff(a, c).choices) == {"calibration.constants": ("1", "3")}


def test_lines_that_send_otherwise_come_first():
    tables = [
        {"layer": {"act": "[ffn]", "up": "[ffn] | F all_gather ffn/tp", "same": "x"}, "layer full": {"act": "y"}},
        {"layer": {"act": "[ffn/tp]", "up": "[ffn]", "same": "x", "new": "z"}},
    ]
    found = diff(*(predicted(dataclasses.replace(ASKED, strategies=table)) for table in tables))
    assert [(line.op, line.a, line.b) for line in found.lines] == [
        ("up", "[ffn] | F all_gather ffn/tp", "[ffn]"), ("act", "[ffn]", "[ffn/tp]"), ("new", None, "z")
    ]  # fmt: skip
    assert found.blocks == (PlanChange(name="layer full", a=1, b=None),)
    assert not found.is_nothing and not found.choices
