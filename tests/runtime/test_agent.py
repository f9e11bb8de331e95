"""torchrun of older torch, whose ranks get the time that they need after SIGTERM."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoshard.runtime.agent import patient
from autoshard.runtime.launch import agent_patience_s, is_orphan, patience_notes, patience_s
from autoshard.runtime.meeting import GivenRank
from autoshard.spec.training import Checkpointing
from tests.jobs.test_stopping import slow
from tests.runtime.cases import environment, tiny_plan

PLAN = slow(tiny_plan("tp=1,pp=1,dp=2"), 100.0)
BY_TORCHRUN = GivenRank(by="torchrun", rank=0, num_ranks=2, meeting="env://")
BY_SLURM = GivenRank(by="Slurm", rank=0, num_ranks=2, meeting="tcp://here:1")


class Ranks:
    def __init__(self) -> None:
        self.waits: list[object] = []

    def close(self, death_sig: object, wait_s: int = 30) -> None:
        self.waits.append((death_sig, wait_s))


class Agent:
    def __init__(self) -> None:
        self._pcontext = Ranks()

    def shutdown(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        self._pcontext.close(death_sig)


def test_ranks_to_which_a_signal_is_passed_on_are_waited_for() -> None:
    agent, shutdown = Agent(), patient(Agent.shutdown, 400)
    shutdown(agent, signal.SIGTERM)
    assert agent._pcontext.waits == [(signal.SIGTERM, 400), (signal.SIGTERM, 30)], "the second finds nobody"
    agent._pcontext.waits.clear()
    shutdown(agent)
    assert agent._pcontext.waits == [(signal.SIGTERM, 30)], "ranks that wait for a dead one are not"


@pytest.mark.parametrize(("given", "seconds"), [({}, 30), ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "400"}, 400)])
def test_the_environment_says_how_long_torchrun_waits(given: dict[str, str], seconds: int) -> None:
    assert agent_patience_s(given) == seconds


def test_ranks_that_would_be_killed_before_they_have_saved_say_so() -> None:
    (note,) = patience_notes(BY_TORCHRUN, PLAN, {}, "torchrun -m autoshard.cli")
    assert "100.0" in note and "kills it 30 s after SIGTERM" in note and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=131" in note
    (note,) = patience_notes(BY_TORCHRUN, PLAN, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"}, "torchrun")
    assert "kills it 60 s after SIGTERM" in note
    assert not patience_notes(BY_TORCHRUN, PLAN, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "131"}, "torchrun")
    assert not patience_notes(BY_TORCHRUN, PLAN, {}, "torchrun\0--shutdown-timeout\x00140")
    assert not patience_notes(BY_TORCHRUN, PLAN, {}, "torchrun\0--shutdown_timeout=140")
    (note,) = patience_notes(BY_SLURM, PLAN, {})
    assert "KillWait" in note and "--signal=TERM@131" in note
    assert not patience_notes(None, PLAN, {}) and not patience_notes(BY_TORCHRUN, tiny_plan("tp=1,pp=1,dp=2"), {})


def test_forked_ranks_get_what_the_plan_needs_or_the_user_says() -> None:
    assert patience_s(PLAN, Checkpointing(), here=True) == 131
    assert patience_s(PLAN, Checkpointing(), here=False) == 600
    assert patience_s(PLAN, Checkpointing(grace_seconds=25), here=True) == 25


RANK = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved", flush=True)))
print(f"agent {os.getppid()}", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_signal_that_users_of_slurm_ask_for_lets_ranks_save(tmp_path: Path) -> None:
    """By itself it kills torchrun, and Slurm then kills the ranks of a task that ended badly."""
    (tmp_path / "rank.py").write_text(RANK, encoding="utf-8")
    command = [sys.executable, "-m", "autoshard.runtime.agent", "--standalone", "rank.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as agent:
        assert agent.stdout and agent.stdout.readline() == f"agent {agent.pid}\n"
        agent.send_signal(signal.SIGUSR1)
        assert agent.stdout.read() == "saved\n"
    assert agent.returncode == 1


ORPHAN = """
import signal, sys, time
from autoshard.runtime.launch import heed_end_of_agent
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved", flush=True)))
heed_end_of_agent()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("variables", "says"), [({"TORCHELASTIC_RUN_ID": "1"}, "saved\n"), ({}, "")])
def test_a_rank_heeds_the_end_of_its_agent_and_of_no_shell(variables: dict[str, str], says: str) -> None:
    with subprocess.Popen(
        ["sh", "-c", '"$@" & echo $!; wait', "sh", sys.executable, "-c", ORPHAN],
        env=environment(**variables), stdout=subprocess.PIPE, text=True,
    ) as agent:  # fmt: skip
        assert agent.stdout
        rank = int(agent.stdout.readline())
        assert agent.stdout.readline() == "ready\n"
        agent.kill()
        if not says:
            agent.wait()
            time.sleep(1.5)
            os.kill(rank, signal.SIGKILL)
        assert agent.stdout.read() == says


LATE = (
    """
import os, signal, sys, time
while os.getppid() != 1: time.sleep(0.01)
"""
    + ORPHAN
)


def test_a_rank_whose_agent_ended_before_it_looked_ends_too() -> None:
    """torchrun is killed while its ranks import: nothing would ever tell them."""
    if is_orphan(1, "x") != is_orphan(1, Path("/proc/1/cmdline").read_text("utf-8")):
        pytest.skip("the first process of this machine is a Python, which may be a torchrun")
    command = ["sh", "-c", '"$@" &', "sh", sys.executable, "-c", LATE]
    done = subprocess.run(
        command, env=environment(TORCHELASTIC_RUN_ID="1"), capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout in ("ready\nsaved\n", "saved\n")
