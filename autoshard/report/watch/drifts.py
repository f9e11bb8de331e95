"""What is not as it was, or not as it was predicted, in the steps of a run."""

import math
import statistics
from collections.abc import Iterator, Sequence

from autoshard.plan.plan import Plan
from autoshard.report.watch.content import LoggedStep
from autoshard.run.reports import SLOWER, WINDOW
from autoshard.spec.cluster import LOCAL
from autoshard.spec.training import Training
from autoshard.units import counted, format_bytes, format_seconds

_FEW = 5  # steps from which a median is taken
# A loss so many robust deviations above the median of the steps before it, and so far in proportion, is a jump.
_DEVIATIONS, _JUMP = 6.0, 0.1
_SIGMA = 1.4826  # standard deviation of normal numbers over their median absolute deviation
_LATE, _SOON_S = 2.5, 60.0  # intervals without a checkpoint, and seconds in which none is missed


def newest_steady(steps: Sequence[LoggedStep]) -> list[float]:
    """Return the seconds of the last steady steps, with their waits for data."""
    return [logged.step.time_s + logged.step.waited_s for logged in steps if logged.step.phase == "steady"][-WINDOW:]


def drifts_of(
    steps: Sequence[LoggedStep], plan: Plan | None, training: Training | None, saved_step: int | None
) -> tuple[str, ...]:
    """Say what drifts in the steps of a start; ``saved_step`` is None where checkpoints cannot be seen from here."""
    if not steps:
        return ()
    plan_of_machine = plan if steps[-1].compared else None  # else its prediction is about another machine
    late = _late_checkpoint(steps, training, saved_step) if saved_step is not None and training else ()
    return (*_loss(steps), *_speed(steps, plan_of_machine), *_memory(steps, plan_of_machine), *late)


def _loss(steps: Sequence[LoggedStep]) -> Iterator[str]:
    last = [logged.step for logged in steps[-WINDOW:]]
    strange = [step for step in last if not step.finite]
    if strange:
        loss = "" if strange[-1].loss is None else f"loss {strange[-1].loss:g}, "
        yield f"step {strange[-1].number}: {loss}gradient norm {strange[-1].norm:g}"
    if skipped := sum(not step.updated for step in last):
        yield f"{skipped} of the last {len(last)} updates were skipped"
    for number in range(len(steps) - 1, max(_FEW, len(steps) - WINDOW) - 1, -1):
        losses = [logged.step.loss for logged in steps[max(0, number - WINDOW) : number]]
        before = [loss for loss in losses if loss is not None and math.isfinite(loss)]
        loss = steps[number].step.loss
        if len(before) < _FEW or loss is None or not math.isfinite(loss):
            continue
        middle = statistics.median(before)
        deviation = _SIGMA * statistics.median(abs(earlier - middle) for earlier in before)
        if loss - middle > max(_DEVIATIONS * deviation, _JUMP * abs(middle)):
            yield f"step {steps[number].step.number}: the loss jumped to {loss:.4f}, from a median of {middle:.4f}"
            return


def _speed(steps: Sequence[LoggedStep], plan: Plan | None) -> Iterator[str]:
    steady = [logged.step.time_s for logged in steps if logged.step.phase == "steady"]
    if len(steady) < _FEW:
        return
    median_s, prediction = statistics.median(steady[-WINDOW:]), plan.prediction if plan else None
    if prediction and not prediction.low_s <= median_s <= prediction.high_s:
        interval = f"{format_seconds(prediction.low_s)} to {format_seconds(prediction.high_s)}"
        yield f"the last steps took {format_seconds(median_s)} (median), outside the predicted {interval}"
    first_s = statistics.median(steady[:WINDOW])
    if len(steady) >= 2 * WINDOW and median_s > SLOWER * first_s:
        slower = f"{median_s / first_s - 1:.0%} more than the {format_seconds(first_s)} of its first ones"
        yield f"the last steps took {format_seconds(median_s)} (median), {slower}"


def _memory(steps: Sequence[LoggedStep], plan: Plan | None) -> Iterator[str]:
    """Compare the memory of a device; on a host all of the process is measured."""
    most, held = plan.prediction.capacity_bytes if plan and plan.prediction else 0, steps[-1].step.memory_bytes
    if plan and plan.cluster.name != LOCAL and most and held and held > most:
        yield f"rank 0 holds {format_bytes(held)}, more than the {format_bytes(most)} that the plan may fill"


def _late_checkpoint(steps: Sequence[LoggedStep], training: Training, saved_step: int) -> Iterator[str]:
    keeping, since = training.checkpoint, max(saved_step, steps[0].step.number - 1)
    if not keeping.saves:
        return
    num_steps = steps[-1].step.number - since
    passed_s = steps[-1].at - next((logged.at for logged in steps if logged.step.number > since), steps[-1].at)
    by_steps = keeping.every_steps and num_steps > _LATE * keeping.every_steps and passed_s > _SOON_S
    by_time = keeping.every_minutes and passed_s > _LATE * 60 * keeping.every_minutes
    if by_steps or by_time:
        interval = counted(keeping.every_steps or 1, "step") if by_steps else f"{keeping.every_minutes:g} min"
        missing = f"no checkpoint for {num_steps} steps ({format_seconds(passed_s)})"
        yield f"{missing}, though one every {interval} is asked for"
