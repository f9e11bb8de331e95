"""How long a pipeline takes, for columns of candidates that share a schedule: what ``simulate`` says of each of them.

Seconds may carry further axes, one value per candidate. Where sends are part of the actions that make them, GPipe and
1F1B have closed forms; every other schedule is run, as far as it takes to find its steady period (``wavefront``).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.schedule.schedule import Schedule
from autoshard.schedule.timeline import KINDS, Delays
from autoshard.schedule.wavefront import run_columns

Column = Any


def makespan_columns(schedule: Schedule, delays: Delays) -> Column:
    """Return the end of the last action for every candidate."""
    plain = schedule.actions is None and schedule.placement is None
    if plain and schedule.builder == "gpipe":
        return _all_forwards_first(*_by_stage(delays), _on_the_way(delays), schedule.num_micro_batches)
    if plain and schedule.builder == "1f1b" and not np.any(_on_the_way(delays)):
        return _one_forward_one_backward(*_by_stage(delays), schedule.num_micro_batches)
    return run_columns(schedule, delays)


def _on_the_way(delays: Delays) -> Column:
    """Return for how long each message is under way when its rank is at other work already."""
    return delays.travel_s - delays.after_s


def _by_stage(delays: Delays) -> tuple[Column, Column]:
    """Return what forward and backward passes occupy the rank of each stage, with their sends and receives."""
    count = delays.work_s.shape[1]
    held = delays.before_s + delays.after_s
    forward = delays.work_s[KINDS.index("F")] + held[:count]
    backward = delays.work_s[KINDS.index("B")] + held[count : 2 * count][::-1]
    return forward, backward


def _all_forwards_first(forward: Column, backward: Column, on_the_way_s: Column, count: int) -> Column:
    """GPipe: the longest path passes every stage down and up, and waits at the slowest F and B for all the others."""
    passing = forward.sum(axis=0) + backward.sum(axis=0) + on_the_way_s.sum(axis=0)
    return passing + (count - 1) * (forward.max(axis=0) + backward.max(axis=0))


def _one_forward_one_backward(forward: Column, backward: Column, count: int) -> Column:
    """1F1B: the longest path through warm-up, steady state and the way out.

    A path enters the steady state at a stage r: it has passed the forwards 0..r once, and the longest of them
    pp - 1 - r times more. It leaves at a stage s, likewise for backwards. Between, it moves up and down; every further
    micro-batch costs it the F and B of a stage that it passes, so that it collects at one stage what is left of
    ``count - pp + min(r, s)`` micro-batches after one for each stage on the way there. Ranks that begin with all
    micro-batches' forwards have no steady state: r, s and the stage of collection are at least ``pp - count``.
    """
    ranks = len(forward)
    first = max(0, ranks - count)
    number = np.arange(ranks).reshape(-1, *[1] * (forward.ndim - 1))
    both = forward + backward
    passed = np.cumsum(both, axis=0)
    enters = (ranks - 1 - number) * np.maximum.accumulate(forward, axis=0)
    leaves = (ranks - 1 - number) * np.maximum.accumulate(backward, axis=0)
    cut = _Paths(
        left=count - ranks,
        first=first,
        both=both[first:],
        passed=passed[first:],
        enters=enters[first:],
        leaves=leaves[first:],
    )
    best = np.maximum(cut.collecting_between(len(cut.both) - 1), cut.collecting_before().max(axis=0, initial=0.0))
    for low in range(len(cut.both) - 1):
        if np.any(cut.bound_between(low) > best):
            best = np.maximum(best, cut.collecting_between(low))
    bounds = cut.bounds_after()
    for stage in range(len(cut.both)):
        if np.any(bounds[stage] > best):
            best = np.maximum(best, cut.collecting_after(stage))
    return best


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Paths:
    """Seconds of the paths through 1F1B, for the stages from ``first`` on."""

    left: int  # micro-batches less ranks
    first: int
    both: Column  # F and B of each stage
    passed: Column  # of all stages up to it
    enters: Column  # what a path spends beyond its way to the stage where it enters the steady state
    leaves: Column  # likewise after the stage where it leaves it

    def collecting_before(self) -> Column:
        """Return by stage the longest path that collects there and enters and leaves at it or later ones."""
        low_enters = self.passed + self.enters + _later(self.passed + self.leaves)
        low_leaves = self.passed + self.leaves + _later(self.passed + self.enters)
        ends = _later(np.maximum(low_enters, low_leaves))
        found = ends - self.passed + (self.left + self._numbers) * self.both
        return found[int(self.left + self.first == 0) :]  # there is nothing to collect at a stage of number -left

    def collecting_between(self, low: int) -> Column:
        """Return the longest path that enters or leaves at the ``low``-th stage, and collects between the two."""
        collected = (self.left + self.first + low) * np.maximum.accumulate(self.both[low:], axis=0)
        enters_low = self.enters[low] + (self.passed[low:] + self.leaves[low:] + collected).max(axis=0)
        leaves_low = self.leaves[low] + (self.passed[low:] + self.enters[low:] + collected).max(axis=0)
        return np.maximum(enters_low, leaves_low)

    def bound_between(self, low: int) -> Column:
        """Return what ``collecting_between`` is at most."""
        collected = (self.left + self.first + low) * self.both[low:].max(axis=0)
        return self.passed[-1] + self.enters[low:].max(axis=0) + self.leaves[low:].max(axis=0) + collected

    def collecting_after(self, stage: int) -> Column:
        """Return the longest path that collects at a stage, and enters and leaves at it or earlier ones.

        It has ``left + r + s - stage`` to collect, which must not be less than nothing.
        """
        numbers = np.arange(stage + 1)
        enters = self.enters[: stage + 1] + self._numbers[: stage + 1] * self.both[stage]
        leaves = self.leaves[: stage + 1] + self._numbers[: stage + 1] * self.both[stage]
        least = np.clip(stage - self.left - self.first - numbers, 0, None)  # from ``first`` on, as ``numbers``
        ends = enters + _later(leaves)[np.minimum(least, stage)]
        rest = self.passed[stage] + (self.left - self.first - stage) * self.both[stage]
        return rest + ends[least <= stage].max(axis=0)

    def bounds_after(self) -> Column:
        """Return by stage what ``collecting_after`` is at most."""
        enters, leaves = (np.maximum.accumulate(one, axis=0) for one in (self.enters, self.leaves))
        return self.passed + enters + leaves + (self.left + self._numbers) * self.both

    @property
    def _numbers(self) -> Column:
        """Number the stages from ``first`` on, as columns."""
        return np.arange(self.first, self.first + len(self.both)).reshape(-1, *[1] * (self.both.ndim - 1))


def _later(values: Column) -> Column:
    """Return by stage the largest value of it and all later ones."""
    return np.maximum.accumulate(values[::-1], axis=0)[::-1]
