"""A fitted calibration, for a terminal."""

from autoshard.cost.calibration import Calibration


def calibration_report(calibration: Calibration) -> str:
    """Return the constants, what they rest on, and the error of each way to tell them apart."""
    lines = [f"{calibration.name}: {calibration.basis}"]
    lines += [f"  {name:<18} {value:.3f}" for name, value in calibration.constants.items()]
    if calibration.fit:
        lines.append(f"Constants told apart, and the error of rows whose {calibration.fit.left_out_by} was left out:")
        lines += [f"  {split:<30} {error:.1%}" for split, error in calibration.fit.tried.items()]
    return "\n".join(lines)
