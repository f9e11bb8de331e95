"""Why a plan is not another: the Rule or the bytes that forbid it, or what it loses, and what would turn the order."""

from collections.abc import Sequence

from autoshard.cost.calibration import Calibration
from autoshard.errors import InputError
from autoshard.plan.candidate import parse_pins, pins_text
from autoshard.plan.explanation import Flip, WhyNot
from autoshard.plan.plan import Plan
from autoshard.search.contest import outer_pins, pinned, request_of_plan
from autoshard.search.flips import Contest
from autoshard.search.planner import search
from autoshard.search.remedy import fixed_faults, why_none


def why_not(plan: Plan, text: str, calibration: Calibration) -> WhyNot:
    """Look for the best plan with these keys, and hold it against another plan of the same question."""
    try:
        pins = parse_pins(text)
    except InputError as error:
        raise error.under("--why-not") from None
    if not pins:
        raise InputError.of("--why-not", "names nothing; write key=value, for example tp=8,pp=16")
    asked = pinned(request_of_plan(plan, calibration), pins)
    found = search(asked)
    other = found.plans[0] if found.plans else found.nearest_miss
    against: Sequence[str] = ()
    if not found.plans:
        faults = fixed_faults(asked) if other is None else ()
        against = [str(fault) for fault in faults] or [why_none(asked, found)]
    flips: list[Flip] = []
    unmoved: list[str] = []
    if other is not None and other.candidate != plan.candidate:
        contest = Contest(
            request=request_of_plan(plan, calibration),
            own=outer_pins(plan.candidate, {}),
            other=outer_pins(other.candidate, {key: pins[key] for key in ("stages", "recompute") if key in pins}),
        )
        for one in contest.flips(plan.candidate, other.candidate):
            if isinstance(one, Flip):
                flips.append(one)
            else:
                unmoved.append(one)
    return WhyNot(
        asked=pins_text(pins),
        other=other,
        fits=bool(found.plans),
        against=tuple(against),
        flips=tuple(flips),
        unmoved=tuple(unmoved),
    )
