"""One figure of the plan says how long a run may take to stop, wherever something could kill it before."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from autoshard.cost.storage import stopping
from autoshard.errors import InputError
from autoshard.jobs.job import Job
from autoshard.jobs.place import limit_s
from autoshard.jobs.remarks import remarks
from autoshard.plan.plan import Plan
from autoshard.spec.training import Checkpointing, Training
from tests.jobs.cases import FIRST, SCHEDULERS, SLURM, files_of, job_of, plan_of
from tests.runtime.cases import tiny_plan


def slow(plan: Plan, step_s: float) -> Plan:
    """A plan whose steps take so long."""
    assert plan.prediction
    seconds = {"step_time_s": step_s, "high_s": step_s, "low_s": step_s}
    return replace(plan, prediction=replace(plan.prediction, **seconds, time_parts={"compute": step_s}))


@pytest.mark.parametrize("under", SCHEDULERS)
@pytest.mark.parametrize("grace_s", [None, 77.5])
def test_whatever_could_kill_the_ranks_waits_so_long(under: str, grace_s: float | None) -> None:
    training = Training(steps=9, checkpoint=Checkpointing(grace_seconds=grace_s))
    job = job_of(plan_of(FIRST), under, training=training)
    texts, wait_s = files_of(job).texts, stopping(plan_of(FIRST)).reserved_s if grace_s is None else 78
    assert f'export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${{TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-{wait_s}}}"' in texts["node.sh"]
    if under.startswith("slurm"):
        assert f"#SBATCH --signal=TERM@{wait_s + 60}\n" in texts["train.sbatch"]
        assert "--signal" not in texts["compile.sbatch"]
    if under.startswith("k8s"):
        waits = re.findall(r"terminationGracePeriodSeconds: (\d+)", "".join(texts.values()))
        assert waits and set(waits) == {str(wait_s + 60)}


def test_notice_is_given_before_the_partition_s_own_time_is_up_too() -> None:
    job = job_of(plan_of(FIRST), SLURM[0])
    job = replace(job, place=replace(job.place, time=None))
    assert f"#SBATCH --signal=TERM@{job.notice_s}\n" in files_of(job).texts["train.sbatch"]


@pytest.mark.parametrize(("end", "code"), [("600 seconds", 1), ("2 days", 0), ("Unknown", 0)])
def test_a_start_that_the_partition_s_time_would_stop_before_its_first_step_is_not_made(
    end: str, code: int, tmp_path: Path
) -> None:
    job = job_of(plan_of(FIRST), SLURM[0])
    text = files_of(replace(job, place=replace(job.place, time=None))).texts["train.sbatch"]
    assert "EndTime" not in files_of(job).texts["train.sbatch"], "launch has looked at the time that was typed"
    ends = end if end == "Unknown" else f"$(date -d '+{end}' +%Y-%m-%dT%H:%M:%S)"
    programs = {"srun": "exit 0", "scontrol": f"echo StartTime=2026-01-01T00:00:00 EndTime={ends} Deadline=N/A"}
    done = with_programs(text, tmp_path, programs)
    assert done.returncode == code
    assert ("partition trn1 gives " in done.stderr and "launch again with --time " in done.stderr) == bool(code)


def with_programs(script: str, folder: Path, programs: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script of Slurm where programs do so, and say what became of it."""
    (folder / "bin").mkdir()
    for name, body in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    (folder / "train.sbatch").write_text(script, encoding="utf-8")
    (folder / "node.sh").touch()
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = {
        "PATH": path, "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "5", "SLURM_JOB_PARTITION": "trn1",
    }  # fmt: skip
    command = ["bash", str(folder / "train.sbatch")]
    return subprocess.run(command, env=variables, check=False, capture_output=True, text=True)


def said(job: Job) -> str:
    return "\n".join(remarks(job))


def test_what_no_file_can_set_is_said() -> None:
    large, small = job_of(plan_of(FIRST), SLURM[0]), job_of(tiny_plan("tp=1,pp=1,dp=2"), SLURM[0])
    assert "FSx" in said(large) and "KillWait" in said(large) and "spot instance" in said(large)
    assert f"SIGTERM comes {large.notice_s} s before" in said(large)
    assert "KillWait" not in said(small) and "spot" not in said(small)
    assert "KillWait" not in said(job_of(plan_of(FIRST), "k8s trainjob"))
    short = replace(large, training=Training(steps=9, checkpoint=Checkpointing(grace_seconds=25)))
    assert "checkpoint.grace_seconds is 25, so SIGTERM may lose the step" in said(short)


def timed(plan: Plan, time: str) -> Mapping[str, str]:
    job = job_of(plan, SLURM[0])
    return files_of(replace(job, place=replace(job.place, time=time))).texts


def test_a_time_in_which_a_start_gets_through_no_step_is_refused() -> None:
    with pytest.raises(InputError, match=r"--time 10: is 10.0 min, and a start needs .* or more") as error:
        timed(plan_of(FIRST), "10")
    least = str(error.value).rpartition("--time ")[2].split()[0]
    timed(plan_of(FIRST), least)
    with pytest.raises(InputError, match="--time"):
        timed(plan_of(FIRST), str(int(least) - 1))
    timed(tiny_plan("tp=1,pp=1,dp=2"), "3")
    with pytest.raises(InputError, match="65535 s of notice at most"):
        files_of(job_of(slow(plan_of(FIRST), 1e5), SLURM[0]))


@pytest.mark.parametrize(
    "text", ["0", "0:00", "0-00:00:00", "1-25:99:99", "1:60", "1:00:60", "1-24", "1-", "-1", "1:2:3:4"]
)
def test_a_time_that_means_nothing_or_no_limit_is_refused(text: str) -> None:
    assert limit_s(text) is None
    with pytest.raises(InputError, match="time: must be minutes"):
        timed(plan_of(FIRST), text)


def resumed(job: Job, folder: Path, code: int, ran_s: int) -> tuple[int, bool]:
    """Run a job of HyperPod whose srun ends so after so long; the exit code, and whether it is queued again."""
    text = files_of(job).texts["train.sbatch"].replace("if srun", f"SECONDS={ran_s}\nif srun")
    programs = {"srun": f"exit {code}", "scontrol": f"touch {folder}/requeued", "sleep": ":"}
    done = with_programs(text, folder, programs)
    return done.returncode, (folder / "requeued").exists()


@pytest.mark.parametrize(
    ("code", "ran_s", "again"), [(0, 172400, (0, False)), (1, 172400, (0, True)), (1, 4000, (1, False))]
)
def test_a_run_of_hyperpod_whose_time_is_up_is_queued_again(
    code: int, ran_s: int, again: tuple[int, bool], tmp_path: Path
) -> None:
    job = job_of(plan_of(FIRST), "slurm hyperpod")
    assert resumed(job, tmp_path, code, ran_s) == again
    assert "#SBATCH --requeue\n" in files_of(job).texts["train.sbatch"]
    untimed = files_of(replace(job, place=replace(job.place, time=None))).texts["train.sbatch"]
    assert "requeue" not in untimed


def test_pods_that_compile_have_nothing_to_save() -> None:
    texts = files_of(job_of(plan_of(FIRST), "k8s trainjob")).texts
    runtime = next(iter(yaml.safe_load_all(texts["job.yaml"])))
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pods = {one["name"]: one["template"]["spec"]["template"]["spec"] for one in jobs}
    assert "terminationGracePeriodSeconds" in pods["node"] and "terminationGracePeriodSeconds" not in pods["compile"]
