"""The ranks of a run as processes of this machine: forked, watched, and ended together, whatever happens."""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from autoshard.errors import Fault, InputError, RunFailed, Stopped

Say = Callable[[Any], None]
Child = Callable[[int, Say], Any]  # its rank, and how it says something before its answer

_LOOK_S = 1.0  # how long to wait for messages before looking after the ranks
_GRACE_S = 0.5  # after a failure, for those who failed before it and are heard of later
_LAST_LINES = 15  # of a traceback that are shown; the log has all


@dataclass(frozen=True, slots=True, kw_only=True)
class Care:
    """How ranks are looked after: how long they may take to heed a signal, and what tells that they hang."""

    grace_s: float = 0.0
    hung: Callable[[], str] = str  # says who hangs; nothing while all is well


_NO_CARE = Care()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saying:
    """Something that a rank tells while it runs."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankAnswer:
    """What a rank returns at its end."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankFailure:
    """How a rank ended badly; one that says nothing was killed, and then the others fail because of it."""

    rank: int
    silent: bool
    at_s: float
    text: str
    faults: tuple[Fault, ...] = ()  # of what the user can mend
    error: RunFailed | None = None  # a run's own failure, which needs no traceback

    @property
    def order(self) -> tuple[bool, float]:
        """Sort the cause before its effects."""
        return not self.silent, self.at_s


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The processes, and the pipes from those that have not answered yet."""

    logs: Path
    workers: list[ForkProcess] = field(default_factory=list)
    ends: dict[Connection, int] = field(default_factory=dict)
    lifelines: list[int] = field(default_factory=list)  # the parent's ends

    def start(self, num_ranks: int, child: Child) -> None:
        """Fork all; each ends when the parent's end of the lifeline closes, which even SIGKILL does."""
        context, lifeline = get_context("fork"), os.pipe()
        self.lifelines.append(lifeline[1])
        for rank in range(num_ranks):
            mine, theirs = context.Pipe(duplex=False)
            target = (rank, child, theirs, lifeline, log_of(self.logs, rank))
            worker = context.Process(target=_work, args=target, name=f"rank {rank}", daemon=True)
            self.workers.append(worker)
            self.ends[mine] = rank
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork with threads
                worker.start()
            theirs.close()
        os.close(lifeline[0])

    def messages(self, timeout_s: float | None = None) -> Iterator[tuple[int, _Saying | _RankAnswer | _RankFailure]]:
        """Yield what has been said, after waiting for something; a rank that is done is listened to no more."""
        for end in wait(list(self.ends), timeout_s):
            assert isinstance(end, Connection)
            rank = self.ends[end]
            try:
                message = end.recv()
            except (EOFError, OSError):
                message = self._death(rank)
            if not isinstance(message, _Saying):
                del self.ends[end]
                end.close()
            yield rank, message

    def _death(self, rank: int) -> _RankFailure:
        worker = self.workers[rank]
        worker.join(1.0)
        code = worker.exitcode
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        hint = ". Perhaps memory ran out; the kernel's log (dmesg) says so" if code == -signal.SIGKILL else ""
        log = log_of(self.logs, rank).read_text(encoding="utf-8", errors="replace").splitlines()
        text = "\n".join([f"it {how}{hint}", *log[-_LAST_LINES:]])
        return _RankFailure(rank=rank, silent=True, at_s=time.monotonic(), text=text)

    def stop(self) -> None:
        """End everybody who is left, and wait until they are gone."""
        for worker in self.workers:
            if worker.pid is not None:
                worker.kill()
        for worker in self.workers:
            if worker.pid is not None:
                worker.join()
        for end in self.ends:
            end.close()
        for lifeline in self.lifelines:
            os.close(lifeline)


def on_forks(num_ranks: int, child: Child, show: Say, logs: Path, care: Care = _NO_CARE) -> list[Any]:
    """Run a function on so many forks of this process; return the answers by rank, and show what rank 0 says.

    The first rank that fails ends all: InputError where the user can mend it, otherwise RunFailed with its traceback.
    SIGTERM and SIGINT go to the ranks, which may answer within their grace; then all are stopped. What ranks print goes
    to ``rank-N.log``.
    """
    ranks, answers = _Ranks(logs), dict[int, Any]()
    with _passing_on_signals(ranks, care.grace_s) as asked:
        try:
            ranks.start(num_ranks, child)
            while ranks.ends:
                _listen(ranks, answers, show, asked)
                if text := care.hung():
                    raise RunFailed(f"{text}\nall ranks were stopped; their logs: {logs}")
                if asked and time.monotonic() > asked[0].at_s + care.grace_s:
                    raise asked[0].error()
        finally:
            ranks.stop()
    return [answers[rank] for rank in range(num_ranks)]


def log_of(logs: Path, rank: int) -> Path:
    """Return where a rank prints to."""
    return logs / f"rank-{rank}.log"


def _listen(ranks: _Ranks, answers: dict[int, Any], show: Say, asked: "list[_SentSignal]") -> None:
    failures: list[_RankFailure] = []
    for rank, message in ranks.messages(_LOOK_S):
        if isinstance(message, _RankFailure):
            failures.append(message)
        elif isinstance(message, _RankAnswer):
            answers[rank] = message.value
        elif rank == 0:
            show(message.value)
    if failures and asked and all(failure.silent for failure in failures):
        raise asked[0].error()  # ranks that do not heed a signal die of it
    if failures:
        raise _first([*failures, *_late_failures(ranks)], len(ranks.workers), ranks.logs)


def _late_failures(ranks: _Ranks) -> Iterator[_RankFailure]:
    """Hear those out who end within a moment: a pipe's end may be seen before that of the rank which failed first."""
    deadline_s = time.monotonic() + _GRACE_S
    while ranks.ends and (left_s := deadline_s - time.monotonic()) > 0:
        for _, message in ranks.messages(left_s):
            if isinstance(message, _RankFailure):
                yield message


def _first(failures: Sequence[_RankFailure], num_ranks: int, logs: Path) -> InputError | RunFailed:
    first = min(failures, key=lambda failure: failure.order)
    if first.faults:
        return InputError(first.faults)
    if first.error:
        return first.error
    lines = first.text.strip().splitlines()[-_LAST_LINES:]
    where = f"its log: {log_of(logs, first.rank)}"
    return RunFailed("\n".join([f"rank {first.rank} of {num_ranks} failed, the others were stopped", *lines, where]))


@dataclass(frozen=True, slots=True)
class _SentSignal:
    """A signal that this process was sent."""

    number: int
    at_s: float

    def error(self) -> BaseException:
        """Return what ends a run that does not end by itself."""
        return KeyboardInterrupt() if self.number == signal.SIGINT else Stopped("SIGTERM", self.number)


@contextmanager
def _passing_on_signals(ranks: _Ranks, grace_s: float) -> Iterator[list[_SentSignal]]:
    """Give SIGTERM and SIGINT to the ranks; without any grace, or when asked again, stop at once."""
    asked: list[_SentSignal] = []

    def heed(number: int, _: object) -> None:
        asked.append(_SentSignal(number, time.monotonic()))
        if not grace_s or len(asked) > 1:
            raise asked[-1].error()
        for worker in ranks.workers:
            if worker.pid is not None and worker.is_alive():
                os.kill(worker.pid, number)

    before = {number: signal.signal(number, heed) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def heeding_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that the ranks end before this process does."""

    def stop(number: int, _: object) -> None:
        raise Stopped("SIGTERM", number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _work(rank: int, child: Child, end: Connection, lifeline: tuple[int, int], log: Path) -> None:
    """Be one rank: its failure is told before its connections close, so that the others fail after it."""
    reader, writer = lifeline
    os.close(writer)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    _end_with_parent(reader)
    _redirect_output(log)
    try:
        message: Any = _RankAnswer(value=child(rank, lambda value: end.send(_Saying(value=value))))
    except BaseException as error:
        traceback.print_exc()
        faults = error.faults if isinstance(error, InputError) else ()
        own = error if isinstance(error, RunFailed) else None
        text = traceback.format_exc()
        message = _RankFailure(rank=rank, silent=False, at_s=time.monotonic(), text=text, faults=faults, error=own)
    with suppress(OSError):  # nobody may be listening any more
        end.send(message)


def _end_with_parent(reader: int) -> None:
    """End this process when the parent has gone, without anybody's leave."""

    def watch() -> None:
        os.read(reader, 1)  # returns when no process holds the other end
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _redirect_output(log: Path) -> None:
    """Send what Python and what libraries print into a file."""
    number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(number, 1)
    os.dup2(number, 2)
    # Open as long as the process lives.
    sys.stdout, sys.stderr = (open(one, "w", buffering=1, closefd=False) for one in (1, 2))  # noqa: SIM115
    faulthandler.enable(file=sys.stderr)
