"""A question without an answer: what is wrong with it, what would change that, what layouts cost that Rules refuse."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.plan.candidate import Candidate
from autoshard.plan.rules.rule import rule
from autoshard.search.ask.no_plan import better_sizes, question_faults, remedies, unanswered, why_none
from autoshard.search.ask.planner import search
from autoshard.search.bound.legal_space import in_the_way
from autoshard.search.bound.request import Request, plan_at, rejections_of
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.units import format_bytes
from tests.search.brute_force import ask
from tests.slower import covering, rest_is_slow

WRONG = [
    (ask("tiny-llama", pins="tp=3"), "--fix tp=3", "8 query heads of tiny-llama do not divide by 3"),
    (ask("tiny-llama", pins="pp=4,tp=2"), "--fix tp=2,pp=4,cp=1,dp=1", "uses 8 ranks, but the cluster has 4"),
    (ask("tiny-llama", pins="mbs=5"), "--fix dp=4,mbs=5", "does not divide by dp*mbs=20"),
    (ask("tiny-llama", pins="vp=2,schedule=1f1b"), "--fix vp=2", "Use schedule=interleaved"),
    (ask("tiny-llama", pins="boundary=[x]"), "--fix boundary=[x]", "with nothing pending"),
    (ask("tiny-llama", pins="recompute=selective[x]"), "--fix recompute=selective[x]", "x is not known"),
    (ask("llama3-8b", "trn1.32xlarge", pins="zero=3"), "--fix zero=3", "NxD has no ZeRO-3"),
    (ask("llama3-8b", "trn1.32xlarge", seq_len=7, pins="cp=1"), "--seq-len 7", "multiples of 2048"),
    (replace(ask("tiny-llama"), engines=("nxd",)), "--engine nxd", "runs on trn1 and trn2 only"),
]


@pytest.mark.parametrize(("request_", "where", "message"), WRONG, ids=[case[1] for case in WRONG])
def test_what_no_layout_could_mend_is_a_fault_of_the_question(request_: Request, where: str, message: str):
    assert search(request_).plans == ()
    faults = question_faults(request_)
    assert any(fault.where == where and message in fault.message for fault in faults), faults


def test_reasons_with_one_remedy_are_one_fault():
    (fault,) = question_faults(ask("llama3-8b", "trn1.32xlarge", pins="tp=3"), "--why-not")
    assert str(fault).startswith("--why-not tp=3: 32 query heads of llama3-8b do not divide by 3. Use tp 1, 8 or 32 on")


def test_what_some_layout_or_another_engine_could_mend_is_no_fault():
    assert question_faults(ask("tiny-llama", ranks=7)) == ()
    assert question_faults(ask("llama3-8b", "trn1.32xlarge", pins="pp=2")) == ()
    both = replace(ask("tiny-llama", pins="zero=3"), engines=("nxd", "torch"))
    assert question_faults(both) == ()
    assert isinstance(unanswered(replace(both, engines=("nxd",)), search(replace(both, engines=("nxd",)))), InputError)


def test_the_message_about_memory_says_by_how_much_the_smallest_plan_misses():
    request = ask("llama3-70b", "trn1.32xlarge")
    found = search(request)
    text = why_none(request, found)
    counts = found.certificate
    assert counts.num_too_large == counts.num_legal > 0 == counts.num_tables, (
        "no block is cut where states are too large"
    )
    assert found.nearest_miss and found.nearest_miss.prediction
    peak = found.nearest_miss.prediction.peak_bytes
    assert f"the smallest found is {found.nearest_miss.candidate}: {format_bytes(peak)} a rank" in text
    more = format_bytes(peak - int(0.9 * 16 * 2**30))
    assert f"{more} more than the 14.40 GiB that a headroom of 0.1 leaves of 16.00 GiB" in text
    fullest = max(found.nearest_miss.prediction.stage_memory, key=lambda memory: memory.total)
    assert found.nearest_miss.mesh.size("dp") == 1, "nothing to shard over"
    moments, fp32 = (format_bytes(count * fullest.num_weights) for count in (8, 4))
    assert f"(optimizer {moments}, gradients {fp32}, masters {fp32})" in text


def test_the_smallest_plan_is_looked_for_where_some_layout_may_fit():
    """Asked for the least memory, a search cuts no block of layouts whose states are too large, as one for time."""
    found = search(replace(ask("llama3-70b", "trn1.32xlarge"), objective="memory"))
    counts = found.certificate
    assert found.plans == () and counts.num_too_large == counts.num_legal > 0 == counts.num_tables


def test_the_message_about_rules_counts_them():
    request = ask("llama3-8b", "trn1.32xlarge", pins="pp=2")
    text = why_none(request, search(request))
    assert "layouts of llama3-8b on 1 x trn1.32xlarge with pp=2 is refused by a rule" in text
    assert "by trn1-dp, like tp=1,pp=2,dp=16: with a pipeline" in text and "counted below" not in text


@pytest.mark.parametrize(
    ("pins", "why"),
    [
        ("tp=3", "no plan: --fix tp=3: 32 query heads of llama3-8b do not divide by 3. Use tp 1, 8 or 32"),
        ("tp=16", "no plan: --fix tp=16: trn1 runs tp 1, 8 or 32"),
        ("tp=8,pp=2,dp=3", "no plan: --fix tp=8,pp=2,dp=3: with a pipeline and tp=8 on trn1"),
    ],
)
def test_pins_that_leave_no_layout_are_the_reason_wherever_a_plan_is_missing(pins: str, why: str):
    request = ask("llama3-8b", "trn1.32xlarge", 2, pins=pins)
    text = why_none(request, search(request))
    assert text.startswith(why) and "layouts" not in text


def test_counts_of_refusals_say_which_layouts_they_leave_out():
    request = ask("llama3.2-1b", "h100-80", 100000, pins="tp=1")
    text = why_none(request, search(request))
    alone, counted, by_sequence = (text.index(words) for words in ("[batch]", "counted below are", " by cp-seq, like"))
    assert alone < counted < by_sequence


HELP = [
    (ask("llama3-8b", "trn1.32xlarge", seq_len=7), ["--seq-len 2048"]),
    (ask("llama3-8b", "trn1.32xlarge", pins="tp=8,pp=2"), ["--fix tp=8, so without pp=2", "--nodes 2"]),
    (ask("gpt2-xl", "trn2.48xlarge"), ["--engine torch"]),
    (ask("llama3-8b", "trn1.32xlarge", pins="pp=2"), ["it without --fix", "--nodes 2"]),
    (ask("tiny-llama", ranks=7, global_batch=32, pins="pp=1"), ["--global-batch 35"]),
    (ask("llama3-8b", "trn1.32xlarge", seq_len=2**20), ["--seq-len 131072"]),
    # one sequence at a time is refused here, by NxD's kernel for experts
    (ask("mixtral-8x22b", "trn1.32xlarge", 64, global_batch=1024), ["--headroom 0.05", "--nodes 96", "--seq-len 4096"]),
]


@pytest.mark.parametrize(("request_", "expected"), rest_is_slow(HELP, 3))
def test_a_remedy_is_what_helps(request_: Request, expected: list[str]):
    none = search(request_)
    assert none.plans == ()
    found = list(remedies(request_, none))
    assert set(expected) <= set(found), found


@pytest.mark.slow
def test_the_least_number_of_nodes_that_works_is_named():
    request = ask("gpt3-175b-untied", "trn1.32xlarge", 7)
    (words,) = remedies(request, search(request))
    least = int(words.removeprefix("--nodes "))
    assert least > 8, "no doubling"
    for count in (least - 1, least):
        asked = replace(request, cluster=replace(request.cluster, num_nodes=count))
        assert bool(search(asked, nearest=False).plans) == (count == least)


@pytest.mark.slow
def test_three_times_a_power_of_two_is_a_number_of_nodes_that_is_tried():
    request = ask("llama3.1-405b", "trn1.32xlarge", 8)
    assert list(remedies(request, search(request))) == ["--nodes 24"], "21 to 23 divide neither layers nor heads well"


def test_the_rule_that_alone_stands_against_a_layout_is_named_first():
    request = ask("gpt2-xl", "trn1.32xlarge", 16, pins="mbs=1,vp=1,schedule=1f1b,recompute=full")
    text = why_none(request, search(request))
    assert "this rule alone stands against tp=1,pp=1,dp=512" in text.splitlines()[1]
    assert "Use --seq-len 2048, or kernels=nxd_core [nxd-flash-seq]" in text
    first = in_the_way(request, "nxd")[0]
    assert (
        [one.rule_id for one in rejections_of(request, first.candidate, "nxd")] == ["nxd-flash-seq"] == [*first.rules]
    )


@pytest.mark.slow
def test_a_card_with_a_head_of_its_own_is_named_where_a_rule_is_against_tied_embeddings():
    request = ask("gpt3-175b", "trn1.32xlarge", 32)
    (found,) = remedies(request, search(request))
    assert found.startswith("--model gpt3-175b-untied (") and "nxd-tied" in found


@pytest.mark.parametrize("calls", [0, 2, 40])
def test_what_would_help_is_not_looked_for_when_time_is_over(calls: int):
    request, left = ask("llama3-8b", "trn1.32xlarge", pins="pp=2,dp=2"), iter(range(calls))
    none = search(request)

    def stopping(_: object) -> str:
        return "stopped" if next(left, None) is None else ""

    error = unanswered(request, none, helpful=True, watch=stopping)
    assert "stopped, before all that could help was tried" in str(error)


def test_a_rule_without_a_key_in_its_words_is_still_shown():
    @rule("tp", source="this test")
    def own(c):
        yield c.tp == 0
        yield "never"

    (fault,) = question_faults(replace(ask("tiny-llama", pins="tp=2"), extra_rules=(own,)))
    assert str(fault) == "never"


@pytest.mark.slow
def test_an_odd_number_of_nodes_is_told_what_the_next_good_one_gains_and_that_is_there_to_gain():
    request = replace(ask("llama2-7b", "h100-80"), cluster=load_cluster("h100-80", 7))
    best = search(request).plans[0]
    assert best.prediction
    words, *others = better_sizes(request, best)
    nodes, gain = (int(number) for number in re.findall(r"\d+", words)[:2])
    assert nodes == 8 and words.startswith("--nodes 8 would train at least") and len(others) <= 1
    (whole,) = search(replace(request, cluster=load_cluster("h100-80", nodes))).plans
    assert whole.prediction
    more = (whole.prediction.tokens_per_s / nodes) / (best.prediction.tokens_per_s / 7) - 1
    assert gain >= 5 and more >= gain / 100 - 0.005
    (even,) = search(replace(request, cluster=load_cluster("h100-80", 8))).plans
    assert not [*better_sizes(replace(request, cluster=load_cluster("h100-80", 8)), even)]


SIZES = st.sampled_from([1, 2, 3, 4, 5, 8, 16, 1000])
AXES = [(tp, pp, cp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4) for cp in (1, 2, 4) if tp * pp * cp <= 8]
KEYS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("ep", "vp", "mbs"), SIZES),
    "zero": st.sampled_from([0, 1, 3]),
    **dict.fromkeys(("zero_group", "weight_group"), st.one_of(st.none(), SIZES)),
    "schedule": st.sampled_from(["1f1b", "gpipe", "interleaved", "zb_h1", "zb_v"]),
    "cp_kind": st.sampled_from(["ring", "all_to_all"]),
    "cp_order": st.sampled_from(["contiguous", "zigzag"]),
    "sp": st.sampled_from([None, False, True]),
    "fold": st.sampled_from([None, "none", "tp", "cp", "cp.tp"]),
}


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-mixtral"])
@given(axes=st.sampled_from(AXES), keys=st.fixed_dictionaries({}, optional=KEYS))
def test_a_refused_layout_is_priced_or_refused_in_words(model: str, axes: tuple[int, int, int], keys: dict[str, Any]):
    """All of them have as many ranks as there are, so that most reach the prices."""
    request, (tp, pp, cp) = ask(model, "h100-80", global_batch=16), axes
    try:
        candidate = Candidate(tp=tp, pp=pp, cp=cp, dp=8 // (tp * pp * cp), **keys)
        plan = plan_at(request, candidate, even_refused=True)
    except InputError as error:
        assert error.faults
    else:
        assert plan.prediction and plan.prediction.step_time_s > 0


@pytest.mark.parametrize(
    ("groups", "size"), covering([(1, "zero_group"), (3, "zero_group"), (3, "weight_group")], [3, 16, 1000], fast=3)
)
def test_groups_that_do_not_divide_the_ranks_are_refused_and_priced_as_one_copy(groups: tuple[int, str], size: int):
    zero, key = groups
    request = ask("tiny-llama", "h100-80", global_batch=16)
    whole, refused = (Candidate.parse(f"tp=1,pp=1,dp=8,zero={zero}{more}") for more in ("", f",{key}={size}"))
    assert [reason.rule_id for reason in rejections_of(request, refused, "torch")] == [key.replace("_", "-")]
    prices = [plan_at(request, candidate, even_refused=True).prediction for candidate in (whole, refused)]
    assert prices[0] and prices[1] and prices[0].time_parts == prices[1].time_parts
