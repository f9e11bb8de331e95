"""A question without an answer: what is wrong with it, or what would change that."""

from dataclasses import replace

import pytest

from autoshard.plan.rules.rule import rule
from autoshard.search.planner import Request, search
from autoshard.search.remedy import fixed_faults, no_remedy, remedies, why_none
from autoshard.units import format_bytes
from tests.search.brute_force import ask

WRONG = [
    (ask("tiny-llama", pins="tp=3"), "--fix tp=3", "8 query heads of tiny-llama do not divide by 3"),
    (ask("tiny-llama", pins="pp=4,tp=2"), "--fix tp=2,pp=4,cp=1,dp=1", "uses 8 ranks, but the cluster has 4"),
    (ask("tiny-llama", pins="mbs=5"), "--fix dp=4,mbs=5", "does not divide by dp*mbs=20"),
    (ask("tiny-llama", pins="vp=2,schedule=1f1b"), "--fix vp=2", "Use schedule=interleaved"),
    (ask("tiny-llama", pins="boundary=[x]"), "--fix boundary=[x]", "with nothing pending"),
    (ask("tiny-llama", pins="recompute=selective[x]"), "--fix recompute=selective[x]", "x is not known"),
    (ask("tiny-llama", pins="recompute=full:9"), "--fix recompute=full:9", "smaller K"),
    (ask("llama3-8b", "trn1.32xlarge", pins="zero=3"), "--fix zero=3", "NxD has no ZeRO-3"),
    (ask("llama3-8b", "trn1.32xlarge", seq_len=7, pins="cp=1"), "--seq-len 7", "multiples of 2048"),
    (ask("gpt2-xl", "h100-80", seq_len=8192), "--seq-len 8192", "learned positions for 1024 tokens"),
    (replace(ask("tiny-llama"), engines=("nxd",)), "--engine nxd", "runs on Trainium only"),
]


@pytest.mark.parametrize(("request_", "where", "message"), WRONG, ids=[case[1] for case in WRONG])
def test_what_no_layout_could_mend_is_a_fault_of_the_question(request_: Request, where: str, message: str):
    assert search(request_).plans == ()
    faults = fixed_faults(request_)
    assert any(fault.where == where and message in fault.message for fault in faults), faults


def test_what_some_layout_could_mend_is_no_fault():
    assert fixed_faults(ask("tiny-llama", ranks=7)) == ()
    assert fixed_faults(ask("llama3-70b", "trn1.32xlarge")) == ()
    assert fixed_faults(ask("llama3-8b", "trn1.32xlarge", pins="pp=2")) == ()


def test_a_fault_for_one_engine_only_is_no_fault_when_another_may_run_the_plan():
    request = replace(ask("tiny-llama", pins="zero=3"), engines=("nxd", "torch"))
    assert fixed_faults(request) == ()
    assert fixed_faults(replace(request, engines=("nxd",)))


def test_the_message_about_memory_says_by_how_much_the_smallest_plan_misses():
    request = ask("llama3-70b", "trn1.32xlarge")
    found = search(request)
    text = why_none(request, found)
    assert found.nearest_miss
    peak = found.nearest_miss.prediction.peak_bytes if found.nearest_miss.prediction else 0
    assert f"the smallest is {found.nearest_miss.candidate}: {format_bytes(peak)} a rank" in text
    assert f"{format_bytes(peak - 16 * 2**30)} more than the 16.00 GiB there are" in text
    assert found.nearest_miss.prediction
    fullest = max(found.nearest_miss.prediction.stage_memory, key=lambda memory: memory.total)
    assert found.nearest_miss.mesh.num_ranks == 32 and found.nearest_miss.mesh.size("dp") == 1, "nothing to shard over"
    moments, fp32 = (format_bytes(count * fullest.num_weights) for count in (8, 4))
    assert f"(optimizer {moments}, gradients {fp32}, masters {fp32})" in text


def test_the_message_about_rules_counts_them():
    request = ask("llama3-8b", "trn1.32xlarge", pins="pp=2")
    text = why_none(request, search(request))
    assert "each of the 24529 outer points of llama3-8b on 1 x trn1.32xlarge with pp=2 is refused by a rule" in text
    assert "by trn1-dp, like tp=1,pp=2,dp=16: with a pipeline" in text


ADVICE = [
    (ask("llama3-70b", "trn1.32xlarge"), ["--nodes 4"]),
    (ask("llama3-8b", "trn1.32xlarge", seq_len=2**20), ["--seq-len 262144", "--nodes 4"]),
    (ask("llama3-8b", "trn1.32xlarge", seq_len=7), ["--seq-len 2048"]),
    (ask("llama3-8b", "trn1.32xlarge", pins="pp=2"), ["it without --fix", "--nodes 2"]),
    (ask("llama3-8b", "trn1.32xlarge", pins="tp=8,pp=2"), ["--fix tp=8, so without pp=2", "--nodes 2"]),
    pytest.param(ask("llama2-7b"), ["--ranks 64"], marks=pytest.mark.slow),
    (ask("tiny-llama", ranks=7, global_batch=32, pins="pp=1"), ["--global-batch 35"]),
    (ask("llama3-70b", "trn1.32xlarge", 1000), ["--global-batch 1125"]),
    (ask("llama3-8b", "a100-40", pins="tp=1,pp=1,zero=1"), ["--fix pp=1,zero=1, so without tp=1"]),
    (ask("gpt2-xl", "trn2.48xlarge"), ["--engine torch"]),
    (ask("gpt3-175b", "trn1.32xlarge", 2), []),
]


def named(value: Request | list[str]) -> str:
    return value.model.name if isinstance(value, Request) else str(value)


@pytest.mark.parametrize(("request_", "expected"), ADVICE, ids=named)
def test_advice_is_what_helps(request_: Request, expected: list[str]):
    assert search(request_).plans == ()
    found = list(remedies(request_))
    assert set(expected) <= set(found), found
    assert bool(expected) == bool(found)


def test_without_advice_the_rules_in_the_way_are_named():
    text = no_remedy(search(ask("gpt3-175b", "trn1.32xlarge", 2)))
    assert "by nxd-tied, like pp=2: gpt3-175b ties its output head to its embedding" in text


def test_a_rule_without_a_key_in_its_words_is_still_shown():
    @rule("tp", source="this test")
    def own(c):
        yield c.tp == 0
        yield "never"

    (fault,) = fixed_faults(replace(ask("tiny-llama", pins="tp=2"), extra_rules=(own,)))
    assert str(fault) == "never"
