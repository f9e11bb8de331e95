"""A training job that has failed: what it does when nodes are lost, with stand-ins for Slurm's programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.jobs.place import JobPlace
from autoshard.plan.codec import load
from autoshard.spec.training import Training
from tests.jobs.cases import FIRST, files_of, job_of, plan_of
from tests.runtime.cases import ROOT

# A run that begins and fails; everything that is called is told.
PROGRAMS = {
    "srun": "mkdir -p run; echo '\"from\"' >> run/attempts.jsonl; exit 1",
    "sinfo": 'echo "$@" > "$TOLD-sinfo"; cat "$TOLD-left"',
    "scontrol": 'echo "scontrol $@" >> "$TOLD"',
    "sbatch": 'echo "sbatch $@" >> "$TOLD"; echo 7',
    "sleep": "",
}


def failed(folder: Path, left: str, autoshard: str) -> list[str]:
    """Run the script of a training job that fails while so many nodes are left; return what was called."""
    place = JobPlace(scheduler="slurm", partition="big", time="1-00", on_failure="replan")
    job = job_of(plan_of(FIRST), setup="source ./activate", training=Training(steps=7), place=place)
    (folder / "job").mkdir()
    for name, text in files_of(job).texts.items():
        (folder / "job" / name).write_text(text, encoding="utf-8")
    (folder / "job" / "activate").touch()
    (folder / "told-left").write_text(left, encoding="utf-8")
    (folder / "bin").mkdir()
    for name, body in {**PROGRAMS, "autoshard": autoshard}.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(folder / "job"), "SLURM_JOB_ID": "5", "SLURM_JOB_PARTITION": "big"}
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, **slurm, "TOLD": str(folder / "told"), "PATH": path}
    command = ["bash", str(folder / "job" / "train.sbatch")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    said = (folder / "told").read_text(encoding="utf-8").splitlines() if (folder / "told").exists() else [done.stderr]
    assert "--partition=big" in (folder / "told-sinfo").read_text(encoding="utf-8")
    return said


def test_with_fewer_nodes_a_plan_for_those_is_submitted_for_the_same_run(tmp_path: Path) -> None:
    plan, launch = failed(tmp_path, "12\n2\n", 'echo "autoshard $@" >> "$TOLD"')
    assert plan == "autoshard plan --like plan.json --nodes 14 --out plan-14.json --force"
    same = f"--config training.yaml --out on-14-nodes --run-folder {tmp_path}/job/run --scheduler slurm"
    again = "--on-failure replan --submit --profile=plain --partition=big --time=1-00 --setup=source ./activate"
    assert launch == f"autoshard launch plan-14.json {same} {again}"


@pytest.mark.parametrize(
    ("left", "called"),
    [*((left, []) for left in ("16\n", "12\n20\n", "", "garbled\n")), ("2\n", ["autoshard plan"])],
)
def test_with_all_nodes_or_none_known_or_without_a_plan_the_job_is_queued_again(
    left: str, called: list[str], tmp_path: Path
) -> None:
    assert failed(tmp_path, left, 'echo "autoshard $1" >> "$TOLD"; exit 1') == [*called, "scontrol requeue 5"]


@pytest.mark.slow
def test_the_job_for_those_nodes_is_whole(tmp_path: Path) -> None:
    body = f'PYTHONPATH={ROOT} exec {sys.executable} -m autoshard.cli "$@"'
    assert [line.split()[-1] for line in failed(tmp_path, "14\n", body)] == ["compile.sbatch", "train.sbatch"]
    folder = tmp_path / "job" / "on-14-nodes"
    assert load(folder / "plan.json").cluster.num_nodes == 14
    assert f"run={tmp_path}/job/run\n" in (folder / "node.sh").read_text(encoding="utf-8")
    assert "steps: 7" in (folder / "training.yaml").read_text(encoding="utf-8")
