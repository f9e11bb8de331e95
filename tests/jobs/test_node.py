"""What a node of a job does: its environment is the engine's, its folders are shared, and what is wrong is said."""

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.jobs.job import Job
from autoshard.plan.environment import environment
from autoshard.runtime.launch import put_environment
from tests.jobs.cases import FIRST, OTHERS, SCHEDULERS, files_of, job_of, plan_of

# In the place of torchrun: what it is told, and its environment.
TOLD = f"#!{sys.executable} -I\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
NAMES = '#!/bin/sh\necho "$@" && seq 30000\n'  # of thousands of nodes: more than a pipe takes without a reader
START = {"NODE_RANK": "0", "MASTER_ADDR": "here"}


def write(job: Job, folder: Path) -> Path:
    for name in ("job", "bin"):
        (folder / name).mkdir()
    for name, text in files_of(job).texts.items():
        (folder / "job" / name).write_text(text.replace("second < 120", "second < 1"), encoding="utf-8")
    for name, text in {"torchrun": TOLD, "python3": TOLD, "scontrol": NAMES}.items():
        (folder / "bin" / name).write_text(text, encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    return folder / "job"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The job of the first plan, started by hand."""
    return write(job_of(plan_of(FIRST)), tmp_path)


def node(place: Path, stage: str, given: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    variables = {**kept, "PATH": f"{place.parent / 'bin'}{os.pathsep}{os.environ['PATH']}", **given}
    command = ["bash", str(place / "node.sh"), stage]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def told(place: Path, stage: str, given: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    done = node(place, stage, given)
    assert not done.returncode, done.stderr
    words, variables = json.loads(done.stdout)
    return words[2:] if words[:2] == ["-m", "autoshard.runtime.agent"] else words, variables


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("mine", [{}, {"NEURON_CC_FLAGS": "--auto-cast all", "NEURON_RT_EXEC_TIMEOUT": "600"}])
def test_a_node_has_the_environment_that_the_engine_sets(case: str, mine: Mapping[str, str], tmp_path: Path) -> None:
    plan, wanted = plan_of(case), dict(mine)
    _, found = told(write(job_of(plan), tmp_path), "train", {**START, **mine})
    put_environment(environment(plan), wanted)
    assert {name: " ".join(found[name].split()) for name in wanted} == wanted
    after = dict(found)
    put_environment(environment(plan), after)
    assert after == found, "the engine has nothing to add"


def test_a_node_starts_its_ranks_or_one_process_that_compiles(place: Path) -> None:
    meeting = ["--node-rank", "3", "--master-addr", "first", "--master-port", "29500"]
    run = ["-m", "autoshard.cli", "run", "plan.json", "--config", "training.yaml"]
    for name in ("run.token", "run-cache.token"):
        (place / name).write_text(f"{job_of(plan_of(FIRST)).hash[:12]}-first:29500\n", encoding="utf-8")
    words, found = told(place, "train", {"NODE_RANK": "3", "MASTER_ADDR": "first"})
    assert words == ["--nnodes", "16", "--nproc-per-node", "32", *meeting, *run, "--out", f"{place}/run"]
    assert found["NEURON_COMPILE_CACHE_URL"] == f"{place}/run-cache"
    cache = {"NEURON_COMPILE_CACHE_URL": "s3://cache"}
    words, _ = told(place, "compile", {"NODE_RANK": "3", "MASTER_ADDR": "first"} | cache)
    assert words[3] == "1" and words[-3:] == ["--compile-only", "--out", f"{place}/run-compiled"]
    for name in ("node-0", "node-1", "short"):
        (place / "run-compiled" / name).mkdir(parents=True)
    told(place, "compile", START)  # an old try is put away, and nothing else
    assert [path.name for path in (place / "run-compiled").iterdir()] == ["node-1"]


def test_a_folder_that_is_not_shared_and_the_plan_of_another_job_are_named(place: Path) -> None:
    second = START | {"NODE_RANK": "1"}
    done = node(place, "train", second)
    lost = f"no {place}/run.token of node 0 here: give --run-folder on a file system that all nodes share"
    assert done.returncode == 1 and not done.stdout and lost in done.stderr
    (place / "run.token").write_text("of another job\n", encoding="utf-8")
    assert node(place, "train", second).returncode == 1
    told(place, "train", START)
    told(place, "train", second)
    other = files_of(job_of(plan_of("llama2-13b-32-trn1")))
    (place / "plan.json").write_text(other.texts["plan.json"], encoding="utf-8")
    done = node(place, "train", START)
    assert done.returncode and "plan.json is not the plan of this job. Type autoshard launch again" in done.stderr


def test_a_script_goes_to_its_own_folder_whatever_the_search_path_of_cd(place: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "job").mkdir(parents=True)
    variables = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CDPATH": str(tmp_path / "elsewhere"), **START}
    command = ["bash", "job/node.sh", "train"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert not done.returncode and json.loads(done.stdout)[0][-1] == f"{place}/run", done.stderr


def test_a_script_that_sbatch_got_in_another_folder_says_where_to_type_it(place: Path, tmp_path: Path) -> None:
    text = files_of(job_of(plan_of(FIRST), "slurm plain")).texts["train.sbatch"]
    variables = {"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(["bash", "-c", text], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not done.stdout
    says = f"{tmp_path} holds no node.sh: submit by bash submit.sh, or type sbatch in the folder of the job\n"
    assert done.stderr == says


def test_a_file_of_the_user_s_does_not_pass_for_a_module_of_its_name(place: Path) -> None:
    (place / "queue.py").write_text("raise SystemExit('this is no queue')\n", encoding="utf-8")
    start = f"#!/bin/sh\nexec '{sys.executable}' -c 'import queue; print(queue.Queue.__name__)'\n"
    (place.parent / "bin" / "python3").write_text(start, encoding="utf-8")
    done = node(place, "train", START)
    assert (done.returncode, done.stdout) == (0, "Queue\n"), done.stderr


def test_a_plan_that_was_edited_is_refused_though_it_names_the_old_hash(place: Path) -> None:
    text = (place / "plan.json").read_text(encoding="utf-8")
    assert '"headroom": 0.1' in text
    (place / "plan.json").write_text(text.replace('"headroom": 0.1', '"headroom": 0.2'), encoding="utf-8")
    done = node(place, "train", START)
    assert done.returncode and "plan.json is not the plan of this job. Type autoshard launch again" in done.stderr


def test_a_node_may_open_many_files_and_says_which_port_may_be_taken(place: Path) -> None:
    fake = place / "range"
    text = (place / "node.sh").read_text(encoding="utf-8").replace("/proc/sys/net/ipv4/ip_local_port_range", str(fake))
    (place / "node.sh").write_text(text.replace("exec python3", "ulimit -S -n; exec python3"), encoding="utf-8")
    for least, says in ((32768, False), (1024, True)):
        fake.write_text(f"{least}\t60999\n", encoding="utf-8")
        done = node(place, "train", START)
        assert not done.returncode and ("port 29500 may be taken" in done.stderr) == says
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        assert int(done.stdout.splitlines()[0]) == (65535 if hard < 0 else min(65535, hard))


def test_a_port_that_another_program_has_is_named_on_the_first_node_alone(place: Path) -> None:
    text = (place / "node.sh").read_text(encoding="utf-8")
    (place / "node.sh").write_text(text.replace("second < 15", "second < 1").replace("&& ! grep", "&& false && ! grep"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        first = node(place, "train", {**START, "NODE_RANK": "0", "MASTER_PORT": str(port)})
        assert first.returncode == 1 and not first.stdout
        assert f"port {port}, at which nodes meet, is taken: set MASTER_PORT to another" in first.stderr
    first = node(place, "train", {**START, "NODE_RANK": "0", "MASTER_PORT": str(port)})
    assert "is taken" not in first.stderr


@pytest.mark.parametrize(
    ("stage", "given", "says"),
    [
        ("", {}, "type: bash node.sh compile | train"),
        ("tran", {}, "type: bash node.sh compile | train"),
        ("train", {}, "NODE_RANK: say which node this is"),
        ("train", {"NODE_RANK": "0"}, "MASTER_ADDR: name the first node"),
    ],
)
def test_what_is_missing_is_said(stage: str, given: dict[str, str], says: str, place: Path) -> None:
    done = node(place, stage, given)
    assert done.returncode and says in done.stderr and not done.stdout


def test_setup_runs_before_torchrun_and_may_read_what_is_not_set(tmp_path: Path) -> None:
    setup = tmp_path / "activate"
    setup.write_text('export FROM_SETUP="yes$NOT_SET"\n', encoding="utf-8")
    _, found = told(write(job_of(plan_of(FIRST), setup=f"source {setup}"), tmp_path), "train", START)
    assert found["FROM_SETUP"] == "yes"


@pytest.mark.parametrize("under", [one for one in SCHEDULERS if one != "torchrun"])
def test_a_script_that_its_scheduler_has_not_started_says_so(under: str, tmp_path: Path) -> None:
    done = node(write(job_of(plan_of(FIRST), under), tmp_path), "train", {})
    assert done.returncode and not done.stdout and done.stderr.endswith(" starts this script: bash submit.sh\n")


@pytest.mark.parametrize(
    ("under", "given", "address", "port"),
    [
        (
            "slurm plain",
            {"SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "trn-[1-16]", "SLURM_JOB_ID": "12345"},
            "show hostnames trn-[1-16]",
            "22345",
        ),
        (
            "pyxis",
            {"SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "trn-[1-16]", "SLURM_JOB_ID": "12345"},
            "first_node",
            "22345",
        ),
        ("k8s trainjob", {"JOB_COMPLETION_INDEX": "0", "MASTER_ADDR": "first"}, "first", "29500"),
        ("k8s pytorchjob", {"RANK": "0", "MASTER_ADDR": "first", "MASTER_PORT": "23456"}, "first", "23456"),
    ],
)
def test_schedulers_say_which_node_this_is(
    under: str, given: dict[str, str], address: str, port: str, tmp_path: Path
) -> None:
    job = job_of(plan_of(FIRST), "slurm plain" if under == "pyxis" else under)
    if under == "pyxis":  # the stand-in for Python tells how it was asked
        job = replace(job, place=replace(job.place, container_image="image"))
    words, _ = told(write(job, tmp_path), "train", given)
    if under == "pyxis":
        assert "from autoshard.runtime.launch import first_node; print(first_node('trn-[1-16]'))" in words[7]
        address = words[7]
    assert words[4:10] == ["--node-rank", "0", "--master-addr", address, "--master-port", port]
