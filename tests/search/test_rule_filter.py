"""A whole space is filtered as its points are, one by one."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given

from autoshard.plan.candidate import Candidate
from autoshard.plan.rules.check import all_rules, rejections
from autoshard.plan.rules.rule import Rejection
from autoshard.search.request import Request
from autoshard.search.rule_filter import legal_space
from autoshard.search.variants import VARIANT_KEYS
from tests.search.brute_force import ask, bare, kinds_of_recompute, points
from tests.search.question_cases import Asked, requests

PINS = (
    "",
    "tp=2",
    "sp=false",
    "sp=true",
    "tp=2,sp=false",
    "tp=1,sp=false",
    "zero=0",
    "zero=3",
    "pp=2,schedule=gpipe",
    "schedule=interleaved,vp=2",
    "schedule=zb_v",
    "vp=2",
    "vp=1",
    "pp=2,recompute=full:1/selective[norms]",
    "recompute=none",
    "recompute=full:2",
    "recompute=selective[x]",
    "stages=1/3",
    "place=3/2/1/0",
    "kernels=te",
    "dp=4",
    "dp=3",
    "mbs=5",
    "cp=2,cp_kind=all_to_all,cp_order=zigzag",
    "cp_kind=all_to_all",
    "cp_order=zigzag",
    "boundary=[batch]",
    "boundary=[batch/dp, seq, hidden/tp]",
    "lnc=2",
    "tp=3",
    "tp=3,pp=3",
)


def rejections_alone(request: Request) -> dict[Candidate, dict[str, list[Rejection]]]:
    """What every Rule has against every point, with each kind of recompute."""
    kernels = request.pins.get("kernels") or request.cluster.kernels
    kinds = [(kind,) for kind in kinds_of_recompute(kernels)]
    kinds = [request.pins["recompute"]] if "recompute" in request.pins else kinds
    facts = (request.model, request.cluster, request.workload, request.engines[0])
    return {
        bare(point): {
            str(kind): list(rejections(replace(point, recompute=kind), *facts, extra_rules=request.extra_rules))
            for kind in kinds
        }
        for point in points(request)
    }


def agrees(request: Request) -> None:
    """Compare what is legal, what is refused, and in which words."""
    alone = rejections_alone(request)
    filtered = legal_space(request, request.engines[0])
    assert filtered.num_points == len(alone)
    legal = {point: [not own for own in kinds.values()] for point, kinds in alone.items()}
    found = {
        bare(replace(one.space.candidate(row, 0), stages=None)): one.allowed[:, row].tolist()
        for one in filtered.variants
        for row in range(len(one.layouts))
    }
    assert found == {point: kinds for point, kinds in legal.items() if any(kinds)}
    assert filtered.num_legal == len(found)
    counts = Counter(
        rule_id for kinds in alone.values() for rule_id in {one.rule_id for own in kinds.values() for one in own}
    )
    messages = {one.message for kinds in alone.values() for own in kinds.values() for one in own}
    chosen = {*VARIANT_KEYS, *({"recompute"} & request.pins.keys())}
    early = {rule.id for rule in all_rules() if not set(rule.subject.replace(" ", "").split(",")) & chosen}
    for refusal in filtered.refusals:
        assert 0 < refusal.num_points <= counts[refusal.rule_id]
        assert refusal.example in messages
        if filtered.variants and refusal.rule_id in early:
            assert refusal.num_points == counts[refusal.rule_id]
    assert bool(filtered.refusals) == any(any(own) for kinds in alone.values() for own in kinds.values())
    assert filtered.hopeless <= {refusal.rule_id for refusal in filtered.refusals}
    if filtered.variants:
        assert {rule_id for rule_id in counts if rule_id in early} <= {one.rule_id for one in filtered.refusals}


@given(requests())
def test_random_questions_are_filtered_as_their_points_are(asked: Asked):
    agrees(asked.request)


@pytest.mark.parametrize("pins", PINS)
def test_what_is_pinned_is_filtered_as_its_points_are(pins: str):
    agrees(ask("tiny-llama", global_batch=8, pins=pins))


@pytest.mark.parametrize(
    "request_",
    [
        ask("llama3-8b", "trn1.32xlarge", pins="mbs=1"),
        ask("llama3-8b", "trn1.32xlarge", 2, pins="mbs=1,tp=8", seq_len=1000),
        pytest.param(ask("mixtral-8x7b", "trn2.48xlarge", pins="mbs=1,tp=4"), marks=pytest.mark.slow),
        ask("mixtral-8x7b", "h100-80", pins="mbs=1,vp=1"),
    ],
    ids=["trn1", "odd sequence", "experts on trn2", "experts on GPUs"],
)
def test_real_questions_are_filtered_as_their_points_are(request_: Request):
    agrees(request_)


def test_what_no_point_has_is_refused_by_no_rule():
    agrees(ask("tiny-llama", ranks=3, global_batch=1, pins="tp=1,pp=1,cp=1,vp=2,mbs=1"))  # one stage is not two chunks


def test_the_example_of_a_refusal_has_least_else_against_it():
    request = ask("tiny-llama", global_batch=8)
    alone = rejections_alone(request)
    for refusal in legal_space(request, "torch").refusals:
        lists = [own for kinds in alone.values() for own in kinds.values()]
        least = min(len(own) for own in lists if refusal.rule_id in {one.rule_id for one in own})
        shown = min(len(own) for own in lists if refusal.example in {one.message for one in own})
        assert shown == least, refusal
