"""Any schedule for columns of candidates: its actions in waves that do not wait for each other, up to a steady period.

After a while each unit of a schedule (one micro-batch, or a round of them) repeats the one before, a period later. As
soon as that holds for all that later actions can wait for, the rest of the steady state is that many periods more.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from autoshard.schedule.schedule import Schedule
from autoshard.schedule.timeline import KINDS, Coded, Delays, Ints, coded, places

Column = Any
_FIRST_TRY = 4  # micro-batches per rank: enough for nearly all to settle; the others are run for twice as many
_MOST_NUMBERS = 2**23  # times that are held at once: 64 MiB
_ROUNDING = 1e-13  # of all seconds so far: periods that differ by no more are equal


def run_columns(schedule: Schedule, delays: Delays) -> Column:
    """Return the end of the last action for every candidate."""
    total, unit = schedule.num_micro_batches, _unit(schedule)
    short = total if schedule.actions is not None else _reduced(total, unit, _FIRST_TRY * schedule.num_ranks)
    found = np.empty(delays.work_s.shape[2])
    rows = np.arange(len(found))
    while len(rows):
        ends, periods = _waves(replace(schedule, num_micro_batches=short)).run_in_parts(delays.only(rows))
        settled = np.isfinite(periods) | (short == total)
        more = (total - short) // unit
        found[rows[settled]] = (ends + more * periods if more else ends)[settled]
        rows = rows[~settled]
        short = _reduced(total, unit, 2 * short)
    return found


def _unit(schedule: Schedule) -> int:
    """Return after how many micro-batches the order of a builder repeats itself."""
    return schedule.num_ranks if schedule.builder == "interleaved" and schedule.num_chunks > 1 else 1


def _reduced(total: int, unit: int, wanted: int) -> int:
    """Return as many micro-batches as wanted or a few more, if whole units are left out."""
    return total if wanted >= total else wanted + (total - wanted) % unit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Waves:
    """The actions of all ranks, numbered wave by wave; what each waits for is of an earlier wave."""

    bounds: tuple[int, ...]  # where waves begin; the last one is the number of actions
    waits: Ints  # wave by wave: of all actions that before it on its rank, then of all that whose message it needs
    codes: Ints  # by action: kind and stage as one number
    last: Ints  # actions that their ranks end with
    window: Ints  # steady actions that later ones may wait for, and whatever lies between
    window_before: Ints  # the same a unit earlier

    def run_in_parts(self, delays: Delays) -> tuple[Column, Column]:
        """Run as many candidates at once as fit in a little memory."""
        size = max(1, _MOST_NUMBERS // self.bounds[-1])
        starts = range(0, delays.work_s.shape[2], size)
        parts = [self.run(delays.only(slice(start, start + size))) for start in starts]
        return np.concatenate([ends for ends, _ in parts]), np.concatenate([periods for _, periods in parts])

    def run(self, delays: Delays) -> tuple[Column, Column]:
        """Return per candidate the end of the last action, and the seconds of a steady unit; NaN if none is steady."""
        count, columns = self.bounds[-1], delays.work_s.shape[2]
        own, free_s, sent_s = _by_code(delays)
        times = np.zeros((2, count + 1, columns))  # when its rank is free, when its message arrives; last what is none
        known, until = times.reshape(-1, columns), np.stack([free_s[self.codes], sent_s[self.codes]])
        for low, high in pairwise(self.bounds):
            ready, width = known.take(self.waits[2 * low : 2 * high], 0), high - low
            np.add(np.maximum(ready[:width], ready[width:]), until[:, low:high], out=times[:, low:high])
        free = times[0]
        ends = (free[self.last] - (free_s - own)[self.codes[self.last]]).max(axis=0)
        if not len(self.window):
            return ends, np.full(columns, np.nan)
        steps = free[self.window] - free[self.window_before]
        steady = np.ptp(steps, axis=0) <= _ROUNDING * ends
        return ends, np.where(steady, steps.mean(axis=0), np.nan)


def _by_code(delays: Delays) -> tuple[Column, Column, Column]:
    """Return by kind and stage what an action takes; the same until its rank is free; and until its message arrives."""
    kinds, stages = np.divmod(np.arange(len(KINDS) * delays.num_stages), delays.num_stages)
    place = places(kinds, stages, delays.num_stages)
    own = delays.before_s[place] + delays.work_s[kinds, stages]
    return own, own + delays.after_s[place], own + delays.travel_s[place]


@lru_cache(maxsize=64)
def _waves(schedule: Schedule) -> _Waves:
    lanes = [coded(own) for own in schedule.steps()]
    starts: Ints = np.cumsum([0, *(len(kinds) for kinds, _, _ in lanes)])
    count = int(starts[-1])
    kinds, stages, _ = (np.concatenate(columns) for columns in zip(*lanes, strict=True))
    before = np.arange(-1, count - 1)
    before[starts[:-1][np.diff(starts) > 0]] = count
    sender = _senders(lanes, schedule)
    waves = np.array(_wave_numbers(before.tolist(), sender.tolist(), starts.tolist()), dtype=np.int64)
    order = np.argsort(waves, kind="stable")
    new = np.append(np.argsort(order, kind="stable"), count)  # by old number; none stays none
    steady = _steady(lanes, starts, sender, _unit(schedule))
    bounds = (0, *np.cumsum(np.bincount(waves)[1:]).tolist())
    return _Waves(
        bounds=bounds,
        waits=_side_by_side(new[before[order]], new[sender[order]] + count + 1, bounds),
        codes=(kinds * schedule.num_stages + stages)[order],
        last=new[starts[1:] - 1],
        window=new[steady[0]],
        window_before=new[steady[1]],
    )


def _side_by_side(ones: Ints, others: Ints, bounds: Sequence[int]) -> Ints:
    """Return for each wave the numbers of its actions, then the others."""
    return np.concatenate([part[low:high] for low, high in pairwise(bounds) for part in (ones, others)])


def _senders(lanes: Sequence[Coded], schedule: Schedule) -> Ints:
    """Return for every action the one that makes what it needs of another stage, or of its own one's F."""
    count, total = schedule.num_stages, schedule.num_micro_batches
    kinds, stages, numbers = (np.concatenate(columns) for columns in zip(*lanes, strict=True))
    place = places(kinds, stages, count)
    maker = np.full((2 * count + 2, total), len(kinds))  # place on the way -> action that makes what it needs
    maker[place + 1, numbers] = np.arange(len(kinds))
    needed = maker[place, numbers]
    return np.where(place == 2 * count, len(kinds), needed)


def _wave_numbers(before: list[int], sender: list[int], starts: list[int]) -> list[int]:
    """Number the waves: every action goes one after the later of the two that it waits for."""
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
    assert min(waves) >= 0, "the schedule never ends"
    return waves[:-1]


def _steady(lanes: Sequence[Coded], starts: Ints, sender: Ints, unit: int) -> tuple[Ints, Ints]:
    """Return the last steady actions, as many as later ones may wait for, and the same ones a unit before.

    Steady is what repeats the actions of the unit before, on micro-batches that come a unit later.
    """
    none = np.empty(0, dtype=np.int64)
    width = _actions_per_unit(lanes[0], unit)
    runs = [_last_run(_repeats(lane, width, unit)) for lane in lanes]
    length = min(end - start for start, end in runs)
    offsets = np.concatenate([np.arange(len(lane[0])) - end for lane, (_, end) in zip(lanes, runs, strict=True)])
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


def _actions_per_unit(lane: Coded, unit: int) -> int:
    return int(np.count_nonzero(lane[2] < unit))


def _repeats(lane: Coded, width: int, unit: int) -> Column:
    kinds, stages, numbers = lane
    same = (kinds[width:] == kinds[:-width]) & (stages[width:] == stages[:-width])
    return np.concatenate([np.zeros(width, dtype=bool), same & (numbers[width:] == numbers[:-width] + unit)])


def _last_run(flags: Column) -> tuple[int, int]:
    """Return where the longest run of true values begins and ends."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]])))
    if not len(edges):
        return 0, 0
    longest = int(np.argmax(edges[1::2] - edges[::2]))
    return int(edges[2 * longest]), int(edges[2 * longest + 1])
