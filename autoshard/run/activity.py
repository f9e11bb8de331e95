"""What a rank is doing right now: a record of a few bytes that other processes of its machine can read at any time."""

import mmap
import os
import socket
import struct
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autoshard.files import naming
from autoshard.run.folder import POSITIONS

_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "Z": "dead", "D": "in uninterruptible sleep"}
_RECORD = struct.Struct("<qqd128s128s?")  # process, step, time of the last change, two texts, for storage or not
_CANNOT_RUN = ("T", "t", "Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """The contents of a record."""

    process: int
    step: int  # 0: in no step
    since_s: float  # of this machine's clock that only goes forward
    action: str  # of the schedule, or another part of a step
    waits_for: str  # a collective or message; empty while it computes
    of_storage: bool = False  # what it waits for comes from storage, and not from other ranks

    def __str__(self) -> str:
        """Say where the rank is and what it does there."""
        doing = f"waits for {self.waits_for}" if self.waits_for else "computes"
        where = f"in step {self.step}" if self.step else "in no step"
        return f"{where}, {self.action or 'before its first action'}: {doing}"


def activity_folder(run: Path) -> Path:
    """Return where the ranks of this machine keep their records: clocks of other machines show other times."""
    return run / POSITIONS / socket.gethostname()


class RankActivity:
    """A rank's own record; without a file it stays in this process."""

    def __init__(self, path: Path | None = None) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(_RECORD.size)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                with naming(path):  # never shorter: another record of this rank may be mapped
                    os.pwrite(number, bytes(_RECORD.size), 0)
                self._memory = mmap.mmap(number, _RECORD.size)
            finally:
                os.close(number)
        self._process, self._step, self._action = os.getpid(), 0, b""

    def begin(self, step: int) -> None:
        """Enter a step, or leave the last one (0); what follows has no limit of time."""
        self._step = step
        self.act("")

    @property
    def action(self) -> str:
        """What the rank does; "" before its first action."""
        return self._action.decode()

    def act(self, action: str) -> None:
        """Begin an action."""
        self._action = action.encode()
        self.wait("")

    def wait(self, what: str, *, of_storage: bool = False) -> None:
        """Begin to wait for other ranks, or for storage; with no text, go on."""
        values = (self._process, self._step, time.monotonic(), self._action, what.encode(), of_storage)
        _RECORD.pack_into(self._memory, 0, *values)

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        """Record what this rank waits for inside a ``with`` block; after an error the record stays."""
        self.wait(what)
        yield
        self.wait("")


def read_status(path: Path) -> RankStatus | None:
    """Read a record; None before its rank has begun."""
    data = path.read_bytes() if path.is_file() else b""
    process, step, since_s, *texts, of_storage = _RECORD.unpack_from(data.ljust(_RECORD.size, b"\0"))
    action, waits_for = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
    status = RankStatus(
        process=process, step=step, since_s=since_s, action=action, waits_for=waits_for, of_storage=of_storage
    )
    return status if process else None


def by_suspicion(statuses: Mapping[int, RankStatus], states: Mapping[int, str]) -> list[int]:
    """Order ranks: those that cannot run first, then those that wait for nobody, then those furthest behind."""

    def suspicion(rank: int) -> tuple[bool, bool, int, float]:
        one = statuses[rank]
        return not states.get(rank), bool(one.waits_for), one.step, one.since_s

    return sorted(statuses, key=suspicion)


def is_alive(process: int) -> bool:
    """Say whether there is a process of this number on this machine."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True


def why_still(process: int) -> str:
    """Say why a process of this machine cannot run; nothing if it can, or where the system does not tell."""
    return _STATES.get(_state(process), "")


def cannot_run(process: int) -> bool:
    """Say whether a process of this machine is stopped or dead, so that it will not go on by itself."""
    return _state(process) in _CANNOT_RUN


def _state(process: int) -> str:
    """Return the letter of a process's state, where the system tells it."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return ""
