"""The ranks of a run as processes of this machine: forked, watched, and ended together, whatever happens."""

import errno
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, cast

from autoshard.errors import InputError, RunFailed, Stopped

Say = Callable[[Any], None]
Child = Callable[[int, Say], Any]  # takes its rank, and how it says something before its answer

_LOOK_S = 1.0  # how long to wait for messages before looking after the ranks
_GRACE_S = 0.5  # after a failure, to hear of those who failed before it
_AGAIN_S = 1.0  # between two signals of somebody impatient: ``timeout`` sends its child one, and the whole group one
# End a run, which saves: of schedulers, of Ctrl-C, of Slurm's users (sbatch --signal=USR1@90), of a closed terminal.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_LAST_LINES = 15  # of a traceback that are shown; the log has all

Explain = Callable[[int, int | None], str]  # why a rank ended with an exit code, if it has left a report


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankMessage:
    """Something that a rank says while it runs, or its answer at the end."""

    value: Any
    last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankFailure:
    """The bad end of a rank. A rank that failed without a message was killed, and the others fail because of it."""

    rank: int
    silent: bool
    at_s: float
    text: str
    error: InputError | RunFailed | None = None  # what needs no traceback


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The processes, the pipes from those that have not answered yet, and what was heard of all."""

    logs: Path
    grace_s: float
    explain: Explain
    parent: int = field(default_factory=os.getpid)
    workers: list[ForkProcess] = field(default_factory=list)
    ends: dict[Connection, int] = field(default_factory=dict)
    lifelines: list[int] = field(default_factory=list)  # the parent's ends
    answers: dict[int, Any] = field(default_factory=dict)
    failures: list[_RankFailure] = field(default_factory=list)
    signals: list[tuple[signal.Signals, float]] = field(default_factory=list)  # and when they came

    def start(self, num_ranks: int, child: Child) -> None:
        """Fork all; each ends when the parent's end of the lifeline closes, which even SIGKILL does."""
        context, lifeline = get_context("fork"), os.pipe()
        self.lifelines.append(lifeline[1])
        for rank in range(num_ranks):
            our_end, their_end = context.Pipe(duplex=False)
            target = (rank, child, their_end, lifeline, self)
            worker = context.Process(target=_work, args=target, name=f"rank {rank}", daemon=True)
            self.workers.append(worker)
            self.ends[our_end] = rank
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork with threads
                worker.start()
            for number, _ in self.signals:  # those that came before the process had a number
                os.kill(cast(int, worker.pid), number)
            their_end.close()
        os.close(lifeline[0])

    def listen(self, show: Say) -> None:
        """Take messages as they come, for a moment; a rank that is done is listened to no more."""
        left_s = self.failures[0].at_s + _GRACE_S - time.monotonic() if self.failures else _LOOK_S
        for end in wait(list(self.ends), max(0.0, min(_LOOK_S, left_s))):
            assert isinstance(end, Connection)
            rank = self.ends[end]
            try:
                message = end.recv()
            except (EOFError, OSError):
                message = self._death(rank)
            if isinstance(message, _RankMessage) and not message.last:
                if rank == 0:
                    show(message.value)
                continue
            del self.ends[end]
            end.close()
            if isinstance(message, _RankMessage):
                self.answers[rank] = message.value
            else:
                self.failures.append(message)

    def _death(self, rank: int) -> _RankFailure:
        worker = self.workers[rank]
        worker.join(1.0)
        code = worker.exitcode
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        hint = ". Perhaps memory ran out; the kernel's log (dmesg) says so" if code == -signal.SIGKILL else ""
        log, error = list[str](), None
        with suppress(OSError):  # a rank that ended at once has none
            log = log_of(self.logs, rank).read_text(encoding="utf-8", errors="replace").splitlines()
        if report := self.explain(rank, code):
            error = RunFailed(f"{report.strip()}\nall ranks were stopped; their logs: {self.logs}")
        text = "\n".join([f"it {how}{hint}", *log[-_LAST_LINES:]])
        return _RankFailure(rank=rank, silent=True, at_s=time.monotonic(), text=text, error=error)

    def pass_on(self, number: int, _: object) -> None:
        """Give a signal to the ranks; without any grace, or at a later second signal, stop at once."""
        now_s = time.monotonic()
        self.signals.append((signal.Signals(number), now_s))
        if os.getpid() != self.parent:
            return  # a fork that is not yet a rank; it looks after what has come when it is
        if not self.grace_s:
            raise self._ending("")
        if now_s > self.signals[0][1] + _AGAIN_S:
            raise self._ending("a second signal came")
        for worker in self.workers:
            if worker.pid is not None and worker.is_alive():
                os.kill(worker.pid, number)

    def _ending(self, unsaved: str) -> BaseException:
        """Return the error that ends the run after a signal which ranks have not answered by a save."""
        number, _ = self.signals[0]
        stopped = Stopped(number.name, number, unsaved)
        return KeyboardInterrupt(f"interrupted: {stopped}") if number == signal.SIGINT else stopped

    def refuse(self) -> None:
        """Raise the error that ends the run, if one does."""
        # The end of a pipe may be seen before that of the rank which failed first.
        if self.failures and (not self.ends or time.monotonic() > self.failures[0].at_s + _GRACE_S):
            first = min(self.failures, key=lambda failure: (not failure.silent, failure.at_s))
            if self.signals and first.silent:  # ranks that do not heed a signal die of it: they have no state yet
                code = self.workers[first.rank].exitcode
                of_signal = code in {-number for number, _ in self.signals}
                raise self._ending("" if of_signal else f"rank {first.rank}: {first.text.splitlines()[0]}")
            what = f"rank {first.rank} of {len(self.workers)} failed, the others were stopped"
            lines = first.text.strip().splitlines()[-_LAST_LINES:]
            raise first.error or RunFailed("\n".join([what, *lines, f"its log: {log_of(self.logs, first.rank)}"]))
        if self.signals and time.monotonic() > self.signals[0][1] + self.grace_s:
            seconds = f"{self.grace_s:g} s (checkpoint.grace_seconds)"
            raise self._ending(f"the ranks did not end their step and save it within {seconds}")

    def stop(self) -> None:
        """End all that are left, and wait until they are gone."""
        started = [worker for worker in self.workers if worker.pid is not None]
        for worker in started:
            worker.kill()
        for worker in started:
            worker.join()
        for end in self.ends:
            end.close()
        for lifeline in self.lifelines:
            os.close(lifeline)


def _nothing(rank: int, code: int | None) -> str:
    """Return no explanation of a rank's end."""
    return ""


def on_forks(
    num_ranks: int, child: Child, show: Say, logs: Path, *, grace_s: float = 0.0, explain: Explain = _nothing
) -> list[Any]:
    """Run a function on so many forks of this process; return the answers by rank, and show what rank 0 says.

    The first rank that fails ends all: InputError where the user can mend it, otherwise RunFailed with its traceback.
    ``STOPS`` go to the ranks, which may answer within their grace; then all are stopped. What ranks print goes to
    ``rank-N.log``; a rank that ends itself may leave a report, which ``explain`` finds.
    """
    ranks = _Ranks(logs, grace_s, explain)
    with handling(ranks.pass_on, *STOPS):
        try:
            ranks.start(num_ranks, child)
            while ranks.ends:
                ranks.listen(show)
                ranks.refuse()
        finally:
            ranks.stop()
    return [ranks.answers[rank] for rank in range(num_ranks)]


def log_of(logs: Path, rank: int) -> Path:
    """Return the file into which a rank prints."""
    return logs / f"rank-{rank}.log"


@contextmanager
def handling(handler: Callable[[int, Any], object], *numbers: signal.Signals) -> Iterator[None]:
    """Let a handler take these signals inside the context; under ``nohup`` a closed terminal stays without effect."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set[signal.Signals]()
    before = {number: signal.signal(number, handler) for number in numbers if number not in ignored}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _work(rank: int, child: Child, end: Connection, lifeline: tuple[int, int], ranks: _Ranks) -> None:
    """Run one rank in this process. Its failure is sent before its connections close, so other ranks fail later."""
    reader, writer = lifeline
    os.close(writer)
    for number in STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    for number, _ in ranks.signals:  # which the parent's handler took in this process
        if number != signal.SIGINT:
            os.kill(os.getpid(), number)

    def end_with_parent() -> None:
        os.read(reader, 1)  # returns when no process holds the other end
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    text = ""
    try:
        _print_into(log_of(ranks.logs, rank))
        answer = child(rank, lambda value: end.send(_RankMessage(value=value)))
        message: Any = _RankMessage(value=answer, last=True)
    except BaseException as error:
        text = traceback.format_exc()
        message = _RankFailure(rank=rank, silent=False, at_s=time.monotonic(), text=text, error=_mendable(error))
    with suppress(OSError):  # the parent may be gone
        end.send(message)
    with suppress(OSError):  # the disk may be full, which the message has said
        sys.stderr.write(text)


def _print_into(log: Path) -> None:
    """Let what Python and what libraries print go into a file, which is open as long as the process lives."""
    number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(number, 1)
    os.dup2(number, 2)
    sys.stdout, sys.stderr = (open(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))  # noqa: SIM115
    faulthandler.enable(file=sys.stderr)


def _mendable(error: BaseException) -> InputError | RunFailed | None:
    """Return an error that needs no traceback: one of autoshard, or a disk that takes no more."""
    if isinstance(error, InputError | RunFailed):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunFailed(f"{error.filename or 'a file of the run'}: {error.strerror}")
    return None
