"""Starts of a run on W&B one after the other, in a process of its own, with which W&B's service ends.

Arguments: the folder, the steps of every start (``1-12,11-20``), and what W&B has when the process is killed,
if it is: ``a-file`` or ``the-last-step``.
"""

import os
import signal
import sys
from pathlib import Path

from autoshard.commands.running.steps import StepDisplay
from autoshard.plan.codec import dump
from autoshard.run.reports import Measured, RunReport, TimedStep
from autoshard.spec.training import Tracking, Training
from tests.runtime.cases import tiny_plan, wait_until
from tests.runtime.metrics.offline import records

FILES = "wandb/offline-run-*/run-*.wandb"


def main(folder: Path, starts: str, killed_with: str | None) -> None:
    """Show the steps of all starts."""
    plan = tiny_plan("tp=1,pp=1,dp=1")
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(dump(plan), encoding="utf-8")
    training = Training(steps=20, track=Tracking(wandb="tested"))
    for first, last in (map(int, start.split("-")) for start in starts.split(",")):
        steps: list[TimedStep] = []
        told = {"num_done": first - 1, "run_id": "0a1b2c3d"}
        with StepDisplay(plan, training, folder, platform="local", silent=False, **told) as show:
            for number in range(first, last + 1):
                loss = float("nan") if number == 4 else 1 / number
                steps.append(TimedStep(number=number, loss=loss, norm=1.0, time_s=0.25, num_tokens=64, memory_bytes=3))
                show(steps[-1])
            if killed_with is not None:
                wait_until(lambda: any(folder.glob(FILES)), "W&B has a file")
                if killed_with == "the-last-step":
                    wait_until(lambda last=last: last in steps_in(folder), f"W&B has written step {last}")
                os.kill(os.getpid(), signal.SIGKILL)
            measured = Measured(memory_bytes={"weights": 5}, sent_bytes={"tp": 7})
            show.conclude(plan, RunReport(steps=tuple(steps), ranks=(measured,)), "local")


def steps_in(folder: Path) -> set[int]:
    """The steps that W&B has written while the run goes on."""
    (file,) = folder.glob(FILES)
    return {record["history"]["item"]["_step"] for record in records(file, folder) if "history" in record}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] if sys.argv[3:] else None)
