"""Runs that are killed at any moment, a third of them in a start, and typed again: each step once, bit for bit."""

import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autoshard.run.activity import activity_folder, read_status
from autoshard.run.folder import CHECKPOINTS, LOCK
from tests.soak import dying, starts
from tests.soak.hunt import HuntResult
from tests.soak.starts import CLI, LAYOUTS, TinyRun, Typed, Way, killed, processes_of, tiny_run, until

Moment = Literal["typed", "begun", "load", "write", "step", "save"]
Victim = Literal["a rank", "all", "the launcher"]
IN_A_START: tuple[Moment, ...] = ("typed", "begun", "load", "write")
LONGEST_S = {"typed": 1.0, "begun": 1.0, "load": 0.05, "write": 0.0, "step": 0.2, "save": 0.03}  # after the moment
VICTIMS: tuple[Victim, ...] = ("a rank", "all", "the launcher")
IN_A_ROW = 4  # kills of a run: after five starts without a step it would be refused
AT_ONCE = 2  # runs
MOST_CHANGES = 24  # of files, up to the first save of a tiny run


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Whom SIGKILL meets, how long after which moment of a start."""

    moment: Moment
    victim: Victim
    after_s: float
    number: int  # of a change of a file, or of steps to wait for

    def __str__(self) -> str:
        if self.moment == "write":
            return f"at change {self.number} of a file"
        return f"{self.victim} {self.after_s:.3f} s after {self.moment}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Kills of one run, which is typed again after each."""

    layout: str
    way: Way
    kills: tuple[Kill, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endured:
    """Which kills met a run, and what is wrong with it."""

    struck: Sequence[Kill] = ()
    fault: str = ""


def hunt(cases: int, seed: int, folder: Path) -> HuntResult:
    """Kill so many starts, four in each run; every third kill falls into a start."""
    draw, chains = random.Random(seed), list[Chain]()
    for first in range(0, cases, IN_A_ROW):
        kills = [drawn(draw, number, is_first=number == first) for number in range(first, min(first + IN_A_ROW, cases))]
        chains.append(
            Chain(
                layout=draw.choice(list(LAYOUTS)), way=draw.choice(("forked", "forked", "torchrun")), kills=tuple(kills)
            )
        )
    references = {name: starts.undisturbed(folder / name, name) for name in {chain.layout for chain in chains}}

    def endure(chain: Chain) -> Endured:
        at = folder / f"chain-{chains.index(chain)}"
        ended = endured(tiny_run(at, chain.layout, chain.way), chain.kills, references[chain.layout])
        kills = "; ".join(map(str, ended.struck))
        print(f"{at.name} of {len(chains)}: {chain.layout} {chain.way}, {kills}: {ended.fault or 'held'}", flush=True)
        return ended

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return summed(chains, list(pool.map(endure, chains)))


def summed(chains: Sequence[Chain], ends: Sequence[Endured]) -> HuntResult:
    """Count the kills by their moments."""
    moments, held, under_torchrun, failures = Counter[str](), 0, 0, list[str]()
    for chain, end in zip(chains, ends, strict=True):
        if end.fault:
            failures.append(f"{chain.layout} {chain.way}, killed {'; '.join(map(str, end.struck))}: {end.fault}")
            continue
        held += len(end.struck)
        under_torchrun += len(end.struck) * (chain.way == "torchrun")
        moments.update(kill.moment for kill in end.struck)
    named = ", ".join(f"{name} {count}" for name, count in sorted(moments.items()))
    late = sum(len(chain.kills) - len(end.struck) for chain, end in zip(chains, ends, strict=True) if not end.fault)
    remark = f"{under_torchrun} under torchrun; {named}" + (f"; {late} came after the end" if late else "")
    return HuntResult(held=held, failures=failures, remark=remark)


def drawn(draw: random.Random, number: int, *, is_first: bool) -> Kill:
    """Draw the kill of a number."""
    moments: tuple[Moment, ...] = ("step", "save")
    if number % 3 == 0:  # a run that is new has nothing to load
        moments = tuple(name for name in IN_A_START if not (is_first and name == "load"))
    moment = draw.choice(moments)
    changes = draw.randint(1, MOST_CHANGES) if moment == "write" else draw.randint(1, 2)
    after_s = draw.uniform(0.0, LONGEST_S[moment])
    return Kill(moment=moment, victim=draw.choice(VICTIMS), after_s=after_s, number=changes)


def endured(run: TinyRun, kills: Sequence[Kill], reference: Sequence[tuple[int, float, float]]) -> Endured:
    """Kill a run so, and type it again at once until it is over."""
    struck, pids = list[Kill](), set[int]()
    for kill in kills:
        code, said, started = killed_start(run, kill)
        pids.update(started)
        if code:
            struck.append(kill)
        if code in (None, 2) or (run.way == "forked" and "Traceback" in said):
            return Endured(struck=struck, fault=f"a start ended with {code} around {kill}: {said[-400:]}")
    fault = starts.to_the_end(run) or starts.differs(run, reference)
    return Endured(struck=struck, fault=fault or ("a process lives on" if starts.live_on(pids) else ""))


def killed_start(run: TinyRun, kill: Kill) -> tuple[int | None, str, list[int]]:
    """Type the command and kill it; return its exit code, its words, and the processes that it had."""
    module, variables = CLI, dict[str, str]()
    if kill.moment == "write":
        module, variables = ("tests.soak.dying",), {dying.NUMBER: str(kill.number), dying.FOLDER: str(run.out)}
    with run.typed(module, **variables) as start:
        pids = aimed(run, kill, start)
        until(lambda: start.is_over, start)
        return start.process.poll(), start.said, pids


def aimed(run: TinyRun, kill: Kill, start: Typed) -> list[int]:
    """Wait for the moment, kill, and return all processes of the start; at a write it kills itself."""
    if kill.moment == "write":
        until(lambda: start.is_over, start)
        return []
    until(lambda: has_come(run, kill, start), start)
    time.sleep(kill.after_s)
    pids = processes_of(start.process.pid)
    targets = {"all": pids, "the launcher": pids[:1], "a rank": ranks(run, pids)[kill.number % 2 :][:1] or pids[:1]}
    killed(targets[kill.victim], signal.SIGKILL)
    return pids


def has_come(run: TinyRun, kill: Kill, start: Typed) -> bool:
    """Say whether the moment of a kill has come."""
    if kill.moment == "begun":
        with suppress(OSError):
            return (run.out / LOCK).stat().st_mtime > start.at_s
        return False
    if kill.moment == "load":
        return any("state is loaded" in action for action in actions(run, start))
    if kill.moment == "save":
        return any((run.out / CHECKPOINTS).glob("*.partial"))
    return kill.moment == "typed" or run.steps_since(start.at_s) >= kill.number


def actions(run: TinyRun, start: Typed) -> list[str]:
    """What the ranks of a start do."""
    statuses = [read_status(activity_folder(run.out) / str(rank)) for rank in range(2)]
    pids = processes_of(start.process.pid)
    return [status.action for status in statuses if status and status.process in pids]


def ranks(run: TinyRun, pids: Sequence[int]) -> list[int]:
    """The ranks among processes, as far as they have begun."""
    statuses = [read_status(activity_folder(run.out) / str(rank)) for rank in range(2)]
    return [status.process for status in statuses if status and status.process in pids] or list(pids[1:])
