"""The benchmarks over time: a line of ``history.jsonl`` for every result, and what drifts in them.

Values of one machine are compared with each other alone. A time is divided by the yardstick loop that ran beside it.
"""

import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from autoshard.errors import InputError, require
from autoshard.report.watch.sparkline import columns
from autoshard.spec.record import decode
from benchmarks.measure import yardstick_s
from benchmarks.result import Result

HISTORY = Path(__file__).with_name("history.jsonl")
_TIMES = ("s", "ms", "us")
_SHOWN = 24  # values of a line of columns
_BEFORE = 12  # earlier values that one is compared with
_FEWEST = 3  # of them; fewer say nothing about noise
# What may be noise: so many robust deviations of the earlier values, and so much of their median. Measured 2026-11-23
# on two shared cores: the same program took 7.0 to 7.9 yardsticks in five runs, and once 1.6 times its usual time.
_DEVIATIONS, _LEAST, _LEAST_OF_TIMES = 3.0, 0.05, 0.15
_SIGMA = 1.4826  # standard deviation of normal numbers over their median absolute deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class Occasion:
    """When, of what and where a result was measured."""

    date: str
    commit: str  # "" outside of git; with a + where files differ from it
    machine: str  # in general words


@dataclass(frozen=True, slots=True, kw_only=True)
class PastResult:
    """A line of the history."""

    date: str
    commit: str
    machine: str
    name: str
    value: float
    unit: str
    bar: float | None
    holds: bool
    yardstick_s: float

    def __post_init__(self) -> None:
        """Refuse a yardstick that divides nothing."""
        require((self.yardstick_s > 0, "yardstick_s", "must be positive"))

    @property
    def is_time(self) -> bool:
        """Whether the value counts seconds.

        >>> [one.removeprefix("CPU ").split()[0] in _TIMES for one in ("CPU us per candidate", "x CPU of the plans")]
        [True, False]
        """
        return self.unit.removeprefix("CPU ").split()[0] in _TIMES

    @property
    def compared(self) -> float:
        """The value, as it is compared with others: of a time, how many yardsticks it is."""
        return self.value / self.yardstick_s if self.is_time else self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How the last value of a benchmark on a machine compares with those before it."""

    past: tuple[PastResult, ...]  # the last one last
    change: float | None  # of the last value against the median of the earlier ones, if there are enough, and not of 0
    noise: float | None  # what of a change may be noise, likewise

    @property
    def last(self) -> PastResult:
        """The last result."""
        return self.past[-1]

    @property
    def words(self) -> str:
        """Say what drifts; nothing where nothing does."""
        said: list[str] = []
        if len(self.past) > 1 and self.past[-2].holds and not self.last.holds:
            said.append("misses its bar, which it held before")
        if self.change is not None and self.noise is not None and abs(self.change) > self.noise:
            seen = "seen twice" if self._seen_twice(self.change, self.noise) else "seen once, so measure again"
            said.append(f"{self.change:+.1%}, beyond noise of {self.noise:.1%}, {seen}")
        before = [one.value for one in self.past[-_BEFORE - 1 : -1]]
        if len(before) >= _FEWEST and not any(before) and self.last.value:
            said.append("no longer 0")
        return "; ".join(said)

    def _seen_twice(self, change: float, noise: float) -> bool:
        """Say whether the value before drifted as well: a machine that was busy for a minute spoils one."""
        middle = self.last.compared / (1 + change)
        before = self.past[-2].compared / middle - 1 if middle else 0.0
        return abs(before) > noise and (before > 0) == (change > 0)


def occasion(date: str) -> Occasion:
    """Return where we are: the commit of this checkout, and the processor."""
    return Occasion(date=date, commit=_commit(Path(__file__).parent), machine=_machine())


def _commit(folder: Path) -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short=10", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", f":!{HISTORY.name}")
    except OSError:  # there is no git
        return ""
    return commit + ("+" if commit and changed else "")


def _machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, platform.machine())}, {os.cpu_count()} cores"


def append(result: Result, where: Occasion, history: Path) -> None:
    """Add a result to the history, unless it is no number."""
    if not math.isfinite(result.value):
        return
    given = result.extras.get("yardstick_s")
    loop_s = float(given) if isinstance(given, float | int) and given > 0 else yardstick_s()
    plain = {name: getattr(result, name) for name in ("name", "value", "unit", "bar", "holds")}
    line = PastResult(**asdict(where), **plain, yardstick_s=round(loop_s, 5))
    with history.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(line)) + "\n")


def read_history(history: Path) -> list[PastResult]:
    """Return all whole lines; a kill may have left half of one."""
    text = history.read_text(encoding="utf-8") if history.is_file() else ""
    found: list[PastResult] = []
    for line in text.splitlines():
        with suppress(ValueError, InputError):
            found.append(decode(PastResult, json.loads(line)))
    return found


def drifts_of(past: Iterable[PastResult]) -> list[Drift]:
    """Compare the last value of each benchmark on each machine with the median of those before it."""

    def key(one: PastResult) -> tuple[str, str, str]:
        return one.machine, one.name, one.unit

    found: list[Drift] = []
    for _, group in groupby(sorted(past, key=lambda one: (*key(one), one.date)), key):
        results = tuple(group)
        least = _LEAST_OF_TIMES if results[-1].is_time else _LEAST
        change, noise = _change([one.compared for one in results], least)
        found.append(Drift(past=results, change=change, noise=noise))
    return found


def _change(values: Sequence[float], least: float) -> tuple[float | None, float | None]:
    """Return the change of the last value against the median of the earlier ones, and what of it may be noise.

    >>> _change([2.0, 2.0, 2.0, 3.0], least=0.05)
    (0.5, 0.05)
    """
    before = values[-_BEFORE - 1 : -1]
    if len(before) < _FEWEST:
        return None, None
    middle = statistics.median(before)
    if not middle:
        return None, None
    deviation = _SIGMA * statistics.median(abs(one - middle) for one in before)
    return values[-1] / middle - 1, max(least, _DEVIATIONS * deviation / abs(middle))


def history_table(drifts: Sequence[Drift]) -> Table:
    """Return each benchmark's values as columns of characters, with the change of the last one."""
    shown = [Column(name, no_wrap=True) for name in ("benchmark", "values", "last")]
    more = [Column(name, overflow="fold") for name in ("unit", "change", "machine")]
    table = Table(*shown, *more, title="autoshard benchmarks over time; a time is compared in yardsticks")
    for one in drifts:
        change = "-" if one.change is None else f"{one.change:+.1%}"
        said = Text(one.words, style="bold yellow") if one.words else Text(change)
        (line,) = columns([past.compared for past in one.past[-_SHOWN:]], _SHOWN)
        table.add_row(one.last.name, line, f"{one.last.value:.4g}", one.last.unit, said, one.last.machine)
    return table


def history_json(drifts: Sequence[Drift]) -> list[dict[str, Any]]:
    """Return the same as JSON."""
    return [
        {
            **asdict(one.last), "change": one.change, "noise": one.noise, "drift": one.words,
            "values": [past.value for past in one.past], "compared": [past.compared for past in one.past],
            "commits": [past.commit for past in one.past],
        }
        for one in drifts
    ]  # fmt: skip
