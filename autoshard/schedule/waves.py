"""When each action of a pipeline can run, for one set of times or for columns of candidates at once.

Actions are run in waves: what an action waits for (the one before it on its rank, and a message) is in an earlier wave.
A micro-batch passes 2 S places: down the S stages by F and back up by B or I. What a place hands on, the next one
needs; W needs only what its own rank did before. After a while each unit of a builder's order (one micro-batch, or a
round of them) repeats the one before, a period later.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autoshard.schedule.builders import Step

KINDS = "BFIW"  # sorted, so that a kind is found by bisection
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Coded = tuple[Ints, Ints, Ints]  # of a rank's actions in order: positions in KINDS, stages, micro-batches
ROUNDING = 1e-13  # of all seconds so far: periods that differ by no more are equal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delays:
    """Seconds by kind and stage, and by place on the way of a micro-batch; the last axis is that of candidates."""

    work_s: Floats  # [kind, stage, candidate]
    before_s: Floats  # [place, candidate]: its rank receives and can do nothing else
    after_s: Floats  # [place, candidate]: its rank sends and can do nothing else
    travel_s: Floats  # [place, candidate]: until the next place has what this one made


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waves:
    """The actions of all ranks, numbered wave by wave; the number after the last stands for no action."""

    bounds: tuple[int, ...]  # where waves begin; the last one is the number of actions
    before: Ints  # the action before each on its rank
    sender: Ints  # the action whose message each needs
    waits: Ints  # both, wave by wave, as positions among the times of ``run``
    stages: Ints
    kinds: Ints
    places: Ints
    numbers: tuple[Ints, ...]  # by rank the numbers of its actions in order
    window: Ints  # steady actions that later ones may wait for, and whatever lies between
    window_before: Ints  # the same a unit earlier
    ranks: Ints
    steady_ends: tuple[int, ...]  # by rank: how many of its actions come before the end of its steady part
    width: int  # actions of a rank in a unit
    later: Ints  # [action, way]: who waits for it, as a row of pairs: twice its number, and which way

    @classmethod
    def of(cls, orders: Sequence[Coded], num_stages: int, num_micro_batches: int, unit: int = 1) -> "Waves":
        """Sort the actions of all ranks; a builder's order repeats itself after ``unit`` micro-batches."""
        kinds, stages, micro_batches = (np.concatenate(columns) for columns in zip(*orders, strict=True))
        starts: Ints = np.cumsum([0, *(len(rank_kinds) for rank_kinds, _, _ in orders)])
        count = int(starts[-1])
        before = np.arange(-1, count - 1)
        before[starts[:-1][np.diff(starts) > 0]] = count
        at = places(kinds, stages, num_stages)
        # By place and micro-batch: who makes what is needed there. The first F and every W need no message.
        maker = np.full((2 * num_stages + 2, num_micro_batches), count)
        maker[at + 1, micro_batches] = np.arange(count)
        sender: Ints = np.where(at == 2 * num_stages, count, maker[at, micro_batches])
        waves = np.array(_wave_numbers(before.tolist(), sender.tolist(), starts.tolist()), dtype=np.int64)
        order = np.argsort(waves, kind="stable")
        new = np.append(np.argsort(order, kind="stable"), count)
        bounds = (0, *np.cumsum(np.bincount(waves)[1:]).tolist())
        ones, senders = new[before[order]], new[sender[order]]
        sizes, action = np.diff(bounds), np.arange(count)
        low = np.repeat(np.array(bounds[:-1], dtype=np.int64), sizes)
        waits = np.empty(2 * count, dtype=np.int64)
        waits[low + action], waits[low + np.repeat(sizes, sizes) + action] = ones, senders + count + 1
        width = int(np.count_nonzero(orders[0][2] < unit))
        runs = [_steady_part(order, width, unit) for order in orders]
        window, window_before = _steady(orders, starts, sender, runs, width)
        return cls(
            bounds=bounds,
            before=ones,
            sender=senders,
            waits=waits,
            stages=stages[order],
            kinds=kinds[order],
            places=at[order],
            numbers=tuple(new[low:high] for low, high in pairwise(starts.tolist())),
            window=new[window],
            window_before=new[window_before],
            ranks=np.repeat(np.arange(len(orders)), np.diff(starts))[order],
            steady_ends=tuple(end for _, end in runs),
            width=width,
            later=_waiting(ones, senders),
        )

    def run(self, delays: Delays, more_s: Floats | None = None) -> Floats:
        """Return when the rank of each action is free again, and when its message arrives: [2, action, candidate].

        ``more_s`` are seconds between each action and the two that it waits for: [2, action, candidate].
        """
        count, columns = self.bounds[-1], delays.work_s.shape[2]
        later: set[int] = set() if more_s is None else {*np.flatnonzero(more_s.any(axis=(0, 2))).tolist()}
        busy_s = delays.before_s[self.places] + delays.work_s[self.kinds, self.stages]
        until = np.stack([busy_s + delays.after_s[self.places], busy_s + delays.travel_s[self.places]])
        times = np.zeros((2, count + 1, columns))  # the last row is that of no action
        rows = times.reshape(-1, columns)
        for low, high in pairwise(self.bounds):
            ready, width = rows.take(self.waits[2 * low : 2 * high], 0), high - low
            if more_s is not None and not later.isdisjoint(range(low, high)):
                ready += more_s[:, low:high].reshape(2 * width, columns)
            np.add(np.maximum(ready[:width], ready[width:]), until[:, low:high], out=times[:, low:high])
        return times

    def ends_s(self, times: Floats, delays: Delays) -> Floats:
        """Return the end of the last action of each candidate, without what it sends."""
        return np.max(times[0, self.last] - delays.after_s[self.places[self.last]], axis=0)

    @property
    def last(self) -> Ints:
        """The last action of every rank."""
        return np.array([numbers[-1] for numbers in self.numbers if len(numbers)], dtype=np.int64)

    def flow(self, delays: Delays, more: int, softness_s: float) -> tuple[Floats, Floats, Floats]:
        """Return a flow of one through the actions of each candidate, along its longest paths.

        The flow starts at the last actions of ranks and runs backwards in time. At each action it divides between the
        two predecessors, the action before on the rank and the sender of the message: the later predecessor gets more
        of it, and all of it if the other is much more than ``softness_s`` earlier.

        Return the flow through each action, [action, candidate]; the flow to each of its predecessors, [2, action,
        candidate]; and the flow that passes the end of each rank's steady part, [rank, candidate]. ``more`` steady
        units are skipped: flow that crosses them stays on its rank.
        """
        count, columns = self.bounds[-1], delays.work_s.shape[2]
        way, over, of = self.crossing if more else (np.zeros(0, dtype=np.int64),) * 3
        more_s = np.zeros((2, count, columns)) if more else None
        if more_s is not None:
            more_s[way, over] = more * self._unit_s(delays)[of]
        times = self.run(delays, more_s)
        late_s = times[1].take(self.sender, 0) - times[0].take(self.before, 0)
        if more_s is not None:
            late_s += more_s[1] - more_s[0]
        by_message = 0.5 + 0.5 * np.tanh(late_s / (2 * softness_s))
        shares = np.stack([1.0 - by_message, by_message], axis=1)  # [action, way, candidate]
        ends_s = times[0, self.last] - delays.after_s[self.places[self.last]]
        through, passed_on = np.zeros((count, columns)), np.zeros((2 * count + 2, columns))
        through[self.last] = np.exp((ends_s - ends_s.max(axis=0)) / softness_s)
        through /= through.sum(axis=0)
        handed = passed_on[:-2].reshape(count, 2, columns)
        for low, high in reversed([*pairwise(self.bounds)]):
            arriving = np.add.reduce(passed_on.take(self.later[low:high], 0), axis=1)
            arriving += through[low:high]
            through[low:high] = arriving
            np.multiply(shares[low:high], arriving[:, None], out=handed[low:high])
        handed = handed.swapaxes(0, 1)
        passing = np.zeros((len(self.numbers), columns))
        np.add.at(passing, of, handed[way, over])
        return through, handed, passing

    @property
    def crossing(self) -> tuple[Ints, Ints, Ints]:
        """Return which actions after the steady parts wait for one before that: in which way, which, and of whose."""
        steady, previous = np.zeros(self.bounds[-1] + 1, dtype=bool), np.stack([self.before, self.sender])
        for numbers, end in zip(self.numbers, self.steady_ends, strict=True):
            steady[numbers[:end]] = True
        way, over = np.nonzero(steady[previous] & ~steady[:-1])
        return way, over, self.ranks[previous[way, over]]

    @property
    def units(self) -> Ints:
        """The actions of the last steady unit of each rank: [rank, turn]."""
        ends = zip(self.numbers, self.steady_ends, strict=True)
        return np.stack([numbers[end - self.width : end] for numbers, end in ends])

    def _unit_s(self, delays: Delays) -> Floats:
        """Return what a steady unit takes each rank: [rank, candidate]."""
        units, at = self.units, self.places[self.units]
        work_s = delays.work_s[self.kinds[units], self.stages[units]]
        return (delays.before_s[at] + work_s + delays.after_s[at]).sum(axis=1)


def places(kinds: Ints, stages: Ints, num_stages: int) -> Ints:
    """Return the place on the way of a micro-batch of each action; 2 S stands for W, which is off the way."""
    back = np.where(kinds == KINDS.index("W"), 2 * num_stages, 2 * num_stages - 1 - stages)
    return np.where(kinds == KINDS.index("F"), stages, back)


def coded(steps: Sequence[Step]) -> Coded:
    """Write a rank's actions as numbers."""
    kinds, stages, micro_batches = zip(*steps, strict=True) if steps else ((), (), ())
    letters = np.frombuffer("".join(kinds).encode(), dtype=np.uint8)
    return (
        np.searchsorted(np.frombuffer(KINDS.encode(), dtype=np.uint8), letters),
        np.array(stages, dtype=np.int64),
        np.array(micro_batches, dtype=np.int64),
    )


def _wave_numbers(before: list[int], sender: list[int], starts: list[int]) -> list[int]:
    """Return each action's wave: one after the later of the two that it waits for."""
    count = len(before)
    waves = [-1] * count + [0]
    waiting: dict[int, int] = defaultdict(lambda: -1)  # action -> the rank's next one, that waits for its message
    ends = {end - 1 for end in starts[1:]}
    awake = [start for start, end in pairwise(starts) if end > start]
    while awake:
        action = awake.pop()
        while True:
            if waves[sender[action]] < 0:
                waiting[sender[action]] = action
                break
            waves[action] = 1 + max(waves[before[action]], waves[sender[action]])
            if action in waiting:
                awake.append(waiting.pop(action))
            if action in ends:
                break
            action += 1
    return waves[:-1]


def _waiting(before: Ints, sender: Ints) -> Ints:
    """Return for each action the places, among all waits, of the actions that wait for it: its rank, its message."""
    count = len(before)
    later = np.full((count + 1, 2), 2 * count)
    for way, previous in enumerate((before, sender)):
        later[previous, way] = 2 * np.arange(count) + way
    return later[:-1]


def _steady(
    orders: Sequence[Coded], starts: Ints, sender: Ints, runs: Sequence[tuple[int, int]], width: int
) -> tuple[Ints, Ints]:
    """Return the last steady actions, as many as later ones may wait for, and the same ones a unit before.

    Steady is what repeats the actions of the unit before, on micro-batches that come a unit later.
    """
    none = np.empty(0, dtype=np.int64)
    length = min(end - start for start, end in runs)
    offsets = np.concatenate([np.arange(len(order[0])) - end for order, (_, end) in zip(orders, runs, strict=True)])
    has = sender < starts[-1]
    waiting_at, sending_at = offsets[has], offsets[sender[has]]  # counted from the ends of their steady parts
    if np.any((waiting_at < 0) & (sending_at >= 0)):
        return none, none
    waits = np.where(waiting_at >= 0, -sending_at, waiting_at - sending_at)[waiting_at >= -width]
    needed = max(width, int(np.max(waits, initial=0)))
    if needed > length:
        return none, none
    last = [start + end for start, (_, end) in zip(starts[:-1].tolist(), runs, strict=True)]
    window = np.array([position for end in last for position in range(end - needed, end)], dtype=np.int64)
    return window, window - width


def _steady_part(order: Coded, width: int, unit: int) -> tuple[int, int]:
    """Return where the longest run of actions begins and ends that repeat those of the unit before."""
    kinds, stages, numbers = order
    same = (kinds[width:] == kinds[:-width]) & (stages[width:] == stages[:-width])
    same &= numbers[width:] == numbers[:-width] + unit
    edges = np.flatnonzero(np.diff(np.concatenate([[False] * (width + 1), same, [False]])))
    if not len(edges):
        return 0, 0
    longest = int(np.argmax(edges[1::2] - edges[::2]))
    return int(edges[2 * longest]), int(edges[2 * longest + 1])
