"""The frontier: nothing on it is bettered, and nothing off it belongs there."""

from dataclasses import replace

import pytest

from autoshard.search import planner as module
from autoshard.search.planner import coordinates, frontier, search, undominated
from tests.search.brute_force import ask

SIZES = [ask("llama3-8b", "trn1.32xlarge", nodes, pins="tp=8,pp=1,cp=1,mbs=1") for nodes in (1, 2)]


def test_no_plan_betters_another_and_each_is_the_fastest_of_its_size_and_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_STEP", 0.3)
    found = frontier(SIZES)
    assert found.ended == "complete" and found.gap <= 5e-3
    points = [coordinates(plan) for plan in found.plans]
    assert len(set(points)) == len(points) >= 2 and points == sorted(points)
    for one in points:
        assert not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in points)
    fastest = min(coordinates(search(request).plans[0])[0] for request in SIZES)
    assert undominated([*found.plans, *found.plans]) == found.plans
    assert points[0][0] == pytest.approx(fastest, rel=5e-3)
    for plan in found.plans[::2]:
        (request,) = (one for one in SIZES if one.cluster == plan.cluster)
        limited = search(replace(request, memory_bytes=coordinates(plan)[1])).plans[0]
        assert coordinates(limited)[0] == pytest.approx(coordinates(plan)[0], rel=5e-3)


def test_a_stopped_search_says_so_and_a_size_without_a_plan_is_left_out():
    assert frontier(SIZES, lambda progress: "stopped").ended == "stopped"
    none = frontier([ask("llama2-7b", pins="tp=1,dp=4")])
    assert none.plans == () and none.ended == "complete"
