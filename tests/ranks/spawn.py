"""Run a function on several CPU processes joined by gloo, and hand back what each returned.

Ranks are interpreters of their own, as torchrun, srun and Kubernetes start them: each has its own hash seed, and
nothing of the process that tests.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import dill
import pytest

ROOT = Path(__file__).parents[2]
_SEEDS = (1, 4, 2, 3, 5, 6, 7, 8)  # of the ranks' hashes: the first two order names of one layer differently

_READY = "ready"

Replaced = tuple[Any, str, Any]


class RankFailed(Exception):
    """A rank raised; the message holds its traceback."""


def on_ranks(
    num_ranks: int,
    body: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    replaced: Sequence[Replaced] = (),
    prepare: Callable[[], object] | None = None,
) -> list[Any]:
    """Call ``body(*args)`` on every rank of a gloo world; raise what went wrong first, with its rank.

    Interpreters stay for the next case, since they take seconds to start; after a failure all are new. What is
    ``replaced`` on the ranks meanwhile are attributes: of which object, its name, its value. Libraries that a process
    can begin only once are imported by ``prepare``; every case is then a fork of its interpreter.
    """
    named = [(place.__name__ if isinstance(place, ModuleType) else place, *other) for place, *other in replaced]
    ranks, work, first = _pool().first(num_ranks), dill.dumps((body, args, named)), dill.dumps(prepare)
    what = f"{body.__name__} on {num_ranks} ranks"
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank, connection in enumerate(ranks):
                connection.send((first, rank, num_ranks, f"file://{folder}/store", timeout_s, work))
            return _collected({connection: rank for rank, connection in enumerate(ranks)}, what, timeout_s)
        except RankFailed:
            _pool().stop(signal.SIGABRT)  # each that still works says where it stands
            raise
        except BaseException:
            _pool().stop()
            raise


@cache
def _pool() -> "_Pool":
    return _Pool()


class _Pool:
    """Interpreters that wait for work, and how to talk to each; they end with this process."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._ready = 0

    def first(self, count: int) -> Sequence[Connection]:
        """Start as many as are missing; return the first ones."""
        for rank in range(len(self._processes), count):
            here, there = socket.socketpair()
            with there:
                paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
                own = {"PYTHONHASHSEED": str(_SEEDS[rank % len(_SEEDS)]), "PYTHONPATH": paths}
                environment = {**os.environ, **own, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
                command = [sys.executable, "-X", "faulthandler", "-m", "tests.ranks.spawn", str(there.fileno())]
                self._processes.append(
                    subprocess.Popen(
                        command, env=environment, cwd=ROOT, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL
                    )
                )
            self._connections.append(Connection(here.detach()))
        for rank in range(self._ready, count):
            assert self._connections[rank].recv() == _READY
        self._ready = max(self._ready, count)
        return self._connections[:count]

    def stop(self, by: signal.Signals = signal.SIGKILL) -> None:
        """End all."""
        for process in self._processes:
            process.send_signal(by)
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._ready = [], [], 0


def _collected(ends: dict[Connection, int], what: str, timeout_s: float) -> list[Any]:
    """Read one answer per rank; the failure that happened first ends the waiting."""
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(answers) < len(ends):
        ready = wait([end for end, rank in ends.items() if rank not in answers], deadline - time.monotonic())
        if not ready:
            missing = sorted(set(ends.values()) - set(answers))
            raise RankFailed(f"{what}: no answer from ranks {missing} within {timeout_s} s")
        failures: list[tuple[float, str]] = []
        for end in ready:
            assert isinstance(end, Connection)
            when, error, value = _answer(end)
            if error:
                failures.append((when, f"{what}: rank {ends[end]} failed\n{error}"))
            answers[ends[end]] = value
        if failures:
            raise RankFailed(min(failures)[1])
    return [answers[rank] for rank in sorted(answers)]


def _answer(end: Connection) -> tuple[float, str, Any]:
    try:
        return pickle.loads(end.recv_bytes())
    except (EOFError, OSError):
        return time.monotonic(), "the process ended without an answer", None


def be_a_rank(number: int) -> None:
    """Do what is sent until nobody is there to send."""
    end = Connection(number)
    import torch

    torch.set_num_threads(1)
    end.send(_READY)
    prepared = set[bytes]()
    with suppress(EOFError, OSError):
        while True:
            first, *work = end.recv()
            prepare = dill.loads(first)
            if prepare is None:
                _work(end, *work)
                continue
            if first not in prepared:
                prepare()
                prepared.add(first)
            if not (child := os.fork()):
                _work(end, *work)
                os._exit(0)
            if status := os.waitpid(child, 0)[1]:
                end.send_bytes(pickle.dumps((time.monotonic(), f"the process ended with {status}", None)))


def _work(end: Connection, rank: int, num_ranks: int, store: str, timeout_s: float, work: bytes) -> None:
    """Be one rank: the answer goes out before the process group goes down, so that the first failure is told first."""
    import torch
    import torch.distributed as dist

    done = threading.Event()
    threading.Thread(target=_end_with_parent, args=(os.getppid(), done), daemon=True).start()
    torch.manual_seed(0)
    try:
        body, args, replaced = dill.loads(work)
        dist.init_process_group("gloo", store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s))
        with pytest.MonkeyPatch.context() as patch:
            for place, name, value in replaced:
                patch.setattr(import_module(place) if isinstance(place, str) else place, name, value)
            answer = pickle.dumps((time.monotonic(), "", body(*args)))
    except BaseException:
        answer = pickle.dumps((time.monotonic(), traceback.format_exc(), None))
    end.send_bytes(answer)
    done.set()
    with suppress(Exception):  # the other end of a connection may be gone already
        dist.destroy_process_group()


def _end_with_parent(parent: int, done: threading.Event) -> None:
    """End this process when the one that tests is gone, even in the middle of work."""
    while not done.wait(1.0):
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    from tests.ranks.spawn import be_a_rank as main  # whose classes have the names that pickles know

    main(int(sys.argv[1]))
