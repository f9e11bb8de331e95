"""The constants of a platform that are not on a data sheet, as data with provenance."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from autoshard.errors import require
from autoshard.spec import record

CONSTANTS = ("matrix_efficiency", "vector_efficiency", "memory_efficiency", "link_efficiency")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Which part of each peak rate is reached, how wide the interval is, and what the numbers rest on."""

    name: str
    matrix_efficiency: float
    vector_efficiency: float
    memory_efficiency: float
    link_efficiency: float
    interval: float  # relative half-width of what is promised
    basis: str
    sources: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        """Refuse efficiencies outside (0, 1] and numbers without a source."""
        numbers = (*CONSTANTS, "interval")
        require(
            *((0 < getattr(self, name) <= 1, name, "must lie in (0, 1]") for name in CONSTANTS),
            (0 <= self.interval < 1, "interval", "must lie in [0, 1)"),
            *((bool(self.sources.get(name)), f"sources.{name}", "say where this number is from") for name in numbers),
        )


@cache
def uncalibrated() -> Calibration:
    """Return nominal constants, for platforms without measurements."""
    text = (resources.files("autoshard.cost") / "uncalibrated.json").read_text("utf-8")
    return record.decode(Calibration, json.loads(text), where="uncalibrated")
