"""Which layout to try after some runs of a program: a search under the constants of its rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoshard.calibration.advice import run_of_plan
from autoshard.calibration.calibrate import TimedRows
from autoshard.calibration.fitting import Sample
from autoshard.calibration.measured_run import MeasuredRun
from autoshard.calibration.next_layout import KnownRows, LayoutToTry, MeasuredBest, known_rows, next_layout
from autoshard.imports.answer import runs_in
from autoshard.imports.logs.row import LoggedRun
from autoshard.imports.table import OtherProgram
from autoshard.plan.plan import Plan
from autoshard.search.ask.no_plan import why_none
from autoshard.search.ask.planner import SearchResult
from autoshard.search.bound.request import Request

OPTIONS = (
    16  # layouts of which the next one to try is chosen: of more, the last are far slower than any error of the first
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NextAnswer:
    """The fastest measured layout of a question, and the one to try next; ``why_none`` says why there is none."""

    program: OtherProgram
    known: KnownRows
    best: MeasuredBest
    to_try: LayoutToTry | None = None
    plan: Plan | None = None  # of the layout to try
    why_none: str = ""


def next_answer(
    logged: Sequence[LoggedRun], rows: TimedRows | None, search: Callable[[Request], SearchResult]
) -> NextAnswer:
    """Search under the constants of the rows of a program, and name the next layout for the question of the last log.

    Rows are those of logs, and of a file in which these lie already.
    """
    last = logged[-1]
    question, known = last.question, known_rows(_samples(logged, rows))
    best = known.best_of(last.run)
    assert best, "the row of the last log is of its question"
    answer = NextAnswer(program=question.run.program, known=known, best=best)
    rules = (*question.request.extra_rules, runs_in(question.run.program))
    constants = question.request.calibration or known.constants
    request = replace(question.request, engines=(question.engine,), extra_rules=rules, calibration=constants)
    result = search(request)
    if not result.plans:
        stopped = result.certificate.stopped
        why = f"the search was not finished ({stopped}); give it more time" if stopped else why_none(request, result)
        return replace(answer, why_none=why)
    plans = {run_of_plan(plan): plan for plan in result.plans}
    to_try = next_layout(known, [*plans], best)
    if to_try is None:
        return replace(answer, why_none="the best layouts under these constants are all measured")
    return replace(answer, to_try=to_try, plan=plans[to_try.run])


def _samples(logged: Sequence[LoggedRun], rows: TimedRows | None) -> list[Sample]:
    """Return the rows of the program of the last log on its chips."""
    run = logged[-1].run
    samples = {
        entry.row.id: Sample(id=entry.row.id, run=entry.run, step_time_s=entry.step.time_s, group=entry.row.group or "")
        for entry in logged
    }
    if rows is not None:
        samples = {sample.id: sample for sample in rows.samples} | samples
    program = _program_of(run)
    return [sample for sample in samples.values() if _program_of(sample.run) == program]


def _program_of(run: MeasuredRun) -> tuple[str, str, str | None]:
    return run.cluster.chip.name, run.kernels, run.framework
