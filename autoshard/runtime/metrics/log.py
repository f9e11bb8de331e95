"""What is kept of every step: a line of ``metrics.jsonl``, whole however the run ends, and its pace.

The fields of a line are described in docs/reference/run-folder.md; those of unknown value are null.
"""

import errno
import json
import os
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from autoshard.files import bring_to_disk, replacing
from autoshard.plan.plan import Prediction
from autoshard.run.folder import METRICS
from autoshard.run.reports import SLOWER, WINDOW, TimedStep, with_nulls
from autoshard.spec.files import json_line
from autoshard.units import format_seconds

_JSON = json.JSONEncoder(allow_nan=False)  # made once: a step must cost next to nothing
_MODE = 0o666  # less what the umask takes


def record_of(step: TimedStep, *, at: float, mfu: float | None = None, neuron: Any = None) -> dict[str, Any]:
    """Return the fields of a step; numbers that are not finite stay as they are."""
    record = {
        "step": step.number,
        "loss": step.loss,
        "norm": step.norm,
        "learning_rate": step.learning_rate,
        "updated": step.updated,
        "time_s": step.time_s,
        "waited_s": step.waited_s,
        "tokens": step.num_tokens,
        "tokens_per_s": step.tokens_per_s,
        "mfu": mfu,
        "memory_bytes": step.memory_bytes,
        "phase": step.phase,
        "at": at,
    }
    router = {} if step.router is None else {"router": step.router.figures}
    norms = {} if step.norms is None else {"norms": step.norms.figures}
    return {**record, **router, **norms, **({} if neuron is None else {"neuron": neuron})}


class MetricsLog:
    """The file of a run under way; one write for every line."""

    def __init__(self, path: Path, num_done: int) -> None:
        """Open it; drop unreadable lines, and those of later steps than ``num_done``, which will be done again."""
        self.path, self.last = path, 0  # the last step that it has
        if self.path.exists():
            with replacing(self.path) as aside, self.path.open("rb") as old, aside.open("wb") as new:
                for line in old:
                    if (record := _record(line)) and record[0] <= num_done:
                        new.write(line)
                        self.last = record[0]
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _MODE)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a step; a line of which a full disk took only a part is taken back, and OSError raised."""
        line = _JSON.encode(with_nulls(record)).encode() + b"\n"
        written = os.write(self._file, line)
        if written < len(line):
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))

    def keep(self) -> None:
        """Bring the lines to the disk: a checkpoint that outlives a power cut has the lines of its steps."""
        bring_to_disk(self.path)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def records_in(folder: Path, name: str = METRICS) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the steps of a run, or of its evaluations, with their fields, as far as their lines are whole."""
    path = folder / name
    if path.is_file():
        with path.open("rb") as lines:
            yield from filter(None, map(_record, lines))


def _record(line: bytes) -> tuple[int, dict[str, Any]] | None:
    """Return the number of a line's step, and its fields as they were; None if it is no whole line of a step."""
    data = json_line(line) if line.endswith(b"\n") else None
    fields = cast(dict[str, Any], data) if isinstance(data, dict) else {}
    number, strange = fields.get("step"), fields.pop("nonfinite", {})
    if type(number) is not int:
        return None
    with suppress(AttributeError, TypeError, ValueError):  # the line is of somebody else; its numbers are not
        fields |= {name: float(text) for name, text in strange.items()}
    return number, fields


def scalars(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record for trackers, nested ones under ``name/``."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and (prefix or name not in ("step", "at")):
            yield f"{prefix}{name}", float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paced:
    """Figures that follow from a step and the steps before it: use of the hardware, time left, warnings."""

    mfu: float | None  # None where the plan is about another machine
    ratio: float | None  # of the step's time to the predicted; likewise
    left_s: float | None  # until the last step, as the last steps went
    warnings: tuple[str, ...] = ()


class Pace:
    """Follows the steps of a run one by one; ``prediction`` is None where it is about another machine.

    Two warnings are given, each once in a start of a run, by the median of the last 20 steady steps: that it lies
    outside the interval of the prediction, and that it is more than 1.2 times the median of the first 20.
    """

    def __init__(self, num_steps: int, prediction: Prediction | None) -> None:
        self._num_steps, self._prediction = num_steps, prediction
        self._ends_s: deque[float] = deque(maxlen=WINDOW + 1)
        self._steady_s: deque[float] = deque(maxlen=WINDOW)
        self._first_s: float | None = None  # the median of the first steady steps
        self._warned: set[str] = set()

    def __call__(self, step: TimedStep, now_s: float) -> Paced:
        """Take one step more, which has ended now."""
        self._ends_s.append(now_s)
        prediction = self._prediction
        each_s = None if step.phase == "compile" else step.time_s + step.waited_s
        if len(self._ends_s) > 1:  # with all that lies between steps
            each_s = (self._ends_s[-1] - self._ends_s[0]) / (len(self._ends_s) - 1)
        return Paced(
            mfu=prediction.mfu * step.tokens_per_s / prediction.tokens_per_s if prediction else None,
            ratio=step.time_s / prediction.step_time_s if prediction else None,
            left_s=None if each_s is None else (self._num_steps - step.number) * each_s,
            warnings=tuple(self._drifts(step)) if step.phase == "steady" else (),
        )

    def _drifts(self, step: TimedStep) -> list[str]:
        self._steady_s.append(step.time_s)
        if len(self._steady_s) < WINDOW:
            return []
        median_s, prediction = statistics.median(self._steady_s), self._prediction
        drifts: dict[str, str] = {}
        if prediction and not prediction.low_s <= median_s <= prediction.high_s:
            interval = f"{format_seconds(prediction.low_s)} to {format_seconds(prediction.high_s)}"
            drifts["prediction"] = f"outside the predicted {interval}"
        if self._first_s is None:
            self._first_s = median_s
        elif median_s > SLOWER * self._first_s:
            slower = f"{median_s / self._first_s - 1:.0%} more than the {format_seconds(self._first_s)}"
            drifts["own"] = f"{slower} that the first {WINDOW} steady steps took"
        new = drifts.keys() - self._warned
        self._warned |= new
        what = f"step {step.number}: the last {WINDOW} steps took {format_seconds(median_s)} (median)"
        return [f"{what}, {text}" for name, text in drifts.items() if name in new]
