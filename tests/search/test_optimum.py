"""The search returns the true optimum, and says the truth about what it looked at."""

from dataclasses import replace

import pytest

from autoshard.cost.predict import predicted
from autoshard.plan.codec import dump
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.rule import Rule
from autoshard.plan.verify import verify
from autoshard.search.planner import Request, plan_at, search
from tests.search.brute_force import Answer, answer, ask, peak, time_s
from tests.tabled import tabled

QUESTIONS = {
    "tiny-llama": ask("tiny-llama", global_batch=8),
    "tiny-mixtral, 8 ranks": ask("tiny-mixtral", ranks=8, global_batch=8, pins="recompute=none"),
    "tiny-llama, pinned": ask("tiny-llama", ranks=6, global_batch=6, pins="sp=false,zero=3,recompute=full:1"),
    "tiny-llama, chunks": ask("tiny-llama", global_batch=8, pins="schedule=interleaved,vp=2,recompute=full"),
    "tiny-llama, stages": ask("tiny-llama", global_batch=8, pins="pp=2,stages=1/3,recompute=full/none"),
    "llama3-8b": ask("llama3-8b", "trn1.32xlarge", pins="tp=8,mbs=1"),
    "llama3-8b, 2 nodes": ask("llama3-8b", "trn1.32xlarge", 2, pins="pp=1,recompute=full"),
    "nothing fits": ask("llama3-70b", "trn1.32xlarge", pins="tp=32,mbs=1"),
    "nothing is legal": ask("tiny-llama", ranks=7),
}


def slowest_first(plans: list[Plan]) -> list[Plan]:
    return sorted(plans, key=time_s, reverse=True)


def same_time(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-8 * other


@pytest.fixture(params=QUESTIONS, scope="module")
def case(request: pytest.FixtureRequest) -> tuple[Request, Answer]:
    question = QUESTIONS[request.param]
    return question, answer(question)


def test_no_candidate_is_faster_than_the_plan_and_no_other_layout_than_the_runners_up(case: tuple[Request, Answer]):
    request, truth = case
    found = search(request, num_plans=4)
    by_layout = {replace(plan.candidate, recompute=(Recompute(),)): plan for plan in slowest_first(truth.fitting)}
    best = sorted(by_layout.values(), key=time_s)[:4]
    assert len(found.plans) == len(best)
    assert all(same_time(time_s(one), time_s(other)) for one, other in zip(found.plans, best, strict=True))
    assert {plan.candidate for plan in found.plans} <= {plan.candidate for plan in truth.fitting}


def test_the_certificate_counts_what_one_by_one_judgement_counts(case: tuple[Request, Answer]):
    request, truth = case
    certificate = search(request).certificate
    assert certificate.num_layouts == truth.num_layouts
    assert {refusal.rule_id: refusal.num_layouts for refusal in certificate.refusals} == truth.refused
    assert certificate.num_candidates == len(truth.plans)
    assert certificate.num_fitting == len(truth.fitting)


def test_the_nearest_miss_is_the_legal_plan_of_least_memory(case: tuple[Request, Answer]):
    request, truth = case
    miss = search(request).nearest_miss
    if truth.fitting or not truth.plans:
        assert miss is None
    else:
        assert miss
        assert peak(miss) == min(map(peak, truth.plans))


def test_found_plans_pass_verify_and_give_themselves_again(case: tuple[Request, Answer]):
    request, _ = case
    for plan in search(request, num_plans=6).plans:
        assert verify(plan) == ()
        assert dump(plan_at(request, plan.candidate)) == dump(tabled(plan))


def test_ties_go_to_less_memory_and_then_to_smaller_axes():
    request = ask("tiny-llama")
    found = search(request, num_plans=100).plans
    keys = [(float(f"{time_s(plan):.9g}"), peak(plan)) for plan in found]
    assert keys == sorted(keys)
    assert [dump(plan) for plan in search(request, num_plans=100).plans] == [dump(plan) for plan in found]


def rule(**changes) -> Rule:
    values = {"id": "mine", "subject": "tp", "message": lambda c: f"tp={c.tp}: no", "source": "this test"}
    return Rule(**{**values, **changes})


def test_a_users_own_rule_is_respected():
    request = ask("tiny-llama", pins="tp=2")
    assert search(request).plans
    own = replace(request, extra_rules=(rule(allows=lambda c: c.tp != 2),))
    found = search(own)
    assert found.plans == ()
    assert [(one.rule_id, one.num_layouts) for one in found.certificate.refusals] == [
        ("mine", found.certificate.num_layouts)
    ]


@pytest.mark.parametrize("subject", ["recompute", "everything that I know"])
def test_a_users_rule_may_judge_what_is_recomputed(subject: str):
    def allows(columns):
        return columns.recompute == "full"

    request = replace(ask("tiny-llama"), extra_rules=(rule(subject=subject, allows=allows),))
    found = search(request, num_plans=3)
    assert [str(plan.stages[0].recompute) for plan in found.plans] == ["full"] * 3
    assert found.certificate.num_candidates == found.certificate.num_legal_layouts


def test_both_engines_are_searched_when_any_may_run_the_plan():
    one = ask("llama3-8b", "trn2.48xlarge")
    both = search(replace(one, engines=("nxd", "torch")), num_plans=8)
    apart = [search(replace(one, engines=(engine,)), num_plans=8) for engine in ("nxd", "torch")]
    times = sorted(time_s(plan) for found in apart for plan in found.plans)[:8]
    assert [time_s(plan) for plan in both.plans] == times
    assert both.certificate.num_candidates == sum(found.certificate.num_candidates for found in apart)
    ids = [refusal.rule_id for refusal in both.certificate.refusals]
    assert len(ids) == len(set(ids))
    for plan in both.plans:
        again = plan_at(replace(one, engines=("nxd", "torch")), plan.candidate)
        assert dump(again) == dump(tabled(plan))


@pytest.mark.parametrize(
    "request_",
    [
        ask("mixtral-8x7b", "a100-80", 4, global_batch=128, pins="mbs=1"),
        ask("mixtral-8x7b", "h100-80", 8, global_batch=32, seq_len=32768),
        ask("llama3-70b", "a100-80", 2, global_batch=128),
        ask("qwen3-8b", "trn1.32xlarge", 2),
    ],
    ids=["experts", "long experts", "copies of keys", "norms of heads"],
)
def test_the_best_plan_does_not_depend_on_how_many_are_shown_and_costs_what_its_table_says(request_: Request):
    (alone,), several = search(request_).plans, search(request_, num_plans=8).plans
    assert alone == several[0]
    assert predicted(replace(alone, prediction=None)) == alone
    for plan in several:
        again = plan_at(request_, plan.candidate)
        assert time_s(again) == time_s(plan) and peak(again) == peak(plan)
