"""The seconds of a step from the reports of a log: the median after the warm-up, compared with what the log states.

A log may say the time of a step, tokens or sequences per second, and the clock beside each report. The first of these
that is there is taken; the others must agree with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles

from autoshard.errors import InputError
from autoshard.imports.logs.log import LogReport, PeakMemory, TrainingLog
from autoshard.imports.logs.steps import comparable, step_range
from autoshard.units import counted, format_seconds

WARM = 0.1  # warm-up ends where the time of a report is this near to the median of the later half of all
_LATE = 10  # from this step on, a log begins in the middle of a run
LEAST_STEPS = 5  # that the reports behind the warm-up cover
_LEAST_REPORTS = 2
AGREEMENT = 0.05  # by which two statements of a log may differ
_TICKS = 40  # of its clock that a time between two reports must take
_SKIPPED = ", of steps that the optimizer left out"
_TIME, _RATE, _CLOCK = "time of a step", "rate", "clock"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What a step of the run does, by its configuration."""

    sequences: int
    seq_len: int
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """The seconds of a step, the middle half of its reports, and what they rest on."""

    time_s: float
    low_s: float  # a quarter of the reports lies below
    high_s: float
    reports: int
    first: int
    last: int
    basis: str  # which statement of the log, and what was done with it
    checks: tuple[str, ...]  # other statements, which agree

    @property
    def steps(self) -> str:
        """The range of steps that count."""
        return f"{self.first}..{self.last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimeSource:
    """One statement of a log: seconds of a step by report."""

    kind: str
    basis: str
    times: tuple[tuple[LogReport, float], ...]


def measured_step(log: TrainingLog, work: StepWork) -> MeasuredStep:
    """Return the seconds of a step; an InputError says why a log gives none."""
    steps = comparable(log.steps)
    _refuse_batch(log, steps, work)
    statements = [reading for reading in _statements(log, steps, work) if reading.times]
    if not statements:
        why = f"{counted(len(steps), 'report')} without seconds or rates, and too few for a clock of {log.clock_s:g} s"
        raise InputError.of(log.file, f"says no time of a step: {why}. Run it for longer, or log the time of each step")
    first = statements[0]
    are_means = log.are_means or first.kind == _CLOCK
    used = _behind_warm_up(first.times, are_means=are_means)
    covered = _covered([step for step, _ in used], are_means=are_means)
    if covered < LEAST_STEPS or len(used) < _LEAST_REPORTS:
        dropped = len(first.times) - len(used)
        said = f"{counted(covered, 'step')} in {counted(len(used), 'report')} behind the warm-up ({dropped} dropped)"
        raise InputError.of(log.file, f"is too short: {said}; {LEAST_STEPS} steps are needed. Run it for longer")
    values = [value for _, value in used]
    middle = median(values)
    low, _, high = quantiles(values, n=4, method="inclusive")
    beside = _statements(log, [step for step, _ in used], work)
    checks = tuple(
        _agreeing(log, first, middle, second) for second in beside if second.times and second.kind != first.kind
    )
    return MeasuredStep(
        time_s=middle,
        low_s=low,
        high_s=high,
        reports=len(used),
        first=used[0][0].number,
        last=used[-1][0].number,
        basis=f"{first.basis}{_SKIPPED if all(step.skipped for step, _ in used) else ''}",
        checks=checks,
    )


def _refuse_batch(log: TrainingLog, steps: Sequence[LogReport], work: StepWork) -> None:
    batch = next((step.batch for step in reversed(steps) if step.batch is not None), None)
    if batch not in (None, work.sequences):
        message = f"says {counted(batch or 0, 'sequence')} in a step, its configuration {work.sequences}"
        raise InputError.of(log.file, f"{message}. Type --global-batch {batch} if the log is right")


def _statements(log: TrainingLog, steps: Sequence[LogReport], work: StepWork) -> Sequence[_TimeSource]:
    """Return what a log says of the seconds of a step, the best statement first."""
    timed = tuple((step, step.time_s) for step in steps if step.time_s)
    unit, rated = log.rate, tuple[tuple[LogReport, float], ...]()
    basis = ""
    if unit is not None:
        parts = (work.sequences, work.seq_len, work.ranks)
        rated = tuple((step, unit.step_time_s(step.rate, *parts)) for step in steps if step.rate)
        of_tokens = f" of {counted(work.seq_len, 'token')}" if unit.what == "tokens" else ""
        over = f" over {counted(work.ranks, 'rank')}" if unit.per_rank else ""
        basis = f"{unit}: {counted(work.sequences, 'sequence')}{of_tokens} in a step{over}, by the configuration"
    return (
        _TimeSource(kind=_TIME, basis="the time of a step in the log", times=timed),
        _TimeSource(kind=_RATE, basis=basis, times=rated),
        _TimeSource(kind=_CLOCK, basis="the clock between reports", times=_by_clock(steps, log.clock_s)),
    )


def _by_clock(steps: Sequence[LogReport], clock_s: float) -> tuple[tuple[LogReport, float], ...]:
    """Return the seconds of a step by the clock, between reports so far apart that its ticks do not matter."""
    stamped = [(step, step.stamp_s) for step in steps if step.stamp_s is not None]
    if len(stamped) < _LEAST_REPORTS:
        return ()
    gaps = [after - before for (_, before), (_, after) in pairwise(stamped)]
    typical = median(gaps) or (stamped[-1][1] - stamped[0][1]) / len(gaps)
    if typical <= 0:
        return ()
    stride = max(1, round(_TICKS * clock_s / typical + 0.5))
    chosen = stamped[::-stride][::-1]
    return tuple(
        (step, (after - before) / (step.number - earlier.number))
        for (earlier, before), (step, after) in pairwise(chosen)
        if after > before
    )


def _behind_warm_up(times: Sequence[tuple[LogReport, float]], *, are_means: bool) -> Sequence[tuple[LogReport, float]]:
    """Drop the first report, and the next ones until one is near to the median of the later half; at most half.

    Where each report is of its step alone, and the first is of a late step, that one counts if it is near as well.
    """
    settled = median(value for _, value in times[len(times) // 2 :])
    begins = are_means or times[0][0].number < _LATE
    start = min(int(begins), len(times) - 1)
    most = max(start, len(times) // 2)
    while start < most and abs(times[start][1] / settled - 1) > WARM:
        start += 1
    return times[start:]


def _covered(used: Sequence[LogReport], *, are_means: bool) -> int:
    """Return how many steps the reports are of."""
    if not are_means:
        return len(used)
    gaps = [after.number - before.number for before, after in pairwise(used)]
    return len(used) * min(gaps, default=1)


def _agreeing(log: TrainingLog, first: _TimeSource, middle: float, second: _TimeSource) -> str:
    """Say that another statement agrees, or refuse the log with both figures."""
    beside = median(value for _, value in second.times)
    if abs(beside / middle - 1) > AGREEMENT:
        said = f"{format_seconds(middle)} a step by {first.basis}, {format_seconds(beside)} by {second.basis}"
        advice = "Check length, batch and ranks of the configuration, and what ran between the steps"
        raise InputError.of(log.file, f"contradicts itself: {said}. {advice}")
    return f"{format_seconds(beside)} by {second.basis}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPeak:
    """The peak of memory of the fullest rank; where stages are many, of each of them, or why that is not known."""

    gib: float | None
    by_stage: tuple[float, ...] | None
    says: str


def measured_peak(log: TrainingLog, stages: int, ranks: int) -> MeasuredPeak:
    """Return the peak of memory: what was allocated, or else reserved; of all stages, which lie outermost on ranks."""
    kind = next((kind for kind in ("allocated", "reserved") if any(peak.kind == kind for peak in log.memory)), None)
    peaks = [peak for peak in log.memory if peak.kind == kind]
    if not peaks:
        return MeasuredPeak(gib=None, by_stage=None, says="")
    most = max(peaks, key=lambda peak: peak.gib)
    says = f"most {kind} of {_rank_words(most)} until step {most.step}"
    if stages == 1:
        return MeasuredPeak(gib=most.gib, by_stage=None, says=says)
    held: dict[int, float] = {}
    for peak in peaks:
        if peak.rank is not None:
            stage = peak.rank * stages // ranks
            held[stage] = max(held.get(stage, 0.0), peak.gib)
    if set(held) != set(range(stages)):
        lacking = f"{says}: {most.gib:.2f} GiB; not of all {stages} stages, so that it may not be the fullest"
        return MeasuredPeak(gib=None, by_stage=None, says=lacking)
    return MeasuredPeak(gib=most.gib, by_stage=tuple(held[stage] for stage in range(stages)), says=says)


def _rank_words(peak: PeakMemory) -> str:
    return "a rank" if peak.rank is None else f"rank {peak.rank}"


def dropped_words(log: TrainingLog, step: MeasuredStep) -> str:
    """Say which steps of a log count."""
    return f"{step.steps} of {step_range(log.steps)}"
