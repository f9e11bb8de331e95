"""What a cost model says about measured rows, and how far it is off."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.calibration.accuracy import Accuracy
from autoshard.errors import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRow:
    """The prediction of one row, from its own layout alone; ``assumed`` says what the row leaves open, by column.

    Memory is what the framework's own peak counter counts, which may leave out the runtime's share.
    """

    id: str
    predicted_step_time_s: float
    low_s: float
    high_s: float
    predicted_peak_memory_gib: float
    assumed: Mapping[str, str] = field(hash=False)
    parts: Mapping[str, float] = field(hash=False)  # seconds; they add up to the step
    predicted_peak_memory_gib_by_stage: tuple[float, ...]  # by pipeline rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrepresented:
    """A row that cannot be predicted, and why."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAccuracy:
    """One data set: its rows, and the errors where something was measured."""

    name: str
    num_rows: int
    num_unrepresented: int
    basis: str  # what the predictions rest on
    step_time: Accuracy | None
    peak_memory: Accuracy | None  # of the fullest pipeline rank
    stage_memory: Accuracy | None  # of every pipeline rank, where each was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Data sets with their errors, and all of their rows."""

    sets: tuple[SetAccuracy, ...]
    rows: tuple[PredictedRow, ...]
    unrepresented: tuple[Unrepresented, ...]
    left_out: tuple[Fault, ...] = ()  # what is no row, or not one that can be used
