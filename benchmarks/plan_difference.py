"""One sentence on why a plan takes less time than another: the parts of the step, and what in the layouts makes them.

Everything is read off the two plans and their predictions, so that a sentence stays true when constants change.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoshard.plan.diff import Term, diff
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute, compress
from autoshard.report.words import TIME_WORDS, counted, share_words

LEAST = 0.05  # a difference that is not larger needs no sentence
_MOST_PARTS = 2  # that a sentence names for each direction
_SMALL = 0.2  # share of the difference; smaller parts are not named
_SELECTIVE = 0.1  # of a layer that selective recompute runs again, of kinds whose order is not told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cause:
    """A choice of a layout in words, and a number that grows with what it adds to a part of the step."""

    of: Callable[[Plan], str]
    size: Callable[[Plan], float]
    before: str = ""  # words that both plans have in common
    after: str = ""

    def words(self, ours: Plan, theirs: Plan) -> str:
        """Say what our plan has in the place of what theirs has."""
        return f"{self.before}{self.of(ours)} instead of {self.of(theirs)}{self.after}"


def _axis(name: str) -> _Cause:
    return _Cause(
        before=f"{name} ",
        of=lambda plan: str(getattr(plan.candidate, name)),
        size=lambda plan: getattr(plan.candidate, name),
    )


def _recompute(plan: Plan) -> str:
    kinds = dict.fromkeys(str(stage.recompute) for stage in plan.stages)
    if len(kinds) == 1:
        return next(iter(kinds))
    return compress(str(stage.recompute) for stage in plan.stages)


def _again(plan: Plan) -> float:
    """Return which share of its layers a plan computes again, roughly."""

    def share(kind: Recompute, layers: int) -> float:
        if kind.kind == "full":
            return min(1.0, kind.num_layers / layers) if kind.num_layers else 1.0
        return 0.0 if kind.kind == "none" else _SELECTIVE

    layers = sum(stage.num_layers for stage in plan.stages)
    return sum(share(stage.recompute, stage.num_layers) * stage.num_layers for stage in plan.stages) / layers


def _pipeline(plan: Plan) -> str:
    """Say how many micro-batches go through how many pipeline ranks, by which schedule."""
    if plan.candidate.pp == 1:
        return "no pipeline"
    count = counted(plan.schedule.num_micro_batches, "micro-batch", "es")
    chunks = f", {plan.candidate.vp} chunks each" if plan.candidate.vp > 1 else ""
    return f"{count} through {plan.candidate.pp} ranks by {plan.schedule.builder}{chunks}"


def _idle(plan: Plan) -> float:
    """Return the share of a step in which a rank of a pipeline waits, as by the formula of 1F1B with chunks."""
    split = 3 if plan.schedule.splits_backward else 1
    return (plan.candidate.pp - 1) / (plan.schedule.num_micro_batches * plan.candidate.vp * split)


def _replicas(plan: Plan) -> str:
    """Say what the ranks of all replicas divide, and how often they send it."""
    ranks = plan.candidate.dp * plan.candidate.cp
    if ranks == 1:
        return "a single replica"
    count = plan.schedule.num_micro_batches
    often = "once" if count == 1 else f"in each of {count} micro-batches"
    return f"ZeRO-{plan.candidate.zero} over {ranks} ranks{f', weights gathered {often}' * (plan.candidate.zero == 3)}"


def _gathered(plan: Plan) -> float:
    """Return what a rank sends of weights and gradients in a step, in units of all weights."""
    ranks = plan.candidate.dp * plan.candidate.cp
    rounds = 2 * plan.schedule.num_micro_batches if plan.candidate.zero == 3 else 1
    return (1 + rounds) * (1 - 1 / ranks) / (plan.candidate.tp * plan.candidate.pp)


def _cp(plan: Plan) -> str:
    if plan.candidate.cp == 1:
        return "no context parallelism"
    return f"cp {plan.candidate.cp} by " + ("rings" if plan.cp_kind == "ring" else "exchange of heads")


def _passes(plan: Plan) -> float:
    """Return how often a rank starts the kernels of a layer, which is what its hosts are busy with."""
    return plan.model.num_layers * plan.schedule.num_micro_batches / plan.candidate.pp


_NORMS = _Cause(
    of=lambda plan: "sequence parallelism" if plan.sp else "norms of whole sequences on every rank",
    size=lambda plan: float(not plan.sp and plan.candidate.tp > 1),
)
_RECOMPUTE = _Cause(before="recompute ", of=_recompute, size=_again)
_PIPELINE = _Cause(of=_pipeline, size=_idle)
_REPLICAS = _Cause(of=_replicas, size=_gathered)
_EXPERTS = _Cause(
    before="ep ", of=lambda plan: str(plan.candidate.ep), size=lambda plan: plan.candidate.ep,
    after="; under ep the ranks of the busiest experts take longest",
)  # fmt: skip
_CAUSES: Mapping[str, Sequence[_Cause]] = {  # of a part of the step, the most important first
    "compute": (_EXPERTS, _RECOMPUTE, _NORMS, _axis("tp"), _axis("cp")),
    "waiting": (
        _Cause(of=lambda plan: f"{_passes(plan):,.0f}", size=_passes, after=" passes of a layer on a rank"),
        _RECOMPUTE, _axis("tp"), _axis("cp"),
    ),
    "tp": (_axis("tp"), _RECOMPUTE),
    "cp": (_Cause(of=_cp, size=lambda plan: plan.candidate.cp), _RECOMPUTE),
    "ep": (_axis("ep"), _axis("tp")),
    "pp": (_Cause(of=_pipeline, size=lambda plan: plan.candidate.pp * plan.candidate.vp),),
    "bubble": (_PIPELINE,),
    "dp": (_REPLICAS,),
    "update": (_Cause(of=_replicas, size=lambda plan: 1 / (plan.candidate.dp * plan.candidate.cp)),),
}  # fmt: skip


def sentence(ours: Plan, theirs: Plan) -> str:
    """Say which parts of a step make the difference between two plans of a question; "" where it is small.

    Parts that make the difference come first, then those that lessen it.
    """
    found = diff(theirs, ours)
    if abs(found.slower_by) <= LEAST:
        return ""
    total = found.time.total.difference
    large = [part for part in found.time.parts if abs(part.difference) > _SMALL * abs(total)]
    causes = [part for part in large if part.difference * total > 0][:_MOST_PARTS]
    against = [part for part in large if part.difference * total < 0][:_MOST_PARTS]
    side = "less" if total < 0 else "more"
    because = "; ".join(_because(part, ours, theirs) for part in causes)
    but = "; ".join(_because(part, ours, theirs) for part in against)
    return (
        f"{share_words(found.slower_by)} {side} time than the vendor's layout: {because}{f'; but {but}' * bool(but)}."
    )


def _because(part: Term, ours: Plan, theirs: Plan) -> str:
    """Say how much a part takes less or more, and the first choice that changes it in this direction."""
    side = "less" if part.difference < 0 else "more"
    words = f"{abs(part.difference):.3g} s {side} of {TIME_WORDS.get(part.name, part.name)}"
    for cause in _CAUSES.get(part.name, ()):
        if (cause.size(ours) - cause.size(theirs)) * part.difference > 0 and cause.of(ours) != cause.of(theirs):
            return f"{words} ({cause.words(ours, theirs)})"
    return words
