"""What a node of a job does: its environment is the engine's, its folders are shared, and what is wrong is said."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autoshard.jobs.job import Job
from autoshard.plan.nxd.environment import environment
from autoshard.plan.plan import Plan
from autoshard.runtime.launch import put_environment
from tests.jobs.cases import FIRST, FIXED, files_of, job_of, plan_of

# In the place of torchrun: what it is told, and its environment.
TOLD = f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"


def write(job: Job, folder: Path) -> Path:
    place = folder / "job"
    place.mkdir()
    for name, text in files_of(job).texts.items():
        (place / name).write_text(text, encoding="utf-8")
    torchrun = folder / "bin" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text(TOLD, encoding="utf-8")
    torchrun.chmod(0o755)
    return place


def node(place: Path, stage: str, **more: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    path = f"{place.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    script = (place / "node.sh").read_text(encoding="utf-8").replace("second < 120", "second < 1")
    (place / "node.sh").write_text(script, encoding="utf-8")
    command = ["bash", str(place / "node.sh"), stage]
    return subprocess.run(command, env={**kept, "PATH": path, **more}, capture_output=True, text=True, check=False)


def told(place: Path, stage: str, **more: str) -> tuple[list[str], dict[str, str]]:
    done = node(place, stage, **more)
    assert not done.returncode, done.stderr
    words, variables = json.loads(done.stdout)
    return words, variables


@pytest.mark.parametrize("case", FIXED)
@pytest.mark.parametrize("mine", [{}, {"NEURON_CC_FLAGS": "--auto-cast all", "NEURON_RT_EXEC_TIMEOUT": "600"}])
def test_a_node_has_the_environment_that_the_engine_sets(case: str, mine: Mapping[str, str], tmp_path: Path) -> None:
    plan = plan_of(case)
    place = write(job_of(plan), tmp_path)
    _, found = told(place, "train", NODE_RANK="0", MASTER_ADDR="here", **mine)
    wanted = dict(mine)
    put_environment(environment(plan), wanted)
    assert {name: " ".join(found[name].split()) for name in wanted} == wanted
    after = dict(found)
    put_environment(environment(plan), after)
    assert after == found, "the engine has nothing to add"


def test_a_node_starts_its_ranks_or_one_process_that_compiles(tmp_path: Path) -> None:
    place = write(job_of(plan_of(FIRST)), tmp_path)
    meeting = ["--node-rank", "3", "--master-addr", "first", "--master-port", "29500"]
    run = ["-m", "autoshard.cli", "run", "plan.json", "--config", "training.yaml"]
    for name in ("run.token", "run-cache.token"):
        (place / name).write_text(f"{job_of(plan_of(FIRST)).hash[:12]}-first:29500\n", encoding="utf-8")
    words, found = told(place, "train", NODE_RANK="3", MASTER_ADDR="first")
    assert words == ["--nnodes", "16", "--nproc-per-node", "32", *meeting, *run, "--out", f"{place}/run"]
    assert found["NEURON_COMPILE_CACHE_URL"] == f"{place}/run-cache"
    words, _ = told(place, "compile", NODE_RANK="3", MASTER_ADDR="first", NEURON_COMPILE_CACHE_URL="s3://cache")
    assert words[3] == "1" and words[-3:] == ["--compile-only", "--out", f"{place}/run-compiled"]


def test_an_old_try_to_compile_is_put_away_and_nothing_else(tmp_path: Path) -> None:
    place = write(job_of(plan_of(FIRST)), tmp_path)
    for name in ("node-0", "node-1", "short"):
        (place / "run-compiled" / name).mkdir(parents=True)
    told(place, "compile", NODE_RANK="0", MASTER_ADDR="here")
    assert [path.name for path in (place / "run-compiled").iterdir()] == ["node-1"]


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path) -> None:
    place = write(job_of(plan_of(FIRST)), tmp_path)
    done = node(place, "train", NODE_RANK="1", MASTER_ADDR="here")
    assert done.returncode == 1 and not done.stdout
    assert (
        f"no {place}/run.token of node 0 here: give --run-folder on a file system that all nodes share" in done.stderr
    )
    (place / "run.token").write_text("of another job\n", encoding="utf-8")
    assert node(place, "train", NODE_RANK="1", MASTER_ADDR="here").returncode == 1
    told(place, "train", NODE_RANK="0", MASTER_ADDR="here")
    told(place, "train", NODE_RANK="1", MASTER_ADDR="here")


@pytest.mark.parametrize(
    ("stage", "more", "says"),
    [
        ("", {}, "type: bash node.sh compile | train"),
        ("tran", {}, "type: bash node.sh compile | train"),
        ("train", {}, "NODE_RANK: say which node this is"),
        ("train", {"NODE_RANK": "0"}, "MASTER_ADDR: name the first node"),
    ],
)
def test_what_is_missing_is_said(stage: str, more: dict[str, str], says: str, tmp_path: Path) -> None:
    done = node(write(job_of(plan_of(FIRST)), tmp_path), stage, **more)
    assert done.returncode and says in done.stderr and not done.stdout


def test_the_plan_of_another_job_is_refused(tmp_path: Path) -> None:
    place = write(job_of(plan_of(FIRST)), tmp_path)
    other = files_of(job_of(plan_of("llama2-13b-32-trn1")))
    (place / "plan.json").write_text(other.texts["plan.json"], encoding="utf-8")
    done = node(place, "train", NODE_RANK="0", MASTER_ADDR="here")
    assert done.returncode and "plan.json is not the plan of this job. Type autoshard launch again" in done.stderr


def test_setup_runs_before_torchrun_and_may_read_what_is_not_set(tmp_path: Path) -> None:
    setup = tmp_path / "activate"
    setup.write_text('export FROM_SETUP="yes$NOT_SET"\n', encoding="utf-8")
    place = write(job_of(plan_of(FIRST), setup=f"source {setup}"), tmp_path)
    _, found = told(place, "train", NODE_RANK="0", MASTER_ADDR="here")
    assert found["FROM_SETUP"] == "yes"


def test_slurm_and_kubernetes_say_which_node_this_is(tmp_path: Path) -> None:
    plan: Plan = plan_of(FIRST)
    for name in ("slurm", "pods", "old"):
        (tmp_path / name).mkdir()
    slurm = write(job_of(plan, "slurm plain"), tmp_path / "slurm")
    scontrol = slurm.parent / "bin" / "scontrol"
    shutil.copy("/bin/echo", scontrol)
    given: dict[str, Any] = {"SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "trn-[1-16]", "SLURM_JOB_ID": "12345"}
    words, _ = told(slurm, "train", **given)
    assert words[4:10] == ["--node-rank", "0", "--master-addr", "show hostnames trn-[1-16]", "--master-port", "22345"]
    pods = write(job_of(plan, "k8s trainjob"), tmp_path / "pods")
    words, _ = told(pods, "train", JOB_COMPLETION_INDEX="0", MASTER_ADDR="first")
    assert words[4:10] == ["--node-rank", "0", "--master-addr", "first", "--master-port", "29500"]
    old = write(job_of(plan, "k8s pytorchjob"), tmp_path / "old")
    words, _ = told(old, "train", RANK="0", MASTER_ADDR="first", MASTER_PORT="23456", WORLD_SIZE="16")
    assert words[4:10] == ["--node-rank", "0", "--master-addr", "first", "--master-port", "23456"]
