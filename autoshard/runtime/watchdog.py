"""Finds out that ranks hang, by their positions, long before a library gives up; the plan says how long steps take."""

import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from autoshard.files import replace_text
from autoshard.plan.plan import Plan
from autoshard.run.activity import (
    RankStatus,
    activity_folder,
    by_suspicion,
    cannot_run,
    is_alive,
    read_status,
    why_still,
)
from autoshard.run.reports import WARM_UP, TimedStep
from autoshard.spec.training import Watching

HUNG = 75  # exit code of a rank that ends because of a hang
_STEPS, _LEAST_S = 4, 24.0  # reported before five step times or 30 s are over
_UNKNOWN_S = 600.0  # for what nothing is known of: steps on another machine, or that set things up; starts, ends
_RESCUE_S = 60.0  # for a last save, at least
_LOOK_S = 1.0
_ASLEEP_S = 10.0  # between two looks: this process did not run meanwhile, as when its machine is suspended

Rescue = Callable[[], str]  # saves the state if the ranks can; says what became of it


class Watch:
    """Watches the ranks of this machine by the positions that they keep in the folder of a run."""

    def __init__(self, folder: Path, plan: Plan, options: Watching | None = None, *, here: bool) -> None:
        """Take the options of a run; the prediction is a measure of steps only ``here``, on the plan's own hardware."""
        self._folder, self._mesh, self._options = activity_folder(folder), plan.mesh, options or Watching()
        self._compiles = plan.engine == "nxd"
        predicted = plan.prediction
        self._predicted_s = predicted.high_s if predicted and here else None
        self._times_s: deque[float] = deque(maxlen=20)
        self._num_steps = 0
        self._looked_s = self._counts_from_s = time.monotonic()
        self._stopped_s: dict[int, float] = {}  # by process: since when it is seen to be stopped
        self.rescue: Rescue | None = None
        self._rescuing, self._rescued = threading.Lock(), ""

    def learn(self, said: object) -> None:
        """Learn from a step how long steps take; the first ones take longer."""
        if isinstance(said, TimedStep):
            self._num_steps += 1
            if self._num_steps > WARM_UP:
                self._times_s.append(said.time_s)

    @property
    def step_s(self) -> float:
        """How long all ranks may stay where they are inside a step."""
        if self._options.step_s is not None:
            return self._options.step_s
        if self._times_s:
            return max(_LEAST_S, _STEPS * statistics.median(self._times_s))
        if self._compiles and self._num_steps <= WARM_UP:
            return math.inf
        return _UNKNOWN_S if self._predicted_s is None else max(_LEAST_S, _STEPS * self._predicted_s)

    def hung(self) -> str:
        """Say who hangs and where; nothing while some rank moves."""
        now_s = time.monotonic()
        if now_s - self._looked_s > _ASLEEP_S:
            self._counts_from_s, self._stopped_s = now_s, {}
        self._looked_s = now_s
        statuses = {
            rank: status
            for rank in range(self._mesh.num_ranks)
            if (status := read_status(self._folder / str(rank)))
            and is_alive(status.process)  # else of an earlier start
        }
        stopped = {status.process for status in statuses.values() if cannot_run(status.process)}
        self._stopped_s = {process: self._stopped_s.get(process, now_s) for process in stopped}
        if self._options.off or not statuses:
            return ""
        in_step = any(status.step for status in statuses.values())
        stopped_s = now_s - min(self._stopped_s.values(), default=math.inf)
        if stopped_s >= (limit_s := min(_UNKNOWN_S, self.step_s) if in_step else _LEAST_S):
            return self._report(f"a rank has been stopped for {stopped_s:.0f} s (limit {limit_s:.0f} s)", statuses)
        still_s = now_s - max(self._counts_from_s, *(status.since_s for status in statuses.values()))
        if still_s >= (limit_s := self._limit_s(statuses, in_step=in_step)):
            return self._report(f"no rank has moved for {still_s:.0f} s (limit {limit_s:.0f} s)", statuses)
        return ""

    def _limit_s(self, statuses: Mapping[int, RankStatus], *, in_step: bool) -> float:
        """Return how long no rank may move where ranks are now; the run itself gives up what storage does not give."""
        if any(status.of_storage for status in statuses.values()):
            return self._options.data_s + _LEAST_S
        if in_step:
            return self.step_s
        return math.inf if self._compiles else max(_UNKNOWN_S, self._options.data_s)

    def _report(self, what: str, statuses: Mapping[int, RankStatus]) -> str:
        states = {rank: why_still(status.process) for rank, status in statuses.items()}
        first, *rest = by_suspicion(statuses, states)

        def line(rank: int) -> str:
            status, stage = statuses[rank], self._mesh.coordinates(rank).get("pp", 0)
            state = f", {states[rank]}" if states[rank] else ""
            return f"rank {rank} (pipeline rank {stage}, process {status.process}{state}) {status}"

        return "\n".join([f"{what}. {line(first)}", *(f"  {line(rank)}" for rank in sorted(rest))])

    def rescued(self) -> str:
        """Let the state be saved before the run ends; return what became of it as a line, if anything can be said.

        It is done once, whoever asks for it first: this watch, or a failure.
        """
        with self._rescuing:
            self._rescued = self._rescued or (self._save(self.rescue) if self.rescue else "")
        return self._rescued

    def _save(self, rescue: Rescue) -> str:
        if self._stopped_s:
            return "the state was not saved: a rank cannot run"
        said, limit_s = list[str](), max(_RESCUE_S, self._options.data_s)
        thread = threading.Thread(target=lambda: said.append(rescue()), daemon=True, name="rescue")
        thread.start()
        thread.join(limit_s)
        return said[0] if said else f"the state was not saved within {limit_s:.0f} s"


def end_if_hung(watch: Watch, report: Path) -> None:
    """Watch from a thread of this rank; a hang ends the process with a report, and saves the state if ranks can."""

    def look() -> None:
        while True:
            time.sleep(_LOOK_S)
            if text := watch.hung():
                text = "\n".join(filter(None, (text, watch.rescued())))
                try:
                    replace_text(report, text + "\n")
                    sys.stderr.write(f"autoshard: {text}\n")
                    sys.stderr.flush()
                finally:
                    os._exit(HUNG)

    threading.Thread(target=look, daemon=True, name="watchdog").start()
