"""How fast a run goes: its utilisation, what is left of it, and when its steps drift from what was to be expected."""

import statistics
from collections import deque
from dataclasses import dataclass

from autoshard.engine.base import TimedStep
from autoshard.plan.plan import Prediction
from autoshard.units import format_seconds

WINDOW = 20  # steps whose median is compared
SLOWER = 1.2  # times the run's own first median, above which it has become slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Paced:
    """What follows from a step and those before it."""

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
        known = self._prediction
        each_s = None if step.phase == "compile" else step.time_s + step.waited_s
        if len(self._ends_s) > 1:  # with all that lies between steps
            each_s = (self._ends_s[-1] - self._ends_s[0]) / (len(self._ends_s) - 1)
        return Paced(
            mfu=known.mfu * step.tokens_per_s / known.tokens_per_s if known else None,
            ratio=step.time_s / known.step_time_s if known else None,
            left_s=None if each_s is None else (self._num_steps - step.number) * each_s,
            warnings=tuple(self._drifts(step)) if step.phase == "steady" else (),
        )

    def _drifts(self, step: TimedStep) -> list[str]:
        self._steady_s.append(step.time_s)
        if len(self._steady_s) < WINDOW:
            return []
        median_s, known = statistics.median(self._steady_s), self._prediction
        found: dict[str, str] = {}
        if known and not known.low_s <= median_s <= known.high_s:
            interval = f"{format_seconds(known.low_s)} to {format_seconds(known.high_s)}"
            found["prediction"] = f"outside the predicted {interval}"
        if self._first_s is None:
            self._first_s = median_s
        elif median_s > SLOWER * self._first_s:
            slower = f"{median_s / self._first_s - 1:.0%} more than the {format_seconds(self._first_s)}"
            found["own"] = f"{slower} that the first {WINDOW} steady steps took"
        new = found.keys() - self._warned
        self._warned |= new
        what = f"step {step.number}: the last {WINDOW} steps took {format_seconds(median_s)} (median)"
        return [f"{what}, {text}" for name, text in found.items() if name in new]
