"""What is known of a run at a moment: one value, made of what its folder holds and of the time."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autoshard.plan.plan import Plan
from autoshard.report.watch.content import LoggedStep, RunFolder, SeenRank
from autoshard.report.watch.drifts import drifts_of, newest_steady
from autoshard.report.words import ranks_text
from autoshard.run.activity import by_suspicion
from autoshard.run.reports import WINDOW, TimedStep
from autoshard.spec.cluster import LOCAL
from autoshard.units import counted, format_seconds

State = Literal["not begun", "starting", "running", "saving", "hangs", "silent", "stopped", "killed", "failed", "ended"]
BAD: tuple[State, ...] = ("hangs", "silent", "killed", "failed")
OVER: tuple[State, ...] = ("stopped", "killed", "failed", "ended")

_STEPS, _LEAST_S = 4, 10.0  # a step that takes so many times its median and so long is reported
_UNKNOWN_S = 600.0  # for steps of which nothing is known: on another machine than the plan's, or while they set up
# cited: nfs(5): a client may show what it knows for 60 s (acregmax), and kernels write back after 30 s
# (vm.dirty_expire_centisecs).
_FAR_S = 90.0
_CLOCK_S = 5.0  # by which clocks may differ before that is worth a remark
_MOST_POINTS, _MOST_LINES = 240, 8  # of the curve, and about ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPace:
    """The speed of the last steps, beside the plan's prediction if that is about the machine that runs."""

    step_time_s: float  # the median of the last steps
    tokens_per_s: float
    predicted_s: float | None
    low_s: float | None
    high_s: float | None
    predicted_tokens_per_s: float | None

    @property
    def ratio(self) -> float | None:
        """The measured step time over the predicted one."""
        return self.step_time_s / self.predicted_s if self.predicted_s else None

    @property
    def inside(self) -> bool | None:
        """Whether the measured step time lies in the predicted interval."""
        if self.low_s is None or self.high_s is None:
            return None
        return self.low_s <= self.step_time_s <= self.high_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenMemory:
    """The memory of rank 0 beside its prediction."""

    measured_bytes: int
    predicted_bytes: int | None
    of_process: bool  # measured was all that the process holds on a host, Python and libraries included


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAge:
    """The newest complete checkpoint."""

    step: int
    age_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """All that is known of a run at a moment."""

    folder: str
    at: float  # the moment
    state: State
    reason: str  # of the state, where it needs one
    model: str | None
    candidate: str | None
    num_ranks: int | None
    step: int  # the last one that was taken
    num_steps: int | None
    left_s: float | None
    idle_s: float | None  # since the last step, while the run is under way
    last: LoggedStep | None
    losses: tuple[tuple[int, float | None], ...]  # by step; None where not finite, or of no answer
    times: tuple[tuple[int, float], ...]  # of the same steps, but for those that warm up
    pace: SeenPace | None
    memory: SeenMemory | None
    checkpoint: CheckpointAge | None
    saving: int | None  # the step of a checkpoint that is being written
    checkpoints_elsewhere: str
    starts: tuple[int, ...]  # after which step each start of the run began
    failures: tuple[str, ...]  # how starts failed, the last one last
    behind: tuple[str, ...]  # where ranks are, while the run hangs: the most suspicious one first
    drifts: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def is_bad(self) -> bool:
        """Whether somebody should look after it."""
        return self.state in BAD

    @property
    def is_over(self) -> bool:
        """Whether the state will not change by itself."""
        return self.state in OVER


def progress_of(folder: RunFolder, now: float) -> RunProgress:
    """Say how a run is doing, by what its folder holds; a pure function of that and of the time."""
    plan, last = folder.plan, folder.steps[-1] if folder.steps else None
    starts = [start for start in folder.starts if isinstance(start.get("from"), int)]
    current = _of_last_start(folder, float(starts[-1].get("at", 0.0)) if starts else 0.0)
    state, reason, idle_s = _state(folder, current, now)
    pace, shown = _pace(plan, current), _evenly(folder.steps)
    checkpoint = folder.checkpoint and CheckpointAge(
        step=folder.checkpoint.step, age_s=max(0.0, now - folder.checkpoint.at), num_bytes=folder.checkpoint.num_bytes
    )
    saved = checkpoint.step if checkpoint else 0
    num_steps, step = folder.training.steps if folder.training else None, last.step.number if last else 0
    under_way = state in ("running", "hangs", "silent")
    return RunProgress(
        folder=str(folder.path), at=now, state=state, reason=reason,
        model=plan.model.name if plan else None, candidate=str(plan.candidate) if plan else None,
        num_ranks=plan.mesh.num_ranks if plan else None,
        step=step, num_steps=num_steps, left_s=_left_s(current, num_steps) if state == "running" else None,
        idle_s=idle_s if under_way else None, last=last, pace=pace,
        losses=tuple((step.number, step.loss if math.isfinite(step.loss or 0.0) else None) for step in shown),
        times=tuple((step.number, step.time_s) for step in shown if step.phase == "steady"),
        memory=_memory(plan, last), checkpoint=checkpoint,
        saving=folder.saving if under_way or state == "saving" else None,
        checkpoints_elsewhere=folder.checkpoints_elsewhere, starts=tuple(start["from"] for start in starts),
        failures=tuple(str(start["failed"]) for start in folder.starts if "failed" in start),
        behind=_behind(folder.ranks, plan) if state in ("hangs", "silent") or (idle_s or 0.0) > _LEAST_S else (),
        drifts=drifts_of(current, plan, folder.training, None if folder.checkpoints_elsewhere else saved),
        remarks=tuple(_remarks(folder, state, now)),
    )  # fmt: skip


def _of_last_start(folder: RunFolder, at: float) -> tuple[LoggedStep, ...]:
    """Return the steps that the last start has taken; the steps of others were maybe of another plan."""
    return tuple(step for step in folder.steps if step.at >= at)


def _state(folder: RunFolder, current: Sequence[LoggedStep], now: float) -> tuple[State, str, float | None]:
    """Return the state, its reason, and how long no step has ended."""
    lock, last = folder.lock, _last_note(folder)
    who = f"process {lock.process} on {lock.host}" if lock else "its process"
    if lock is None and not folder.steps and not folder.starts:
        return "not begun", "", None
    ended_at = float(last.get("at", 0.0)) if {"ended", "failed"} & last.keys() else None
    held = lock.held if lock else False
    if held is None and ended_at is not None and lock and ended_at >= lock.at - _CLOCK_S:
        held = False  # nobody writes after that, unless the run is started again
    if held is False:
        return *_over(folder, who), None
    steps = current if {"from", "stepped"} & last.keys() else ()  # else the next start has not come so far
    since = folder.steps_at, lock.at if lock else None, float(last.get("at", 0.0))
    newest = max(moment for moment in since if moment is not None)
    idle_s = max(0.0, min(now - newest, now - (steps[-1].at if steps else newest)))
    done = folder.training is not None and bool(steps) and steps[-1].step.number >= folder.training.steps
    judged = _judged(folder, steps, int(last.get("from", 0)))
    limit_s = _UNKNOWN_S if done else _limit_s(folder.plan, steps)
    if judged:
        limit_s = max(limit_s, _evaluation_s(folder, steps))
    if held is None:
        limit_s = max(limit_s, _FAR_S)
    if idle_s > limit_s:
        usual = newest_steady(steps)
        takes = f", and its steps take {format_seconds(statistics.median(usual))}" if usual else ""
        takes = f", while step {judged} is evaluated" if judged else takes
        still = f"no step has ended for {format_seconds(idle_s)}{takes}"
        if held:
            return "hangs", still, idle_s
        return "silent", f"{still}: it hangs or was killed; {who} cannot be looked at from here", idle_s
    if done and not judged:
        return "saving", "all steps are done", idle_s
    judging = f"step {judged} is evaluated" if judged else ""
    if steps:
        return "running", judging, idle_s
    again = "failed" in last
    return (
        "starting",
        f"again, after: {_first_line(str(last['failed']))}" if again else judging or "no step has ended yet",
        idle_s,
    )


def _over(folder: RunFolder, who: str) -> tuple[State, str]:
    """Return how a run ended that nobody runs any more."""
    last = _last_note(folder)
    if "failed" in last:
        return "failed", str(last["failed"])
    if "ended" in last:
        done = not folder.training or not folder.steps or folder.steps[-1].step.number >= folder.training.steps
        return ("ended", "") if done else ("stopped", f"by {last['ended'] or 'its end'}, before its last step")
    if folder.hang_reports:
        return "failed", folder.hang_reports[0].strip()
    if folder.plan is None and not folder.starts:
        return "not begun", f"{who} ended before the run began"
    return "killed", f"{who} ended without a word, as a kill or a machine that fails ends it"


def _judged(folder: RunFolder, current: Sequence[LoggedStep], begun_after: int) -> int:
    """Return the step after which an evaluation is due that has not ended; 0 while steps are taken."""
    step, training = current[-1].step.number if current else begun_after, folder.training
    has_ended = folder.evaluation is not None and folder.evaluation.step >= step
    return step if step and training and training.eval.is_due(step, training.steps) and not has_ended else 0


def _evaluation_s(folder: RunFolder, current: Sequence[LoggedStep]) -> float:
    """Return how long an evaluation may take: as the last one, or as steps for so many batches."""
    if folder.evaluation is not None:
        return _STEPS * folder.evaluation.time_s
    steady, plan, training = newest_steady(current), folder.plan, folder.training
    if not steady or plan is None or training is None:
        return _UNKNOWN_S
    return _STEPS * statistics.median(steady) * (1 + training.eval.samples / plan.workload.global_batch)


def _limit_s(plan: Plan | None, current: Sequence[LoggedStep]) -> float:
    """Return how long a step may take before it is said that the run hangs; the watchdog of the run waits longer."""
    steady = newest_steady(current)
    if steady:
        return max(_LEAST_S, _STEPS * statistics.median(steady))
    if plan is not None and plan.engine == "nxd":
        return math.inf  # compiles, as long as it takes
    prediction = plan.prediction if plan and current and current[-1].compared else None
    return max(_LEAST_S, _STEPS * prediction.high_s) if prediction else _UNKNOWN_S


def _pace(plan: Plan | None, current: Sequence[LoggedStep]) -> SeenPace | None:
    if not current:
        return None
    last = [logged.step for logged in current if logged.step.phase == "steady"][-WINDOW:] or [current[-1].step]
    prediction = plan.prediction if plan and current[-1].compared else None
    return SeenPace(
        step_time_s=statistics.median(step.time_s for step in last),
        tokens_per_s=statistics.median(step.tokens_per_s for step in last),
        predicted_s=prediction.step_time_s if prediction else None, low_s=prediction.low_s if prediction else None,
        high_s=prediction.high_s if prediction else None,
        predicted_tokens_per_s=prediction.tokens_per_s if prediction else None,
    )  # fmt: skip


def _memory(plan: Plan | None, last: LoggedStep | None) -> SeenMemory | None:
    if last is None or last.step.memory_bytes is None:
        return None
    predicted = None
    if plan and plan.prediction:
        predicted = plan.prediction.stage_memory[plan.mesh.coordinates(0).get("pp", 0)].total
    on_host = not last.compared or plan is None or plan.cluster.name == LOCAL
    return SeenMemory(measured_bytes=last.step.memory_bytes, predicted_bytes=predicted, of_process=on_host)


def _left_s(current: Sequence[LoggedStep], num_steps: int | None) -> float | None:
    """Return how long the rest takes, as the last steps went, with all that lies between them."""
    last = current[-WINDOW - 1 :]
    if num_steps is None or len(last) < 2 or last[-1].at <= last[0].at:
        return None
    each_s = (last[-1].at - last[0].at) / (last[-1].step.number - last[0].step.number)
    return max(0, num_steps - last[-1].step.number) * each_s


def _evenly(steps: Sequence[LoggedStep]) -> list[TimedStep]:
    """Return steps at even distances, the last one included: as many as a curve needs."""
    span = range(steps[0].step.number, steps[-1].step.number + 1) if steps else range(0)
    distance = max(1, len(span) // _MOST_POINTS)
    return list({(logged.step.number - span.stop) // distance: logged.step for logged in steps}.values())


def _behind(ranks: Sequence[SeenRank], plan: Plan | None) -> tuple[str, ...]:
    """Say where ranks are; those that wait for the same share a line."""
    by_number = {seen.rank: seen for seen in ranks}
    statuses, stills = ({rank: getattr(seen, name) for rank, seen in by_number.items()} for name in ("status", "still"))
    lines: dict[str, list[int]] = {}
    for number, rank in enumerate(by_suspicion(statuses, stills)):
        seen = by_number[rank]
        since = "" if seen.still_s is None else f"there for {format_seconds(seen.still_s)}"
        about = [f"process {seen.status.process} on {seen.host}", *filter(None, [seen.still, since])]
        if plan and rank < plan.mesh.num_ranks:
            about.insert(0, f"pipeline rank {plan.mesh.coordinates(rank).get('pp', 0)}")
        text = f" ({', '.join(about)}) {seen.status}" if number == 0 or seen.still else f" {seen.status}"
        lines.setdefault(text, []).append(rank)
    texts = [f"rank{'s' if len(those) > 1 else ''} {ranks_text(those)}{text}" for text, those in lines.items()]
    more = [f"and {counted(len(texts) - _MOST_LINES, 'line')} more"] if len(texts) > _MOST_LINES else []
    return (*texts[:_MOST_LINES], *more)


def _remarks(folder: RunFolder, state: State, now: float) -> list[str]:
    remarks = list(folder.faults)
    newest = max((logged.at for logged in folder.steps[-1:]), default=now)
    if newest - now > _CLOCK_S:
        ahead = f"{format_seconds(newest - now)} ahead of the one here"
        remarks.append(f"the clock of the machine that runs it is {ahead}")
    if folder.lock and folder.lock.held is None and state not in OVER:
        judged = "so it is judged by the times of its files, not by its processes"
        remarks.append(f"it runs on {folder.lock.host}, {judged}")
    return remarks


def _last_note(folder: RunFolder) -> Mapping[str, Any]:
    """Return what was noted last of the starts of a run."""
    return folder.starts[-1] if folder.starts else {}


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
