"""The best ranges of layers of one candidate, by labels: layers so far, their seconds, the worst path through them.

Stages are filled from the last to the first. A label is dropped when no way to fill the others can end below a limit,
and, unless a proof is asked for, when another with as many layers is no worse in seconds and path.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.search.chosen import SURE, Chosen, best_of
from autoshard.search.ranges import Stages, path_weights

Column = Any
_AT_ONCE = 64  # ways that are timed together


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How far a search goes: the gap that it may leave, and how many labels and timed ways one candidate may take."""

    gap: float = 1e-3
    most_labels: int = 50_000
    most_timed: int = 4096
    exhaustive: bool = False  # no point is left out because of its bound


EVERYTHING = Effort(gap=0.0, most_labels=1_000_000, most_timed=1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Labels:
    """Ways to fill the last stages, a row each; ``before`` numbers the label of one stage less that each extends."""

    layers: Column
    sum_s: Column
    path_s: Column
    option: Column
    before: Column

    def only(self, rows: Column) -> "_Labels":
        return _Labels(
            layers=self.layers[rows], sum_s=self.sum_s[rows], path_s=self.path_s[rows], option=self.option[rows],
            before=self.before[rows],
        )  # fmt: skip


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
            if mine.bound_s[0] >= below * (1 - self.effort.gap * proves):
                break
            better = self._best(below, proves=proves)
            bound = np.maximum(mine.bound_s, np.minimum(better.bound_s, mine.time_s))
            mine = best_of([mine, better]).bounded(bound)
        return mine

    def _best(self, below_s: float, *, proves: bool) -> Chosen:
        """Return the fastest way of those that take less; the bound says what was left open."""
        labels, dropped_s = self._labelled(below_s, proves=proves)
        last = labels[-1]
        values = last.sum_s + last.path_s + self.rest_s + self._fixed_s
        order = np.argsort(values, kind="stable")
        found: Chosen | None = None
        timed = 0
        while timed < min(len(order), self.effort.most_timed):
            if found is not None and values[order[timed]] >= found.time_s[0]:
                break
            rows = order[timed : timed + _AT_ONCE]
            timed += len(rows)
            times = self._timed(labels, rows)
            found = times if found is None else best_of([found, times])
        if found is None:
            return Chosen.nothing(self.stages.frame.schedule, np.array([min(below_s, dropped_s)]))
        left_s = values[order[timed]] if timed < len(order) else np.inf
        least = min(float(found.time_s[0]), below_s, left_s if proves else float(values[order[0]]), dropped_s)
        return found.bounded(np.array([least * (1 - SURE)]))

    @property
    def _fixed_s(self) -> float:
        return float(self.stages.frame.fixed_s[self.candidate])

    def _timed(self, labels: list[_Labels], rows: Column) -> Chosen:
        """Time several ways in full, and return the fastest."""
        options: list[Column] = []
        places = rows
        for step in reversed(labels):
            options.append(step.option[places])
            places = step.before[places]
        columns = np.full(len(rows), self.candidate)
        found = self.stages.timed(np.stack(options), columns)
        return found.only(np.array([int(np.argmin(found.time_s))]))

    def _labelled(self, below_s: float, *, proves: bool) -> tuple[list[_Labels], float]:
        """Extend labels stage by stage; return those of each stage, and the least that a dropped one may become."""
        layers, limit = self.stages.options.num_layers, below_s - self.rest_s - self._fixed_s
        sums, worst = self._prefixes()
        _, tails = path_weights(self.stages.frame.schedule)
        zero = np.zeros(1)
        nobody = np.zeros(1, dtype=np.int64)
        labels = [_Labels(layers=nobody, sum_s=zero, path_s=zero, option=nobody, before=nobody)]
        dropped_s = np.inf
        for rank in reversed(range(self.stages.frame.schedule.num_ranks)):
            more = self._extended(labels[-1], rank, tails[rank], every=proves)
            more = more.only(np.flatnonzero(more.layers <= layers))
            rest = layers - more.layers
            tail_s = more.sum_s if rank and tails[:rank].all() else 0.0
            least = sums[rank][rest] + more.sum_s + np.maximum(more.path_s, worst[rank][rest] + tail_s)
            kept = np.flatnonzero(least < limit)
            if not proves:
                kept = kept[_undominated(more.only(kept))]
            if len(kept) > self.effort.most_labels:
                order = kept[np.argsort(least[kept], kind="stable")]
                kept, dropped_s = (
                    np.sort(order[: self.effort.most_labels]),
                    min(dropped_s, float(least[order[self.effort.most_labels]])),
                )
            labels.append(more.only(kept))
        return labels[1:], dropped_s + self.rest_s + self._fixed_s

    def _extended(self, labels: _Labels, rank: int, tail: float, *, every: bool) -> _Labels:
        size, option, both, path = self.stages.ways(rank, self.candidate, every=every)
        number, way = np.divmod(np.arange(len(labels.layers) * len(size)), len(size))
        own = both[way]
        return _Labels(
            layers=labels.layers[number] + size[way],
            sum_s=labels.sum_s[number] + own,
            path_s=np.maximum(labels.path_s[number], path[way] + tail * labels.sum_s[number]),
            option=option[way],
            before=number,
        )

    def _prefixes(self) -> tuple[list[Column], list[Column]]:
        """Return by number of stages and of layers what these take at least: the sum, and the worst path in them."""
        layers = self.stages.options.num_layers
        _, tails = path_weights(self.stages.frame.schedule)
        sums, worst = [np.full(layers + 1, np.inf)], [np.full(layers + 1, np.inf)]
        sums[0][0] = worst[0][0] = 0.0
        for rank in range(self.stages.frame.schedule.num_ranks - 1):
            total, path = np.full((2, layers + 1), np.inf)
            waits = bool(tails[: rank + 1].all())
            size, _, both, path_s = self.stages.ways(rank, self.candidate, every=False)
            for count, own, path_own in zip(size.tolist(), both.tolist(), path_s.tolist(), strict=True):
                before, earlier = sums[-1][: layers + 1 - count], worst[-1][: layers + 1 - count]
                np.minimum(total[count:], before + own, out=total[count:])
                here = np.maximum(earlier + (own if waits and rank else 0.0), path_own)
                np.minimum(path[count:], np.where(np.isfinite(before), here, np.inf), out=path[count:])
            sums.append(total)
            worst.append(path)
        return sums, worst


def _undominated(labels: _Labels) -> Column:
    """Return the labels that no other with as many layers equals or beats in both seconds, in their order."""
    if not len(labels.layers):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((labels.path_s, labels.sum_s, labels.layers))
    # Every number of layers starts below all before it, so that one running minimum serves all of them.
    step = 2.0 * float(labels.path_s.max()) + 1.0
    path = labels.path_s[order] - step * labels.layers[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(path)[:-1]])
    return np.sort(order[path < before])
