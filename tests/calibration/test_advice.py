"""Which runs are advised: small ones that may run, and those after which the choice is better."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from autoshard.calibration.advice import Advice, advised, run_of_plan
from autoshard.calibration.belief import Belief
from autoshard.calibration.fitting import Sample
from autoshard.calibration.measured_run import MeasuredRun
from autoshard.calibration.proposals import proposed_runs, smaller
from autoshard.cost.calibration import Calibration
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.plan.verify import verify
from autoshard.search.ask.api import request_of
from autoshard.search.ask.planner import search
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.recipe import Pins, QuestionOptions

LLAMA = QuestionOptions(model="llama3-8b", cluster="trn1.32xlarge", fix=Pins("mbs=1"))


@cache
def local() -> tuple[Request, tuple[Plan, ...]]:
    """A question on 4 ranks of this machine, and its best plans."""
    request = request_of(QuestionOptions(model="tiny-llama", cluster="local"))
    return request, search(request, 6).plans


@cache
def on_nodes(count: int = 4) -> tuple[Request, tuple[Plan, ...]]:
    """A question for several nodes of trn1, and its best plans."""
    request = request_of(LLAMA, count)
    return request, search(request, 6).plans


def taking(plan: Plan, factor: float) -> Sample:
    """A plan that took so many times what was predicted."""
    assert plan.prediction
    seconds = plan.prediction.step_time_s * factor
    return Sample(id=str(plan.candidate), run=run_of_plan(plan), step_time_s=seconds)


def advice(plans: Sequence[Plan], rows: Sequence[Sample], budget: int = 3) -> Advice:
    return advised(plans, plans, rows, local()[0].constants, budget)


class TestAdvice:
    """On one node the plans themselves can be measured."""

    @pytest.mark.slow
    def test_each_run_lowers_the_regret_further_and_all_fit_the_budget(self) -> None:
        _, plans = local()
        rows = [taking(plans[0], 1.1)]
        found, more = advice(plans, rows, budget=2), advice(plans, rows, budget=4)
        regrets = [one.regret for one in more.proposals]
        assert len(found.proposals) == 2 and found.proposals == more.proposals[:2], (
            "each is the best beside those before"
        )
        assert regrets == sorted(regrets, reverse=True) and regrets[-1] > 0 and regrets[0] < more.regret < 1
        assert len({str(one.plan.candidate) for one in more.proposals}) == len(more.proposals) <= 4
        assert advice(plans, rows, budget=4) == more, "output repeats"

    @pytest.mark.slow
    def test_what_is_measured_already_is_not_proposed_and_the_best_of_it_is_chosen(self) -> None:
        _, plans = local()
        factors = [1.3, 1.2, 0.8, 1.1, 1.2, 1.3]
        before = advice(plans, [taking(plans[0], factors[0])])
        after = advice(
            plans, [taking(plan, factor) for plan, factor in zip(plans, factors, strict=True) for _ in range(9)]
        )
        assert after.choice.plan == plans[2] and after.choice is not after.options[0]
        assert after.regret < 0.01 * before.regret and not after.proposals
        expected = [taking(plan, factor).step_time_s for plan, factor in zip(plans, factors, strict=True)]
        assert [one.step_s for one in after.options] == pytest.approx(expected, rel=0.02)

    def test_what_a_plan_predicts_counts_and_its_median_decides_not_its_interval(self) -> None:
        _, plans = local()
        assert plans[0].prediction
        twice = {one: 2 * getattr(plans[0].prediction, one) for one in ("step_time_s", "low_s", "high_s")}
        parts = {name: 2 * seconds for name, seconds in plans[0].prediction.time_parts.items()}
        slow = replace(plans[0], prediction=replace(plans[0].prediction, **twice, time_parts=parts))
        assert advice([slow, plans[1]], []).options[0].step_s == pytest.approx(twice["step_time_s"])
        widths: list[float] = []
        for first, last in ((1.0, 1.0), (1.15, 1.0)):
            found = advice(plans[:4], [taking(plans[0], first), taking(plans[-1], last)])
            assert found.choice.step_s == min(one.step_s for one in found.options)
            widths.append(found.choice.high_s / found.choice.low_s)
        assert widths[0] < 1.1 < widths[1], "the one that was measured, then one that was not"

    def test_no_run_is_proposed_twice_however_noisy_runs_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.believing(monkeypatch, np.diag([0.1, 0.01]) ** 2, noise=0.1)
        _, plans = local()
        found = advised(plans[:2], plans[:1], [], local()[0].constants, 5)
        assert [one.plan for one in found.proposals] == [plans[0]]

    def test_two_runs_are_proposed_where_one_alone_tells_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """How fast all are is not known, so that only the difference of two runs tells which is faster."""
        self.believing(monkeypatch, 0.1**2 * np.eye(2) + 100.0, noise=0.01)
        request, plans = local()
        found, one = (advised(plans[:2], plans[:2], [], request.constants, budget) for budget in (2, 1))
        assert not one.proposals and [run.plan for run in found.proposals] == list(plans[:2])
        assert found.proposals[1].regret < 0.1 * found.regret

    def believing(self, monkeypatch: pytest.MonkeyPatch, covariance: np.ndarray, noise: float) -> None:
        """Put a belief in the place of that of two options; runs are the first of them."""

        def made(runs: Sequence[MeasuredRun], constants: Calibration) -> Belief:
            index = [0, 1, *range(len(runs) - 2)]
            return Belief(
                mean=np.zeros(len(runs)), covariance=covariance[np.ix_(index, index)], noise=np.full(len(runs), noise)
            )

        monkeypatch.setattr("autoshard.calibration.advice.belief_of", made)

    def test_with_one_plan_nothing_is_regretted(self) -> None:
        _, plans = local()
        found = advice(plans[:1], [taking(plans[0], 1.0)])
        assert (found.regret, found.proposals) == (0.0, ())

    @pytest.mark.slow
    def test_dollars_are_those_of_the_share_of_the_step(self) -> None:
        request, plans = on_nodes()
        found = advised(plans, [], [], request.constants, 1)
        dollars = found.choice.plan.dollars
        assert dollars and found.usd_per_billion_tokens(0.1) == pytest.approx(0.1 * dollars.usd_per_billion_tokens)
        assert local()[1][0].dollars is None and advice(local()[1], []).usd_per_billion_tokens(0.1) is None

    def test_a_factor_for_all_plans_says_nothing_about_the_choice(self) -> None:
        _, plans = local()
        slow, fast = (advice(plans, [taking(plans[0], factor)]) for factor in (0.5, 2.0))
        ratio = [two.step_s / one.step_s for one, two in zip(slow.options, fast.options, strict=True)]
        assert math.log(max(ratio) / min(ratio)) < 0.3 * math.log(4), "most of it is of the constants, which all share"


class TestProposedRuns:
    """A large plan, made so small that it runs on fewer nodes."""

    @pytest.mark.slow
    def test_runs_are_legal_and_fit_and_are_no_larger_than_allowed(self) -> None:
        request, plans = on_nodes()
        runs = proposed_runs(request, plans, 2)
        assert {run.cluster.num_nodes for run in runs} == {1, 2}
        for run in runs:
            assert run.prediction and not verify(run)
            assert run.prediction.peak_bytes <= request.capacity_bytes(run.kernels)
            assert run.candidate.num_ranks == run.cluster.num_ranks
            count = run.workload.global_batch / (run.candidate.dp * run.candidate.mbs)
            assert count == int(count) <= 8 * run.candidate.pp
        assert len({(run.candidate, run.model, run.cluster.num_nodes) for run in runs}) == len(runs)

    def test_what_decides_a_kernel_stays(self) -> None:
        _, plans = on_nodes()
        for plan in plans:
            layout, num_layers = smaller(plan, 32) or pytest.fail(f"{plan.candidate} has no small form")
            large = plan.candidate
            for key in ("tp", "cp", "ep", "mbs", "zero", "sp", "kernels", "cp_kind", "cp_order", "lnc"):
                assert getattr(layout, key) == getattr(large, key)
            assert layout.num_ranks == 32 and layout.dp <= large.dp and large.pp % layout.pp == 0
            assert num_layers % layout.num_stages == 0 or layout.pp == large.pp
            kinds = {one.kind for one in large.recompute}
            assert {one.kind for one in layout.recompute} <= kinds

    @pytest.mark.slow
    def test_a_plan_on_its_own_nodes_is_the_plan_with_fewer_micro_batches(self) -> None:
        request, plans = on_nodes(1)
        runs = proposed_runs(request, plans, 1)
        assert str(runs[0].candidate) == str(plans[0].candidate) and runs[0].model == plans[0].model

    def test_what_cannot_be_made_small_is_left_out(self) -> None:
        _, plans = on_nodes()
        (plan,) = plans[:1]
        assert smaller(plan, plan.candidate.tp // 2) is None
        experts = plan_at(request_of(QuestionOptions(model="tiny-mixtral", cluster="local")), Candidate(ep=2, dp=4))
        assert smaller(experts, 3) is None and (smaller(experts, 2) or pytest.fail("2 ranks hold ep=2"))[0].dp == 2
        model = replace(plan.model, hidden=64 * plan.model.hidden, ffn=64 * plan.model.ffn)
        assert not proposed_runs(request_of(LLAMA), [replace(plan, model=model)], 1), "it does not fit"
