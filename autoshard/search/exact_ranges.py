"""The best ranges of layers of one candidate, by labels: layers so far, their seconds, the paths through them.

Stages are filled from the first to the last. A label is dropped when no way to fill the others can end below a limit,
and, unless a proof is asked for, when another with as many layers is no worse in anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np

from autoshard.search.chosen import SURE, Chosen, best_of
from autoshard.search.ranges import NEVER, PathWeights, Stages, Ways, path_weights

Column = Any
_Step = tuple[Column, Column]  # of the labels of one more stage: their options, and the labels that they extend
_AT_ONCE = 64  # ways that are timed together, and labels that are compared
_MOST_EXTENDED = 2**18  # labels that are looked at together
_SECONDS = ("sum_s", "path_s", "waiting_s", "ahead_s", "back_s", "slowest_ahead_s", "slowest_back_s", "update_s")
_CLOSED = 1e-9  # a gap that is none, by which plans of equal time may differ as well
_ROUNDING = 1e-13  # of seconds: labels that differ by no more are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How far a search goes: the gap that it may leave, and how many labels and timed ways one candidate may take."""

    gap: float = 1e-3
    most_labels: int = 50_000
    most_timed: int = 4096
    exhaustive: bool = False  # no point is left out because of its bound


EVERYTHING = Effort(gap=0.0, most_labels=1_000_000, most_timed=1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Labels:
    """Ways to fill the first stages; ``before`` numbers the label of one stage less that each extends.

    Beside the micro-batch that passes all stages, a path does more F and B at some rank (``ranges.path_weights``), and
    waits for some of those after it; then it does what is left: F at the slowest up to one rank, B up to another.
    """

    layers: Column
    sum_s: Column
    waiting_s: Column  # beside that micro-batch, the longest path that still waits
    ahead_s: Column  # likewise the longest of those that have done their F
    back_s: Column  # likewise their B
    path_s: Column  # the longest path that has done both, with that micro-batch up to there
    slowest_ahead_s: Column
    slowest_back_s: Column
    update_s: Column  # the longest step phase of a rank
    option: Column
    before: Column

    @classmethod
    def nothing(cls, update_s: float) -> "Labels":
        """Return that no stage is filled, but what the step phase takes at least."""
        zero, nobody, never = np.zeros(1), np.zeros(1, dtype=np.int64), np.full(1, -np.inf)
        seconds = dict.fromkeys(_SECONDS, zero) | {"waiting_s": never, "update_s": np.array([update_s])}
        return cls(layers=nobody, **seconds, option=nobody, before=nobody)

    def only(self, rows: Column) -> "Labels":
        """Return some of them."""
        return Labels(**{one.name: getattr(self, one.name)[rows] for one in fields(Labels)})

    @classmethod
    def side_by_side(cls, parts: "Sequence[Labels]") -> "Labels":
        """Return those of several as one."""
        return cls(**{one.name: np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exact:
    """One candidate among those of a frame, with its ways to fill each stage."""

    stages: Stages
    candidate: int
    rest_s: float  # what a step takes at least beside its micro-batches
    effort: Effort

    def improved(self, found: Chosen, below_s: float) -> Chosen:
        """Return the best of what was found of all candidates and what labels find, if that may be better.

        Labels that drop what others beat come first; if they leave too wide a gap, those that keep everything.
        """
        mine = found.only(np.array([self.candidate]))
        for proves in (False, True):
            below = min(below_s, float(mine.time_s[0]))
            if mine.bound_s[0] >= below * (1 - max(self.effort.gap, _CLOSED) * proves):
                break
            better = self._best(below, proves=proves)
            bound = np.maximum(mine.bound_s, np.minimum(better.bound_s, mine.time_s))
            mine = best_of([mine, better]).bounded(bound)
        return mine

    def _best(self, below_s: float, *, proves: bool) -> Chosen:
        """Return the fastest way of those that take less; the bound says what was left open."""
        least_s, steps, dropped_s = self._labelled(below_s, proves=proves)
        values = least_s + self._fixed_s
        order = np.argsort(values, kind="stable")
        found: Chosen | None = None
        timed = 0
        while timed < min(len(order), self.effort.most_timed):
            if found is not None and values[order[timed]] >= found.time_s[0]:
                break
            rows = order[timed : timed + _AT_ONCE]
            timed += len(rows)
            times = self._timed(steps, rows)
            found = times if found is None else best_of([found, times])
        if found is None:
            return Chosen.nothing(self.stages.frame.schedule, np.array([min(below_s, dropped_s)]))
        left_s = values[order[timed]] if timed < len(order) else np.inf
        least = min(float(found.time_s[0]), below_s, left_s if proves else float(values[order[0]]), dropped_s)
        return found.bounded(np.array([least * (1 - SURE - len(steps) * _ROUNDING)]))

    @property
    def _fixed_s(self) -> float:
        return float(self.stages.frame.fixed_s[self.candidate])

    def _timed(self, steps: Sequence[_Step], rows: Column) -> Chosen:
        """Time several ways in full, and return the fastest."""
        options: list[Column] = []
        places = rows
        for option, before in reversed(steps):
            options.insert(0, option[places])
            places = before[places]
        columns = np.full(len(rows), self.candidate)
        found = self.stages.timed(np.stack(options), columns)
        return found.only(np.array([int(np.argmin(found.time_s))]))

    def _labelled(self, below_s: float, *, proves: bool) -> tuple[Column, list[_Step], float]:
        """Extend labels stage by stage; return what the last come to, and the least that a dropped one may become."""
        limit = min(below_s - self._fixed_s, NEVER)
        sums, worst = self.stages.suffixes(slice(self.candidate, self.candidate + 1))
        labels, steps, dropped_s = Labels.nothing(self.rest_s), list[_Step](), np.inf
        for rank in range(self.stages.frame.schedule.num_ranks):
            later = np.stack([sums[rank + 1][:, 0], worst[rank + 1][:, 0]])
            ways = self.stages.ways(rank, self.candidate, every=proves)
            width = max(1, _MOST_EXTENDED // max(1, len(ways.layers)))
            parts = [
                self._near(labels.only(slice(start, start + width)), ways, rank, later, limit, start)
                for start in range(0, max(1, len(labels.layers)), width)
            ]
            labels = Labels.side_by_side([part for part, _ in parts])
            least = np.concatenate([own for _, own in parts])
            if not proves:
                kept = _undominated(labels)
                labels, least = labels.only(kept), least[kept]
            if len(least) > self.effort.most_labels:
                order = np.argsort(least, kind="stable")
                dropped_s = min(dropped_s, float(least[order[self.effort.most_labels]]))
                labels = labels.only(np.sort(order[: self.effort.most_labels]))
            steps.append((labels.option.astype(np.int32), labels.before.astype(np.int32)))
        return labels.path_s + labels.update_s, steps, dropped_s + self._fixed_s

    def _near(
        self, labels: Labels, ways: Ways, rank: int, later: Column, limit: float, start: int
    ) -> tuple[Labels, Column]:
        """Extend some labels by every way to fill a rank; return what may end below a limit, with its least end."""
        more = extended(labels, ways, path_weights(self.stages.frame.schedule), rank, start)
        left = self.stages.options.num_layers - more.layers
        more = more.only(np.flatnonzero(left >= 0))
        sum_s, worst_s = later[:, left[left >= 0]]
        paths_s = np.maximum(np.maximum(more.ahead_s, more.back_s), np.maximum(worst_s, more.waiting_s + sum_s))
        least = np.maximum(more.path_s, more.sum_s + sum_s + paths_s) + more.update_s
        kept = np.flatnonzero(least < limit)
        return more.only(kept), least[kept]


def extended(labels: Labels, ways: Ways, weights: PathWeights, rank: int, start: int) -> Labels:
    """Return every label with every way to fill the next rank; the labels are numbered from ``start``."""
    number, way = np.divmod(np.arange(len(labels.layers) * len(ways.layers)), max(1, len(ways.layers)))
    both_s, one = ways.both_s[way], weights.one[rank]
    sum_s = labels.sum_s[number] + both_s
    waiting_s = labels.waiting_s[number] + both_s
    here_s = np.maximum(waiting_s, weights.both[rank] * both_s)
    slowest_ahead_s = np.maximum(labels.slowest_ahead_s[number], ways.ahead_s[way])
    slowest_back_s = np.maximum(labels.slowest_back_s[number], ways.back_s[way])
    ahead_s = np.maximum(labels.ahead_s[number], here_s + one * slowest_ahead_s)
    back_s = np.maximum(labels.back_s[number], here_s + one * slowest_back_s)
    done_s = np.maximum(ahead_s + one * slowest_back_s, back_s + one * slowest_ahead_s)
    return Labels(
        layers=labels.layers[number] + ways.layers[way],
        sum_s=sum_s,
        waiting_s=here_s if weights.waits[rank] else waiting_s,
        ahead_s=ahead_s,
        back_s=back_s,
        path_s=np.maximum(labels.path_s[number], sum_s + done_s),
        slowest_ahead_s=slowest_ahead_s,
        slowest_back_s=slowest_back_s,
        update_s=np.maximum(labels.update_s[number], ways.update_s[way]),
        option=ways.option[way],
        before=number + start,
    )


def _undominated(labels: Labels) -> Column:
    """Return the labels that no other with as many layers equals or beats in everything, in their order."""
    values = np.stack([getattr(labels, name) for name in _SECONDS])
    order = np.lexsort((*values[::-1], labels.layers))
    starts = np.flatnonzero(np.diff(labels.layers[order], prepend=-1)).tolist()
    kept: list[Column] = []
    for low, high in pairwise([*starts, len(order)]):
        mine = order[low:high]
        kept.append(mine[_unbeaten(values[:, mine])])
    return np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *kept]))


def _unbeaten(values: Column) -> Column:
    """Return the columns that none before them equals or beats in every row."""
    kept = np.zeros(0, dtype=np.int64)
    for start in range(0, values.shape[1], _AT_ONCE):
        own = np.arange(start, min(start + _AT_ONCE, values.shape[1]))
        own = own[~_beaten(values[:, kept], values[:, own]).any(axis=0)]
        among = np.triu(_beaten(values[:, own], values[:, own]), 1)
        kept = np.concatenate([kept, own[~among.any(axis=0)]])
    return kept


def _beaten(ones: Column, others: Column) -> Column:
    """Say which of the others each of some equals or beats: [one, other]."""
    return (ones[:, :, None] <= others[:, None] * (1 + _ROUNDING)).all(axis=0)
