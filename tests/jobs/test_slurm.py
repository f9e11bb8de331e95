"""Emitted jobs under a real Slurm: submitted, killed, queued again, finished; compiled first; cancelled; refused."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoshard.plan.codec import dump
from tests.jobs.cases import FIRST, files_of, job_of, plan_of
from tests.jobs.local_slurm import Slurm, local_slurm, missing, until
from tests.jobs.slow_step import DELAY_S
from tests.plan.nxd.test_match import planned
from tests.runtime.cases import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "")]
TINY = ["--ranks", "2", "--seq-len", "32", "--global-batch", "4", "--fix", "tp=1,pp=1,dp=2"]
STEPS = 250


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with local_slurm() as started:
        yield started


def launched(slurm: Slurm, folder: Path, *words: str, **more: str) -> list[str]:
    """Write and submit a job; return the numbers of its jobs, that of the training job last."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "autoshard.cli", "launch", *words, "--scheduler", "slurm", "--submit"],
        cwd=folder,
        env=slurm.variables | {"PYTHONPATH": str(ROOT), "PATH": path} | more,
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    numbers = re.findall(r"job: (\d+)", done.stdout)
    assert f"watch: squeue --jobs {','.join(numbers)}" in done.stdout
    assert f"{folder}/job/train-{numbers[-1]}.log" in done.stdout
    assert f"scontrol update JobId={numbers[-1]} Requeue=0 && scancel --signal=TERM {numbers[-1]}\n" in done.stdout
    return numbers


def tiny(slurm: Slurm, folder: Path, *more: str) -> str:
    (number,) = launched(
        slurm, folder, str(ROOT / "recipes" / "tiny-llama-local.yaml"), *TINY, "--checkpoint.every-steps", "10", *more
    )
    return number


def newest(folder: Path) -> int:
    """The step of the newest checkpoint of a job's run."""
    return max((int(path.name[5:]) for path in folder.glob("job/run/checkpoints/step-????????")), default=0)


def rank_of(slurm: Slurm, number: str, rank: int) -> int:
    """The process of a rank."""
    for line in slurm.call("scontrol", "listpids", number).splitlines()[1:]:
        pid = line.split()[0]
        if pid.isdecimal() and int(pid) > 0:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables:
                return int(pid)
    raise AssertionError(f"no rank {rank}")


def log(folder: Path, number: str) -> str:
    return (folder / "job" / f"train-{number}.log").read_text(encoding="utf-8")


def test_a_run_goes_on_after_a_kill_and_after_its_time_until_it_is_finished(slurm: Slurm, tmp_path: Path) -> None:
    number = tiny(slurm, tmp_path, "--steps", str(STEPS))
    until(lambda: newest(tmp_path) >= 20, "a checkpoint")
    os.kill(rank_of(slurm, number, 1), signal.SIGKILL)
    slurm.start_again(number, restarts=1)
    killed_at = newest(tmp_path)
    until(lambda: newest(tmp_path) > killed_at, "it goes on")
    slurm.call("scancel", "--signal=TERM", number)  # as --signal=TERM@300 does before the time of a job is up
    slurm.start_again(number, restarts=2)
    stopped_at = newest(tmp_path)
    assert slurm.wait(number, "COMPLETED", "FAILED")["JobState"] == "COMPLETED", log(tmp_path, number)
    run = tmp_path / "job" / "run"
    attempts = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    assert [one["from"] for one in attempts if "from" in one] == [0, killed_at, stopped_at]
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1)) and newest(tmp_path) == STEPS
    assert f"wrote {run}" in log(tmp_path, number)


def test_a_cancelled_job_saves_and_is_not_queued_again(slurm: Slurm, tmp_path: Path) -> None:
    number = tiny(slurm, tmp_path, "--steps", "100000")
    until(lambda: newest(tmp_path) >= 10, "a checkpoint")
    slurm.call("scancel", number)
    ended = slurm.wait(number, "CANCELLED", "COMPLETED", "FAILED")
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")
    run = tmp_path / "job" / "run"
    until(lambda: '"ended": "SIGTERM"' in (run / "attempts.jsonl").read_text(), "the end of the run")
    assert newest(tmp_path) == json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]


def test_a_step_that_takes_longer_than_kill_wait_is_saved_before_the_time_is_up(slurm: Slurm, tmp_path: Path) -> None:
    number = tiny(slurm, tmp_path, "--steps", "9", "--extend", f"{ROOT}/tests/jobs/slow_step.py", "--time", "5")
    metrics = tmp_path / "job" / "run" / "metrics.jsonl"
    until(lambda: metrics.is_file() and metrics.read_text(encoding="utf-8").count("\n") == 1, "the first step")
    begun_s = time.monotonic()
    slurm.call("scontrol", "update", f"JobId={number}", "Requeue=0")
    slurm.call("scancel", "--signal=TERM", number)
    ended = slurm.wait(number, "CANCELLED", "COMPLETED", "FAILED")
    assert time.monotonic() - begun_s > DELAY_S - 5 > 30
    assert (newest(tmp_path), ended["JobState"], ended["Restarts"]) == (2, "FAILED", "0"), log(tmp_path, number)


def test_a_run_that_cannot_begin_is_not_queued_again(slurm: Slurm, tmp_path: Path) -> None:
    number = tiny(slurm, tmp_path, "--data.set", "nowhere=1")
    ended = slurm.wait(number, "CANCELLED", "COMPLETED", "FAILED")
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0")
    assert f"{tmp_path}/nowhere" in log(tmp_path, number)


def test_a_partition_that_gives_no_start_time_for_a_step_is_named_once(slurm: Slurm, tmp_path: Path) -> None:
    number = tiny(slurm, tmp_path, "--partition", "short")
    ended = slurm.wait(number, "CANCELLED", "COMPLETED", "FAILED")
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0")
    assert "partition short gives " in log(tmp_path, number) and "launch again with --time 2" in log(tmp_path, number)
    assert not (tmp_path / "job" / "run").exists()


@pytest.mark.parametrize("compiles", [True, False])
def test_training_waits_for_the_compile_job_and_ends_with_it(compiles: bool, slurm: Slurm, tmp_path: Path) -> None:
    """A stand-in for Python, which would be torchrun, tells what it was told: there is no Trainium here."""
    plan = planned("llama3-8b", "trn1.32xlarge", "tp=8,pp=4,dp=1")
    (tmp_path / "plan.json").write_text(dump(plan), encoding="utf-8")
    torchrun = tmp_path / "bin" / "python3"
    torchrun.parent.mkdir()
    code = 0 if compiles else 1
    body = f'#!/bin/sh\necho "$(date +%s.%N) $@" >> {tmp_path}/told\ncase $* in *--compile-only*) exit {code} ;; esac\n'
    torchrun.write_text(body, encoding="utf-8")
    torchrun.chmod(0o755)
    path = os.pathsep.join((str(torchrun.parent), str(Path(sys.executable).parent), os.environ["PATH"]))
    first, second = launched(slurm, tmp_path, "plan.json", PATH=path)
    ended = slurm.wait(second, "CANCELLED", "COMPLETED", "FAILED")
    assert slurm.job(first)["JobState"] == ("COMPLETED" if compiles else "FAILED")
    assert ended["JobState"] == ("COMPLETED" if compiles else "CANCELLED")
    told = (tmp_path / "told").read_text(encoding="utf-8").splitlines()
    assert len(told) == (2 if compiles else 1) and "-m autoshard.runtime.agent " in told[0]
    assert "--nproc-per-node 1 " in told[0]
    assert not compiles or ("--nproc-per-node 32 " in told[1] and told[1].endswith("--out " + f"{tmp_path}/job/run"))


def test_nodes_that_are_left_are_counted(slurm: Slurm, tmp_path: Path) -> None:
    text = files_of(job_of(plan_of(FIRST), "slurm plain", replans=True)).texts["train.sbatch"]
    start = text.index("replanned() {")
    function = text[start : text.index("\n}\n", start) + 3]
    told = 'sleep() { :; }; autoshard() { echo "$@"; return 1; };'
    partition = slurm.call("sinfo", "--noheader", "--format=%R", "--partition=all").strip()
    env = {"SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_PARTITION": partition}
    done = subprocess.run(
        ["bash", "-c", f"{told}\n{function}\nreplanned"],
        env=slurm.variables | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "plan --like plan.json --nodes 1 --out plan-1.json --force\n", done.stderr


def test_the_tasks_of_a_sweep_leave_their_rows_for_whoever_gathers_them(slurm: Slurm, tmp_path: Path) -> None:
    base = {"model": "tiny-llama", "cluster": "local", "seq_len": 32, "global_batch": 4, "steps": 2}
    (tmp_path / "two.yaml").write_text(json.dumps({"mode": "run", "base": base, "grid": {"ranks": [1, 2]}}))
    words = [sys.executable, "-m", "autoshard.cli", "sweep", "two.yaml", "--out", "out"]
    variables = slurm.variables | {"PYTHONPATH": str(ROOT)}

    def typed(*more: str) -> str:
        done = subprocess.run([*words, *more], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stdout + done.stderr
        return done.stdout

    assert "next: sbatch out/array.sbatch" in typed("--scheduler", "slurm")
    done = subprocess.run(
        ["sbatch", "--parsable", "out/array.sbatch"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    number = done.stdout.strip()
    until(lambda: not slurm.call("squeue", "--noheader", "--jobs", number).strip(), "all tasks have ended")
    logs = "\n".join(path.read_text(encoding="utf-8") for path in sorted((tmp_path / "out").glob("task-*.log")))
    assert "2 of 2 points are already done" in typed(), logs
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert sorted((row["ranks"], row["status"], row["num_steps"]) for row in rows) == [(1, "ran", 2), (2, "ran", 2)], (
        logs
    )
