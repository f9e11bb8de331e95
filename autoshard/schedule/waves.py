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

from autoshard.errors import require
from autoshard.schedule.builders import PipelineShape, Step

KINDS = "BFIW"  # sorted, so that a kind is found by bisection
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Coded = tuple[Ints, Ints, Ints]  # of a rank's actions in order: positions in KINDS, stages, micro-batches
_ROUNDING = 1e-13  # of all seconds so far: periods that differ by no more are equal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delays:
    """Seconds by kind and stage, and by place on the way of a micro-batch; the last axis is that of candidates."""

    work_s: Floats  # [kind, stage, candidate]
    before_s: Floats  # [place, candidate]: its rank receives and can do nothing else
    after_s: Floats  # [place, candidate]: its rank sends and can do nothing else
    travel_s: Floats  # [place, candidate]: until the next place has what this one made

    def only(self, rows: Ints | slice) -> "Delays":
        """Return those of some candidates."""
        columns = (self.work_s, self.before_s, self.after_s, self.travel_s)
        work, before, after, travel = (column[..., rows] for column in columns)
        return Delays(work_s=work, before_s=before, after_s=after, travel_s=travel)


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
    is_stuck: bool  # some actions wait for each other

    @classmethod
    def of(cls, orders: Sequence[Coded], num_stages: int, num_micro_batches: int, unit: int = 1) -> "Waves":
        """Sort the actions of all ranks; the order of a builder repeats itself after ``unit`` micro-batches."""
        kinds, stages, micro_batches = (np.concatenate(columns) for columns in zip(*orders, strict=True))
        known = bool((stages < num_stages).all() and (micro_batches < num_micro_batches).all())
        require((known, "actions", f"name more than {num_stages} stages or {num_micro_batches} micro-batches"))
        starts: Ints = np.cumsum([0, *(len(own) for own, _, _ in orders)])
        count = int(starts[-1])
        before = np.arange(-1, count - 1)
        before[starts[:-1][np.diff(starts) > 0]] = count
        at = places(kinds, stages, num_stages)
        sender = _senders(at, micro_batches, num_stages, num_micro_batches)
        waves = np.array(_wave_numbers(before.tolist(), sender.tolist(), starts.tolist()), dtype=np.int64)
        order = np.argsort(waves, kind="stable")
        new = np.append(np.argsort(order, kind="stable"), count)
        is_stuck = bool((waves < 0).any())
        bounds = (0, count) if is_stuck else (0, *np.cumsum(np.bincount(waves)[1:]).tolist())
        ones, others = new[before[order]], new[sender[order]]
        width, action = np.diff(bounds), np.arange(count)
        low = np.repeat(np.array(bounds[:-1], dtype=np.int64), width)
        waits = np.empty(2 * count, dtype=np.int64)
        waits[low + action], waits[low + np.repeat(width, width) + action] = ones, others + count + 1
        window, window_before = _steady(orders, starts, sender, unit)
        return cls(
            bounds=bounds,
            before=ones,
            sender=others,
            waits=waits,
            stages=stages[order],
            kinds=kinds[order],
            places=at[order],
            numbers=tuple(new[low:high] for low, high in pairwise(starts.tolist())),
            window=new[window],
            window_before=new[window_before],
            is_stuck=is_stuck,
        )

    def run(self, delays: Delays) -> Floats:
        """Return when the rank of each action is free again, and when its message arrives: [2, action, candidate]."""
        count, columns = self.bounds[-1], delays.work_s.shape[2]
        own = delays.before_s[self.places] + delays.work_s[self.kinds, self.stages]
        until = np.stack([own + delays.after_s[self.places], own + delays.travel_s[self.places]])
        times = np.zeros((2, count + 1, columns))  # the last row is that of no action
        known = times.reshape(-1, columns)
        for low, high in pairwise(self.bounds):
            ready, width = known.take(self.waits[2 * low : 2 * high], 0), high - low
            np.add(np.maximum(ready[:width], ready[width:]), until[:, low:high], out=times[:, low:high])
        return times

    def starts(self, times: Floats, delays: Delays) -> Floats:
        """Return when each action begins, after what its rank receives for it."""
        return np.maximum(times[0, self.before], times[1, self.sender]) + delays.before_s[self.places]

    def ends_s(self, times: Floats, delays: Delays) -> Floats:
        """Return the end of the last action of each candidate, without what it sends."""
        last = np.array([own[-1] for own in self.numbers if len(own)], dtype=np.int64)
        return (times[0, last] - delays.after_s[self.places[last]]).max(axis=0)

    def period_s(self, times: Floats, ends_s: Floats) -> Floats:
        """Return the seconds of a steady unit of each candidate; NaN where none is steady yet."""
        if not len(self.window):
            return np.full(len(ends_s), np.nan)
        steps = times[0, self.window] - times[0, self.window_before]
        return np.where(np.ptp(steps, axis=0) <= _ROUNDING * ends_s, steps.mean(axis=0), np.nan)


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


def unit_bubble(steps: Sequence[Sequence[Step]], shape: PipelineShape) -> float:
    """Return the share of the step in which a rank waits, if F, I and W take one unit each and B two."""
    num_stages = shape.num_ranks * shape.num_chunks
    nothing, work = np.zeros((2 * num_stages + 1, 1)), np.ones((len(KINDS), num_stages, 1))
    work[KINDS.index("B")] = 2.0
    delays = Delays(work_s=work, before_s=nothing, after_s=nothing, travel_s=nothing)
    waves = Waves.of([coded(own) for own in steps], num_stages, shape.num_micro_batches)
    if waves.is_stuck:
        return 1.0
    total = float(waves.ends_s(waves.run(delays), delays)[0])
    busy = float(work[waves.kinds, waves.stages].sum()) / shape.num_ranks
    return 1 - busy / total if total else 0.0


def _senders(at: Ints, micro_batches: Ints, num_stages: int, num_micro_batches: int) -> Ints:
    """Return for every action the one that makes what it needs of another stage, or of its own one's F.

    What nobody makes is waited for without end: such an action waits for itself.
    """
    count, numbers = len(at), np.arange(len(at))
    maker = np.full((2 * num_stages + 2, num_micro_batches), -1)  # by place: the action that makes what it needs
    maker[at + 1, micro_batches] = numbers
    made = np.where(maker[at, micro_batches] < 0, numbers, maker[at, micro_batches])
    return np.where((at == 2 * num_stages) | (at == 0), count, made)


def _wave_numbers(before: list[int], sender: list[int], starts: list[int]) -> list[int]:
    """Return each action's wave: one after the later of the two that it waits for; -1 if it never runs."""
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


def _steady(orders: Sequence[Coded], starts: Ints, sender: Ints, unit: int) -> tuple[Ints, Ints]:
    """Return the last steady actions, as many as later ones may wait for, and the same ones a unit before.

    Steady is what repeats the actions of the unit before, on micro-batches that come a unit later.
    """
    none = np.empty(0, dtype=np.int64)
    width = int(np.count_nonzero(orders[0][2] < unit))
    runs = [_last_run(_repeats(order, width, unit)) for order in orders]
    length = min(end - start for start, end in runs)
    offsets = np.concatenate([np.arange(len(order[0])) - end for order, (_, end) in zip(orders, runs, strict=True)])
    has = sender < starts[-1]
    own, theirs = offsets[has], offsets[sender[has]]  # of actions and senders, from the ends of their steady parts
    if np.any((own < 0) & (theirs >= 0)):
        return none, none
    waits = np.where(own >= 0, -theirs, own - theirs)[own >= -width]
    needed = max(width, int(np.max(waits, initial=0)))
    if needed > length:
        return none, none
    last = [start + end for start, (_, end) in zip(starts[:-1].tolist(), runs, strict=True)]
    window = np.array([position for end in last for position in range(end - needed, end)], dtype=np.int64)
    return window, window - width


def _repeats(order: Coded, width: int, unit: int) -> NDArray[np.bool_]:
    kinds, stages, numbers = order
    same = (kinds[width:] == kinds[:-width]) & (stages[width:] == stages[:-width])
    return np.concatenate([np.zeros(width, dtype=bool), same & (numbers[width:] == numbers[:-width] + unit)])


def _last_run(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """Return where the longest run of true values begins and ends."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]])))
    if not len(edges):
        return 0, 0
    longest = int(np.argmax(edges[1::2] - edges[::2]))
    return int(edges[2 * longest]), int(edges[2 * longest + 1])
