"""``autoshard compare``: in what two plans differ, and which is faster."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autoshard.commands.output import print_json
from autoshard.errors import CheckFailed, Fault, InputError

if TYPE_CHECKING:
    from autoshard.cost.checked import CheckedPlan

_PERCENT = re.compile(r"\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*%\s*")


def compare(a: Path, b: Path, fail_if_slower: str | None = None, json: bool = False) -> int:
    """Say which of two plans is predicted to be faster and why: in a sentence, then part by part.

    Args:
        a: The plan file to compare with.
        b: The plan file that is called faster or slower.
        fail_if_slower: Exit with code 1 if b takes longer for a token than a by more than this, e.g. 2%.
        json: Print one JSON object instead of tables.
    """
    from autoshard.plan.diff import diff
    from autoshard.report.comparison import comparison_report
    from autoshard.report.structured import comparison_json
    from autoshard.report.terminal import make_console

    paths = a, b
    allowed, read = _read(paths, fail_if_slower)
    if _say_refused(paths, read, json):
        return 1
    difference = diff(*(one.plan for one in read))
    remarks = [f"{path}: {one.remark}" for path, one in zip(paths, read, strict=True) if one.remark]
    if json:
        print_json(comparison_json(difference, remarks))
    else:
        make_console().print(comparison_report(difference, (str(a), str(b)), remarks))
    if allowed is not None and difference.slower_by > allowed:
        slower, most = (f"{100 * share:.4g}%" for share in (difference.slower_by, allowed))
        per = "" if difference.same_tokens else " per token"
        raise CheckFailed(f"{b} is predicted {slower} slower{per} than {a}; --fail-if-slower allows {most}")
    return 0


def _read(paths: Sequence[Path], fail_if_slower: str | None) -> "tuple[float | None, list[CheckedPlan]]":
    """Read everything that was given, and name all faults of all of it."""
    from autoshard.cost.checked import check_plan
    from autoshard.plan.codec import load

    faults: dict[Fault, None] = {}
    allowed: float | None = None
    read: list[CheckedPlan] = []
    try:
        allowed = None if fail_if_slower is None else _share(fail_if_slower)
    except InputError as error:
        faults |= dict.fromkeys(error.faults)
    for path in paths:
        prefix = ""  # faults of reading name the file, those of judging do not
        try:
            plan = load(path)
            prefix = f"{path}: "
            read.append(check_plan(plan))
        except InputError as error:
            faults |= {Fault(where=f"{prefix}{fault.where}", message=fault.message): None for fault in error.faults}
    if faults:
        raise InputError(faults)
    return allowed, read


def _share(text: str) -> float:
    """Read a percentage; a bare number might be either, so it is refused.

    >>> _share("2%"), _share("0.5 %")
    (0.02, 0.005)
    """
    match = _PERCENT.fullmatch(text)
    if match is None:
        message = "must not be negative" if text.strip().startswith("-") else f"{text!r} is not a percentage"
        raise InputError.of("--fail-if-slower", f"{message}. Write it like 2%")
    return round(float(match[1]) / 100, 9)


def _say_refused(paths: Sequence[Path], read: "Sequence[CheckedPlan]", json: bool) -> bool:
    """Print why plans may not run, if any may not; too little memory is no reason not to compare."""
    from autoshard.report.structured import rejection_json
    from autoshard.report.terminal import make_console, rejections_report

    refused = [tuple(reason for reason in one.rejections if reason.rule_id != "memory") for one in read]
    if json and any(refused):
        reasons = ([rejection_json(reason) for reason in against] for against in refused)
        print_json({"rejections": dict(zip(("a", "b"), reasons, strict=True))})
    elif any(refused):
        for path, against in zip(paths, refused, strict=True):
            if against:
                print(f"{path} may not run, so there is nothing to compare:")
                make_console().print(rejections_report(against))
    return any(refused)
