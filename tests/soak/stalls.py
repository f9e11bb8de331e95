"""What looks like a hang and is none, and SIGTERM in steps of up to 90 s: no run is ended, and no step is lost."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.jobs.local_slurm import Slurm, local_slurm, missing
from tests.jobs.test_slurm import launched, newest
from tests.jobs.test_torchrun import free_port
from tests.runtime.cases import ROOT, environment, read_metrics
from tests.soak import slow_steps, stalling, starts
from tests.soak.hunt import HuntResult
from tests.soak.kills import Kill, has_come
from tests.soak.starts import CLI, LAYOUTS, killed, processes_of, tiny_run, until

DATA_S, FROZEN_S, LONGEST_STEP_S = 60.0, 40.0, 90.0
KINDS = ("slow data", "suspended", "SIGTERM under torchrun", "SIGTERM under Slurm")
AT_ONCE = 3  # most of a case is waiting
JOB_STEPS = 6
EXTENSION = f"{ROOT}/tests/soak/slow_steps.py"
JOB = ("--ranks", "2", "--seq-len", "32", "--global-batch", "4", "--fix", "tp=1,pp=1,dp=2", "--steps", str(JOB_STEPS))

Case = Mapping[str, Any]
Curve = Sequence[tuple[int, float, float]]


def hunt(cases: int, seed: int, folder: Path) -> HuntResult:
    """Stall runs in so many ways; without Slurm its cases run under torchrun."""
    draw, kinds = random.Random(seed), KINDS[:3] if missing() else KINDS
    drawn = with_step_times(
        draw, [case_of(draw, kinds[number % len(kinds)], folder / str(number)) for number in range(cases)]
    )
    plain = {name: starts.undisturbed(folder / name, name) for name in {case["layout"] for case in drawn}}
    of_job = undisturbed_job(folder / "job")

    def judged(case: Case, slurm: Slurm | None = None) -> str:
        reference = of_job if case["kind"].startswith("SIGTERM") else plain[case["layout"]]
        begun_s = time.monotonic()
        try:
            fault = terminated(case, reference, slurm) if reference is of_job else stalled(case, reference)
        except Exception as error:
            fault = f"{type(error).__name__}: {str(error)[-300:]}"
        print(f"{named(case)}: {fault or 'held'} after {time.monotonic() - begun_s:.0f} s", flush=True)
        return fault

    under_slurm = [case for case in drawn if case["kind"] == KINDS[3]]
    others = [case for case in drawn if case["kind"] != KINDS[3]]
    with local_slurm() if under_slurm else nullcontext() as slurm, ThreadPoolExecutor(AT_ONCE + 1) as pool:
        queue = pool.submit(lambda: [judged(case, slurm) for case in under_slurm])  # its node takes a job at a time
        faults = list(pool.map(judged, others)) + queue.result()
    ends = list(zip([*others, *under_slurm], faults, strict=True))
    held = Counter(case["kind"] for case, fault in ends if not fault)
    steps_s = sorted(case["step_s"] for case, fault in ends if case["kind"].startswith("SIGTERM") and not fault)
    remark = ", ".join(f"{kind} {held[kind]}" for kind in kinds)
    return HuntResult(
        held=held.total(),
        failures=[f"{named(case)}: {fault}" for case, fault in ends if fault],
        remark=f"{remark}; steps of {', '.join(f'{step_s:.0f}' for step_s in steps_s)} s at SIGTERM",
    )


def case_of(draw: random.Random, kind: str, folder: Path) -> Case:
    """Draw a case of a kind."""
    return {
        "kind": kind, "folder": folder, "layout": draw.choice(list(LAYOUTS)),
        "way": draw.choice(("forked", "torchrun")), "rank": draw.randrange(2), "step": draw.randint(2, 6),
        "moment": draw.choice(("step", "save", "load")), "after_s": draw.uniform(0.0, 0.2),
    }  # fmt: skip


def with_step_times(draw: random.Random, cases: Sequence[Case]) -> list[Case]:
    """Spread the steps of those that get SIGTERM from 1 s to the longest, and draw when it comes."""
    signalled = [case for case in cases if case["kind"].startswith("SIGTERM")]

    def timed(case: Case) -> Case:
        step_s = 1 + (LONGEST_STEP_S - 1) * (signalled.index(case) + draw.random()) / len(signalled)
        return {**case, "step_s": step_s, "signal_s": draw.uniform(0.0, 0.8) * step_s}

    return [timed(case) if case in signalled else case for case in cases]


def named(case: Case) -> str:
    """Return a case on a line."""
    if case["kind"].startswith("SIGTERM"):
        return f"{case['kind']} {case['signal_s']:.1f} s after the begin of a step of {case['step_s']:.1f} s"
    where = f"rank {case['rank']} step {case['step']}" if case["kind"] == "slow data" else f"in {case['moment']}"
    return f"{case['kind']}, {case['layout']} {case['way']}, {where}"


def stalled(case: Case, reference: Curve) -> str:
    """Let data come late, or suspend all processes; the same start must take all steps."""
    run, frozen = tiny_run(case["folder"], case["layout"], case["way"]), case["kind"] == "suspended"
    sample = (case["step"] - 1) * 4  # of the global batch
    late = {stalling.RANK: str(case["rank"]), stalling.SAMPLE: str(sample), stalling.SECONDS: str(DATA_S)}
    moment = Kill(moment=case["moment"], victim="all", after_s=case["after_s"], number=case["step"])
    with run.typed(CLI if frozen else ("tests.soak.stalling",), **({} if frozen else late)) as start:
        if frozen:
            until(lambda: has_come(run, moment, start), start)
            time.sleep(case["after_s"])
            pids = processes_of(start.process.pid)
            killed(pids, signal.SIGSTOP)
            time.sleep(FROZEN_S)
            killed(pids, signal.SIGCONT)
        if not until(lambda: start.is_over, start) or start.process.returncode:
            return f"it must go on, and ended with {start.process.returncode}: {start.said[-400:]}"
    at_s = [line["at"] for line in read_metrics(run.out / "metrics.jsonl")]
    longest_s = max(late - early for early, late in zip([start.at_s, *at_s], at_s, strict=False))
    if longest_s < FROZEN_S - 1:
        return f"the stall has met no step: the longest took {longest_s:.0f} s"
    return starts.differs(run, reference)


def terminated(case: Case, reference: Curve, slurm: Slurm | None) -> str:
    """Send SIGTERM inside a step of many seconds to a job; it is saved, and the same job goes on after it."""
    folder = case["folder"]
    folder.mkdir()
    (slow := folder / "slow").touch()
    variables = {slow_steps.SECONDS: str(case["step_s"]), slow_steps.WHILE: str(slow)}
    metrics = folder / "job" / "run" / "metrics.jsonl"

    def meets() -> None:
        """Wait until the second step is under way."""
        until_s = time.monotonic() + starts.PATIENCE_S
        while not (metrics.is_file() and metrics.read_text(encoding="utf-8").count("\n")):
            assert time.monotonic() < until_s, "no step was taken"
            time.sleep(0.02)
        time.sleep(case["signal_s"])

    def is_saved() -> str:
        slow.unlink()
        steps = [line["step"] for line in read_metrics(metrics)]
        if newest(folder) != steps[-1] or not 2 <= steps[-1] < JOB_STEPS:
            return f"the step under way must be saved: steps {steps}, newest checkpoint {newest(folder)}"
        return ""

    if slurm:
        fault = stopped_by_slurm(slurm, folder, variables, meets, is_saved)
    else:
        fault = stopped_by_torchrun(folder, variables, meets, is_saved)
    return fault or job_differs(folder, reference)


def job_words(*more: str) -> list[str]:
    """What ``autoshard launch`` is told."""
    return [str(ROOT / "recipes" / "tiny-llama-local.yaml"), *JOB, "--checkpoint.every-steps", "100", *more]


def written_job(folder: Path, variables: Mapping[str, str], *more: str) -> dict[str, str]:
    """Write the job of one node under torchrun; return what its script needs around it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    known = environment(PATH=path, GLOO_SOCKET_IFNAME="lo", MASTER_PORT=str(free_port()), **variables)
    words = [sys.executable, "-m", "autoshard.cli", "launch", *job_words("--scheduler", "torchrun", *more)]
    subprocess.run(words, cwd=folder, env=known, check=True, capture_output=True)
    return known


def node(folder: Path, variables: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start the script of the node."""
    with (folder / "log").open("ab") as log:
        command = ["bash", str(folder / "job" / "node.sh"), "train"]
        return subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)


def stopped_by_torchrun(
    folder: Path, variables: Mapping[str, str], meets: Callable[[], None], is_saved: Callable[[], str]
) -> str:
    """Send SIGTERM to torchrun, and type the same again."""
    known = written_job(folder, variables, "--extend", EXTENSION)
    first = node(folder, known)
    try:
        meets()
        first.send_signal(signal.SIGTERM)
        first.wait(LONGEST_STEP_S + starts.PATIENCE_S)
    finally:
        killed(processes_of(first.pid))
    if fault := is_saved():
        return fault
    code = node(folder, known).wait(starts.PATIENCE_S)
    return f"the next start ended with {code}" if code else ""


def stopped_by_slurm(
    slurm: Slurm,
    folder: Path,
    variables: Mapping[str, str],
    meets: Callable[[], None],
    is_saved: Callable[[], str],
) -> str:
    """Send SIGTERM to the job as Slurm does before its time is up; it queues itself again."""
    (number,) = launched(slurm, folder, *job_words("--extend", EXTENSION, "--time", "9"), **variables)
    meets()
    slurm.call("scancel", "--signal=TERM", number)
    wait_s = time.monotonic() + LONGEST_STEP_S + starts.PATIENCE_S
    while slurm.job(number)["Restarts"] != "1":
        assert time.monotonic() < wait_s, "the job was not queued again"
        time.sleep(0.2)
    if fault := is_saved():
        return fault
    slurm.start_again(number, restarts=1)
    state = slurm.wait(number, "COMPLETED", "FAILED", "CANCELLED")["JobState"]
    return "" if state == "COMPLETED" else f"the next start is {state}"


def undisturbed_job(folder: Path) -> Curve:
    """Return the curve of the job when nothing disturbs it."""
    folder.mkdir()
    code = node(folder, written_job(folder, {})).wait(starts.PATIENCE_S)
    assert code == 0, (folder / "log").read_text(encoding="utf-8")
    return curve_of(folder)


def curve_of(folder: Path) -> Curve:
    """Number, loss and norm of each step of a job."""
    lines = read_metrics(folder / "job" / "run" / "metrics.jsonl")
    return [(line["step"], line["loss"], line["norm"]) for line in lines]


def job_differs(folder: Path, reference: Curve) -> str:
    """Say how the job differs from the undisturbed one."""
    curve = curve_of(folder)
    return "" if curve == reference else f"each step once, as undisturbed: {curve}, not {reference}"
