"""Run a function on several CPU processes joined by gloo, and hand back what each returned."""

import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RankFailed(Exception):
    """A rank raised; the message holds its traceback."""


def on_ranks(num_ranks: int, body: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call ``body(*args)`` on every rank of a gloo world; raise what went wrong first, with its rank.

    Processes are forked after torch is imported, which takes seconds, and are gone when this returns.
    """
    context = get_context("fork")
    workers: list[ForkProcess] = []
    ends: dict[Connection, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(num_ranks):
                mine, theirs = context.Pipe(duplex=False)
                place = (rank, num_ranks, Path(folder) / "store", timeout_s)
                workers.append(context.Process(target=_work, args=(theirs, place, body, args), daemon=True))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork with threads
                    workers[-1].start()
                theirs.close()
                ends[mine] = rank
            return _collected(ends, f"{body.__name__} on {num_ranks} ranks", timeout_s)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


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
    except EOFError:
        return time.monotonic(), "the process ended without an answer", None


def _work(end: Connection, place: tuple[int, int, Path, float], body: Callable[..., Any], args: Any) -> None:
    """Be one rank: the answer goes out before the process group goes down, so that the first failure is told first."""
    rank, num_ranks, store, timeout_s = place
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo", f"file://{store}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s)
        )
        answer = pickle.dumps((time.monotonic(), "", body(*args)))
    except BaseException:
        answer = pickle.dumps((time.monotonic(), traceback.format_exc(), None))
    end.send_bytes(answer)
    with suppress(Exception):  # the other end of a connection may be gone already
        dist.destroy_process_group()
