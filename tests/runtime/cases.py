"""Small plans to run, and a run of the command line in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoshard.plan.codec import dump
from autoshard.plan.plan import Plan
from autoshard.run.activity import read_status
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision
from tests.kit import local_plan

ROOT = Path(__file__).parents[2]
PATIENCE_S = 600.0  # far beyond what anything here takes, a disk that others write to included; then a test has failed
LONGEST = 8000  # characters of an output in the message of a test that fails
OUTSIDE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def tiny_plan(text: str, *, seq_len: int = 16, global_batch: int = 4, precision: str = "bf16", **changes: Any) -> Plan:
    """The plan of exactly this candidate for tiny-llama, or one with other sizes, on this machine."""
    sizes = {"seq_len": seq_len, "global_batch": global_batch, "precision": Precision.named(precision)}
    return local_plan(text, replace(load_model("tiny-llama"), **changes), **sizes)


def write_tiny(folder: Path, text: str = "tp=1,pp=1,dp=2") -> Path:
    """The same as a file."""
    path = folder / "tiny.json"
    path.write_text(dump(tiny_plan(text)), encoding="utf-8")
    return path


def environment(**more: str) -> dict[str, str]:
    """What a process gets that nobody has made a rank."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return {name: value for name, value in inherited.items() if name not in OUTSIDE} | {"PYTHONPATH": str(ROOT)} | more


@contextmanager
def started(folder: Path, *arguments: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """Start ``autoshard`` in a folder, as the leader of a session, and leave nothing of it behind.

    A test that fails meanwhile says what became of the process, and where it and its ranks stood.
    """
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-m", "autoshard.cli", *arguments],
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    except BaseException as error:
        error.add_note(last_words(process, folder))
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def last_words(process: subprocess.Popen[str], folder: Path) -> str:
    """What a process has said, where its ranks stand, and, as it ends with all of them, the stacks of their threads."""
    code, positions = process.poll(), sorted(folder.rglob("positions/*/*"))
    words = ["it runs" if code is None else f"it has ended with exit code {code}"]
    words += [
        f"rank {path.name} (process {status.process}) {status}" for path in positions if (status := read_status(path))
    ]
    if code is None:
        for pid in (*children_of(process.pid), process.pid):  # ranks too write their stacks at SIGABRT, into their logs
            os.kill(pid, signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):  # its output may be full
            process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    said = [both_ends(text) for text in process.communicate()]
    logs = [f"{path}:\n{both_ends(path.read_text(errors='replace'))}" for path in sorted(folder.rglob("rank-*.log"))]
    return "\n".join([*words, *said, *logs])


def both_ends(text: str) -> str:
    """A text, or its beginning and its end: stacks begin with the call that is under way."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}\n...\n{text[-LONGEST // 2 :]}"


def children_of(pid: int) -> list[int]:
    """The processes that one has started, in the order in which it did."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(holds: Callable[[], bool], what: str, process: "subprocess.Popen[str] | None" = None) -> None:
    """Wait for something that happens soon, unless the process ends before that does it."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert process is None or process.poll() is None or holds(), f"the process ended before {what}"
        assert time.monotonic() < deadline_s, f"waited {PATIENCE_S} s until {what}"
        time.sleep(0.02)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file of steps."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
