"""How a command is measured: CPU seconds with children, peak memory, a yardstick for noisy machines."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from autoshard.commands.progress import StatusLine
from autoshard.errors import RunFailed

Value = TypeVar("Value")

# Runs in a small process between us and the command: on Linux the memory of the process that forks counts
# towards the peak of the process that it starts, so a large parent would hide a small command.
_SCALE = """
import json, os, sys
pid = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)])
_, status, usage = os.wait4(pid, 0)
print(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss]))
"""

# getrusage(2) gives kilobytes on Linux; macOS gives bytes.
_MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024

_YARDSTICK_STEPS = 2_000_000
_COPIED_BYTES = 2**23  # at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one command used: CPU seconds with its children, and the memory of the largest of them."""

    cpu_s: float
    peak_bytes: int


def counted_off(values: Iterable[Value], what: str) -> Iterator[Value]:
    """Yield values, and say on stderr which of them is worked on: on a terminal in one line, elsewhere every 10 s."""
    all_values, line = list(values), StatusLine(logs=True)
    for number, value in enumerate(all_values, 1):
        line.show(f"{what} {number} of {len(all_values)}")
        yield value
    line.clear()


def measure(command: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None) -> Usage:
    """Run a command to its end and return what it used; one that fails is an error, never a fast result."""
    scale = [sys.executable, "-I", "-S", "-c", _SCALE, *command]
    done = subprocess.run(scale, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunFailed(f"`{command[0]}` could not be started: {done.stderr.strip().splitlines()[-1]}")
    code, cpu_s, peak = json.loads(done.stdout)
    if code != 0:
        raise RunFailed(f"`{' '.join(command)}` ended with exit code {code}:\n{done.stderr.strip()}")
    return Usage(cpu_s=cpu_s, peak_bytes=peak * _MAXRSS_UNIT_BYTES)


def interleave(
    commands: Mapping[str, Sequence[str]], *, rounds: int, cwd: Path, env: Mapping[str, str] | None = None
) -> list[dict[str, Usage]]:
    """Measure all commands once per round, so that a slow minute of the machine hits each of them alike.

    One round before the first is not counted: it fills the file and bytecode caches.
    """
    measured = [
        {name: measure(command, cwd=cwd, env=env) for name, command in commands.items()} for _ in range(rounds + 1)
    ]
    return measured[1:]


def warm_environment(root: Path, cache: Path) -> dict[str, str]:
    """Return an environment that imports from ``root`` and keeps bytecode in ``cache``.

    Under a user's ``PYTHONDONTWRITEBYTECODE`` a checkout would be compiled anew in every run.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(root), "PYTHONPYCACHEPREFIX": str(cache)}


def yardstick_s() -> float:
    """Return the CPU seconds of a fixed loop, to tell a slow machine from a slow program."""
    before = time.process_time()
    total = 0
    for step in range(_YARDSTICK_STEPS):
        total += step & 7
    return time.process_time() - before


def plain_copy(source: Path, target: Path) -> None:
    """Read, write and synchronise a file."""
    buffer = memoryview(bytearray(_COPIED_BYTES))
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        while count := reader.readinto(buffer):
            writer.write(buffer[:count])
        os.fsync(writer.fileno())


def forget_pages(file: Path) -> None:
    """Let the page cache forget a file, so that it is read from the disk."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
