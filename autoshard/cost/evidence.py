"""What each part of a step rests on: data sheets, shares of them that rows fit, or the other parts."""

from collections.abc import Mapping, Sequence

from autoshard.cost.built_in import calibration_of
from autoshard.cost.calibration import Calibration
from autoshard.cost.outside import features_of
from autoshard.plan.plan import Plan
from autoshard.units import counted, format_seconds

_NEAR = 0.05  # by which a fit to compiled programs tells single shares apart
_LINKS = ("tp", "cp", "ep", "pp", "dp")
# The feature by whose value rows are counted that have a part of the step as a plan has it.
_FEATURE: Mapping[str, str] = {"compute": "recompute", "tp": "tp", "pp": "schedule", "bubble": "schedule"}


def evidence_of(part: str, plans: Sequence[Plan]) -> str:
    """Say what a part of the seconds of some plans rests on, and how many rows have it as each of them has.

    The constants are those that the first plan carries.
    """
    constants = calibration_of(plans[0])
    counted = _rows_words(part, plans, constants)
    return _basis(part, constants, plans[0].engine) + (f"; {counted}" if counted else "")


def _basis(part: str, constants: Calibration, engine: str) -> str:
    """Say whether a part is a data sheet's, follows from a constant that rows fit, or from the other parts."""
    fitted = "fitted" if constants.seen else "not fitted"
    if part == "bubble":
        return "derived: the simulated schedule of the other parts"
    if part == "host":
        return "published speed of the link to the host"
    if part == "waiting":
        seconds, what = (constants.task_s, "task") if constants.task_s else (constants.launch_s, "kernel")
        return f"{format_seconds(seconds)} for each {what}, {fitted}"
    if part == "fixed":
        return f"{format_seconds(constants.step_s)} for each step, {fitted}"
    name, rates = ("memory_efficiency", "of memory") if part == "update" else ("matrix_efficiency", "of the chip")
    if part in _LINKS:
        name, rates = "far_link_efficiency" if part == "dp" else "near_link_efficiency", "of links"
    elif part not in ("compute", "update"):
        return "a term of your own"
    share = getattr(constants, name)
    is_near = constants.seen and engine == "nxd" and abs(share / constants.matrix_efficiency - 1) < _NEAR
    shared = ", near that of compute: rows hardly tell them apart" if is_near and name != "matrix_efficiency" else ""
    return f"data sheet {rates} x {share:.0%}, {fitted}{shared}"


def _rows_words(part: str, plans: Sequence[Plan], constants: Calibration) -> str:
    """Say how many rows of the fit have the part as each plan has it."""
    feature = _FEATURE.get(part, "")
    if feature not in constants.seen:
        return ""
    seen = constants.seen[feature]
    counts = dict(zip(seen.values, seen.counts, strict=False))
    plan_features = [features_of(plan.candidate, plan.model, plan.cluster, plan.workload)[feature] for plan in plans]
    values = list(dict.fromkeys(value for feature_values in plan_features for value in feature_values))
    if not counts:
        return f"rows have {feature} {', '.join(seen.values)}"
    have = {value: f"{counted(count, 'row')} {'has' if count == 1 else 'have'}" for value, count in counts.items()}
    texts = [f"{have.get(value, '0 rows have')} {feature} {value}" for value in values]
    return ", ".join(texts)
