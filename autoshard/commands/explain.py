"""``autoshard explain``: where a plan's time goes."""

from pathlib import Path
from typing import TYPE_CHECKING

from autoshard.commands.output import constants_in, place_checks, print_json, write_text
from autoshard.errors import InputError, require

if TYPE_CHECKING:
    from autoshard.cost.calibration import Calibration
    from autoshard.plan.plan import Plan


def explain(
    plan: Path,
    why_not: str | None = None,
    calibration: Path | None = None,
    trace: Path | None = None,
    json: bool = False,
) -> int:
    """Show where each second and byte of a plan goes, what limits it, every operation, and the next best plans.

    Args:
        plan: The plan file.
        why_not: Hold it against another layout instead, e.g. tp=8,pp=16, and say what would turn the order.
        calibration: A calibration file, made by `autoshard calibrate`. Default: the constants that the plan carries.
        trace: Also write the predicted step as a timeline for https://ui.perfetto.dev to this file, at most 20 MB.
        json: Print one JSON object instead of tables.
    """
    from autoshard.cost.checked import check_plan
    from autoshard.cost.provenance import calibration_of
    from autoshard.plan.codec import load
    from autoshard.report.terminal import make_console, rejections_report

    if trace:
        is_plan = trace.exists() and plan.exists() and trace.samefile(plan)
        require((not is_plan, f"--trace {trace}", "is the plan itself"), *place_checks(trace, "--trace"))
    constants = constants_in(calibration)
    read = check_plan(load(plan), constants)
    misfits = tuple(reason for reason in read.rejections if reason.rule_id != "memory")
    if misfits:
        make_console().print(rejections_report(misfits))
        return 1
    if trace:
        _write_trace(read.plan, trace)
    known = constants or calibration_of(read.plan)
    if why_not is None:
        _say_all(read.plan, known, json)
    else:
        _say_why_not(read.plan, why_not, known, json)
    if trace and not json:
        print(f"wrote {trace}; open it at https://ui.perfetto.dev")
    return 0


def _say_all(plan: "Plan", constants: "Calibration", json: bool) -> None:
    from autoshard.report.explained import explanation_report
    from autoshard.report.structured import explanation_json
    from autoshard.report.terminal import make_console
    from autoshard.search.explain import explain as explained
    from autoshard.search.what_if import alternatives

    found, beside = explained(plan), alternatives(plan, constants)
    if json:
        print_json(explanation_json(plan, found, beside))
    else:
        make_console().print(explanation_report(plan, found, beside))


def _say_why_not(plan: "Plan", text: str, constants: "Calibration", json: bool) -> None:
    from autoshard.report.structured import why_not_json
    from autoshard.report.terminal import make_console
    from autoshard.report.why_not import why_not_report
    from autoshard.search.what_if import why_not

    found = why_not(plan, text, constants)
    if json:
        print_json(why_not_json(plan, found))
    else:
        make_console().print(why_not_report(plan, found))


def _write_trace(plan: "Plan", out: Path) -> None:
    from autoshard.cost.trace import trace
    from autoshard.report.trace import trace_text

    try:
        found = trace(plan)
    except InputError as error:
        raise error.under("--trace") from None
    write_text(trace_text(plan, found), out, "--trace")
