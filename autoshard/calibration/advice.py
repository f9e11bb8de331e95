"""Which short runs would change the choice of a plan most: the expected regret of today's choice, and after each run.

Regret is how much longer the chosen plan takes than the fastest of the plans that could be chosen. Nobody knows it, but
a belief about their step times says what to expect of it, and how far a measurement would lower it: after the
measurement another plan may be chosen (the knowledge gradient; Frazier, Powell and Dayanik 2008).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from autoshard.calibration.belief import Belief, belief_of, believed_seconds
from autoshard.calibration.fitting import Sample
from autoshard.calibration.measured_run import MeasuredRun
from autoshard.cost.calibration import Calibration
from autoshard.plan.plan import Plan, rounded

_NOTHING = 0.01  # of today's regret: a run that lowers it by less tells nothing
_MOST_PAIRED = 24  # runs that are tried two at a time: three hundred pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class BelievedPlan:
    """A plan that may be chosen, and what is believed of its step: the median, and what holds 80% of it."""

    plan: Plan
    step_s: float
    low_s: float
    high_s: float

    @classmethod
    def of(cls, plan: Plan, mean: float, variance: float) -> "BelievedPlan":
        """Return a plan with what is believed of the logarithm of its step."""
        low_s, step_s, high_s = believed_seconds(mean, variance)
        return cls(plan=plan, step_s=step_s, low_s=low_s, high_s=high_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A run to measure, and the expected regret after it and those before it, as a share of the step."""

    plan: Plan
    regret: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Today's choice with its expected regret, a share of its step, and the runs that lower it most, best first."""

    options: tuple[BelievedPlan, ...]  # as the planner ranks them
    choice: BelievedPlan
    regret: float
    num_rows: int
    num_runs: int  # that could have been proposed
    proposals: tuple[Proposal, ...]

    def usd_per_billion_tokens(self, regret: float) -> float | None:
        """Return what a regret costs; None where no price is known."""
        dollars, prediction = self.choice.plan.dollars, self.choice.plan.prediction
        assert prediction, "an option is predicted"
        believed = self.choice.step_s / prediction.step_time_s
        return dollars.usd_per_billion_tokens * believed * regret if dollars else None


def advised(
    plans: Sequence[Plan], runs: Sequence[Plan], rows: Sequence[Sample], constants: Calibration, budget: int
) -> Advice:
    """Return which of some runs to measure, at most so many, to choose better among plans; rows are known already.

    Each next run is the one that lowers the regret most beside those before it; where none does, each next two are.
    """
    measured_runs = [sample.run for sample in rows]
    everything = [*measured_runs, *map(run_of_plan, plans), *map(run_of_plan, runs)]
    options = range(len(measured_runs), len(measured_runs) + len(plans))
    candidates = range(len(measured_runs) + len(plans), len(everything))
    prior = belief_of(everything, constants)
    mean = prior.mean.copy()
    mean[list(options)] = [math.log(_step_s(plan)) for plan in plans]  # with its own cuts and terms
    prior = replace(prior, mean=mean)
    belief = prior.given_robustly([sample.step_time_s for sample in rows]) if rows else prior
    believed = tuple(
        BelievedPlan.of(plan, belief.mean[number], belief.covariance[number, number])
        for plan, number in zip(plans, options, strict=True)
    )
    chosen, (today,) = list[int](), belief.regrets(options, [()])
    while more := _next_runs(
        belief, options, [candidate for candidate in candidates if candidate not in chosen], chosen, budget
    ):
        chosen += more
    after = belief.regrets(options, [chosen[:count] for count in range(1, len(chosen) + 1)])
    proposals = [
        Proposal(plan=runs[number - candidates.start], regret=rounded(1 - math.exp(-regret)))
        for number, regret in zip(chosen, after, strict=True)
    ]
    return Advice(
        options=believed,
        choice=min(believed, key=lambda option: option.step_s),
        regret=rounded(1 - math.exp(-today)),
        num_rows=len(rows),
        num_runs=len(runs),
        proposals=tuple(proposals),
    )


def _next_runs(
    belief: Belief, options: Sequence[int], candidates: Sequence[int], chosen: Sequence[int], budget: int
) -> list[int]:
    """Return the next run to measure, or the next two; none where the budget is spent, or nothing lowers the regret.

    Of one plan a measurement may say how fast all are, and only with that of another one which is faster.
    """
    if not candidates or len(chosen) >= budget:
        return []
    today, last, *alone = belief.regrets(options, [(), chosen, *((*chosen, candidate) for candidate in candidates)])
    order = [candidate for _, candidate in sorted(zip(alone, candidates, strict=True))]
    if last - min(alone) > _NOTHING * today:
        return order[:1]
    pairs = list(combinations(order[:_MOST_PAIRED], 2)) if len(chosen) + 2 <= budget else []
    after = belief.regrets(options, [(*chosen, *pair) for pair in pairs])
    if not pairs or last - min(after) <= 2 * _NOTHING * today:
        return []
    return [*pairs[after.index(min(after))]]


def run_of_plan(plan: Plan) -> MeasuredRun:
    """Return a plan as a run that somebody may measure."""
    return MeasuredRun(
        model=plan.model, cluster=plan.cluster, workload=plan.workload, candidate=plan.candidate, assumed={}
    )


def _step_s(plan: Plan) -> float:
    assert plan.prediction, "a plan of a search is predicted"
    return plan.prediction.step_time_s
