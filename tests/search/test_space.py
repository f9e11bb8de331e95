"""The outer space: every way to divide ranks and batch; what is pinned stays."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.plan.candidate import Candidate
from autoshard.plan.rules.check import rejections
from autoshard.search.planner import judge_space
from autoshard.search.space import Space, divisors, recompute_choices, whole_space
from tests.search.brute_force import ask, candidates, kinds_of_recompute, layouts


def space_of(request) -> Space:
    return whole_space(request.model, request.cluster, request.workload, request.engines[0], request.pins)


def everything(space: Space) -> list[Candidate]:
    return [space.at(row, kind) for row in range(space.num_layouts) for kind in range(len(space.recomputes))]


@given(st.integers(1, 5000))
def test_divisors_are_what_divides(number: int):
    assert list(divisors(number)) == [size for size in range(1, number + 1) if number % size == 0]


@given(
    model=st.sampled_from(["tiny-llama", "tiny-mixtral", "gpt2-xl"]),
    ranks=st.integers(1, 24),
    batch=st.integers(1, 40),
    seq_len=st.sampled_from([1, 7, 256]),
)
def test_the_space_is_every_product_of_whole_numbers(model: str, ranks: int, batch: int, seq_len: int):
    request = ask(model, ranks=ranks, global_batch=batch, seq_len=seq_len)
    found = everything(space_of(request))
    assert len(found) == len(set(found))
    assert set(found) == set(candidates(request))


PINS = (
    "tp=2",
    "sp=false",
    "sp=true",
    "tp=2,sp=false",
    "tp=1,sp=false",
    "zero=0",
    "zero=3",
    "pp=2,schedule=gpipe",
    "schedule=interleaved,vp=2",
    "pp=2,recompute=full:1/selective[norms]",
    "recompute=none",
    "stages=1/3",
    "place=3/2/1/0",
    "kernels=te",
    "dp=4",
    "dp=3",
    "mbs=5",
    "cp=2,cp_kind=all_to_all,cp_order=zigzag",
    "boundary=[batch]",
    "lnc=2",
    "tp=3",
)


@pytest.mark.parametrize("pins", PINS)
def test_what_is_pinned_stays_and_the_rest_is_complete(pins: str):
    request = ask("tiny-llama", global_batch=8, pins=pins)
    found = everything(space_of(request))
    if "kernels" not in pins:  # other Kernels have other kinds of recompute
        assert set(found) == set(candidates(request))
    for candidate in found:
        for key, value in request.pins.items():
            shown = candidate.sequence_parallel if key == "sp" else getattr(candidate, key)
            assert shown == value or (key == "recompute" and candidate.recompute * candidate.num_stages == value)


@pytest.mark.parametrize(
    "pins", ["", *PINS, "pp=2,recompute=full:1/full:3", "recompute=full:2", "recompute=selective[x]"]
)
def test_rules_judge_the_space_as_they_judge_one_candidate(pins: str):
    request = ask("tiny-llama", global_batch=8, pins=pins)
    judged = judge_space(request, "torch")
    facts = (request.model, request.cluster, request.workload, "torch")
    counts = Counter[str]()
    for row in range(judged.space.num_layouts):
        against = set[str]()
        for kind in range(len(judged.space.recomputes)):
            reasons = rejections(judged.space.at(row, kind), *facts)
            assert bool(judged.legal[row, kind]) == (not reasons)
            against |= {reason.rule_id for reason in reasons}
        counts.update(against)
    assert {refusal.rule_id: refusal.num_layouts for refusal in judged.refusals(request)} == counts


@pytest.mark.parametrize("kernels", ["nxd", "te", "torch_cpu", "torch_cuda"])
def test_every_kind_of_recompute_is_tried_once(kernels: str):
    choices = recompute_choices(kernels)
    assert len(choices) == len(set(choices))
    assert set(choices) == kinds_of_recompute(kernels)


def test_the_example_of_a_refusal_is_the_layout_with_least_else_against_it():
    request = ask("llama3-70b", "trn1.32xlarge", 16)
    for refusal in judge_space(request, "nxd").refusals(request):
        alone = any(
            [reason.message for reason in rejections(layout, request.model, request.cluster, request.workload, "nxd")]
            == [refusal.example]
            for layout in layouts(replace(request, pins={"mbs": 1}))
        )
        assert alone, refusal


def test_a_cluster_too_large_to_enumerate_is_refused():
    with pytest.raises(InputError, match="nodes: a search takes at most 131072 nodes"):
        ask("tiny-llama", "trn1.32xlarge", 10**15)


def test_a_prime_number_of_nodes_is_enumerated_too():
    request = ask("llama3-8b", "h100-80", 13)
    assert {row["tp"] for row in ({"tp": int(size)} for size in space_of(request).rows["tp"])} >= {1, 2, 4, 8, 13, 26}
