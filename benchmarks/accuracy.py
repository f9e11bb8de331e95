"""How far predictions are off published measurements, per data set; a row is predicted from its own layout alone."""

import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from autoshard.calibration.validate import Accuracy, SetAccuracy, Validation, validate
from benchmarks.accuracy_table import PredictedSets, left_out, write_pages
from benchmarks.measure import yardstick_s
from benchmarks.result import Extra, Result

DATA = Path(__file__).parent / "data"  # published rows; each names its source

# VIA-Research/vTrain, the only peer that publishes errors over hundreds of runs: 8.37% on one node, 14.73% on several.
TIME_BAR = 0.10
_LEFT_OUT = ("count", "mape", "bias", "coverage")


def run(rows: Path | None = None, write: bool = False) -> Result:
    """Predict the rows of this repository, and those of another folder; write the tables of the pages if asked to."""
    start_s = time.process_time()
    others = [validate(rows)] if rows else []
    found = validate(DATA)
    parts = left_out(DATA, found)
    cpu_s = time.process_time() - start_s
    if write:
        other, today = others[0].sets if others else None, datetime.now(UTC).date().isoformat()
        write_pages(PredictedSets(own=found.sets, parts=parts, other=other, date=today), DATA)
    return judge([found, *others], parts, cpu_s)


def judge(found: list[Validation], parts: Mapping[str, Accuracy], cpu_s: float) -> Result:
    """Hold the worst left-out error of what ran against the bar; it holds only if every row was predicted."""
    sets = [entry for one in found for entry in one.sets]
    worst = max((entry.mape for entry in parts.values()), default=math.inf)
    missing = sum(one.num_unread for one in found)  # of whole runs: those whose times had not settled are none
    return Result(
        name="accuracy",
        value=round(worst, 4),
        unit="left-out MAPE, worst chip",
        bar=TIME_BAR,
        holds=worst <= TIME_BAR and not missing,
        extras={
            **{f"{name}.{key}": _short(getattr(one, key)) for name, one in parts.items() for key in _LEFT_OUT},
            **{key: value for name, entry in _named(sets) for key, value in _extras(name, entry).items()},
            "left_out": missing,
            "cpu_s": round(cpu_s, 3),
            "yardstick_s": yardstick_s(),
        },
    )


def _named(sets: list[SetAccuracy]) -> list[tuple[str, SetAccuracy]]:
    """Give sets of one name, from several folders, a number."""
    names = [entry.name for entry in sets]
    return [
        (name if name not in names[:place] else f"{name}-{names[: place + 1].count(name)}", entry)
        for place, (name, entry) in enumerate(zip(names, sets, strict=True))
    ]


def _extras(name: str, entry: SetAccuracy) -> dict[str, Extra]:
    """Return the numbers of one set, each under its name."""
    found: dict[str, Extra] = {"rows": entry.num_rows}
    if entry.step_time:
        found["layouts"] = entry.step_time.num_layouts
        keys = ("noise_floor", "mape", "median", "p90", "bias", "coverage", "spearman", "regret", "worst_regret")
        found |= {key: _short(getattr(entry.step_time, key)) for key in keys}
        found["holds"] = entry.step_time.mape <= TIME_BAR
    if entry.peak_memory:
        found["memory_mape"] = _short(entry.peak_memory.mape)
    if entry.stage_memory:
        found["stage_memory_worst"] = _short(abs(entry.stage_memory.worst))
    return {f"{name}.{key}": value for key, value in found.items()}


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
