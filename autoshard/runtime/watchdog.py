"""Finds out that ranks hang, by their positions, long before a library gives up; the plan says how long steps take."""

import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from pathlib import Path

from autoshard.engine.activity import RankStatus, activity_folder, by_suspicion, is_alive, read_status, why_still
from autoshard.engine.base import WARM_UP, TimedStep
from autoshard.plan.plan import Plan

HUNG = 75  # exit code of a rank that ends because of a hang
_STEPS, _LEAST_S = 4, 24.0  # reported before five step times or 30 s are over
_UNKNOWN_S = 600.0  # for steps of which nothing is known: on another machine, or while they set things up


class Watch:
    """Watches the ranks of this machine by the positions that they keep in the folder of a run."""

    def __init__(self, folder: Path, plan: Plan, *, here: bool) -> None:
        self._folder, self._mesh = activity_folder(folder), plan.mesh
        self._compiles = plan.engine == "nxd"
        predicted = plan.prediction
        self._predicted_s = predicted.high_s if predicted and here else None
        self._times_s: deque[float] = deque(maxlen=20)
        self._num_steps = 0

    def learn(self, said: object) -> None:
        """Learn from a step how long steps take; the first ones take longer."""
        if isinstance(said, TimedStep):
            self._num_steps += 1
            if self._num_steps > WARM_UP:
                self._times_s.append(said.time_s)

    @property
    def limit_s(self) -> float:
        """How long all ranks may stay where they are inside a step."""
        if self._times_s:
            return max(_LEAST_S, _STEPS * statistics.median(self._times_s))
        if self._compiles and self._num_steps <= WARM_UP:
            return math.inf
        return _UNKNOWN_S if self._predicted_s is None else max(_LEAST_S, _STEPS * self._predicted_s)

    def hung(self) -> str:
        """Say who hangs and where; nothing while some rank moves."""
        found: dict[int, RankStatus] = {}
        for rank in range(self._mesh.num_ranks):
            one = read_status(self._folder / str(rank))
            if one and one.step and is_alive(one.process):  # else it is left of an earlier start
                found[rank] = one
        still_s = time.monotonic() - max((one.since_s for one in found.values()), default=math.inf)
        if still_s < self.limit_s:
            return ""

        states = {rank: why_still(one.process) for rank, one in found.items()}
        first, *others = by_suspicion(found, states)

        def line(rank: int) -> str:
            one, stage = found[rank], self._mesh.coordinates(rank).get("pp", 0)
            state = f", {states[rank]}" if states[rank] else ""
            return f"rank {rank} (pipeline rank {stage}, process {one.process}{state}) {one}"

        limits = f"no rank has moved for {still_s:.0f} s (limit {self.limit_s:.0f} s)"
        return "\n".join([f"{limits}. {line(first)}", *(f"  {line(rank)}" for rank in sorted(others))])


def end_if_hung(watch: Watch, report: Path) -> None:
    """Watch from a thread of this rank, which nobody else watches; a hang ends the process with a report."""

    def look() -> None:
        while True:
            time.sleep(1.0)
            if text := watch.hung():
                report.write_text(text + "\n", encoding="utf-8")
                sys.stderr.write(f"autoshard: {text}\n")
                sys.stderr.flush()
                os._exit(HUNG)

    threading.Thread(target=look, daemon=True, name="watchdog").start()
