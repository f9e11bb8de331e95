"""A plan is there at once: it is legal, fits, keeps what is pinned, and is not far from what a search finds."""

from dataclasses import replace

import pytest

from autoshard.layout.pin import pins_of
from autoshard.plan.candidate import Candidate
from autoshard.plan.explanation import Answer
from autoshard.search.ask.answers import answers_of
from autoshard.search.ask.plain import Plain, plain_plan
from autoshard.search.ask.planner import frontier, search
from autoshard.search.ask.vendor.answer import vendor_answer
from autoshard.search.bound.request import Request, plan_at, rejections_of
from autoshard.search.bound.rough import rough_seconds
from autoshard.search.bound.space import whole_space
from autoshard.search.bound.watch import Look, SearchProgress
from tests.search.brute_force import ask, peak, time_s

TINY = ask("tiny-llama", ranks=8)
REAL = {
    "llama3-8b on one h100-80": ask("llama3-8b", "h100-80"),
    "llama3-70b on 16 trn1": ask("llama3-70b", "trn1.32xlarge", 16),
    "deepseek-v2-lite on one h100-80": ask("deepseek-v2-lite", "h100-80"),
}


def stopped(_: Look) -> str:
    return "stopped after a moment"


@pytest.mark.parametrize("request_", [TINY, *REAL.values()], ids=["tiny-llama", *REAL])
def test_a_search_that_is_stopped_at_once_has_a_plan_that_runs(request_: Request):
    limited = replace(request_, effort=replace(request_.effort, at_once=True))
    answer = search(limited, watch=stopped)
    plan = answer.preferred
    assert answer.plans == (plan,) and answer.certificate.stopped and "rules of thumb" in answer.simple_why
    assert answer.certificate.bound == 0.0, "nothing is proven of it"
    assert not rejections_of(request_, plan.candidate, plan.engine)
    assert peak(plan) <= request_.capacity_bytes(plan.kernels)
    again = plan_at(request_, plan.candidate)
    assert time_s(plan) == time_s(again) and plan.strategies == again.strategies, "it has its price and its tables"
    assert not search(request_, watch=stopped).plans, "without a limit no time is spent on it"


def test_the_vendors_layout_is_looked_at_before_a_search_that_may_be_stopped_if_there_is_time_then() -> None:
    request = REAL["llama3-70b on 16 trn1"]
    limited = replace(request, effort=replace(request.effort, at_once=True))
    looks = iter(("", *[stopped(SearchProgress)] * 1000))
    in_time, late = search(limited, 3, lambda _: next(looks)), search(limited, 3, stopped)
    assert isinstance(in_time.vendor, Answer) and in_time.certificate.stopped
    answers = answers_of(request, in_time)
    shown = answers.named("vendor")
    assert shown.slower == time_s(shown.plan) / time_s(answers.named("fastest").plan) - 1 != 0
    unlimited = vendor_answer(request)
    assert isinstance(unlimited, Answer) and unlimited.plan.candidate == shown.plan.candidate
    assert late.vendor == answers_of(request, late).no_vendor == "none was looked at: stopped after a moment"


def test_of_a_frontier_that_is_stopped_nothing_is_promised():
    limited = replace(TINY, effort=replace(TINY.effort, at_once=True))
    edge = frontier([limited, limited], stopped)
    assert len(edge.plans) == 1 and edge.gap == 1.0 and edge.ended == "stopped after a moment"


@pytest.mark.slow
def test_a_plain_plan_is_at_most_twice_as_slow_as_the_best():
    best = search(TINY).plans[0]
    plain = plain_plan(TINY).plan
    assert plain and time_s(best) <= time_s(plain) <= 2 * time_s(best)


@pytest.mark.slow
def test_a_search_that_ends_in_time_does_not_show_the_plain_plan():
    limited = replace(TINY, effort=replace(TINY.effort, at_once=True))
    assert search(limited).plans == search(TINY).plans


def test_what_is_pinned_is_kept_and_where_nothing_fits_there_is_no_plain_plan():
    plan = plain_plan(replace(TINY, pins={"tp": 2, "schedule": "gpipe", "pp": 2})).plan
    assert plan and (plan.candidate.tp, plan.candidate.pp, plan.candidate.schedule) == (2, 2, "gpipe")
    none = plain_plan(ask("llama3-70b", "h100-80"))
    assert none.plan is None and none.miss and peak(none.miss) > 2 * 80e9


@pytest.mark.slow
def test_pinned_tensors_leave_the_answer_to_the_search():
    pinned = replace(TINY, layouts=pins_of({"layer.up.weight": "[ffn/tp, hidden]"}, "--pin"), pins={"tp": 2, "pp": 1})
    assert plain_plan(pinned) == Plain()
    limited = replace(pinned, effort=replace(pinned.effort, at_once=True))
    assert not search(limited, watch=stopped).plans and search(limited).plans == search(pinned).plans != ()


def test_after_a_plan_that_is_too_large_fewer_tokens_or_more_ranks_for_the_weights_are_tried():
    request = replace(TINY, pins={"pp": 1, "cp": 1, "zero": 1})
    peaks = {mbs: peak(plan_at(request, Candidate.parse(f"tp=1,pp=1,mbs={mbs},recompute=full", 8))) for mbs in (1, 4)}
    assert peaks[1] < peaks[4]
    plan = plain_plan(replace(request, pins={**request.pins, "tp": 1}, memory_bytes=(peaks[1] + peaks[4]) / 2)).plan
    assert plan and plan.candidate.mbs < 4
    sharded = {
        zero: peak(plan_at(request, Candidate.parse(f"tp=1,pp=1,zero={zero},recompute=full", 8))) for zero in (1, 3)
    }
    assert sharded[3] < sharded[1]
    tight = replace(TINY, pins={"tp": 1, "pp": 1, "cp": 1}, memory_bytes=(sharded[1] + sharded[3]) / 2)
    plan = plain_plan(tight).plan
    assert plan and plan.candidate.zero == 3


def test_rough_seconds_know_what_makes_a_layout_slow_or_too_large():
    request = REAL["llama3-8b on one h100-80"]
    space = whole_space(request.model, request.cluster, request.workload, "torch", {"mbs": 1, "ep": 1})
    rough_s = {
        tuple(int(space.rows[key][row]) for key in ("tp", "pp", "cp")): seconds
        for row, seconds in enumerate(rough_seconds(request.question(space.base), space.rows).tolist())
    }
    sharded = rough_seconds(request.question(space.base), space.rows, 3)
    assert rough_s[2, 1, 1] < rough_s[8, 1, 1], "tensor parallelism sends more"
    assert rough_s[1, 2, 1] < rough_s[1, 8, 1], "longer pipelines wait longer"
    assert rough_s[1, 2, 1] < rough_s[1, 2, 2], "attention in parts takes longer"
    row = next(row for row in range(space.num_layouts) if space.candidate(row, 0).dp == 8)
    assert sharded[row] < rough_s[1, 1, 1], "weights, gradients and states of 8 G parameters do not fit on each rank"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "nodes", "fastest", "times"),
    [
        ("deepseek-v3", 32, "tp=1,pp=32,ep=8,dp=8,mbs=2,recompute=full", 1.2),
        ("gpt-oss-120b", 8, "tp=1,pp=8,ep=8,dp=8,mbs=2,recompute=full", 1.5),
    ],
)
def test_the_plain_plan_of_a_large_mixture_is_near_a_layout_that_a_search_chooses(
    model: str, nodes: int, fastest: str, times: float
):
    request = ask(model, "h100-80", nodes)
    plan, chosen = plain_plan(request).plan, plan_at(request, Candidate.parse(fastest, request.cluster.num_ranks))
    assert plan and time_s(plan) < times * time_s(chosen), "ep lets fewer ranks share the states of an expert"
