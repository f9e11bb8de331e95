"""Plans run as a user runs them: ``autoshard run`` under torchrun, or what of it goes without a Trainium."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from autoshard.calibration.rows import OF_A_CLUSTER
from autoshard.cli import main
from autoshard.errors import RunFailed
from autoshard.plan.codec import dump
from autoshard.plan.plan import Plan
from autoshard.spec.cluster_catalogue import cluster_names
from autoshard.spec.files import json_line
from autoshard.spec.record import encode
from benchmarks.trainium.machine import Machine

ROOT = Path(__file__).parents[2]
RUNS = "runs"  # in the folder of a setting: what `autoshard calibrate` reads
OTHERS = "others"  # runs that are slowed, or compiled in a hurry
OWN = "autoshard.cli"
Environment = Mapping[str, str]
_SAME: Environment = {}
_LAST_WORDS = 400
QUIET = ("--checkpoint.to", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What the folder of a run says."""

    folder: Path
    steps: tuple[Mapping[str, Any], ...]  # lines of metrics.jsonl
    report: Mapping[str, Any]  # report.json

    @property
    def step_time_s(self) -> float:
        """The step time that the run reports."""
        return float(self.report["step_time_s"]["measured"])

    @property
    def first_step_s(self) -> float | None:
        """The seconds of the first step, in which what is not in a cache is compiled."""
        return next((float(one["time_s"]) for one in self.steps), None)

    @property
    def device_bytes(self) -> int | None:
        """The most device memory of the node in use, as neuron-monitor says; None where it says nothing."""
        seen = [one["neuron"]["device_bytes"] for one in self.steps if isinstance(one.get("neuron"), dict)]
        return max(map(int, seen), default=None)


def run_plan(
    plan: Plan, machine: Machine, name: str, steps: int, *, program: str = OWN, more: Environment = _SAME
) -> Ran:
    """Run a plan on all ranks of this machine under torchrun; a run unlike a user's is not among those of rows."""
    among = RUNS if program == OWN and not more else OTHERS
    file, folder = written(plan, machine, name), machine.setting.folder / among / name
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(plan.mesh.num_ranks))
    options = ("run", str(file), "--steps", str(steps), "--out", str(folder), "--resume", "never", *QUIET)
    started([sys.executable, *start, "-m", program, *options], more)
    if plan.cluster.name not in cluster_names():  # so that its row can be read
        text = json.dumps(encode(machine.node_type), indent=2) + "\n"
        (folder / OF_A_CLUSTER).write_text(text, encoding="utf-8")
    return read(folder)


def run_here(arguments: Sequence[str], folder: Path) -> Ran:
    """Run what needs no Trainium in this process, which imports torch once for all."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = main(["run", *arguments, "--out", str(folder), "--resume", "never"])
    if code:
        raise RunFailed(f"autoshard run {' '.join(arguments)} ended with {code}: {said.getvalue()[-_LAST_WORDS:]}")
    return read(folder)


def run_apart(arguments: Sequence[str], folder: Path) -> Ran:
    """Run what is not for the cores of this machine in a process of its own."""
    started([sys.executable, "-m", "autoshard.cli", "run", *arguments, "--out", str(folder), "--resume", "never"])
    return read(folder)


def dry_counts(plan: Plan, machine: Machine, name: str) -> Mapping[str, Any]:
    """Return what ``autoshard run --dry-run`` counts of a plan's first rank, with shapes alone."""
    said, file = io.StringIO(), written(plan, machine, name)
    with redirect_stdout(said):
        code = main(["run", str(file), "--dry-run", "--dry-ranks", "0", "--json"])
    if code:
        raise RunFailed(f"autoshard run {file.name} --dry-run ended with {code}")
    return cast(Mapping[str, Any], json.loads(said.getvalue()))


def written(plan: Plan, machine: Machine, name: str) -> Path:
    """Write a plan into the folder of the setting."""
    file = machine.setting.folder / "plans" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dump(plan), encoding="utf-8")
    return file


def started(command: Sequence[str], more: Environment = _SAME) -> str:
    """Run a program to its end, return what it printed; its words go on into the log of the part."""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", check=False,
    )  # fmt: skip
    sys.stderr.write(done.stdout)
    if done.returncode:
        last = " ".join(done.stdout.split())[-_LAST_WORDS:]
        raise RunFailed(f"`{' '.join(command[1:6])} ...` ended with exit code {done.returncode}: {last}")
    return done.stdout


def read(folder: Path) -> Ran:
    """Read the folder of a run that has ended."""
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    steps = [json_line(line) for line in lines]
    report = json_line((folder / "report.json").read_text("utf-8"))
    return Ran(
        folder=folder,
        steps=tuple(cast(Mapping[str, Any], one) for one in steps if isinstance(one, dict)),
        report=cast(Mapping[str, Any], report),
    )
