"""``autoshard explain``: where a plan's time goes."""

from pathlib import Path
from typing import TYPE_CHECKING

from autoshard.commands.output import constants_in, place_checks, print_json, write_text
from autoshard.errors import InputError, require

if TYPE_CHECKING:
    from autoshard.plan.plan import Plan


def explain(plan: Path, calibration: Path | None = None, trace: Path | None = None, json: bool = False) -> int:
    """Show every operation of a plan: its layout, its time, what is sent over which link, and its second-best cut.

    Args:
        plan: The plan file.
        calibration: A calibration file, made by `autoshard calibrate`. Default: the constants that the plan carries.
        trace: Also write the predicted step as a timeline for https://ui.perfetto.dev to this file, at most 20 MB.
        json: Print one JSON object instead of tables.
    """
    from autoshard.plan.codec import load
    from autoshard.report.explained import explanation_report
    from autoshard.report.structured import explanation_json
    from autoshard.report.terminal import make_console, rejections_report
    from autoshard.search.explain import explain as explained
    from autoshard.search.judged import judged

    if trace:
        is_plan = trace.exists() and plan.exists() and trace.samefile(plan)
        require((not is_plan, f"--trace {trace}", "is the plan itself"), *place_checks(trace, "--trace"))
    read = judged(load(plan), constants_in(calibration))
    misfits = tuple(reason for reason in read.rejections if reason.rule_id != "memory")
    if misfits:
        make_console().print(rejections_report(misfits))
        return 1
    found = explained(read.plan)
    if trace:
        _write_trace(read.plan, trace)
    if json:
        print_json(explanation_json(read.plan, found))
    else:
        make_console().print(explanation_report(read.plan, found))
        if trace:
            print(f"wrote {trace}; open it at https://ui.perfetto.dev")
    return 0


def _write_trace(plan: "Plan", out: Path) -> None:
    from autoshard.cost.trace import trace
    from autoshard.report.trace import trace_text

    try:
        found = trace(plan)
    except InputError as error:
        raise error.under("--trace") from None
    write_text(trace_text(plan, found), out, "--trace")
