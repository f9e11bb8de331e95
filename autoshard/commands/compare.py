"""``autoshard compare``: which of two plans is faster, and where they differ."""

import re
from dataclasses import replace
from pathlib import Path

from autoshard.commands.output import print_answer
from autoshard.cost.doubt import compared
from autoshard.cost.predict import CheckedPlan, check_plan
from autoshard.errors import CheckFailed, Faults, InputError, inside
from autoshard.plan.codec import load
from autoshard.report.comparison import comparison_sheets
from autoshard.report.plan_sheets import rejections_sheet
from autoshard.report.sheet import Node
from autoshard.report.structured import comparison_json, rejection_json
from autoshard.spec.price import checked_prices, price_of_each, with_user_price


def compare(
    a: Path, b: Path, fail_if_slower: str | None = None, price: float | str | None = None, json: bool = False
) -> int:
    """Say which of two plans is predicted to be faster and why: first in a sentence, then part by part.

    Args:
        a: The plan file that is the reference.
        b: The plan file that is called faster or slower than a.
        fail_if_slower: Exit with code 1 if b needs this much more time per token than a, or more, e.g. 2%.
        price: What an hour costs you in dollars, of a node (21.5) or of a chip (2.5/chip); of two clusters one for
            each: 21.5,98.
        json: Print one JSON object instead of tables.
    """
    allowed, read = _read((a, b), fail_if_slower, price)
    # plans that do not fit in memory are compared as well
    refused = [tuple(reason for reason in checked.rejections if reason.rule_id != "memory") for checked in read]
    if any(refused):
        if json:
            reasons = ([rejection_json(reason) for reason in against] for against in refused)
            print_answer({"rejections": dict(zip(("a", "b"), reasons, strict=True))})
            return 1
        for path, against in zip((a, b), refused, strict=True):
            if against:
                print(f"{path} cannot run, so it is not compared:")
                print_answer([rejections_sheet(against)])
        return 1
    difference = compared(*(checked.plan for checked in read))
    remarks = [f"{path}: {checked.remark}" for path, checked in zip((a, b), read, strict=True) if checked.remark]
    figures = comparison_json(difference, remarks)
    print_answer(figures if json else comparison_sheets(difference, Node(figures), (str(a), str(b))))
    if allowed is not None and difference.slower_by > allowed:
        slower, most = (f"{100 * share:.4g}%" for share in (difference.slower_by, allowed))
        per = "" if difference.same_tokens else " per token"
        raise CheckFailed(f"{b} is predicted {slower} slower{per} than {a}; --fail-if-slower allows {most}")
    return 0


def _read(
    paths: tuple[Path, Path], fail_if_slower: str | None, price: float | str | None
) -> tuple[float | None, list[CheckedPlan]]:
    """Return the allowed share and both plans, at the user's price; all their faults are reported together."""
    faults, allowed, read = Faults(), None, list[CheckedPlan]()
    with faults.of():
        allowed = None if fail_if_slower is None else _share(fail_if_slower)
    for path in paths:
        with faults.of():
            read.append(check_plan(load(path), place=path))
    with faults.of(), inside("--price"):
        checked_prices(price)
    faults.refuse()
    prices = price_of_each(price, [checked.plan.cluster.name for checked in read], "plan")
    at_prices = zip(read, prices, strict=True)
    return allowed, [
        replace(checked, plan=replace(checked.plan, cluster=with_user_price(checked.plan.cluster, price_of_plan)))
        for checked, price_of_plan in at_prices
    ]


def _share(text: str) -> float:
    """Read a percentage. A number without % is refused, because 2 could mean 2% or 200%.

    >>> _share("2%"), _share("0.5 %")
    (0.02, 0.005)
    """
    match = re.fullmatch(r"\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*%\s*", text)
    if match is None:
        message = "must not be negative" if text.strip().startswith("-") else f"{text!r} is not a percentage"
        raise InputError.of("--fail-if-slower", f"{message}. Write it like 2%")
    return round(float(match[1]) / 100, 9)
