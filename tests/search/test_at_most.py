"""A plan for at most so many nodes is the fastest of all numbers of nodes, and few of them are searched."""

import math
from dataclasses import replace

import pytest

from autoshard.search.ask.planner import AtMost, Known, SearchResult, Size, at_most, search
from autoshard.search.bound.request import Request
from autoshard.search.bound.watch import never_stop
from tests.search.brute_force import ask
from tests.slower import rest_is_slow


def answer(request: Request, before: Size) -> AtMost:
    def asked(request: Request, known: Known) -> SearchResult:
        return search(request, 1, never_stop, known=known)

    return at_most(request, before, never_stop, asked)


def on(request: Request, num_nodes: int) -> Request:
    return replace(request, cluster=replace(request.cluster, num_nodes=num_nodes))


def step_s(request: Request) -> float:
    plans = search(request, nearest=False).plans
    return plans[0].prediction.step_time_s if plans and plans[0].prediction else math.inf


@pytest.mark.parametrize("num_left", rest_is_slow([7, 5, 3], 0, 1))
def test_no_smaller_number_of_nodes_is_faster(num_left: int) -> None:
    request = replace(ask("llama3-8b", "trn1.32xlarge", 8, global_batch=256), pins={"tp": 8, "mbs": 1, "vp": 1})
    found = answer(on(request, num_left), Size(num_nodes=8, step_s=step_s(request)))
    best = min(step_s(on(request, number)) for number in range(1, num_left + 1))
    assert found.found.plans[0].prediction
    assert found.found.plans[0].prediction.step_time_s == pytest.approx(best, rel=0.006)  # what a search leaves
    assert found.found.plans[0].cluster.num_nodes == found.request.cluster.num_nodes == num_left - found.num_spare
    for size in found.sizes:
        assert size.step_s <= step_s(on(request, size.num_nodes)) * (1 + 1e-9) or not size.is_bound


@pytest.mark.slow
def test_a_bad_number_of_nodes_is_left_and_the_old_plan_s_speed_ends_the_search() -> None:
    request = replace(ask("llama3-8b", "trn1.32xlarge", 7, global_batch=256), pins={"tp": 8, "mbs": 1})
    many = answer(request, Size(num_nodes=8, step_s=1e-3))  # each node was so fast that any number may do
    few = answer(request, Size(num_nodes=8, step_s=16.0))
    unknown = answer(request, Size(num_nodes=7, step_s=35.0))  # the plan of a run on a bad number of nodes
    assert many.num_spare == few.num_spare == unknown.num_spare == 1
    assert [one.num_nodes for one in many.sizes] == [7, 6, 5, 4, 3, 2, 1]
    assert [one.num_nodes for one in few.sizes] == [7, 6] and [one.num_nodes for one in unknown.sizes] == [7, 4, 6, 5]


def test_where_layouts_are_legal_and_none_fits_fewer_nodes_are_not_tried() -> None:
    found = answer(ask("llama3-70b", "trn1.32xlarge", 2, global_batch=64), Size(num_nodes=3, step_s=1.0))
    assert not found.found.plans and [one.step_s for one in found.sizes] == [math.inf]


def test_memory_is_least_on_all_nodes() -> None:
    request = ask("llama3-8b", "trn1.32xlarge", 3, global_batch=256)
    request = replace(request, pins={"tp": 8, "mbs": 1}, objective="memory")
    assert answer(request, Size(num_nodes=4, step_s=1.0)).num_spare == 0
