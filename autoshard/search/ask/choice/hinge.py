"""Whether a choice hinges on one number that nobody has measured for this question: the imbalance of experts."""

from collections.abc import Sequence
from dataclasses import replace

from autoshard.plan.build import mesh_of
from autoshard.search.ask.choice.choosing import fastest_of
from autoshard.search.ask.choice.looking import best_of_kind, rivals_of_kind, with_experts
from autoshard.search.ask.choice.searched import EngineResult
from autoshard.search.bound.points import Solution
from autoshard.spec.workload import EXPERT_IMBALANCE
from autoshard.units import format_seconds

_RIVALS = 8  # points that are solved; each of their plans is priced again


def experts_hinge(results: Sequence[EngineResult]) -> str:
    """Say whether another imbalance of experts turns the order of plans with and without expert parallelism; or "".

    The other imbalance is 0, as if routing were even, or the default where 0 is asked for. Plans are priced again as
    they are: under another imbalance other layers and recompute may be faster still.
    """
    request, fastest = results[0].request, fastest_of(results)
    if fastest is None or not request.model.num_experts or "ep" in request.pins:
        return ""
    now, apart = request.workload.expert_imbalance, not _shares_experts_out(fastest[1])
    changed, kind = (0.0 if now else EXPERT_IMBALANCE), with_experts(apart=apart)
    pools = [(result, result.pool) for result in results if result.pool]
    pairs = [(result, rival) for result, pool in pools for rival in rivals_of_kind(pool, kind, _RIVALS)]
    pairs = pairs or [(result, rival) for result, pool in pools if (rival := best_of_kind(pool, kind))]
    priced = [(_step_s(*pair, changed), pair[1]) for pair in pairs if _shares_experts_out(pair[1]) == apart]
    if not priced:
        return ""
    rival_s, rival = min(priced, key=lambda entry: (entry[0], entry[1].order))
    own_s = _step_s(*fastest, changed)
    if rival_s >= own_s:
        return ""
    return (
        f"the choice hinges on how evenly tokens reach experts, which is assumed: with --expert-imbalance {changed:g} "
        f"the fastest takes {format_seconds(own_s)}, and {kind.words} {rival.candidate} takes "
        f"{format_seconds(rival_s)} ({format_seconds(rival.value)} with {now:g})"
    )


def _shares_experts_out(solution: Solution) -> bool:
    """Say whether ranks hold different experts: those of ep, or those of tp or cp as the tables cut experts."""
    priced = solution.point.priced
    sizes = mesh_of(solution.candidate, priced.question.model, priced.question.cluster)
    cuts = (cuts for kind in priced.question.step.kinds for cuts in solution.cutting.block(kind).values())
    return any(sizes.size(atom) > 1 for of_op in cuts for atom in of_op.get("experts", ()))


def _step_s(result: EngineResult, solution: Solution, imbalance: float) -> float:
    """Return the step of a solution under another imbalance of experts."""
    request = replace(result.request, workload=replace(result.request.workload, expert_imbalance=imbalance))
    plan = request.plan(solution.candidate, result.engine, solution.cutting, tables=False)
    assert plan.prediction, "a plan of a request has its prediction"
    return plan.prediction.step_time_s
