"""How the ranks of a run come to be: forked here, or started by torchrun or Slurm, one process each.

With ``cli.py`` the only code that reads the environment.
"""

import os
import re
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.cost.storage import stopping
from autoshard.errors import AutoshardError, Fault, InputError, RunFailed, file_faults, require
from autoshard.plan.environment import COMPILER_FLAGS
from autoshard.plan.plan import Plan
from autoshard.run.activity import RankActivity, activity_folder
from autoshard.run.folder import LOGS, hang_report
from autoshard.run.protocol import HOST
from autoshard.runtime.forked import Say, on_forks
from autoshard.runtime.machine import XLA
from autoshard.runtime.meeting import GivenRank, joined_world, meeting_file
from autoshard.runtime.watchdog import HUNG, Watch, end_if_hung
from autoshard.spec.training import Checkpointing
from autoshard.units import counted, format_seconds

Body = Callable[[Say], Any]

PATIENCE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # what torchrun reads, as its --shutdown-timeout, from torch 2.12 on
USUAL_PATIENCE_S = 30  # torchrun's own, and Slurm's KillWait
_UNKNOWN_S = 600.0  # for a step of which nothing is known, and its save
_STARTED_BY = os.getppid()
_BY_AGENT = "TORCHELASTIC_RUN_ID"  # which torchrun sets
_LOOK_S = 1.0  # after whoever started this process
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000  # of Slurm jobs without a MASTER_PORT, by their number
# cited: aws-neuron torch_neuronx/parallel_compile/neuron_parallel_compile.py sets it for what it starts.
_EXTRACTING = "NEURON_EXTRACT_GRAPHS_ONLY"
_SPECIAL_STEPS = 2**32 - 16  # slurm.h numbers batch scripts and interactive shells from here: srun started none of them


def given_rank(environment: Mapping[str, str] = os.environ) -> GivenRank | None:
    """Return which rank this process was started as; None if it was not started as a rank."""
    if {"RANK", "WORLD_SIZE"} & environment.keys():
        return _given_by_torchrun(environment)
    if {"SLURM_PROCID", "SLURM_NTASKS"} <= environment.keys():
        return _given_by_slurm(environment)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Where the ranks of a run lie, and who watches them."""

    folder: Path  # of the run
    device: str = HOST
    watch: Watch | None = None
    grace_s: float = 0.0  # for ranks to heed a signal


def launch(launched: GivenRank | None, num_ranks: int, body: Body, *, show: Say, placing: Placing) -> Any:
    """Run a body on every rank, in torch's world; return the answer of rank 0, None in the process of another rank.

    What rank 0 says while it runs is shown. Import torch before: forks of a process that has it start at once.
    """
    folder, device = placing.folder, placing.device
    if launched is not None:
        try:
            answer = _as_rank(launched, body, show if launched.rank == 0 else lambda _: None, placing)
        except AutoshardError:
            raise
        except Exception as error:
            with suppress(OSError):  # the disk of the log may be full
                traceback.print_exc()
            cause = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
            raise RunFailed(f"rank {launched.rank} of {launched.num_ranks} failed: {cause}") from error
        return answer if launched.rank == 0 else None
    assert device != XLA, "its devices are not for forks"
    logs = folder / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    with meeting_file() as meeting:

        def child(rank: int, say: Say) -> Any:
            meet = f"file://{meeting}"
            alone = GivenRank(by="torchrun", rank=rank, num_ranks=num_ranks, meeting=meet, alone=True, local_rank=rank)
            return _as_rank(alone, body, say, placing)

        def explain(rank: int, code: int | None) -> str:
            report = hang_report(folder, rank)
            return report.read_text(encoding="utf-8") if code == HUNG and report.is_file() else ""

        return on_forks(num_ranks, child, show, logs, grace_s=placing.grace_s, explain=explain)[0]


def _as_rank(launched: GivenRank, body: Body, say: Say, placing: Placing) -> Any:
    """Run a body as one rank of torch's world, which is watched from before it meets the others."""
    watch = placing.watch

    def tell(said: object) -> None:
        if watch is not None:
            watch.learn(said)
        say(said)

    if watch is not None:
        with file_faults(f"--out {placing.folder}"):
            activity = RankActivity(activity_folder(placing.folder) / str(launched.rank))
        activity.act("its start")
        activity.wait("all ranks to meet")
        end_if_hung(watch, hang_report(placing.folder, launched.rank))
    if launched.alone:  # the name of this machine may lead to a network that is down
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    with joined_world(launched, placing.device):
        return body(tell)


def heed_end_of_agent(environment: Mapping[str, str] = os.environ) -> None:
    """Take the end of torchrun for SIGTERM: SIGKILL of it leaves its ranks behind, which keep the folder of the run."""
    if _BY_AGENT not in environment:  # a shell that starts ranks by hand may end before them
        return
    was_orphan = is_orphan(_STARTED_BY, _parent_command())

    def look() -> None:
        while os.getppid() == _STARTED_BY and not was_orphan:
            time.sleep(_LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, daemon=True, name="agent").start()


def is_orphan(parent: int, command: str) -> bool:
    """Say whether torchrun ended before its rank looked: the parent is then the machine's first process, no torchrun.

    >>> is_orphan(1, "/sbin/init"), is_orphan(1, "/usr/bin/python3 -m torch.distributed.run"), is_orphan(87, "bash")
    (True, False, False)
    """
    return parent == 1 and bool(command) and "python" not in command


def patience_s(plan: Plan, keeping: Checkpointing, *, here: bool) -> float:
    """Return how long forked ranks get to heed a signal; ``here``: the plan's seconds are those of this machine."""
    if keeping.grace_seconds is not None:
        return keeping.grace_seconds
    needed_s = stopping(plan).reserved_s
    return needed_s if here else max(needed_s, _UNKNOWN_S)


def patience_notes(
    launched: GivenRank | None, plan: Plan, environment: Mapping[str, str] = os.environ, command: str | None = None
) -> list[str]:
    """Say that this rank would be killed before a step and a save are over; ``command``: how its parent was started."""
    stop = stopping(plan)
    needed_s, busy_s = stop.reserved_s, stop.busy_s
    if launched is None or busy_s <= USUAL_PATIENCE_S:
        return []
    needs = f"a step and a save may take {format_seconds(busy_s)}, and whoever started this rank kills it"
    if launched.by == "Slurm":
        remedy = f"sbatch --signal=TERM@{needed_s} gives notice"
        return [
            f"{needs} KillWait (by default 30 s) after SIGTERM, when its time is up: nothing is saved then. {remedy}"
        ]
    option = re.search(r"--shutdown.timeout[=\0](\d+)", _parent_command() if command is None else command)
    waits_s = int(option[1]) if option else agent_patience_s(environment)
    if waits_s >= needed_s:
        return []
    remedy = f"Start torchrun with {PATIENCE}={needed_s}, or torch before 2.12 by python3 -m autoshard.runtime.agent"
    return [f"{needs} {waits_s} s after SIGTERM: nothing is saved then. {remedy}"]


def agent_patience_s(environment: Mapping[str, str] = os.environ) -> int:
    """Return how long torchrun waits after SIGTERM, as far as its environment says."""
    stated = environment.get(PATIENCE, "")
    return int(stated) if stated.isdecimal() else USUAL_PATIENCE_S


def _parent_command() -> str:
    """Return the words of the process that started this one, as Linux tells them; nothing elsewhere."""
    try:
        return Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def put_environment(variables: Mapping[str, str], environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what is not set; the user's compiler flags come after the plan's, so that they win.

    >>> mine = {"NEURON_CC_FLAGS": "--verbose", "FI_PROVIDER": "tcp"}
    >>> put_environment({"NEURON_CC_FLAGS": "--auto-cast none", "FI_PROVIDER": "efa"}, mine)
    >>> mine
    {'NEURON_CC_FLAGS': '--auto-cast none --verbose', 'FI_PROVIDER': 'tcp'}
    """
    for name, value in variables.items():
        if name == COMPILER_FLAGS and value not in environment.get(name, value):
            environment[name] = f"{value} {environment[name]}"
        else:
            environment.setdefault(name, value)


def only_extracts(environment: Mapping[str, str] = os.environ) -> bool:
    """Say whether this process only finds graphs for a compiler, and computes no real numbers."""
    return environment.get(_EXTRACTING) == "1"


def node_words(
    launched: GivenRank | None, num_nodes: int, num_ranks: int, environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Return torchrun's options that start the ranks of this node; ``launched`` counts nodes here.

    Nodes meet one port above that where ``launched`` met: torchrun still listens there.
    """
    if num_nodes == 1:
        return ["--standalone", "--nproc-per-node", str(num_ranks)]
    assert launched is not None, "one of several nodes is told which"
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if launched.meeting != "env://":
        address, _, port = launched.meeting.removeprefix("tcp://").rpartition(":")
    where = ["--master-addr", address, "--master-port", str(int(port) + 1)]
    return ["--nnodes", str(num_nodes), "--node-rank", str(launched.rank), *where, "--nproc-per-node", str(num_ranks)]


def _given_by_torchrun(environment: Mapping[str, str]) -> GivenRank:
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    there = next(name for name in needed if name in environment)
    message = f"missing, though {there} is set. Start the ranks with torchrun, or unset {there} to have them forked"
    require(*((name in environment, name, message) for name in needed))
    environment = {"LOCAL_RANK": environment["RANK"], **environment}
    rank, num_ranks, local_rank, _ = _numbers(environment, "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    alone = environment.get("LOCAL_WORLD_SIZE") == str(num_ranks)
    address = f"tcp://{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    meeting = "env://" if _BY_AGENT in environment else address  # without torchrun rank 0 opens the port
    return GivenRank(by="torchrun", rank=rank, num_ranks=num_ranks, meeting=meeting, alone=alone, local_rank=local_rank)


def _given_by_slurm(environment: Mapping[str, str]) -> GivenRank | None:
    """Read srun's variables; a batch script, or a shell in an allocation, is none of its tasks."""
    step = environment.get("SLURM_STEP_ID", "")
    environment = {"SLURM_LOCALID": environment["SLURM_PROCID"], **environment}
    if not step.isdecimal() or int(step) >= _SPECIAL_STEPS:
        number = environment["SLURM_NTASKS"]
        message = f"this job has {number} tasks, but this process is none that srun started. Type srun autoshard run"
        require((number == "1", "SLURM_NTASKS", message))
        return None
    rank, num_ranks, local_rank = _numbers(environment, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    job = environment.get("SLURM_JOB_ID", "0")
    port = environment.get("MASTER_PORT", str(_FIRST_PORT + (int(job) if job.isdecimal() else 0) % _NUM_PORTS))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    alone = environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES")) == "1"
    address = "127.0.0.1" if alone else environment.get("MASTER_ADDR") or first_node(nodes)
    meeting = f"tcp://{address}:{port}"
    return GivenRank(by="Slurm", rank=rank, num_ranks=num_ranks, meeting=meeting, alone=alone, local_rank=local_rank)


def first_node(nodes: str) -> str:
    """Return the first of Slurm's list of nodes, where rank 0 is."""
    match = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    return f"{match[1]}{match[2] or ''}" if match else "localhost"


def _numbers(environment: Mapping[str, str], *names: str) -> list[int]:
    """Read variables as whole numbers; the first is a rank, the second how many ranks there are."""
    wrong = [name for name in names if not re.fullmatch("[0-9]{1,9}", environment[name])]
    if wrong:
        raise InputError(
            Fault(where=name, message=f"must be a whole number, not {environment[name]!r}") for name in wrong
        )
    rank, num_ranks, *rest = (int(environment[name]) for name in names)
    require((rank < num_ranks, names[0], f"is {rank}, but there are only {counted(num_ranks, 'rank')}, counted from 0"))
    return [rank, num_ranks, *rest]
