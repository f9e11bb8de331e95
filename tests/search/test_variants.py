"""What a layout can be run as: everything that changes what is executed, once."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.plan.candidate import Candidate
from autoshard.search.request import Request
from autoshard.search.space import whole_space
from autoshard.search.variants import cp_forms, num_variants, variants
from tests.search.brute_force import Truth, ask, bare, every_point, points, refused, says_something
from tests.search.test_rule_filter import PINS


def listed(request: Request) -> tuple[list[Candidate], list[int], list[int]]:
    """Every row of every variant, the layout that it names, and how many rows each layout should have."""
    facts = (request.model, request.cluster, request.workload)
    space = whole_space(*facts, request.engines[0], request.pins)
    forms = tuple(cp_forms(space, request.pins))
    found = [
        (one.space.candidate(row, 0), layout)
        for one in variants(forms, request.model, request.pins)
        for row, layout in enumerate(one.layouts.tolist())
    ]
    num_forms = sum(np.bincount(one.layouts, minlength=space.num_layouts) for one in forms)
    counts = (num_variants(space, request.model, request.pins) * num_forms).tolist()
    return [candidate for candidate, _ in found], [layout for _, layout in found], counts


@pytest.mark.parametrize("pins", PINS)
@pytest.mark.parametrize(("model", "ranks"), [("tiny-llama", 4), ("tiny-llama", 6), ("tiny-mixtral", 8)])
def test_every_point_is_listed_once(model: str, ranks: int, pins: str):
    request = ask(model, ranks=ranks, global_batch=4, pins=pins)
    candidates, layouts, counts = listed(request)
    assert len(set(candidates)) == len(candidates)
    assert {bare(one) for one in candidates} == {bare(one) for one in points(request)}
    assert np.bincount(layouts, minlength=len(counts)).tolist() == counts
    sizes = {
        (layout, one.tp, one.pp, one.cp, one.dp, one.ep, one.mbs)
        for one, layout in zip(candidates, layouts, strict=True)
    }
    assert len(sizes) == len(set(layouts))


def usual(point: Candidate) -> Candidate:
    """The point with everything said that means nothing left out."""
    found = replace(point, recompute=(point.recompute[0],))
    if point.dp * point.cp == 1:
        found = replace(found, zero=1)
    if point.cp == 1 or point.cp_kind == "all_to_all":
        found = replace(found, cp_order="contiguous")
    if point.pp == 1:
        found = replace(found, schedule="1f1b", vp=1)
    return found


@pytest.mark.parametrize(
    "request_",
    [
        ask("tiny-llama", ranks=4, global_batch=4, pins="mbs=1"),
        ask("tiny-mixtral", ranks=2, global_batch=4, pins="mbs=1"),
        ask("llama3-8b", "trn1.32xlarge", pins="tp=32,pp=1,mbs=1", global_batch=4),
        ask("llama3-8b", "trn1.32xlarge", pins="tp=8,pp=4,mbs=1", global_batch=4),
    ],
    ids=["tiny-llama", "tiny-mixtral", "trn1", "trn1, stages"],
)
def test_what_is_not_listed_is_refused_or_the_same_as_what_is(request_: Request):
    truth = Truth(request_)
    known = {bare(point.candidate): point for point in truth.legal}
    for point in every_point(request_):
        if says_something(point, request_) or refused(request_, point):
            continue
        same = known[bare(usual(point))]
        assert same.cost_of(point) == pytest.approx(same.cost_of(same.candidate), rel=1e-12), str(point)
