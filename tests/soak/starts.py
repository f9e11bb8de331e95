"""Starts of tiny runs as users type them, forked or under torchrun, and what must hold of them in the end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autoshard.plan.codec import dump
from tests.runtime.cases import environment, is_alive, read_metrics, tiny_plan

Way = Literal["forked", "torchrun"]
CLI = ("autoshard.cli",)
STEPS = 14
PATIENCE_S = 600.0  # a busy machine takes seconds for a step of a tiny run, which takes milliseconds
ORPHANS_S = 10.0  # in which all processes of a run are gone after its end
LAYOUTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "tp2": ("tp=2,pp=1,dp=1", {}),
    "pp2 interleaved": ("tp=1,pp=2,dp=1,vp=2,schedule=interleaved", {"num_layers": 4}),
    "ZeRO-3 bf16": ("tp=1,pp=1,dp=2,zero=3", {}),
    "ep2 MoE": ("tp=1,pp=1,dp=2,ep=2", {"num_experts": 4, "experts_per_token": 2}),
    "cp2": ("tp=1,pp=1,cp=2,dp=1", {}),
    "ZeRO-1 bf16-sr": ("tp=1,pp=1,dp=2,zero=1", {"precision": "bf16-sr"}),
}
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """A command that runs: its process, what it prints, and since when."""

    process: "subprocess.Popen[bytes]"
    log: Path
    at_s: float  # of the clock of metrics

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyRun:
    """A command that is typed again and again in a folder until the run is over."""

    folder: Path
    way: Way
    words: tuple[str, ...]

    @property
    def out(self) -> Path:
        return self.folder / "run"

    @contextmanager
    def typed(self, module: Sequence[str] = CLI, **variables: str) -> Iterator[Typed]:
        """Start it, and leave no process of it behind."""
        log = self.folder / f"log-{len(list(self.folder.glob('log-*')))}"
        command = [*((sys.executable, *_TORCHRUN) if self.way == "torchrun" else (sys.executable,)), "-m", *module]
        known = environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", **variables)
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, *self.words], cwd=self.folder, env=known, stdout=file, stderr=file, start_new_session=True
            )
        try:
            yield Typed(process=process, log=log, at_s=time.time())
        finally:
            killed(processes_of(process.pid))
            process.wait()

    def steps_since(self, at_s: float) -> int:
        """How many steps have ended since then."""
        with suppress(FileNotFoundError):
            return sum(line["at"] > at_s for line in read_metrics(self.out / "metrics.jsonl"))
        return 0

    def curve(self) -> list[tuple[int, float, float]]:
        """Number, loss and norm of each step, in the order of the file."""
        lines = read_metrics(self.out / "metrics.jsonl")
        return [(line["step"], line["loss"], line["norm"]) for line in lines]


def tiny_run(folder: Path, layout: str, way: Way, *more: str) -> TinyRun:
    """Write the plan of a layout into a new folder."""
    folder.mkdir(parents=True)
    text, options = LAYOUTS[layout]
    (folder / "tiny.json").write_text(dump(tiny_plan(text, seq_len=8, **options)), encoding="utf-8")
    usual = {"--steps": str(STEPS), "--checkpoint.every-steps": "3"}
    steps = [word for name, value in usual.items() if name not in more for word in (name, value)]
    return TinyRun(folder=folder, way=way, words=("run", "tiny.json", "--out", "run", *steps, *more))


def undisturbed(folder: Path, layout: str) -> list[tuple[int, float, float]]:
    """Return the curve of a run that nothing disturbs."""
    run = tiny_run(folder, layout, "forked")
    fault = to_the_end(run)
    assert not fault, fault
    return run.curve()


def to_the_end(run: TinyRun) -> str:
    """Type the command a last time, and let it end by itself; say what is wrong with that."""
    with run.typed() as start:
        if not until(lambda: start.is_over, start, PATIENCE_S):
            return f"the last start has not ended within {PATIENCE_S:.0f} s: {start.said[-300:]}"
        if start.process.returncode:
            return f"the last start ended with {start.process.returncode}: {start.said[-300:]}"
        return "the last start printed a traceback" if "Traceback" in start.said else ""


def differs(run: TinyRun, reference: Sequence[tuple[int, float, float]]) -> str:
    """Say how a run that is over differs from an undisturbed one."""
    curve = run.curve()
    if [step for step, *_ in curve] != list(range(1, STEPS + 1)):
        return f"not each step once: {[step for step, *_ in curve]}"
    wrong = [step for (step, *numbers), (_, *expected) in zip(curve, reference, strict=True) if numbers != expected]
    if wrong:
        return f"losses or norms are not those of the undisturbed run in steps {wrong}"
    for name in ("plan.json", "training.json"):
        json.loads((run.out / name).read_text(encoding="utf-8"))
    return ""


def until(holds: Callable[[], bool], start: Typed, limit_s: float = PATIENCE_S) -> bool:
    """Look often whether something holds, until the command is over; return whether it does."""
    end_s = time.monotonic() + limit_s
    while not holds():
        if start.is_over or time.monotonic() > end_s:
            return holds()
        time.sleep(0.002)
    return True


def processes_of(pid: int) -> list[int]:
    """A process and all that it has started, by any of its threads."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            for child in (task / "children").read_text(encoding="ascii").split():
                pids += processes_of(int(child))
    return pids


def killed(pids: Sequence[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to all that are there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def live_on(pids: Iterable[int]) -> bool:
    """Say whether processes do not end in a while; end them then."""
    end_s = time.monotonic() + ORPHANS_S
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < end_s:
        time.sleep(0.01)
    killed(alive)
    return bool(alive)
