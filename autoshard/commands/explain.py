"""``autoshard explain``: where the time and memory of a plan go."""

from collections.abc import Sequence
from pathlib import Path

from autoshard.blocks.explain import explain as explained
from autoshard.command_line.options import DEFAULT_PLAN
from autoshard.commands.output import print_answer, print_refused, write_text
from autoshard.commands.writing.places import TRACE, place_checks
from autoshard.cost.built_in import calibration_of
from autoshard.cost.calibration import load_calibration
from autoshard.cost.predict import check_plan
from autoshard.cost.timeline import rank_times, timeline_of
from autoshard.errors import inside, require
from autoshard.plan.codec import load
from autoshard.plan.module_plan import is_module_plan, load_module_plan
from autoshard.report.comparison import why_not_sheets
from autoshard.report.explanation import explanation_sheets
from autoshard.report.module_sheets import module_sheets
from autoshard.report.sheet import Node
from autoshard.report.structured import explanation_json, why_not_json
from autoshard.report.traces.measured import measured_steps
from autoshard.report.traces.predicted import trace_text
from autoshard.search.ask.what_if import alternatives, why_not as compared
from autoshard.spec.recipe import Pins
from autoshard.spec.record import encode


def explain(
    plan: Path = DEFAULT_PLAN,
    why_not: Pins | None = None,
    calibration: Path | None = None,
    trace: Path | None = None,
    run: Path | None = None,
    verbose: bool = False,
    json: bool = False,
) -> int:
    """Show where the time and memory of a plan go, what limits it, and the next best plans; every operation with -v.

    Args:
        plan: The plan file.
        why_not: Compare with the best plan of another layout, e.g. tp=8,pp=16, or with an answer by its name, e.g.
            fsdp, and say what would make it better. The exit code is 1 if no plan of that layout may run.
        calibration: A calibration file, made by `autoshard calibrate`. Default: the constants in the plan.
        trace: Also write the predicted step to this file, as a timeline for https://ui.perfetto.dev (at most 20 MB).
        run: The folder of a run of the plan: the trace holds its measured step, and the passes of the steps that it
            recorded with --profile.
        verbose: Also show memory in parts, every operation with its layout and what it sends, and what was refused.
        json: Print one JSON object instead of tables.
    """
    require((run is None or trace is not None, "--run", "is what --trace draws beside the prediction. Type both"))
    if trace:
        is_plan = trace.exists() and plan.exists() and trace.samefile(plan)
        require((not is_plan, f"--trace {trace}", "is the plan itself"), *place_checks(trace, "--trace", TRACE))
    if is_module_plan(plan):
        options = {"--why-not": why_not, "--calibration": calibration, "--trace": trace, "--run": run}
        return _explain_module(plan, [name for name, value in options.items() if value is not None], json=json)
    constants = calibration and load_calibration(calibration)
    read = check_plan(load(plan), constants, place=plan)
    misfits = [reason for reason in read.rejections if reason.rule_id != "memory"]
    if misfits:
        return print_refused(misfits, json=json)
    if trace:
        measured = measured_steps(run, read.plan) if run else None
        with inside("--trace"):
            text = trace_text(read.plan, timeline_of(read.plan), measured=measured)
        write_text(text, trace, "--trace")
    pricing = constants or calibration_of(read.plan)
    code, notes = 0, [read.remark] if read.remark and not constants else []
    if why_not is None:
        parts = read.plan, explained(read.plan), alternatives(read.plan, pricing), rank_times(read.plan)
        print_answer(explanation_json(*parts, notes) if json else explanation_sheets(*parts, whole=verbose))
    else:
        answer = compared(read.plan, why_not, pricing)
        figures = why_not_json(read.plan, answer, notes)
        print_answer(figures if json else why_not_sheets(read.plan, answer, Node(figures)))
        code = 0 if answer.fits else 1
    for note in [] if json else notes:
        print(f"\nnote: {note}")
    if trace and not json:
        print(f"wrote {trace}; open it at https://ui.perfetto.dev")
    return code


def _explain_module(plan: Path, stated: Sequence[str], *, json: bool) -> int:
    """Show the plan of a module, for which the options that were stated are not."""
    require(*((False, name, f"is not for the plan of a module, as {plan} is") for name in stated))
    figures = encode(load_module_plan(plan))
    print_answer(figures if json else module_sheets(Node(figures)))
    return 0
