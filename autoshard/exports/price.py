"""A plan as another program will run it: the file, what is lost, and what that costs."""

from dataclasses import dataclass, replace

from autoshard.cost.built_in import calibration_of
from autoshard.cost.doubt import ratio_of
from autoshard.errors import Check, InputError
from autoshard.exports.limits import Expressed, expressed
from autoshard.exports.writing import text_of
from autoshard.imports.table import OtherProgram
from autoshard.plan.candidate import Candidate
from autoshard.plan.explanation import Ratio
from autoshard.plan.plan import Plan
from autoshard.plan.rules.rule import Rejection
from autoshard.plan.verify import verify as reasons_against
from autoshard.search.ask.what_if import request_of_plan
from autoshard.search.bound.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportAnswer:
    """A plan in the form of a program; both plans have the program's kernels, and None is one without a price."""

    program: OtherProgram
    text: str
    expressed: Expressed
    planned: Plan | None
    as_run: Plan | None
    unpriced: str  # why there is no price
    refused: tuple[Rejection, ...]  # of what the program will run
    ratio: Ratio | None  # as it is run, against as it was planned


def export_checks(plan: Plan, program: OtherProgram, of_plan: str, of_program: str) -> list[Check]:
    """Check that a program can train a plan's model where the plan runs; faults name the places of these two."""
    unsayable = ", ".join(program.limits.unsayable(plan.model))
    advice = "Plan for GPUs (--cluster h100)" if plan.engine == "nxd" else "Plan for Trainium (--cluster trn1)"
    of_code = f"{plan.model.name} was read off its code, and {program.title} knows models by name. Use autoshard run"
    if plan.model.traced is not None:  # no other model or machine would do
        return [(False, of_plan, of_code)]
    unknown = f"exports write no key of {program.title} for {unsayable} of {plan.model.name}. Choose another"
    elsewhere = f"{program.title} does not run on {plan.cluster.name}. {advice}"
    return [(not unsayable, of_plan, unknown), (plan.engine == program.engine, of_program, elsewhere)]


def exported(plan: Plan, program: OtherProgram) -> ExportAnswer:
    """Write a plan for a program, and price what it cannot express."""
    expression = expressed(plan, program)
    request = request_of_plan(plan, calibration_of(plan))
    if expression.planned.kernels != plan.candidate.kernels:
        request = replace(request, calibration=None)  # the constants of the plan are those of its own kernels
    work = expression.workload
    planned, unpriced = _priced(request, expression.planned, plan)
    as_run, why = _priced(replace(request, workload=work), expression.candidate, plan)
    same = expression.planned == expression.candidate and work == request.workload
    return ExportAnswer(
        program=program,
        text=text_of(program, plan, expression),
        expressed=expression,
        planned=planned,
        as_run=as_run,
        unpriced=why or unpriced,
        refused=tuple(reasons_against(as_run)) if as_run else (),
        ratio=ratio_of(as_run, planned) if as_run and planned and not same else None,
    )


def _priced(request: Request, candidate: Candidate, plan: Plan) -> tuple[Plan | None, str]:
    try:
        return request.plan(candidate, plan.engine), ""
    except InputError as error:
        return None, str(error)
