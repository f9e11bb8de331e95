"""A whole space is listed and filtered as its points are, one by one; what it leaves out means nothing of its own."""

from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.plan.candidate import Candidate
from autoshard.plan.rules.check import all_rules, rejections
from autoshard.plan.rules.rule import Rejection
from autoshard.search.bound.legal_space import VARIANT_KEYS, legal_space, run_choices
from autoshard.search.bound.priced_layouts import LayoutPricer
from autoshard.search.bound.request import Request
from autoshard.search.bound.space import Space, divisors, recompute_choices, whole_space
from autoshard.spec.cluster_catalogue import load_cluster
from tests.search.brute_force import (
    Truth,
    ask,
    bare,
    every_point,
    kinds_of_recompute,
    layouts,
    points,
    refused,
    requests,
    says_something,
)
from tests.slower import rest_is_slow

PINS = (
    *("", "tp=2", "sp=false", "sp=true", "tp=2,sp=false", "tp=1,sp=false", "zero=0", "zero=3", "pp=2,schedule=gpipe"),
    "weight_group=2",
    *("schedule=interleaved,vp=2", "schedule=zb_v", "vp=2", "vp=1", "pp=2,recompute=full:1/selective[norms]"),
    *("recompute=none", "recompute=full:2", "recompute=selective[x]", "stages=1/3", "place=3/2/1/0", "kernels=te"),
    *("dp=4", "dp=3", "mbs=5", "cp=2,cp_kind=all_to_all,cp_order=zigzag", "cp_kind=all_to_all", "cp_order=zigzag"),
    *("boundary=[batch]", "boundary=[batch/dp, seq, hidden/tp]", "lnc=2", "tp=3", "tp=3,pp=3"),
)

QUICK = ("tp=2,sp=false", "schedule=zb_v", "recompute=full:2")  # the others of PINS are slow


def space_of(request: Request) -> Space:
    return whole_space(request.model, request.cluster, request.workload, request.engines[0], request.pins)


def rejections_alone(request: Request) -> dict[Candidate, dict[str, list[Rejection]]]:
    """What every Rule has against every point, with each kind of recompute."""
    kernels = request.pins.get("kernels") or request.cluster.kernels
    kinds = [(kind,) for kind in kinds_of_recompute(kernels, request.cluster)]
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
    """Compare what is listed, what is legal, what is refused, and in which words."""
    space, alone = space_of(request), rejections_alone(request)
    listed = [
        bare(replace(space.candidate(layout, 0), zero=base.zero, zero_group=base.zero_group, cp_kind=base.cp_kind,
                     cp_order=base.cp_order, schedule=base.schedule, sp=sp, vp=vp))
        for base, sp, some, chunks in run_choices(space, request.model, request.cluster, request.pins)
        for layout, vp in zip(some.tolist(), chunks.tolist(), strict=True)
    ]  # fmt: skip
    assert len(listed) == len(set(listed)) and {*listed} == {*alone}
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
    for one in filtered.variants:
        assert np.array_equal(one.space.rows["tp"], filtered.space.rows["tp"][one.layouts])
    counts = Counter(
        rule_id for kinds in alone.values() for rule_id in {one.rule_id for own in kinds.values() for one in own}
    )
    messages = {one.message for kinds in alone.values() for own in kinds.values() for one in own}
    decided = {*VARIANT_KEYS, *({"recompute"} & request.pins.keys())}
    early = {rule.id for rule in all_rules() if not rule.keys & decided}
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
def test_random_questions_are_filtered_as_their_points_are(request: Request):
    agrees(request)


@pytest.mark.parametrize("pins", rest_is_slow(sorted(PINS, key=lambda pins: pins not in QUICK), len(QUICK), 7))
def test_what_is_pinned_is_filtered_as_its_points_are(pins: str):
    request = ask("tiny-llama", global_batch=4, pins=pins)
    agrees(request)
    space = space_of(request)
    for number in range(space.num_candidates):
        candidate = space.candidate(*divmod(number, len(space.recomputes)))
        for key, value in request.pins.items():
            shown = candidate.sequence_parallel if key == "sp" else getattr(candidate, key)
            assert shown == value or (key == "recompute" and candidate.recompute * candidate.num_stages == value)


@pytest.mark.parametrize(
    "request_",
    rest_is_slow(
        [
            ask("tiny-llama", ranks=3, global_batch=1, pins="tp=1,pp=1,cp=1,vp=2,mbs=1"),  # one stage is not two chunks
            ask("llama3-8b", "trn1.32xlarge", 2, pins="mbs=1,tp=8,zero=1", seq_len=1000),
            ask("mixtral-8x7b", "h100-80", pins="mbs=1,vp=1,zero=1"),
            ask("tiny-llama", ranks=6, global_batch=4),
            ask("tiny-mixtral", ranks=8, global_batch=2, pins="zero=1"),
            ask("llama3-8b", "trn1.32xlarge", pins="mbs=1,cp=1,zero=1"),
            ask("tiny-mixtral", "h100-80", 2, global_batch=16, pins="pp=1,mbs=1,recompute=none"),
            ask("mixtral-8x7b", "trn2.48xlarge", pins="mbs=1,tp=4"),
        ],
        3,
        4,
    ),
    ids=["nothing", "odd sequence", "experts on GPUs", "6 ranks", "experts", "trn1", "two nodes", "experts on trn2"],
)
def test_other_questions_are_filtered_as_their_points_are(request_: Request):
    agrees(request_)


def test_the_example_of_a_refusal_has_least_else_against_it():
    request = ask("tiny-llama", ranks=8, global_batch=4, pins="mbs=1")
    lists = [own for kinds in rejections_alone(request).values() for own in kinds.values()]
    refusals = legal_space(request, "torch").refusals
    assert len(refusals) >= 2
    for refusal in refusals:
        least = min(len(own) for own in lists if refusal.rule_id in {one.rule_id for one in own})
        shown = min(len(own) for own in lists if refusal.example in {one.message for one in own})
        assert shown == least, refusal


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
    space = space_of(request)
    assert space.recomputes == tuple((kind,) for kind in kinds_of_recompute(request.cluster.kernels, request.cluster))
    found = [space.candidate(row, 0) for row in range(space.num_layouts)]
    assert len(found) == len(set(found)) and set(found) == set(layouts(request))


@pytest.mark.parametrize("kernels", ["nxd", "te", "torch_cuda", "torch_engine_gpu", "torch_engine", "neuron_native"])
@pytest.mark.parametrize("name", ["h100-80", "h800", "local"])
def test_every_kind_of_recompute_is_tried_once(kernels: str, name: str):
    choices = recompute_choices(kernels, cluster := load_cluster(name))
    assert choices == tuple((kind,) for kind in kinds_of_recompute(kernels, cluster))
    assert any(kind.offload for (kind,) in choices) == ((kernels, name) == ("torch_engine_gpu", "h100-80"))


def test_a_cluster_too_large_to_enumerate_is_refused():
    with pytest.raises(InputError, match="nodes: a search takes at most 131072 nodes"):
        ask("tiny-llama", "trn1.32xlarge", 10**15)


def usual(point: Candidate) -> Candidate:
    """The point with everything said that means nothing left out."""
    found = replace(point, recompute=(point.recompute[0],))
    if point.dp * point.cp == 1:
        found = replace(found, zero=1)
    if point.zero_group == point.dp * point.cp:
        found = replace(found, zero_group=None)
    if point.cp == 1 or point.cp_kind == "all_to_all":
        found = replace(found, cp_order="contiguous")
    if point.pp == 1:
        found = replace(found, schedule="1f1b", vp=1)
    return found


@pytest.mark.parametrize(
    "request_",
    rest_is_slow(
        [
            ask("tiny-llama", ranks=2, global_batch=4, pins="mbs=1"),
            ask("tiny-mixtral", ranks=2, global_batch=4, pins="mbs=1"),
        ],
        0,
        2,
    ),
    ids=["tiny-llama", "tiny-mixtral"],
)
def test_what_is_not_listed_is_refused_or_the_same_as_what_is(request_: Request):
    truth = Truth(request_)
    known = {bare(point.candidate): point for point in truth.legal}
    every = np.random.default_rng(3).permutation(np.array(list(every_point(request_)), dtype=object)).tolist()
    others = (point for point in every if not says_something(point, request_) and not refused(request_, point))
    unlisted = [*islice(others, 25)]
    assert len(unlisted) >= 20
    for point in unlisted:
        same = known[bare(usual(point))]
        assert same.cost_of(point) == pytest.approx(same.cost_of(same.candidate), rel=1e-12), str(point)


def test_the_part_that_needs_least_memory_is_priced_with_its_own_kinds_of_recompute():
    request = ask("tiny-mixtral", ranks=8, global_batch=16, pins="kernels=torch_engine")
    whole = legal_space(request, "torch")
    small = whole.of_least_memory()
    assert (
        {str(kind) for (kind,) in small.space.recomputes}
        == {"none", "full"}
        < {str(kind) for (kind,) in whole.space.recomputes}
    )
    assert all(run.space.base.schedule == "1f1b" and set(run.space.rows["mbs"]) == {1} for run in small.variants)
    assert all(len(run.allowed) == len(run.space.recomputes) for run in small.variants)
    candidate = whole.space.candidate(0, 0)
    cutting, pricer = request.cutting(candidate, "torch"), LayoutPricer(request.question(candidate), whole.space)
    for legal in (whole, small, whole):  # one after the other, of the same layouts
        (priced,) = pricer.priced(legal.space, [(cutting, {"contiguous": np.arange(1)})])
        kinds = pricer.with_recompute([priced])[0].kinds
        assert set(kinds) == {kind for (kind,) in legal.space.recomputes}
