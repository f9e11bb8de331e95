"""What a rank is doing right now: a record of a few bytes that other processes of its machine can read at any time."""

import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_RECORD = struct.Struct("<qqd128s128s")  # process, step, time of the last change, and two texts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """The contents of a record."""

    process: int
    step: int  # 0: in no step
    since_s: float  # of this machine's clock that only goes forward
    action: str  # of the schedule, or another part of a step
    waits_for: str  # a collective or message; empty while it computes


def activity_folder(run: Path) -> Path:
    """Return where the ranks of this machine keep their records: clocks of other machines show other times."""
    return run / "positions" / socket.gethostname()


class RankActivity:
    """A rank's own record; without a file it stays in this process."""

    def __init__(self, path: Path | None = None) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(_RECORD.size)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(_RECORD.size))
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _RECORD.size)
        self._process, self._step, self._action = os.getpid(), 0, b""

    def begin(self, step: int) -> None:
        """Enter a step, or leave the last one (0); what follows has no limit of time."""
        self._step = step
        self.act("")

    def act(self, action: str) -> None:
        """Begin an action."""
        self._action = action.encode()
        self.wait("")

    def wait(self, what: str) -> None:
        """Begin to wait for other ranks; with no text, go on."""
        _RECORD.pack_into(self._memory, 0, self._process, self._step, time.monotonic(), self._action, what.encode())

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Record while it lasts what this rank waits for; after an error it stays on record."""
        self.wait(what)
        yield
        self.wait("")


def read_status(path: Path) -> RankStatus | None:
    """Read a record; None before its rank has begun."""
    data = path.read_bytes() if path.is_file() else b""
    process, step, since_s, *texts = _RECORD.unpack_from(data.ljust(_RECORD.size, b"\0"))
    action, waits_for = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
    found = RankStatus(process=process, step=step, since_s=since_s, action=action, waits_for=waits_for)
    return found if process else None
