"""An emitted job by torchrun: two agents of two ranks, which meet over loopback and train to the end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.training import Checkpointing, Training
from autoshard.spec.workload import Precision, Workload
from tests.jobs.cases import files_of, job_of
from tests.jobs.slow_step import DELAY_S
from tests.runtime.cases import ROOT, environment, wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
STEPS = 4


def two_nodes() -> Plan:
    """A plan for two nodes with two processors each, joined as the cluster `local` joins its own."""
    local = load_cluster("local", ranks=2)
    (inside,) = local.links
    between = replace(inside, name="network", domain="cluster")
    request = Request(
        model=load_model("tiny-llama"),
        cluster=replace(local, name="pair", num_nodes=2, links=(inside, between)),
        workload=Workload(seq_len=16, global_batch=4, precision=Precision.named("bf16")),
        engines=("torch",),
    )
    return plan_at(request, Candidate.parse("tp=2,pp=2,dp=1,mbs=1"))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def started(place: Path, node: int, port: int) -> "subprocess.Popen[str]":
    meeting = {"NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(place / "node.sh"), "train"],
        env=environment(PATH=path, PYTHONPATH=str(ROOT), **meeting),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_agents_of_two_ranks_train_to_the_end(tmp_path: Path) -> None:
    plan = two_nodes()
    training = Training(steps=STEPS, checkpoint=Checkpointing(every_steps=2))
    for name, text in files_of(job_of(plan, training=training)).texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert "torchrun --nnodes 2 --nproc-per-node" in (tmp_path / "node.sh").read_text(encoding="utf-8")
    port = free_port()
    second = started(tmp_path, 1, port)  # waits for the token of the first
    first = started(tmp_path, 0, port)
    said = [agent.communicate(timeout=300)[0] for agent in (first, second)]
    assert [agent.returncode for agent in (first, second)] == [0, 0], "\n".join(said)
    assert f"tiny-llama on 4 ranks that torchrun started: {plan.candidate}" in said[0] and "on 4 ranks" not in said[1]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in steps] == list(range(1, STEPS + 1)) and steps[-1]["loss"] < steps[0]["loss"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{STEPS:08}").is_dir()


def test_a_step_that_takes_longer_than_torchrun_waits_by_itself_is_saved(tmp_path: Path) -> None:
    """By torchrun and by our agent, beside each other: each is told to end after its first step."""
    jobs = [job_under(agent, tmp_path / str(number)) for number, agent in enumerate(AGENTS)]
    told_s = dict[Path, float]()

    def all_are_told() -> bool:
        for place, agent in jobs:
            metrics = place / "job" / "run" / "metrics.jsonl"
            if place not in told_s and metrics.is_file() and metrics.read_text("utf-8").count("\n") == 1:
                told_s[place] = time.monotonic()
                agent.send_signal(signal.SIGTERM)
        return len(told_s) == len(jobs)

    wait_until(all_are_told, "the first steps")
    for place, agent in jobs:
        assert agent.wait(timeout=300) and time.monotonic() - told_s[place] > DELAY_S - 5 > 30
        log = (place / "log").read_text(encoding="utf-8")
        assert [path.name for path in (place / "job" / "run" / "checkpoints").iterdir()] == ["step-00000002"], log
        assert "note: a step and a save" not in log


AGENTS = ("torchrun", "python3 -m autoshard.runtime.agent")


def job_under(agent: str, place: Path) -> tuple[Path, "subprocess.Popen[bytes]"]:
    """Write a job whose steps are slow, and start it under this agent; return its place and its process."""
    place.mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    typed = "--ranks 2 --fix tp=1,pp=1,dp=2 --scheduler torchrun --steps 9 --extend"
    files = [str(ROOT / "recipes" / "tiny-llama-local.yaml"), *typed.split(), f"{ROOT}/tests/jobs/slow_step.py"]
    words = [sys.executable, "-m", "autoshard.cli", "launch", *files]
    variables = environment(PATH=path, PYTHONPATH=str(ROOT), GLOO_SOCKET_IFNAME="lo", MASTER_PORT=str(free_port()))
    subprocess.run(words, cwd=place, env=variables, check=True, capture_output=True)
    node = place / "job" / "node.sh"
    node.write_text(node.read_text(encoding="utf-8").replace("exec torchrun", f"exec {agent}"), encoding="utf-8")
    with (place / "log").open("wb") as file:
        started = subprocess.Popen(["bash", str(node), "train"], env=variables, stdout=file, stderr=subprocess.STDOUT)
    return place, started
