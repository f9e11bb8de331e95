"""How many processors other programs of this machine keep busy while a run is under way, where Linux counts that.

A prediction for this machine has all of its processors for the run. So a run beside a build or a browser takes longer,
and its figures say so.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path

_PROC = Path("/proc")
_IDLE = (3, 4)  # columns of the line of all processors: idle, and waiting for a disk
_COUNTED = slice(0, 7)  # the columns before the time that virtual machines beside this one took
_NOTICED = 0.05  # of all processors: more than the services of a quiet machine use


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorTime:
    """Seconds of processors up to a moment: of all programs of the machine, and of a process with all it started."""

    at_s: float
    all_s: float
    ours_s: float

    @classmethod
    def now(cls, proc: Path = _PROC) -> "ProcessorTime | None":
        """Read the counters; return None where the system has none."""
        ticks_per_s, root = os.sysconf("SC_CLK_TCK"), os.getpid()
        try:
            columns = [int(text) for text in (proc / "stat").read_text().split("\n", 1)[0].split()[1:]]
            ticks = dict(_ticks_of(proc, root))
        except (OSError, ValueError):
            return None
        busy = sum(columns[_COUNTED]) - sum(columns[number] for number in _IDLE)
        ours = sum(ticks.values())
        return cls(at_s=time.monotonic(), all_s=busy / ticks_per_s, ours_s=ours / ticks_per_s)


def _ticks_of(proc: Path, root: int) -> Iterator[tuple[int, int]]:
    """Yield a process and those that descend from it, each with its ticks and those of its ended children."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError):  # a process that has ended meanwhile
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            number = int(folder.name)
            parents[number], ticks[number] = int(fields[1]), sum(map(int, fields[11:15]))
    for number, of_process in ticks.items():
        ancestor = number
        while ancestor != root and ancestor in parents:
            ancestor = parents[ancestor]
        if ancestor == root:
            yield number, of_process


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyProcessors:
    """How many processors other programs used in the mean, of how many the machine has."""

    used: float
    of: int

    def __str__(self) -> str:
        """Say so; nothing where it is not worth a word.

        >>> str(BusyProcessors(used=1.55, of=2)), str(BusyProcessors(used=0.02, of=2))
        ('other programs used 1.6 of the 2 processors of this machine', '')
        """
        if self.used < _NOTICED * self.of:
            return ""
        return f"other programs used {self.used:.1f} of the {self.of} processors of this machine"


class OtherPrograms:
    """Looks at the processors while ranks that this process has forked take steps."""

    def __init__(self) -> None:
        self._begin: ProcessorTime | None = None

    def begin(self) -> None:
        """Look for the first time, if the ranks are children of this process: others would count as other programs."""
        if self._begin is None and active_children():
            self._begin = ProcessorTime.now()

    def busy(self) -> BusyProcessors | None:
        """Return what other programs used since the beginning; None where that is not counted."""
        begin, end = self._begin, ProcessorTime.now() if self._begin else None
        if begin is None or end is None or end.at_s <= begin.at_s:
            return None
        programs_s = (end.all_s - begin.all_s) - (end.ours_s - begin.ours_s)
        return BusyProcessors(used=max(0.0, programs_s / (end.at_s - begin.at_s)), of=os.cpu_count() or 1)
