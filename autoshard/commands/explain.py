"""``autoshard explain``: where a plan's time goes."""

from pathlib import Path

from autoshard.commands.output import constants_in, print_json


def explain(plan: Path, calibration: Path | None = None, json: bool = False) -> int:
    """Show every operation of a plan: its layout, its time, what is sent over which link, and its second-best cut.

    Args:
        plan: The plan file.
        calibration: A calibration file, made by `autoshard calibrate`. Default: the constants that the plan carries.
        json: Print one JSON object instead of tables.
    """
    from autoshard.plan.codec import load
    from autoshard.report.explained import explanation_report
    from autoshard.report.structured import explanation_json
    from autoshard.report.terminal import make_console, rejections_report
    from autoshard.search.explain import explain as explained
    from autoshard.search.judged import judged

    read = judged(load(plan), constants_in(calibration))
    misfits = tuple(reason for reason in read.rejections if reason.rule_id != "memory")
    if misfits:
        make_console().print(rejections_report(misfits))
        return 1
    found = explained(read.plan)
    if json:
        print_json(explanation_json(read.plan, found))
    else:
        make_console().print(explanation_report(read.plan, found))
    return 0
