"""The unknowns of a fit: what a split of the constants leaves open, and how runs are timed under any values of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autoshard.calibration.measured_run import MeasuredRun
from autoshard.calibration.splits import FRAMEWORK, RELEASE, Split
from autoshard.calibration.validate import outlined_run
from autoshard.cost.calibration import Calibration, Software, uncalibrated
from autoshard.cost.predict import step_timer

Array = NDArray[np.float64]
Predict = Callable[[Array], Array]  # unknowns -> predicted over measured, row by row

_DIGITS = 6  # of a constant: far beyond what rows decide, and a file that people can read
UNITS = {"launch_s": 1e-5, "collective_s": 1e-4, "task_s": 1e-1, RELEASE: 1e-1}  # of what may be nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A run and what it took; what is left out together with it."""

    id: str
    run: MeasuredRun
    step_time_s: float
    apart: str


def slowness(samples: Sequence[Sample], calibration: Calibration) -> Array:
    """Return how often as long each row's software takes as that of a plan."""
    software = calibration.software
    runs = (sample.run for sample in samples)
    return np.array([software.slowness(run.framework, run.release) if software else 1.0 for run in runs])


def with_unknowns(calibration: Calibration, split: Split, unknowns: Array) -> Calibration:
    """Return the constants of some unknowns, slownesses and times in their unit, as a file states them."""
    values: dict[str, float] = {}
    for group, one in zip(split, unknowns.tolist(), strict=True):
        for name in group:
            scaled = one * UNITS[name] if name in UNITS else one if name.startswith(FRAMEWORK) else 1 / one
            values[name] = float(f"{scaled:.{_DIGITS}g}")
    slower = {name.removeprefix(FRAMEWORK): values.pop(name) for name in [*values] if name.startswith(FRAMEWORK)}
    per_release, software = values.pop(RELEASE, 0.0), calibration.software
    if software and (slower or per_release):
        software = replace(software, frameworks={**software.frameworks, **slower}, slower_per_release=per_release)
    return replace(calibration, **values, software=software)


def unknowns_of(constants: Calibration, split: Split) -> Array:
    """Return the unknowns that are these constants, each group's by its first."""
    software, found = constants.software or Software(frameworks={}), list[float]()
    for name, *_ in split:
        if name.startswith(FRAMEWORK):
            found.append(software.frameworks.get(name.removeprefix(FRAMEWORK), 1.0))
        elif name in UNITS:
            found.append(getattr(software if name == RELEASE else constants, name) / UNITS[name])
        else:
            found.append(1 / getattr(constants, name))
    return np.array(found)


def predictor(samples: Sequence[Sample], nominal: Calibration, split: Split) -> Predict:
    """Return how to predict all rows over what they took under some unknowns, each layout once."""
    runs = list(dict.fromkeys(sample.run for sample in samples))
    timers = [timer(run) for run in runs]
    positions = [runs.index(sample.run) for sample in samples]
    measured = np.array([sample.step_time_s for sample in samples])

    def ratios(unknowns: Array) -> Array:
        calibration = with_unknowns(nominal, split, unknowns)
        known = np.array([time_s(calibration) for time_s in timers])
        return known[positions] * slowness(samples, calibration) / measured

    return ratios


@cache
def timer(run: MeasuredRun) -> Callable[[Calibration], float]:
    """Return how to time a run, its blocks cut as is best at nominal rates: a fit moves rates, not what was run."""
    return step_timer(*outlined_run(run, uncalibrated()))
