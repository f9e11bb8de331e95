"""The search returns the true optimum, and says the truth about what it looked at."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.cost.predict import predicted
from autoshard.plan.codec import dump
from autoshard.plan.rules.rule import rule
from autoshard.plan.verify import verify
from autoshard.search.planner import search
from autoshard.search.request import Request, plan_at
from autoshard.search.stage_filling import EVERYTHING
from tests.search.brute_force import EXACT, Truth, ask, peak, refused, time_s
from tests.tabled import tabled

QUESTIONS = {
    "tiny-llama": ask("tiny-llama", global_batch=8, pins="mbs=1,recompute=none"),
    "tiny-mixtral, 8 ranks": ask("tiny-mixtral", ranks=8, global_batch=4, pins="zero=1,pp=2,cp=1,recompute=none"),
    "tiny-llama, 6 ranks": ask("tiny-llama", ranks=6, global_batch=6, pins="sp=false,zero=3,recompute=full"),
    "tiny-llama, chunks": ask("tiny-llama", global_batch=8, pins="schedule=interleaved,vp=2,recompute=full"),
    "tiny-llama, stages": ask("tiny-llama", global_batch=8, pins="pp=2,vp=1,stages=1/3,recompute=full/none"),
    "tiny-llama, cp": ask("tiny-llama", global_batch=2, pins="tp=1,dp=1,recompute=none"),
    "llama3-8b": ask("llama3-8b", "trn1.32xlarge", pins="tp=8,pp=1,cp=1"),
    "nothing fits": ask("llama3-70b", "trn1.32xlarge", pins="tp=32,mbs=1"),
    "nothing is legal": ask("tiny-llama", ranks=7, pins="tp=7"),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_no_candidate_is_faster_than_the_plan_and_the_certificate_accounts_for_every_point(name: str):
    request, truth = QUESTIONS[name], Truth(QUESTIONS[name])
    capacity = request.cluster.rank_memory_bytes
    best, smallest = truth.fastest(capacity), truth.smallest()
    found = search(replace(request, effort=EXACT), num_plans=3)
    certificate, fits = found.certificate, [point for point in truth.legal if point.fastest(capacity)]
    assert (certificate.num_points, certificate.num_legal) == (len(truth.points), len(truth.legal))
    assert certificate.num_fitting <= certificate.num_solved
    assert certificate.num_too_large <= len(truth.legal) - len(fits)
    assert bool(fits) == bool(certificate.num_fitting)
    if best:
        assert best.time_s * (1 - 1e-9) <= certificate.value <= best.latest_s * (1 + 1e-9)
    if found.plans or not truth.legal:
        assert found.nearest_miss is None
    else:
        assert best is None and certificate.value == np.inf and found.nearest_miss and smallest
        assert peak(found.nearest_miss) == pytest.approx(smallest.peak_bytes, rel=1e-9)
    for plan in found.plans:
        assert not refused(request, plan.candidate)
        assert verify(tabled(plan)) == ()
        assert dump(plan_at(request, plan.candidate)) == dump(tabled(plan))


@pytest.mark.parametrize(
    "request_",
    [
        ask("tiny-llama", global_batch=8, pins="cp=1"),
        replace(ask("tiny-mixtral", global_batch=4, pins="kernels=torch_cuda,cp=1,mbs=1"), memory_bytes=1.12e9),
        pytest.param(ask("llama3-70b", "trn1.32xlarge", 16), marks=pytest.mark.slow),
    ],
    ids=["tiny-llama", "little memory", "llama3-70b"],
)
def test_bounds_leave_out_nothing_that_is_better(request_: Request):
    pruned = search(replace(request_, effort=EVERYTHING))
    whole = search(replace(request_, effort=replace(EVERYTHING, exhaustive=True)))
    assert dump(whole.plans[0]) == dump(pruned.plans[0])
    assert whole.certificate.num_legal == pruned.certificate.num_legal
    assert (whole.certificate.num_too_large, whole.certificate.num_bounded) == (0, 0)
    assert whole.certificate.gap < 1e-9 and pruned.certificate.gap < 1e-9
    assert pruned.certificate.num_solved < whole.certificate.num_solved


def test_ties_go_to_less_memory_and_then_to_smaller_axes():
    request = ask("tiny-llama", global_batch=8, pins="cp=1")
    found = search(request, num_plans=30).plans
    keys = [(float(f"{time_s(plan):.9g}"), peak(plan)) for plan in found]
    assert keys == sorted(keys)
    assert [dump(plan) for plan in search(request, num_plans=30).plans] == [dump(plan) for plan in found]


@pytest.mark.parametrize(
    "request_",
    [ask("tiny-llama", global_batch=1, pins="tp=1,dp=1"), ask("llama2-7b", "a100-80", pins="tp=1,pp=1", seq_len=32768)],
    ids=["local", "GPUs"],
)
def test_cp_cuts_the_heads_where_that_is_faster_than_a_ring(request_: Request):
    found = search(request_).plans[0]
    apart = {kind: replace(request_, pins={**request_.pins, "cp_kind": kind}) for kind in ("ring", "all_to_all")}
    times = {kind: time_s(search(one).plans[0]) for kind, one in apart.items()}
    assert found.cp_kind == "all_to_all" and found.mesh.size("cp") > 1
    assert time_s(found) == times["all_to_all"] < times["ring"]


def test_a_users_own_rule_is_respected():
    @rule("tp", source="this test")
    def own(c):
        yield c.tp != 2
        yield f"tp={c.tp}: no"

    request = ask("tiny-llama", pins="tp=2,cp=1")
    found = search(replace(request, extra_rules=(own,)))
    assert found.plans == ()
    (mine,) = (one for one in found.certificate.refusals if one.rule_id == "own")
    assert mine.num_points >= search(request).certificate.num_legal
    assert mine.example == "tp=2: no"


@pytest.mark.parametrize("subject", ["recompute", "everything that I know"])
def test_a_users_rule_may_judge_what_is_recomputed(subject: str):
    @rule(subject, source="this test")
    def own(c):
        yield c.recompute == "full"
        yield f"recompute={c.recompute}: no"

    found = search(replace(ask("tiny-llama", pins="cp=1,mbs=1"), extra_rules=(own,)), num_plans=3)
    assert {str(stage.recompute) for plan in found.plans for stage in plan.stages} == {"full"}
    assert len(found.plans) == 3


@pytest.mark.slow
def test_both_engines_are_searched_when_any_may_run_the_plan():
    one = ask("llama3-8b", "trn2.48xlarge")
    both = search(replace(one, engines=("nxd", "torch")), num_plans=8)
    apart = [search(replace(one, engines=(engine,)), num_plans=8) for engine in ("nxd", "torch")]
    times = sorted(time_s(plan) for found in apart for plan in found.plans)[:8]
    assert [time_s(plan) for plan in both.plans] == times
    assert both.certificate.num_legal == sum(found.certificate.num_legal for found in apart)
    ids = [refusal.rule_id for refusal in both.certificate.refusals]
    assert len(ids) == len(set(ids))
    for plan in both.plans:
        again = plan_at(replace(one, engines=("nxd", "torch")), plan.candidate)
        assert dump(again) == dump(tabled(plan))


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(ask("mixtral-8x7b", "a100-80", 4, global_batch=128, pins="mbs=1"), marks=pytest.mark.slow),
        pytest.param(ask("mixtral-8x7b", "h100-80", 8, global_batch=32, seq_len=32768), marks=pytest.mark.slow),
        ask("llama3-70b", "a100-80", 2, global_batch=128, pins="cp=1,mbs=1"),
        ask("qwen3-8b", "trn1.32xlarge", 2),
    ],
    ids=["experts", "long experts", "copies of keys", "norms of heads"],
)
def test_the_best_plan_does_not_depend_on_how_many_are_shown_and_costs_what_its_table_says(request_: Request):
    (alone,), several = search(request_).plans, search(request_, num_plans=4).plans
    assert alone == several[0]
    assert predicted(replace(alone, prediction=None)) == alone
    for plan in several:
        again = plan_at(request_, plan.candidate)
        assert time_s(again) == time_s(plan) and peak(again) == peak(plan)
