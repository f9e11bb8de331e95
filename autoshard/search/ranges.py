"""Which layers each stage gets and what it recomputes: the best of all ways, for many candidates that share a schedule.

Where a schedule's makespan has a closed form (GPipe and 1F1B) all ranges of layers are searched, by dynamic programming
over the stages. Its value is a lower bound: for every rank c there is a path through the schedule on which c does
``alpha_c`` micro-batches more than the one that passes all stages, and, where it waits for them, those after it one
more. The best found by it is timed as every plan is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.schedule.schedule import Schedule
from autoshard.search.chosen import SURE, Chosen, Options
from autoshard.search.fillings import Filled, Fillings, Frame, filled
from autoshard.search.timed import timed

Column = Any
ALL_RANGES = ("1f1b", "gpipe")  # schedules of which all ranges of layers are searched
_MORE = 2  # layers beyond an even share that a stage may get at first
_NEVER = 1e30  # seconds of what does not fit: unlike infinity, nothing times that is nothing


def searches_all(options: Options, schedule: Schedule) -> bool:
    """Say whether all ranges of layers are searched."""
    return options.stages is None and schedule.builder in ALL_RANGES and schedule.num_ranks > 1


def smallest_ranges(frame: Frame, options: Options, capacity: float) -> Chosen:
    """Find for every candidate the way of all ranges whose fullest rank holds least."""
    schedule = frame.schedule
    widest = options.num_layers - schedule.num_ranks + 1
    high = min(widest, -(-options.num_layers // schedule.num_ranks) + _MORE)
    while True:
        low = max(1, options.num_layers - (schedule.num_ranks - 1) * high)
        best = Stages.of(frame, options, range(low, high + 1), capacity).smallest()
        longest = int((best.dropped + best.plain).max())
        if high == widest or (longest < high and np.all(np.isfinite(best.peak_bytes))):
            return best
        high = min(widest, 2 * high)


def stages_below(frame: Frame, options: Options, below_s: Column, capacity: float, rest_s: Column) -> "Stages":
    """Return the ways to fill stages of as many layers as may be part of a step that takes less than ``below_s``.

    ``rest_s`` is what a step takes at least beside its micro-batches.
    """
    ranks, layers = frame.schedule.num_ranks, options.num_layers
    widest = layers - ranks + 1
    high = min(widest, -(-layers // ranks) + _MORE)
    while True:
        low = max(1, layers - (ranks - 1) * high)
        stages = Stages.of(frame, options, range(low, high + 1), capacity)
        limit = np.minimum(below_s, stages.chosen(rest_s).time_s) - rest_s - frame.fixed_s
        longest = min(widest, stages.longest(limit))
        if high >= longest:
            return stages
        high = longest if np.all(np.isfinite(limit)) else min(widest, 2 * high)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stages:
    """The ways to fill each stage, by rank, number of layers and candidate: the fastest that fits."""

    frame: Frame
    options: Options
    sizes: Column  # numbers of layers
    fillings: Fillings
    filled: Filled
    best: Column  # [rank, size, candidate]: the option
    fits: Column  # [rank, option, candidate]
    both_s: Column  # [rank, size, candidate]: F and B with its sends; forever where nothing fits
    path_s: Column  # [rank, size, candidate]: what it adds to a path at least

    @classmethod
    def of(cls, frame: Frame, options: Options, sizes: Sequence[int], capacity: float) -> "Stages":
        """Price all options of stages of some sizes."""
        rows = list(_range_rows(options, sizes))
        kind, dropped, plain = (np.array([row[place] for row in rows]) for place in range(3))
        fillings = Fillings(
            kind=kind[None, :, None], dropped=dropped[None, :, None], plain=plain[None, :, None],
            plain_kind=options.plain_kind,
        )  # fmt: skip
        found = filled(frame, fillings)
        fits = _legal(options, frame.schedule, kind, dropped, plain) & (found.peak_bytes <= capacity)
        cost = np.where(fits, found.pass_s, np.inf)
        best = _best_of_sizes(cost, [own for *_, own in rows], sizes)
        both = np.minimum(np.take_along_axis(cost, best, axis=1), _NEVER) + frame.hop_s[:, None]
        own = np.where(fits, _own_path_s(frame, found), np.inf)
        path = np.minimum(_least_of_sizes(own, [size for *_, size in rows], sizes), _NEVER)
        return cls(
            frame=frame, options=options, sizes=np.array(sizes), fillings=fillings, filled=found, best=best, fits=fits,
            both_s=both, path_s=path,
        )  # fmt: skip

    def longest(self, most_s: Column) -> int:
        """Return the most layers of a stage that all micro-batches can pass in this time, for any candidate."""
        least = self.frame.layer.pass_s.min(axis=0)
        counts = most_s / (self.frame.schedule.num_micro_batches * least)
        return int(min(self.options.num_layers, np.max(counts, initial=0.0)))

    def chosen(self, update_s: Column) -> Chosen:
        """Return the way of least bound, timed in full."""
        sums, worst = self._suffixes()
        layers = self.options.num_layers
        bound = sums[0][layers] + worst[0][layers]
        found = timed(self.frame, self.fillings, self.filled, self._path(sums, worst), bound < _NEVER)
        constant = update_s + self.frame.fixed_s
        return replace(found, bound_s=np.minimum(found.time_s, (bound + constant) * (1 - SURE)))

    def smallest(self) -> Chosen:
        """Return the way whose fullest rank holds least, by dynamic programming over the stages."""
        layers, count, ranks = self.options.num_layers, self.frame.num_candidates, self.frame.schedule.num_ranks
        peak = np.where(self.fits, self.filled.peak_bytes, np.inf)
        option = _best_of_sizes(peak, self.fillings.num_layers[0].tolist(), self.sizes.tolist())
        least = np.take_along_axis(peak, option, axis=1)  # [rank, size, candidate]
        tables = [np.where(np.arange(layers + 1)[:, None] == 0, 0.0, np.full((layers + 1, count), np.inf))]
        for rank in reversed(range(ranks)):
            table = np.full((layers + 1, count), np.inf)
            for number, size in enumerate(self.sizes.tolist()):
                here = np.maximum(tables[0][: layers + 1 - size], least[rank, number])
                np.minimum(table[size:], here, out=table[size:])
            tables.insert(0, table)
        columns, left = np.arange(count), np.full(count, layers)
        chosen: list[Column] = []
        for rank in range(ranks):
            rest = left - self.sizes[:, None]
            after = np.where(rest >= 0, tables[rank + 1][np.maximum(rest, 0), columns], np.inf)
            number = np.maximum(after, least[rank]).argmin(axis=0)
            chosen.append(option[rank, number, columns])
            left = np.maximum(left - self.sizes[number], 0)
        ok = np.isfinite(tables[0][layers])
        found = timed(self.frame, self.fillings, self.filled, np.stack(chosen), ok)
        return replace(found, bound_s=found.peak_bytes)

    def timed(self, option: Column, candidates: Column) -> Chosen:
        """Time an option per rank for some candidates, or for one several times, in full."""
        ok = np.ones(len(candidates), dtype=bool)
        return timed(self.frame, self.fillings, self.filled, option, ok, candidates)

    def ways(self, rank: int, candidate: int, *, every: bool) -> tuple[Column, Column, Column, Column]:
        """Return numbers of layers, options, seconds of F and B with sends, and those of the path, of what fits a rank.

        The fastest of each number of layers, with the least that any adds to a path; or every one that no other beats
        in both F and B.
        """
        if not every:
            both = self.both_s[rank, :, candidate]
            fits = np.flatnonzero(both < _NEVER)
            return self.sizes[fits], self.best[rank, fits, candidate], both[fits], self.path_s[rank, fits, candidate]
        options = np.flatnonzero(self.fits[rank, :, candidate])
        size = self.fillings.num_layers[0, options]
        found, sent = self.filled, float(self.frame.hop_s[rank, candidate])
        path = _own_path_s(self.frame, found)[rank, options, candidate]
        if self.frame.hides_updates:  # behind more work more traffic hides, so none is beaten
            return size, options, found.pass_s[rank, options, candidate] + sent, path
        forward = found.forward_s[rank, options, 0, candidate]
        backward = (found.input_s + found.weight_s)[rank, options, 0, candidate]
        kept = [number for number in range(len(options)) if not np.any(_beats(number, size, forward, backward))]
        return size[kept], options[kept], (forward + backward + sent)[kept], path[kept]

    def _suffixes(self) -> tuple[list[Column], list[Column]]:
        """Return by stage and number of layers left: the least sum of F and B, and the least worst path."""
        layers, count = self.options.num_layers, self.frame.num_candidates
        _, tails = path_weights(self.frame.schedule)
        sums = [_only_zero(layers, count)]
        worst = [_only_zero(layers, count)]
        for rank in reversed(range(self.frame.schedule.num_ranks)):
            total, path = np.full((2, layers + 1, count), _NEVER)
            for number, size in enumerate(self.sizes.tolist()):
                own = self.both_s[rank, number]
                after, later = sums[0][: layers + 1 - size], worst[0][: layers + 1 - size]
                np.minimum(total[size:], after + own, out=total[size:])
                here = np.maximum(later, self.path_s[rank, number] + tails[rank] * after)
                np.minimum(path[size:], here, out=path[size:])
            sums.insert(0, total)
            worst.insert(0, path)
        return sums, worst

    def _path(self, sums: list[Column], worst: list[Column]) -> Column:
        """Return the option of each rank on a way whose paths are no worse than the bound, with little work."""
        _, tails = path_weights(self.frame.schedule)
        columns = np.arange(self.frame.num_candidates)
        left = np.full(self.frame.num_candidates, self.options.num_layers)
        target = worst[0][left, columns] * (1 + SURE)
        chosen: list[Column] = []
        for rank in range(self.frame.schedule.num_ranks):
            own = self.both_s[rank]  # [size, candidate]
            rest = left - self.sizes[:, None]
            kept = np.maximum(rest, 0)
            after, later = sums[rank + 1][kept, columns], worst[rank + 1][kept, columns]
            path = np.maximum(later, self.path_s[rank] + tails[rank] * after)
            number = np.where((path <= target) & (rest >= 0), own + after, np.inf).argmin(axis=0)
            chosen.append(self.best[rank, number, columns])
            left = np.maximum(left - self.sizes[number], 0)
        return np.stack(chosen)


def _best_of_sizes(cost: Column, owned: Sequence[int], sizes: Sequence[int]) -> Column:
    """Return the cheapest option of every size: [rank, size, candidate]. Options stand in order of size."""
    starts = [owned.index(size) for size in sizes]
    spans = zip(starts, [*starts[1:], len(owned)], strict=True)
    return np.stack([low + cost[:, low:end].argmin(axis=1) for low, end in spans], axis=1)


def _least_of_sizes(cost: Column, owned: Sequence[int], sizes: Sequence[int]) -> Column:
    """Return what an option of every size costs at least: [rank, size, candidate]."""
    starts = [owned.index(size) for size in sizes]
    ends = [*starts[1:], len(owned)]
    spans = zip(starts, ends, strict=True)
    return np.stack([cost[:, low:end].min(axis=1) for low, end in spans], axis=1)


def _beats(number: int, size: Column, forward: Column, backward: Column) -> Column:
    """Say which options beat one with as many layers; of equals the first does."""
    same = size == size[number]
    no_worse = (forward <= forward[number]) & (backward <= backward[number])
    better = (forward < forward[number]) | (backward < backward[number]) | (np.arange(len(size)) < number)
    return same & no_worse & better


def path_weights(schedule: Schedule) -> tuple[Column, Column]:
    """Return for every rank c how many micro-batches more than one it does on a path, and whether later ranks add one.

    1F1B: c comes to its steady state once later ranks have done a forward and a backward, and leaves it likewise
    (``schedule/makespan``). GPipe's ranks do all F in a row, then all B. Where ranks of 1F1B do so too, a path that
    passes the later ones has all of a rank's F or all of its B, so at least half of both.
    """
    ranks, count = schedule.num_ranks, schedule.num_micro_batches
    number = np.arange(ranks)
    if schedule.builder == "gpipe":
        return np.full(ranks, count - 1), np.zeros(ranks)
    steady = number > ranks - count
    return np.where(steady, count - ranks + number, (count - 1) / 2), steady.astype(np.float64)


def own_path_s(schedule: Schedule, slower_s: Column, both_s: Column) -> Column:
    """Return what ranks add to the paths on which they do more than one micro-batch: [rank, ...].

    Given the slower of F and B, and both with what sends hold. Of a rank that does all its F in a row, then all its B,
    one path has all of these and another all of those.
    """
    alphas, tails = path_weights(schedule)
    path: Column = (alphas * both_s.T).T
    if schedule.builder != "gpipe":
        early = tails == 0
        path[early] = np.maximum(path[early], (schedule.num_micro_batches - 1) * slower_s[early])
    return path


def _own_path_s(frame: Frame, found: Filled) -> Column:
    """Return the same for every option of a rank."""
    slower = np.maximum(found.forward_s, found.input_s + found.weight_s)[:, :, 0]
    return own_path_s(frame.schedule, slower, found.pass_s + frame.hop_s[:, None])


def _only_zero(layers: int, count: int) -> Column:
    found = np.full((layers + 1, count), _NEVER)
    found[0] = 0.0
    return found


def _range_rows(options: Options, sizes: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield every option of a stage: kind, layers of it, layers without, layers together."""
    full = options.full_kind
    for size in sizes:
        yield from ((kind, size, 0, size) for kind in range(len(options.kinds)))
        if full is not None:
            yield from ((full, count, size - count, size) for count in range(1, size))


def _legal(options: Options, schedule: Schedule, kind: Column, dropped: Column, plain: Column) -> Column:
    """Say which options Rules and pins allow, by rank, option and candidate."""
    allowed = options.allowed[kind] & ((plain == 0)[:, None] | options.allowed[options.plain_kind])
    if options.recompute is None:
        return allowed[None]
    pinned = options.recompute * (schedule.num_stages if len(options.recompute) == 1 else 1)
    rows: list[tuple[int, int, int]] = list(zip(kind.tolist(), dropped.tolist(), plain.tolist(), strict=True))
    same = [
        [
            options.kinds[one] == own.kinds[0] and (rest == 0 if own.num_layers is None else some == own.num_layers)
            for one, some, rest in rows
        ]
        for own in pinned
    ]
    return allowed[None] & np.array(same)[:, :, None]
