"""Folders of runs as they are at a moment, made by hand: nothing runs in them."""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from autoshard.plan.codec import dump
from autoshard.plan.plan import Plan
from autoshard.report.watch.content import read_run
from autoshard.report.watch.progress import RunProgress, progress_of
from autoshard.run.activity import RankActivity
from autoshard.run.reports import TimedStep
from autoshard.runtime.metrics.log import MetricsLog, record_of
from autoshard.spec.record import encode
from autoshard.spec.training import Checkpointing, Training
from tests.runtime.cases import tiny_plan

NOW = 1_800_000_000.0
STEP_S = 0.5
FAR = "node-7"  # another machine
FROM = {"from": 0, "at": NOW - 1000}


@cache
def plan_of_two() -> Plan:
    """A plan for two ranks that promises steps of half a second."""
    plan = tiny_plan("tp=1,pp=1,dp=2")
    assert plan.prediction
    scale = STEP_S / plan.prediction.step_time_s
    parts = {name: scale * time_s for name, time_s in plan.prediction.time_parts.items()}
    known = replace(plan.prediction, step_time_s=STEP_S, low_s=0.4, high_s=0.6, time_parts=parts, tokens_per_s=128.0)
    return replace(plan, prediction=known)


def steps_of(count: int, *, age_s: float = 0.3, **changes: Any) -> list[dict[str, Any]]:
    """So many even steps, of which the last ended so long ago; a change is a value, or a function of the step."""
    records: list[dict[str, Any]] = []
    for number in range(1, count + 1):
        step = TimedStep(
            number=number, loss=4.0 - 0.01 * number, norm=1.0, time_s=STEP_S, num_tokens=64, memory_bytes=2**20,
            phase="warm-up" if number <= 2 else "steady",
        )  # fmt: skip
        own: dict[str, Any] = {name: one(number) if callable(one) else one for name, one in changes.items()}
        at, mfu = NOW - age_s - STEP_S * (count - number), own.pop("mfu", 0.4)
        records.append(record_of(replace(step, **own), at=at, mfu=mfu))
    return records


def made_run(
    folder: Path, records: Sequence[Mapping[str, Any]] = (), notes: Sequence[Mapping[str, Any]] = (FROM,), *,
    host: str = "", num_steps: int = 100, keeping: Checkpointing | None = None,
) -> Path:  # fmt: skip
    """Write what a run has in its folder; ``host`` ran it, or this machine did and has ended."""
    folder.mkdir(parents=True, exist_ok=True)
    training = Training(steps=num_steps, checkpoint=keeping or Checkpointing())
    (folder / "plan.json").write_text(dump(plan_of_two()), encoding="utf-8")
    (folder / "training.json").write_text(json.dumps(encode(training)), encoding="utf-8")
    (folder / "attempts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in notes), encoding="utf-8")
    if records:
        log = MetricsLog(folder / "metrics.jsonl", 0)
        for record in records:
            log.append(record)
        log.close()
        touch(folder / "metrics.jsonl", records[-1]["at"])
    (folder / ".lock").write_text(f"process 4711 on {host or socket.gethostname()}", encoding="utf-8")
    touch(folder / ".lock", NOW - 1010)
    return folder


def touch(path: Path, at: float) -> None:
    """Give a file a time."""
    os.utime(path, (at, at))


def at_work(folder: Path, rank: int, step: int, action: str, waits_for: str = "", host: str = "") -> None:
    """Write the record of a rank, as this process."""
    path = folder / "positions" / (host or socket.gethostname()) / str(rank)
    activity = RankActivity(path)
    activity.begin(step)
    activity.act(action)
    activity.wait(waits_for)
    touch(path, NOW - 900)


def seen(folder: Path, now: float = NOW) -> RunProgress:
    """What a watcher knows of a folder."""
    return progress_of(read_run(folder), now)
