"""The entries of a plan's provenance that its prediction rests on: the constants, and seconds of a user's own terms."""

import math
from collections.abc import Mapping, Sequence

from autoshard.cost.calibration import CONSTANTS, Calibration, built_in
from autoshard.cost.terms import PREFIX, CostTerm
from autoshard.errors import InputError
from autoshard.plan.plan import Plan
from autoshard.plan.rules.columns import Columns
from autoshard.spec import record

_NUMBERS = (*CONSTANTS, "interval")
_AXES = ("tp", "pp", "dp", "cp", "ep", "vp")
_WIDER, _WIDEST = 2, 0.95  # outside of what was measured errors are not known; this is a convention, not a fit


def interval_and_basis(calibration: Calibration, plan: Plan) -> tuple[float, str]:
    """Return the relative half-width of a plan's prediction, and what it rests on in words.

    The interval is wider where the plan has what no row of the fit has.
    """
    reach, beyond = calibration.reach, list[str]()
    if reach:
        beyond += [plan.cluster.name] if plan.cluster.name != reach.cluster else []
        beyond += [f"kernels {plan.kernels}"] if plan.kernels not in reach.kernels else []
        beyond += [axis for axis in _AXES if getattr(plan.candidate, axis) > 1 and axis not in reach.axes]
    if not beyond:
        return calibration.interval, calibration.basis
    words = f"extrapolated to {', '.join(beyond)}, which none of these rows has, so the interval is twice as wide"
    return min(_WIDEST, _WIDER * calibration.interval), f"{calibration.basis}; {words}"


def calibration_entries(calibration: Calibration) -> Mapping[str, str]:
    """Return the entries from which ``calibration_of`` reads the same constants."""
    numbers = ",".join(f"{name}={getattr(calibration, name)!r}" for name in _NUMBERS)
    reach = {"calibration.reach": str(calibration.reach)} if calibration.reach else {}
    return {
        "calibration": calibration.name,
        "calibration.basis": calibration.basis,
        "calibration.constants": numbers,
        **reach,
    }


def calibration_of(plan: Plan) -> Calibration:
    """Return the constants that a plan carries; where it carries none, those of its cluster."""
    entries = plan.provenance
    if "calibration.constants" not in entries:
        return built_in(plan.cluster.name)
    try:
        fields = {
            "name": entries.get("calibration", ""),
            "basis": entries.get("calibration.basis", ""),
            "reach": entries.get("calibration.reach"),
            "sources": dict.fromkeys(_NUMBERS, "the plan's provenance"),
            **_numbers(entries["calibration.constants"]),
        }
        return record.decode(Calibration, fields)
    except InputError as error:
        raise error.under("provenance.calibration") from None


def _numbers(text: str) -> Mapping[str, float | str]:
    """Read ``name=value,...`` with every number once; what is no number stays text, which no record takes."""
    pairs = [part.partition("=") for part in text.split(",")]
    if sorted(name for name, _, _ in pairs) != sorted(_NUMBERS):
        raise InputError.of("constants", f"must be NAME=NUMBER,... for each of {', '.join(_NUMBERS)}")
    return {name: value if math.isnan(_number(value)) else _number(value) for name, _, value in pairs}


def term_entries(terms: Sequence[CostTerm], columns: Columns) -> Mapping[str, str]:
    """Return the entries of a user's own terms: the seconds of the plan's own outer point, and their source."""
    return {term.part: f"{float(term.of(columns))!r} s, {term.source}" for term in terms}


def term_seconds(provenance: Mapping[str, str]) -> Mapping[str, float]:
    """Return the seconds of the terms that a plan states.

    >>> term_seconds({"model": "a card", "cost.stall": "0.25 s, my own runs"})
    {'cost.stall': 0.25}
    """
    found: dict[str, float] = {}
    for key, entry in provenance.items():
        if key.startswith(PREFIX):
            number, unit, _ = entry.partition(" s, ")
            found[key] = _number(number)
            if not unit or not 0 <= found[key] < math.inf:
                message = f"must be SECONDS s, SOURCE with at least 0 seconds, not {entry!r}"
                raise InputError.of(f"provenance.{key}", message)
    return found


def _number(text: str) -> float:
    """Read a number; what is none is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
