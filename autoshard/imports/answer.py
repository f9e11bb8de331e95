"""What is said of an imported configuration: its prediction, what cannot run, and the best plan beside it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from autoshard.cost.doubt import ratio_of
from autoshard.errors import InputError
from autoshard.imports.imported import ImportedRun
from autoshard.imports.question import Assumed, ImportedQuestion, ImportOptions, imported_question
from autoshard.imports.table import OtherProgram
from autoshard.plan.explanation import Ratio
from autoshard.plan.plan import Plan
from autoshard.plan.rules.columns import Columns
from autoshard.plan.rules.rule import Rejection, Rule, Verdict, one_of, rule
from autoshard.plan.verify import verify as reasons_against
from autoshard.search.ask.no_plan import why_none
from autoshard.search.ask.planner import SearchResult
from autoshard.search.bound.request import Request, rejections_of

_MOST_DOUBLINGS = 7  # of nodes, until a layout fits
_LAYOUT = ("tp", "pp", "cp", "ep", "vp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportAnswer:
    """One configuration, answered; ``plan`` is None where the layout has no shape, ``best`` where nothing fits."""

    question: ImportedQuestion
    plan: Plan | None
    refused: tuple[Rejection, ...]
    shapeless: str
    best: Plan | None
    ratio: Ratio | None  # of the best plan against the imported one
    why_no_best: str

    @property
    def runs(self) -> bool:
        """Whether nothing speaks against the configuration as it is, so that it can be kept as a plan."""
        return self.plan is not None and not self.refused


def fitting_question(run: ImportedRun, options: ImportOptions, nodes: int | None = None) -> ImportedQuestion:
    """Return the question of a configuration; nodes that it leaves open are doubled until the layout fits."""
    first = imported_question(run, options, nodes)
    if not first.opens_nodes:
        return first
    question, count = first, first.request.cluster.num_nodes
    for doubling in range(_MOST_DOUBLINGS):
        fits = _fits(question)
        if fits is None:  # more nodes cannot share the batch
            return first
        if fits:
            return question
        more = count << (doubling + 1)
        why = "the file names no number of nodes; with half as many the layout does not fit in memory"
        question = imported_question(run, options, more, Assumed(what=f"{more} nodes", why=why, option="--nodes"))
    return question if _fits(question) else first


def _fits(question: ImportedQuestion) -> bool | None:
    """Say whether the layout of a question fits in memory; None if it has no shape."""
    request = question.request
    try:
        plan = request.plan(question.candidate, question.engine, tables=False)
    except InputError:  # it has no shape, on more nodes neither
        return None
    return plan.prediction is None or plan.prediction.peak_bytes <= request.capacity_bytes(plan.kernels)


def answered(question: ImportedQuestion, search: Callable[[Request], SearchResult] | None) -> ImportAnswer:
    """Price a configuration as it stands, and search for the best plan that its program can run."""
    request, candidate, engine = question.request, question.candidate, question.engine
    refused = rejections_of(request, candidate, engine)
    plan, shapeless = None, ""
    try:
        plan = request.plan(candidate, engine)
        refused = reasons_against(plan)
    except InputError as error:
        if not refused:
            raise
        shapeless = str(error)
    best, why = _best(question, search) if search else (None, "")
    return ImportAnswer(
        question=question,
        plan=plan,
        refused=tuple(refused),
        shapeless=shapeless,
        best=best,
        ratio=ratio_of(best, plan) if best and plan and best.candidate != plan.candidate else None,
        why_no_best=why,
    )


def _best(question: ImportedQuestion, search: Callable[[Request], SearchResult]) -> tuple[Plan | None, str]:
    """Return the plan that would be written for the same question, of those that the program can run."""
    request = question.request
    rules = (*request.extra_rules, runs_in(question.run.program))
    result = search(replace(request, engines=(question.engine,), extra_rules=rules))
    if result.plans:
        return result.preferred, ""
    if result.certificate.stopped:
        return None, f"the search was not finished ({result.certificate.stopped}); give it more time"
    return None, why_none(request, result)


def runs_in(program: OtherProgram) -> Rule:
    """Return the Rule that a program refuses the axes, schedules and stages of ZeRO that it does not have."""
    limits, schedules = program.limits, tuple(program.limits.schedules)
    absent = tuple(axis for axis in _LAYOUT if axis not in limits.axes)

    @rule("tp,pp,cp,ep,vp,schedule,zero,cp_kind", source=program.source)
    def another_program(c: Columns) -> Verdict:
        allowed = one_of(c.schedule, schedules) & one_of(c.zero, limits.zero) & one_of(c.cp_kind, limits.cp_kinds)
        for axis in absent:
            allowed = allowed & (getattr(c, axis) == 1)
        yield allowed
        yield f"schedule={c.schedule},zero={c.zero}: {program.title} has no such layout"

    return another_program
