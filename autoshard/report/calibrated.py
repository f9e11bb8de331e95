"""A fitted calibration, for a terminal."""

from collections.abc import Mapping

from autoshard.cost.calibration import SECONDS, Calibration
from autoshard.units import format_seconds


def calibration_report(calibration: Calibration) -> str:
    """Return the constants, what they rest on, and the error of each way to tell them apart."""
    lines = [f"{calibration.name}: {calibration.basis}"]
    constants = calibration.constants
    shown = {name: format_seconds(value) if name in SECONDS else f"{value:.3f}" for name, value in constants.items()}
    lines += _aligned(shown)
    if calibration.fit:
        lines.append(f"Constants told apart, and the error of rows whose {calibration.fit.left_out_by} was left out:")
        lines += _aligned({split: f"{error:.1%}" for split, error in calibration.fit.tried.items()})
    return "\n".join(lines)


def _aligned(entries: Mapping[str, str]) -> list[str]:
    width = max(map(len, entries), default=0)
    return [f"  {name:<{width}} {value}" for name, value in entries.items()]
