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
    "scontrol": 'case $1 in show) seq -f "trn-%g" 16 ;; *) echo "scontrol $@" >> "$TOLD" ;; esac',
    "sbatch": 'echo "sbatch $@" >> "$TOLD"; echo 7',
    "sleep": "",
}


def nodes(first: int, last: int, state: str = "alloc", name: str = "trn", what: str = "128 neuron:16") -> str:
    """Lines of sinfo."""
    return "".join(f"{name}-{number} {state} {what}\n" for number in range(first, last + 1))


def failed(folder: Path, left: str, autoshard: str) -> list[str]:
    """Run the script of a training job on 16 nodes that fails while sinfo tells this; return what was called."""
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
    slurm = {
        "SLURM_SUBMIT_DIR": str(folder / "job"),
        "SLURM_JOB_ID": "5",
        "SLURM_JOB_PARTITION": "big",
        "SLURM_JOB_NODELIST": "trn-[1-16]",
    }
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, **slurm, "TOLD": str(folder / "told"), "PATH": path}
    command = ["bash", str(folder / "job" / "train.sbatch")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    said = (folder / "told").read_text(encoding="utf-8").splitlines() if (folder / "told").exists() else [done.stderr]
    assert "--partition=big" in (folder / "told-sinfo").read_text(encoding="utf-8")
    return said


def test_with_fewer_nodes_a_plan_for_those_is_submitted_for_the_same_run(tmp_path: Path) -> None:
    plan, launch = failed(tmp_path, nodes(1, 12) + nodes(13, 14, "comp"), 'echo "autoshard $@" >> "$TOLD"')
    assert plan == "autoshard plan --like plan.json --nodes 14 --out plan-14.json --force"
    same = f"--config training.yaml --out on-14-nodes --run-folder {tmp_path}/job/run --scheduler slurm"
    again = "--on-failure replan --submit --profile=plain --partition=big --time=1-00 --setup=source ./activate"
    assert launch == f"autoshard launch plan-14.json {same} {again}"


LEFT = nodes(1, 13, "mix") + nodes(14, 14, "down")
STRANGERS = nodes(17, 90) + nodes(91, 95, "mix") + nodes(1, 9, "idle", "gpu", "192 gpu:8")


@pytest.mark.parametrize(
    ("left", "count"),
    [
        (nodes(1, 14) + nodes(15, 16, "down*") + STRANGERS, 14),
        (nodes(1, 14) + nodes(15, 16, "alloc*") + nodes(17, 17, "drain"), 14),
        (LEFT + nodes(101, 101, "idle") + nodes(102, 102, "idle~") + STRANGERS, 15),
    ],
)
def test_only_nodes_of_this_job_and_idle_ones_of_their_type_count(left: str, count: int, tmp_path: Path) -> None:
    plan, _ = failed(tmp_path, left, 'echo "autoshard $@" >> "$TOLD"')
    assert plan == f"autoshard plan --like plan.json --nodes {count} --out plan-{count}.json --force"


@pytest.mark.parametrize(
    ("left", "called"),
    [
        *((left, []) for left in (nodes(1, 16), nodes(1, 15) + nodes(17, 19, "idle"), "", "garbled\n", STRANGERS)),
        (nodes(1, 2), ["autoshard plan"]),
    ],
)
def test_with_all_nodes_or_none_known_or_without_a_plan_the_job_is_queued_again(
    left: str, called: list[str], tmp_path: Path
) -> None:
    assert failed(tmp_path, left, 'echo "autoshard $1" >> "$TOLD"; exit 1') == [*called, "scontrol requeue 5"]


@pytest.mark.slow
def test_the_job_for_those_nodes_is_whole(tmp_path: Path) -> None:
    body = f'PYTHONPATH={ROOT} exec {sys.executable} -m autoshard.cli "$@"'
    assert [line.split()[-1] for line in failed(tmp_path, nodes(1, 15), body)] == ["compile.sbatch", "train.sbatch"]
    folder = tmp_path / "job" / "on-15-nodes"
    assert load(folder / "plan.json").cluster.num_nodes == 14
    assert f"run={tmp_path}/job/run\n" in (folder / "node.sh").read_text(encoding="utf-8")
    assert "steps: 7" in (folder / "training.yaml").read_text(encoding="utf-8")
