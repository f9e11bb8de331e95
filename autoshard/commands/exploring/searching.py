"""The processes that search for the panes of a page: at most one for each, and a newer question ends the older one.

They are forked from a process that has imported the planner, and has nothing else: no thread, no socket.
"""

import os
import signal
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from threading import Lock
from typing import Any

from autoshard.commands.exploring.answering import Event, Task, work

_PATIENCE_S = 2.0  # of a process that is told to end: a step of a search is much shorter
REPLACED: Event = {"kind": "replaced", "final": True}


@dataclass(slots=True, eq=False)
class _PaneSearch:
    """A process that works for a pane, and our ends of its pipes: of what goes on, and of what shows early answers."""

    process: ForkServerProcess
    pipes: tuple[Connection, Connection]
    replaced: bool = False

    def stop(self) -> None:
        """Tell the process to end, and to take along what it has forked."""
        self.process.terminate()

    def end(self) -> None:
        """Wait until the process has ended; if it takes too long, kill it with what it has forked."""
        self.process.join(_PATIENCE_S)
        if self.process.exitcode is None:
            pid = self.process.pid
            assert pid, "it was started"
            with suppress(ProcessLookupError):  # it may not have its group yet
                os.killpg(pid, signal.SIGKILL)
            self.process.kill()
            self.process.join()


@dataclass(frozen=True, slots=True)
class Searches:
    """What works for each pane now."""

    extensions: Sequence[Path] = ()
    _context: ForkServerContext = field(default_factory=lambda: get_context("forkserver"))
    _running: dict[str, _PaneSearch] = field(default_factory=dict[str, _PaneSearch])
    _lock: Lock = field(default_factory=Lock)

    def warm_up(self) -> None:
        """Start the process that imports the planner, so that the first question need not wait for it."""
        self._context.set_forkserver_preload(["autoshard.commands.exploring.answering"])
        process = self._context.Process(target=_nothing, daemon=True)
        process.start()
        process.join()

    def events(self, pane: str, task: Task, *arguments: Any) -> Generator[Event]:
        """Do a task for a pane, and yield its events until the final one; end what works for the pane before."""
        search = self._begin(pane, task, arguments)
        try:
            pipes = list(search.pipes)
            while pipes:
                for pipe in wait(pipes):
                    assert isinstance(pipe, Connection)
                    try:
                        event: Event = pipe.recv()
                    except (EOFError, OSError):  # OSError: killed in the middle of an event
                        pipes.remove(pipe)
                        continue
                    yield event
                    if event["final"]:
                        return
            yield REPLACED if search.replaced else self._broken(search)
        finally:
            self._end(pane, search)

    def close(self) -> None:
        """End everything."""
        with self._lock:
            for search in self._running.values():
                search.replaced = True
                search.stop()
            searches = list(self._running.values())
        for search in searches:
            search.end()

    def _begin(self, pane: str, task: Task, arguments: Sequence[Any]) -> _PaneSearch:
        last, last_end = self._context.Pipe(duplex=False)
        early, early_end = self._context.Pipe(duplex=False)
        words = ((last_end, early_end), tuple(self.extensions), task, arguments)
        process = self._context.Process(target=work, args=words, daemon=True)
        with self._lock:
            if older := self._running.get(pane):
                older.replaced = True
                older.stop()
            process.start()
            search = self._running[pane] = _PaneSearch(process, (last, early))
        last_end.close()
        early_end.close()
        return search

    def _end(self, pane: str, search: _PaneSearch) -> None:
        search.stop()
        search.end()
        with self._lock:
            if self._running.get(pane) is search:
                del self._running[pane]
        for pipe in search.pipes:
            pipe.close()

    def _broken(self, search: _PaneSearch) -> Event:
        search.process.join()
        code = search.process.exitcode or 0
        killed = f"was killed by {signal.Signals(-code).name}, perhaps for its memory" if code < 0 else ""
        why = killed or f"ended with exit code {code}; its message stands where autoshard explore was started"
        return {"kind": "refused", "final": True, "lines": [f"the search {why}"]}


def _nothing() -> None:
    """Do nothing: the process that forks this one is what is wanted."""
