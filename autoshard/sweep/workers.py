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
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from autoshard.extensions import EXTENSIONS, load_extension
from autoshard.sweep.work import Row, SweepJob, failed_rows, rows_of


@dataclass(slots=True, eq=False)
class _Worker:
    """A process with our end of its pipe: jobs go in, rows come out, and nothing comes any more when it is gone."""

    process: BaseProcess
    pipe: Connection
    job: SweepJob

    def rows(self) -> list[Row] | None:
        """Return the rows of its job; None if the process died."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            return None

    def end(self) -> int:
        """Let the process end, and return its exit code; it ends when the pipe is closed."""
        self.pipe.close()
        self.process.join()
        return self.process.exitcode or 0


def work_through(jobs: Sequence[SweepJob], num_workers: int, begin: Callable[[SweepJob], None]) -> Iterator[list[Row]]:
    """Yield the rows of each job as it is done. When we end, however that happens, so do the processes."""
    context: Any = multiprocessing.get_context("spawn")  # a fork would take along what draws the progress
    waiting, workers = list(reversed(jobs)), list[_Worker]()

    def give(worker: _Worker) -> None:
        begin(worker.job)
        with suppress(OSError):  # the process is gone, as we shall hear
            worker.pipe.send(worker.job)

    try:
        while waiting or workers:
            while waiting and len(workers) < num_workers:
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, tuple(EXTENSIONS.files)), daemon=False)
                process.start()
                theirs.close()
                workers.append(_Worker(process=process, pipe=ours, job=waiting.pop()))
                give(workers[-1])
            for pipe in wait([one.pipe for one in workers]):
                worker = next(one for one in workers if one.pipe is pipe)
                rows, done = worker.rows(), worker.job
                if rows is not None and waiting:
                    worker.job = waiting.pop()
                    give(worker)
                else:
                    workers.remove(worker)
                    code = worker.end()
                    killed = f"was killed by {signal.Signals(-code).name}, perhaps for its memory" if code < 0 else ""
                    rows = rows or failed_rows(done, f"the process of this point {killed or f'ended with {code}'}")
                yield rows
    finally:
        for worker in workers:
            worker.end()


def _work(pipe: Connection, extensions: Sequence[Path]) -> None:
    """Do jobs until the other end of the pipe is closed."""
    for path in extensions:
        load_extension(path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells all; the parent decides
    running: list[subprocess.Popen[str]] = []
    jobs: SimpleQueue[SweepJob] = SimpleQueue()

    def listen() -> None:
        with suppress(EOFError, OSError):
            while True:
                jobs.put(pipe.recv())
        for process in running:
            process.terminate()  # it saves what it has to save, and takes its ranks with it
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        rows = rows_of(jobs.get(), running.append)
        running.clear()
        pipe.send(rows)
