"""The frontier: nothing on it is bettered, and nothing off it belongs there."""

from dataclasses import replace

import pytest

from autoshard.search.frontier import coordinates, frontier, undominated
from autoshard.search.planner import search
from tests.search.brute_force import ask

SIZES = [ask("llama3-8b", "trn1.32xlarge", nodes, pins="mbs=1,cp=1") for nodes in (1, 2)]


def test_no_plan_betters_another_and_the_first_is_the_fastest():
    found = frontier(SIZES)
    assert found.ended == "complete" and found.gap <= 1e-3
    points = [coordinates(plan) for plan in found.plans]
    assert len(set(points)) == len(points) >= 2
    for one in points:
        assert not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in points)
    assert points == sorted(points)
    fastest = min(coordinates(search(request).plans[0])[0] for request in SIZES)
    assert points[0][0] == pytest.approx(fastest, rel=1e-3)
    assert {plan.cluster.num_nodes for plan in found.plans} == {1, 2}


def test_each_is_the_fastest_of_its_nodes_and_memory():
    for plan in frontier(SIZES[:1]).plans:
        assert plan.prediction
        limited = search(replace(SIZES[0], memory_bytes=plan.prediction.peak_bytes)).plans[0]
        assert limited.prediction
        assert limited.prediction.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=1e-3)


def test_a_stopped_search_says_so():
    found = frontier(SIZES, lambda progress: "stopped")
    assert found.ended == "stopped"


def test_what_is_bettered_is_left_out():
    plans = search(ask("llama3-8b", "trn1.32xlarge", 2, pins="mbs=1"), num_plans=4).plans
    assert undominated([*plans, *plans]) == undominated(plans)
    assert undominated(plans)[0] == plans[0]


def test_a_size_without_a_plan_is_left_out():
    none = ask("llama3-70b", "trn1.32xlarge")
    assert frontier([none]).plans == ()
