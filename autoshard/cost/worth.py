"""What a plan's numbers are worth: the constants that it carries, and whether it lies beyond their fit."""

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.cost.calibration import CONSTANTS, Calibration, Reach, built_in
from autoshard.errors import Fault, InputError
from autoshard.plan.plan import Plan
from autoshard.spec import record

_NUMBERS = (*CONSTANTS, "interval")
_AXES = ("tp", "pp", "dp", "cp", "ep", "vp")
_WIDER, _WIDEST = 2, 0.95  # outside of what was measured errors are not known; this is a convention, not a fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """The relative half-width of a prediction, and what it rests on, in words."""

    interval: float
    basis: str


def worth(calibration: Calibration, plan: Plan) -> Worth:
    """Return the interval of a plan's prediction: wider where the plan has what no row of the fit has."""
    beyond = _beyond(calibration.reach, plan) if calibration.reach else ()
    if not beyond:
        return Worth(interval=calibration.interval, basis=calibration.basis)
    said = f"extrapolated to {', '.join(beyond)}, which none of these rows has, so the interval is twice as wide"
    return Worth(interval=min(_WIDEST, _WIDER * calibration.interval), basis=f"{calibration.basis}; {said}")


def _beyond(reach: Reach, plan: Plan) -> tuple[str, ...]:
    others = (
        (plan.cluster.name, plan.cluster.name == reach.cluster),
        (f"kernels {plan.kernels}", plan.kernels in reach.kernels),
    )
    axes = (axis for axis in _AXES if getattr(plan.candidate, axis) > 1 and axis not in reach.axes)
    return (*(name for name, is_known in others if not is_known), *axes)


def carried(calibration: Calibration) -> Mapping[str, str]:
    """Return what a plan's provenance says of its calibration, so that it is judged with the same constants."""
    numbers = ",".join(f"{name}={getattr(calibration, name)!r}" for name in _NUMBERS)
    reach = {"calibration.reach": str(calibration.reach)} if calibration.reach else {}
    return {"calibration": calibration.name, "calibration.basis": calibration.basis,
            "calibration.constants": numbers, **reach}  # fmt: skip


def calibration_of(plan: Plan) -> Calibration:
    """Return the constants that a plan carries; where it carries none, those of its cluster."""
    said = plan.provenance
    if "calibration.constants" not in said:
        return built_in(plan.cluster.name)
    try:
        return record.decode(
            Calibration,
            {
                "name": said.get("calibration", ""),
                "basis": said.get("calibration.basis", ""),
                "reach": said.get("calibration.reach"),
                "sources": dict.fromkeys(_NUMBERS, "the plan's provenance"),
                **_numbers(said["calibration.constants"]),
            },
        )
    except InputError as error:
        raise error.under("provenance.calibration") from None


def _numbers(text: str) -> dict[str, float]:
    """Read ``name=value,...`` with every number once."""
    entries = [part.partition("=") for part in text.split(",")]
    if sorted(name for name, _, _ in entries) != sorted(_NUMBERS):
        raise InputError.of("constants", f"must be NAME=NUMBER,... for each of {', '.join(_NUMBERS)}")
    numbers: dict[str, float] = {}
    faults: list[Fault] = []
    for name, _, value in entries:
        try:
            numbers[name] = float(value)
        except ValueError:
            faults.append(Fault(where=name, message=f"expected a number, found {value!r}"))
    if faults:
        raise InputError(faults)
    return numbers
