"""Processes that do the jobs of a sweep side by side; one that dies takes only its own job with it."""

import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

from autoshard.sweep.work import Row, SweepJob, failed, rows_of


@dataclass(slots=True, eq=False)
class _Worker:
    """A process with the two ends that we hold: jobs go one way, and nothing comes any more when it is gone."""

    process: BaseProcess
    pipe: Connection
    job: SweepJob | None = None


def done_by(jobs: Sequence[SweepJob], num_workers: int, begun: Callable[[SweepJob], None]) -> Iterator[list[Row]]:
    """Yield the rows of each job as it is done. When we end, however that happens, so do the processes."""
    context: Any = multiprocessing.get_context("spawn")  # a fork would take along what draws the progress
    waiting, workers = list(reversed(jobs)), list[_Worker]()
    try:
        while waiting or workers:
            while waiting and len(workers) < num_workers:
                workers.append(_hired(context))
            for worker in [one for one in workers if one.job is None]:
                _give(worker, waiting, workers, begun)
            for pipe in wait([one.pipe for one in workers]) if workers else ():
                worker = next(one for one in workers if one.pipe is pipe)
                rows = _received(worker)
                if rows is None:
                    workers.remove(worker)
                    rows = _lost(worker)
                worker.job = None
                yield rows
    finally:
        for worker in workers:
            worker.pipe.close()
            worker.process.join()


def _hired(context: Any) -> _Worker:
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=False)
    process.start()
    theirs.close()
    return _Worker(process=process, pipe=ours)


def _give(worker: _Worker, waiting: list[SweepJob], workers: list[_Worker], begun: Callable[[SweepJob], None]) -> None:
    """Hand out the next job, or let a process go for which there is none."""
    if not waiting:
        workers.remove(worker)
        worker.pipe.close()
        worker.process.join()
        return
    worker.job = waiting.pop()
    begun(worker.job)
    with suppress(OSError):  # it is gone, as we shall hear
        worker.pipe.send(worker.job)


def _received(worker: _Worker) -> list[Row] | None:
    try:
        return worker.pipe.recv()
    except (EOFError, OSError):
        return None


def _lost(worker: _Worker) -> list[Row]:
    worker.pipe.close()
    worker.process.join()
    code = worker.process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}, perhaps for its memory" if code < 0 else f"ended with {code}"
    assert worker.job, "who waits for a job hears nothing"
    return failed(worker.job, f"the process of this point {how}")


def _work(pipe: Connection) -> None:
    """Do jobs until there are no more, or whoever gives them is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells all; who gives the jobs decides
    running: list[subprocess.Popen[str]] = []
    jobs: SimpleQueue[SweepJob] = SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, jobs, running), daemon=True).start()
    while True:
        rows = rows_of(jobs.get(), running.append)
        running.clear()
        pipe.send(rows)


def _listen(pipe: Connection, jobs: "SimpleQueue[SweepJob]", running: list[Any]) -> None:
    """Take jobs from the pipe; when its other end is closed, stop what runs and end this process."""
    try:
        while True:
            jobs.put(pipe.recv())
    except (EOFError, OSError):
        for process in running:
            process.terminate()  # it saves what it has to save, and takes its ranks with it
        os._exit(0)
