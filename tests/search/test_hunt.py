"""Changes of the best plan, which a local search prices: they are what ``--at`` says, and find what a search missed."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.plan.explanation import Certificate
from autoshard.search.ask.choice.changes import FillingChanges, improved
from autoshard.search.ask.choice.choosing import fastest_of
from autoshard.search.ask.choice.doubt import DOUBT
from autoshard.search.ask.choice.hunt import hunted
from autoshard.search.ask.choice.searched import EngineResult
from autoshard.search.ask.planner import search
from autoshard.search.bound.legal_space import legal_space
from autoshard.search.bound.points import Solution
from autoshard.search.bound.pool import Pool
from autoshard.search.bound.priced_layouts import LayoutPricer
from autoshard.search.bound.request import Request, plan_at
from autoshard.search.fill.stage_options import Effort
from tests.search.brute_force import ask, time_s
from tests.slower import rest_is_slow

HASTY = Effort(gap=0.3, most_splits=0, split_s=0.0, most_idle=1)
PIPELINES = [
    ask("llama3-8b", "h100-80", pins="tp=1,pp=4,dp=2,mbs=1,schedule=1f1b,cp=1", global_batch=16),
    ask("llama3-8b", "h100-80", pins="tp=1,pp=4,dp=2,mbs=1,vp=2,schedule=interleaved,cp=1", global_batch=16),
    ask("gemma3-27b", "a100-80", nodes=4, pins="tp=2,pp=4,cp=2,dp=2,mbs=1,schedule=zb_h1", global_batch=16),
]


def solved(request: Request) -> tuple[EngineResult, Solution]:
    """The best solution of a search, with what the search knows."""
    engine = request.engines[0]
    legal = legal_space(request, engine)
    pricer = LayoutPricer(request.question(legal.space.base), legal.space)
    pool = Pool(pricer, legal, request.goal(pricer.question.kernels), request.layouts)
    pool.settle(1)
    result = EngineResult(request=request, engine=engine, legal=Certificate(), pool=pool, nearest_miss=None)
    best = fastest_of([result])
    assert best
    return best


@pytest.mark.parametrize("request_", rest_is_slow(PIPELINES[::-1], 2), ids=["windows", "interleaved", "1f1b"])
def test_every_change_is_priced_as_at_prices_it(request_: Request):
    result, solution = solved(request_)
    assert result.pool
    changes = FillingChanges(solution=solution, goal=replace(result.pool.goal, capacity=np.inf))
    single = changes.single(solution.filling)
    rng, priced = np.random.default_rng(1), 0
    for drawn in ([[change] for change in rng.permutation(single).tolist()[:4]], changes.drawn(single, rng)[:6]):
        for entry in drawn:
            filling = changes.best(changes.changed(solution.filling, [entry]))
            if filling is not None:
                candidate = replace(solution, filling=filling).candidate
                plan = request_.plan(candidate, result.engine, solution.cutting, tables=False)
                assert time_s(plan) == pytest.approx(float(filling.time_s[0]), rel=1e-8), candidate
                assert plan.prediction and plan.prediction.peak_bytes == pytest.approx(filling.peak_bytes[0], rel=1e-8)
                assert sum(filling.stages(0)) == request_.model.num_layers
                priced += 1
    assert priced >= 6


def test_changes_undo_a_bad_split_and_stay_within_memory_and_pins():
    result, solution = solved(PIPELINES[0])
    assert result.pool
    goal = result.pool.goal
    changes = FillingChanges(solution=solution, goal=goal)
    source, target = np.argsort(solution.filling.plain[:, 0] + solution.filling.recomputed[:, 0])[[-1, 0]].tolist()
    worse = changes.best(changes.changed(solution.filling, [[(source, target, 0)] * 2]))
    assert worse and worse.time_s[0] > solution.value
    better, num_changes = improved(replace(solution, filling=worse, value=float(worse.time_s[0])), goal, 5_000, 1.0)
    assert better.value <= solution.value * (1 + 1e-9) and 0 < num_changes <= 5_000
    assert better.filling.peak_bytes[0] <= np.max(goal.capacity)
    pinned = ask("llama3-8b", "h100-80", pins="tp=1,pp=4,dp=2,mbs=1,stages=8*4,recompute=full", global_batch=16)
    of_pinned, fixed = solved(pinned)
    assert of_pinned.pool and improved(fixed, of_pinned.pool.goal, 100, 1.0) == (fixed, 0)


def test_a_hasty_search_is_improved_by_changes_of_any_key_and_says_so():
    hasty = replace(ask("llama3-8b", "trn1.32xlarge", global_batch=64), effort=HASTY)
    result, best = solved(hasty)
    hunt = hunted(result, best)
    assert result.pool and hunt.num_changes > 20 and result.pool.solutions[0].value <= best.value
    assert hunt.gained == pytest.approx(1 - result.pool.solutions[0].value / best.value)
    answer = search(hasty, 1, simple_within=DOUBT)
    certificate = answer.certificate
    assert certificate.num_changes == hunt.num_changes and certificate.changes in certificate.accounting
    assert time_s(plan_at(hasty, answer.plans[0].candidate)) <= best.value * (1 + 1e-9)
    assert certificate.bound <= certificate.value * (1 + 1e-12)


@pytest.mark.parametrize(("model", "nodes", "gap"), [("gemma3-4b", 1, 0.1), ("olmo2-13b", 2, 0.3)])
def test_a_search_goes_on_from_what_changes_have_found(model: str, nodes: int, gap: float):
    result, best = solved(replace(ask(model, "a100-80", nodes, global_batch=64), effort=replace(HASTY, gap=gap)))
    assert hunted(result, best).gained > 0 and result.pool
    assert {solution.point.variant for solution in result.pool.solutions} <= {*result.pool.legal.variants}
    result.pool.settle(1)
    assert result.pool.solutions[0].value < best.value


def test_changes_make_a_layout_that_is_close_to_the_best_the_fastest():
    """Where layers differ, splits that are far from even are only found by changes."""
    result, best = solved(ask("gemma3-4b", "h100-80", seq_len=4096, global_batch=64))
    assert result.pool
    alone, _ = improved(best, result.pool.goal, 5_000, 1.0)
    hunt, fastest = hunted(result, best), result.pool.solutions[0]
    assert hunt.gained > 0.004 and fastest.value < alone.value * 0.996 and fastest.layout != best.layout
    assert time_s(plan_at(result.request, fastest.candidate)) == pytest.approx(fastest.value, rel=1e-8)


def test_a_certificate_says_what_changes_gained():
    assert Certificate(num_changes=0).changes == ""
    assert Certificate(num_changes=5000).changes == "5,000 changes of the best plans gained nothing"
    some = Certificate(num_changes=5000, gained=0.0012)
    assert some.changes == "5,000 changes of the best plans gained 0.12%"
    assert some.plus(Certificate(num_changes=1)).num_changes == 5001 and some.plus(Certificate()).gained == 0.0012
