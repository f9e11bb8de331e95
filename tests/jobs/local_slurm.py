"""A real Slurm of one node on this machine, started for tests and ended with them; nothing of the system is changed."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "runuser")
_PATH = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))
_PATIENCE_S = 600.0  # far beyond what anything here takes
# task/none and linuxproc need nothing of the kernel.
_CONF = """
ClusterName=local
FirstJobId={number}
SlurmctldHost=localhost
SlurmUser=root
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPort={first}
SlurmdPort={second}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
MpiDefault=none
ReturnToService=2
NodeName=localhost CPUs=2 State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=localhost MaxTime=1 State=UP
"""


def missing() -> str | None:
    """Say why no Slurm can be started here; None if one can."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"no {', '.join(absent)} here: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "slurmd is to be started by root"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """A cluster that takes jobs."""

    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """What a process needs to submit to it."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *words: str) -> str:
        done = subprocess.run(words, env=self.variables, capture_output=True, text=True, check=False)
        assert not done.returncode, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        return dict(word.split("=", 1) for word in self.call("scontrol", "show", "job", number).split() if "=" in word)

    def start_again(self, number: str, restarts: int) -> None:
        """Wait until a job is queued again, and start it: Slurm would let two minutes pass.

        The node takes a job only if it was allowed after the last one was called back, in whole seconds.
        """
        until(lambda: self.job(number)["Restarts"] == str(restarts), f"job {number} is queued again")
        time.sleep(3)

        def runs() -> bool:
            found = self.job(number)
            if found["JobState"] == "PENDING":  # also what Slurm has put off anew
                with suppress(AssertionError):  # it may begin by itself between both calls
                    self.call("scontrol", "update", f"JobId={number}", "StartTime=now")
            return found["JobState"] == "RUNNING"

        try:
            until(runs, f"job {number} runs again")
        except AssertionError as error:
            said = (self.folder / "slurmctld.log").read_text(encoding="utf-8")[-3000:]
            raise AssertionError(f"{error}: {self.job(number)}\n{said}") from None

    def wait(self, number: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of these states."""
        until(lambda: self.job(number)["JobState"] in states, f"job {number} is {states}")
        return self.job(number)


def until(holds: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s, f"waited in vain: {what}"
        time.sleep(0.2)


@contextmanager
def local_slurm() -> Iterator[Slurm]:
    """Start munged as its own user, the controller and the node; end them."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        for part in ("munge", "state", "spool"):
            (folder / part).mkdir()
        (folder / "munge").chmod(0o755)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for path in (folder / "munge", key):
            shutil.chown(path, "munge")
        first, second = _free_ports()
        text = _CONF.format(
            folder=folder, first=first, second=second, number=first % 9000 + 1
        )  # jobs have ports by their number
        (folder / "slurm.conf").write_text(text, encoding="utf-8")
        slurm = Slurm(folder=folder)
        options = [f"--{one}-file={folder}/munge/{one}" for one in ("key", "pid", "log", "seed")]
        munged = ["runuser", "-u", "munge", "--", shutil.which("munged", path=_PATH) or "", "--foreground"]
        stack.enter_context(_running([*munged, f"--socket={folder}/munge/socket", *options], slurm))
        until((folder / "munge" / "socket").exists, "munged")
        stack.enter_context(_running(["slurmctld", "-D"], slurm))
        stack.enter_context(_running(["slurmd", "-D", "-N", "localhost"], slurm))
        until(lambda: _idle(slurm), "an idle node")
        try:
            yield slurm
        finally:
            slurm.call("scancel", "--user=root")
            until(lambda: not slurm.call("squeue", "--noheader").strip(), "all jobs have ended")


def _free_ports() -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _idle(slurm: Slurm) -> bool:
    done = subprocess.run(
        ["sinfo", "-h", "-p", "all", "-o", "%t"], env=slurm.variables, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() == "idle"


@contextmanager
def _running(command: list[str], slurm: Slurm) -> Iterator[None]:
    program = shutil.which(command[0], path=_PATH) or command[0]
    log = slurm.folder / f"{Path(command[0]).name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen([program, *command[1:]], env=slurm.variables, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
