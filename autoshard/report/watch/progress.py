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
from autoshard.units import format_seconds

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
    losses: tuple[tuple[int, float | None], ...]  # by step; None where not finite
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


def progress_of(found: RunFolder, now: float) -> RunProgress:
    """Say how a run is doing, by what its folder holds; a pure function of that and of the time."""
    plan, last = found.plan, found.steps[-1] if found.steps else None
    begun = [one for one in found.starts if isinstance(one.get("from"), int)]
    current = _of_last_start(found, float(begun[-1].get("at", 0.0)) if begun else 0.0)
    state, reason, idle_s = _state(found, current, now)
    pace, shown = _pace(plan, current), _evenly(found.steps)
    checkpoint = found.checkpoint and CheckpointAge(
        step=found.checkpoint.step, age_s=max(0.0, now - found.checkpoint.at), num_bytes=found.checkpoint.num_bytes
    )
    saved = checkpoint.step if checkpoint else 0
    num_steps, step = found.training.steps if found.training else None, last.step.number if last else 0
    under_way = state in ("running", "hangs", "silent")
    return RunProgress(
        folder=str(found.path), at=now, state=state, reason=reason,
        model=plan.model.name if plan else None, candidate=str(plan.candidate) if plan else None,
        num_ranks=plan.mesh.num_ranks if plan else None,
        step=step, num_steps=num_steps, left_s=_left_s(current, num_steps) if state == "running" else None,
        idle_s=idle_s if under_way else None, last=last, pace=pace,
        losses=tuple((step.number, step.loss if math.isfinite(step.loss) else None) for step in shown),
        times=tuple((step.number, step.time_s) for step in shown if step.phase == "steady"),
        memory=_memory(plan, last), checkpoint=checkpoint,
        saving=found.saving if under_way or state == "saving" else None,
        checkpoints_elsewhere=found.checkpoints_elsewhere, starts=tuple(one["from"] for one in begun),
        failures=tuple(str(one["failed"]) for one in found.starts if "failed" in one),
        behind=_behind(found.ranks, plan) if state in ("hangs", "silent") or (idle_s or 0.0) > _LEAST_S else (),
        drifts=drifts_of(current, plan, found.training, None if found.checkpoints_elsewhere else saved),
        remarks=tuple(_remarks(found, state, now)),
    )  # fmt: skip


def _of_last_start(found: RunFolder, at: float) -> tuple[LoggedStep, ...]:
    """Return the steps that the last start has taken; the steps of others were maybe of another plan."""
    return tuple(one for one in found.steps if one.at >= at)


def _state(found: RunFolder, current: Sequence[LoggedStep], now: float) -> tuple[State, str, float | None]:
    """Return the state, its reason, and how long no step has ended."""
    lock, last = found.lock, _last_note(found)
    who = f"process {lock.process} on {lock.host}" if lock else "its process"
    if lock is None and not found.steps and not found.starts:
        return "not begun", "", None
    ended_at = float(last.get("at", 0.0)) if {"ended", "failed"} & last.keys() else None
    held = lock.held if lock else False
    if held is None and ended_at is not None and lock and ended_at >= lock.at - _CLOCK_S:
        held = False  # nobody writes after that, unless the run is started again
    if held is False:
        return *_over(found, who), None
    taken = current if {"from", "stepped"} & last.keys() else ()  # else the next start has not come so far
    since = found.steps_at, lock.at if lock else None, float(last.get("at", 0.0))
    newest = max(one for one in since if one is not None)
    idle_s = max(0.0, min(now - newest, now - (taken[-1].at if taken else newest)))
    done = found.training is not None and bool(taken) and taken[-1].step.number >= found.training.steps
    limit_s = _UNKNOWN_S if done else _limit_s(found.plan, taken)
    if held is None:
        limit_s = max(limit_s, _FAR_S)
    if idle_s > limit_s:
        usual = newest_steady(taken)
        takes = f", and its steps take {format_seconds(statistics.median(usual))}" if usual else ""
        still = f"no step has ended for {format_seconds(idle_s)}{takes}"
        if held:
            return "hangs", still, idle_s
        return "silent", f"{still}: it hangs or was killed; {who} cannot be looked at from here", idle_s
    if done:
        return "saving", "all steps are done", idle_s
    if taken:
        return "running", "", idle_s
    again = "failed" in last
    return "starting", f"again, after: {_first_line(str(last['failed']))}" if again else "no step has ended yet", idle_s


def _over(found: RunFolder, who: str) -> tuple[State, str]:
    """Return how a run ended that nobody runs any more."""
    last = _last_note(found)
    if "failed" in last:
        return "failed", str(last["failed"])
    if "ended" in last:
        done = not found.training or not found.steps or found.steps[-1].step.number >= found.training.steps
        return ("ended", "") if done else ("stopped", f"by {last['ended'] or 'its end'}, before its last step")
    if found.hang_reports:
        return "failed", found.hang_reports[0].strip()
    if found.plan is None and not found.starts:
        return "not begun", f"{who} ended before the run began"
    return "killed", f"{who} ended without a word, as a kill or a machine that fails ends it"


def _limit_s(plan: Plan | None, current: Sequence[LoggedStep]) -> float:
    """Return how long a step may take before it is said that the run hangs; the watchdog of the run waits longer."""
    steady = newest_steady(current)
    if steady:
        return max(_LEAST_S, _STEPS * statistics.median(steady))
    if plan is not None and plan.engine == "nxd":
        return math.inf  # compiles, as long as it takes
    known = plan.prediction if plan and current and current[-1].compared else None
    return max(_LEAST_S, _STEPS * known.high_s) if known else _UNKNOWN_S


def _pace(plan: Plan | None, current: Sequence[LoggedStep]) -> SeenPace | None:
    if not current:
        return None
    last = [one.step for one in current if one.step.phase == "steady"][-WINDOW:] or [current[-1].step]
    known = plan.prediction if plan and current[-1].compared else None
    return SeenPace(
        step_time_s=statistics.median(one.time_s for one in last),
        tokens_per_s=statistics.median(one.tokens_per_s for one in last),
        predicted_s=known.step_time_s if known else None, low_s=known.low_s if known else None,
        high_s=known.high_s if known else None, predicted_tokens_per_s=known.tokens_per_s if known else None,
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
    """Return steps evenly chosen among those that are known, the last one among them."""
    span = range(steps[0].step.number, steps[-1].step.number + 1) if steps else range(0)
    apart = max(1, len(span) // _MOST_POINTS)
    return list({(one.step.number - span.stop) // apart: one.step for one in steps}.values())


def _behind(ranks: Sequence[SeenRank], plan: Plan | None) -> tuple[str, ...]:
    """Say where ranks are; those that wait for the same share a line."""
    found = {one.rank: one for one in ranks}
    statuses, stills = ({rank: getattr(one, name) for rank, one in found.items()} for name in ("status", "still"))
    lines: dict[str, list[int]] = {}
    for number, rank in enumerate(by_suspicion(statuses, stills)):
        one = found[rank]
        since = "" if one.still_s is None else f"there for {format_seconds(one.still_s)}"
        about = [f"process {one.status.process} on {one.host}", *filter(None, [one.still, since])]
        if plan and rank < plan.mesh.num_ranks:
            about.insert(0, f"pipeline rank {plan.mesh.coordinates(rank).get('pp', 0)}")
        text = f" ({', '.join(about)}) {one.status}" if number == 0 or one.still else f" {one.status}"
        lines.setdefault(text, []).append(rank)
    texts = [f"rank{'s' if len(those) > 1 else ''} {ranks_text(those)}{text}" for text, those in lines.items()]
    more = [f"and {len(texts) - _MOST_LINES} lines more"] if len(texts) > _MOST_LINES else []
    return (*texts[:_MOST_LINES], *more)


def _remarks(found: RunFolder, state: State, now: float) -> list[str]:
    remarks = list(found.faults)
    newest = max((one.at for one in found.steps[-1:]), default=now)
    if newest - now > _CLOCK_S:
        remarks.append(f"the clock of the machine that runs it is {format_seconds(newest - now)} ahead of the one here")
    if found.lock and found.lock.held is None and state not in OVER:
        remarks.append(f"it runs on {found.lock.host}, so it is judged by the times of its files, not by its processes")
    return remarks


def _last_note(found: RunFolder) -> Mapping[str, Any]:
    """Return what was noted last of the starts of a run."""
    return found.starts[-1] if found.starts else {}


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
