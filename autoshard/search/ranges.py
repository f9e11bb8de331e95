"""Which layers each stage gets and what it recomputes: the best of all ways, for many candidates that share a schedule.

Where a schedule's makespan has a closed form (GPipe and 1F1B) all ranges of layers are searched, by dynamic programming
over the stages. Its value is a lower bound: beside the micro-batch that passes all stages, every rank lies on paths
through the schedule on which it does several more (``path_weights``). The best found by it is timed as every plan is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.cost.step import rank_update
from autoshard.cost.update import Turns
from autoshard.schedule.schedule import Schedule
from autoshard.search.chosen import SURE, Chosen, Options
from autoshard.search.fillings import Filled, Fillings, Frame, filled
from autoshard.search.loads import loads_of
from autoshard.search.timed import timed

Column = Any
ALL_RANGES = ("1f1b", "gpipe")  # schedules of which all ranges of layers are searched
_MORE = 2  # layers beyond an even share that a stage may get at first
NEVER = 1e30  # seconds of what does not fit: unlike infinity, nothing times that is nothing


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
class Ways:
    """Ways to fill one rank for one candidate, and what each takes."""

    layers: Column
    option: Column
    both_s: Column  # F and B with its sends
    ahead_s: Column  # F alone
    back_s: Column  # B alone
    update_s: Column  # the step phase of the rank, at least

    def only(self, rows: Column) -> "Ways":
        """Return some of them."""
        return Ways(
            layers=self.layers[rows], option=self.option[rows], both_s=self.both_s[rows],
            ahead_s=self.ahead_s[rows], back_s=self.back_s[rows], update_s=self.update_s[rows],
        )  # fmt: skip


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
    each_s: Column  # [F or B, rank, size, candidate]: each with its sends, at least
    update_s: Column  # [rank, size, candidate]: the step phase of the rank, at least

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
        both = np.minimum(np.take_along_axis(cost, best, axis=1), NEVER) + frame.hop_s[:, None]
        owned = [size for *_, size in rows]
        each = [_least_of_sizes(np.where(fits, own, np.inf), owned, sizes) for own in _each_s(frame, found)]
        return cls(
            frame=frame, options=options, sizes=np.array(sizes), fillings=fillings, filled=found, best=best, fits=fits,
            both_s=both, each_s=np.minimum(each, NEVER), update_s=_update_s(frame, found, best, sizes),
        )  # fmt: skip

    def longest(self, most_s: Column) -> int:
        """Return the most layers of a stage that all micro-batches can pass in this time, for any candidate."""
        least = self.frame.layer.pass_s.min(axis=0)
        counts = most_s / (self.frame.schedule.num_micro_batches * least)
        return int(min(self.options.num_layers, np.max(counts, initial=0.0)))

    def chosen(self, update_s: Column) -> Chosen:
        """Return the way of least bound, timed in full."""
        sums, worst = self.suffixes(slice(None))
        layers = self.options.num_layers
        bound = sums[0][layers] + worst[0][layers]
        found = timed(self.frame, self.fillings, self.filled, self._path(sums, worst), bound < NEVER)
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

    def ways(self, rank: int, candidate: int, *, every: bool) -> "Ways":
        """Return the ways to fill a rank that fit.

        The fastest of each number of layers, with the least that any adds to a path; or every one that no other beats
        in both F and B.
        """
        if not every:
            both = self.both_s[rank, :, candidate]
            fits = np.flatnonzero(both < NEVER)
            ahead, back = self.each_s[:, rank, fits, candidate]
            return Ways(
                layers=self.sizes[fits], option=self.best[rank, fits, candidate], both_s=both[fits], ahead_s=ahead,
                back_s=back, update_s=self.update_s[rank, fits, candidate],
            )  # fmt: skip
        options = np.flatnonzero(self.fits[rank, :, candidate])
        alone = np.array([candidate])
        found, one = self.filled.only(alone), self.frame.only(alone)
        ahead, back = (own[rank, options, 0] for own in _each_s(one, found))
        layers = self.fillings.num_layers[0, options]
        update = self.update_s[rank, np.searchsorted(self.sizes, layers), candidate]
        ways = Ways(
            layers=layers, option=options, both_s=ahead + back, ahead_s=ahead, back_s=back, update_s=update
        )  # fmt: skip
        if self.frame.hides_updates:  # behind more work more traffic hides, so none is beaten
            return ways
        beaten = [bool(np.any(_beats(number, layers, ahead, back))) for number in range(len(options))]
        return ways.only(np.flatnonzero(~np.array(beaten, dtype=bool)))

    def suffixes(self, candidates: slice) -> tuple[list[Column], list[Column]]:
        """Return by stage and number of layers left: the least sum of F and B, and the least worst path."""
        weights, both_s = path_weights(self.frame.schedule), self.both_s[..., candidates]
        alone_s = own_paths_s(self.frame.schedule, self.each_s[..., candidates].max(axis=0), both_s)
        layers, count = self.options.num_layers, both_s.shape[-1]
        sums = [_only_zero(layers, count)]
        worst = [_only_zero(layers, count)]
        for rank in reversed(range(self.frame.schedule.num_ranks)):
            total, path = np.full((2, layers + 1, count), NEVER)
            for number, size in enumerate(self.sizes.tolist()):
                own = both_s[rank, number]
                after, later = sums[0][: layers + 1 - size], worst[0][: layers + 1 - size]
                np.minimum(total[size:], after + own, out=total[size:])
                waiting = weights.both[rank] * own + weights.waits[rank] * after
                here = np.maximum(np.maximum(later, alone_s[rank, number]), waiting)
                np.minimum(path[size:], here, out=path[size:])
            sums.insert(0, total)
            worst.insert(0, path)
        return sums, worst

    def _path(self, sums: list[Column], worst: list[Column]) -> Column:
        """Return the option of each rank on a way whose paths are no worse than the bound, with little work."""
        weights = path_weights(self.frame.schedule)
        alone_s = own_paths_s(self.frame.schedule, self.each_s.max(axis=0), self.both_s)
        columns = np.arange(self.frame.num_candidates)
        left = np.full(self.frame.num_candidates, self.options.num_layers)
        target = worst[0][left, columns] * (1 + SURE)
        chosen: list[Column] = []
        for rank in range(self.frame.schedule.num_ranks):
            own = self.both_s[rank]  # [size, candidate]
            rest = left - self.sizes[:, None]
            kept = np.maximum(rest, 0)
            after, later = sums[rank + 1][kept, columns], worst[rank + 1][kept, columns]
            waiting = weights.both[rank] * own + weights.waits[rank] * after
            path = np.maximum(np.maximum(later, alone_s[rank]), waiting)
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PathWeights:
    """What every rank does on paths through a schedule, beside the micro-batch that passes all stages.

    On one path ``both`` F and B more, and where it ``waits`` those of all later ranks once more; on another ``both`` F
    and B more, and ``one`` F or B more.
    """

    both: Column
    one: Column
    waits: Column


def path_weights(schedule: Schedule) -> PathWeights:
    """Return the weights of GPipe and 1F1B.

    GPipe's ranks do all F in a row, then all B. A rank of 1F1B comes to its steady state once all later ranks have done
    a forward and a backward, and leaves it likewise (``schedule/makespan``); or it does as many F as there are later
    ranks before that, or B after that, while they pass a micro-batch. Where there are too few micro-batches for a
    steady state it does all F in a row, then all B: a path that passes the later ranks has all of these or of those.
    """
    ranks, count = schedule.num_ranks, schedule.num_micro_batches
    later = ranks - 1 - np.arange(ranks)
    if schedule.builder == "gpipe":
        return PathWeights(both=np.full(ranks, count - 1), one=np.zeros(ranks), waits=np.zeros(ranks))
    return PathWeights(
        both=np.maximum(0, count - 1 - later),
        one=np.minimum(count - 1, later),
        waits=(later < count).astype(np.float64),
    )


def own_paths_s(schedule: Schedule, slower_s: Column, both_s: Column) -> Column:
    """Return what ranks add to the path that waits for no later one: [rank, ...].

    Given the slower of F and B, and both, with what sends hold.
    """
    weights = path_weights(schedule)
    return (weights.both * both_s.T).T + (weights.one * slower_s.T).T


def _each_s(frame: Frame, found: Filled) -> tuple[Column, Column]:
    """Return F and B of every option of a rank, with what sends hold."""
    ahead, back = _hops_s(frame)
    return found.forward_s[:, :, 0] + ahead, (found.input_s + found.weight_s)[:, :, 0] + back


def _update_s(frame: Frame, found: Filled, option: Column, sizes: Sequence[int]) -> Column:
    """Return what the step phase of every rank takes at least, by option that it has for each size: [rank, size, ...].

    That depends on how many layers there are, not on what is computed again, but for what hides behind it.
    """
    shape = (frame.schedule.num_ranks, found.pass_s.shape[1], frame.num_candidates)
    ranks, columns = np.arange(shape[0])[:, None, None], np.arange(shape[2])
    weights = {pending: np.broadcast_to(own, shape)[ranks, option, columns] for pending, own in found.weights.items()}
    passes = np.full(option.shape, NEVER)
    blocks = np.array(sizes)[:, None] + loads_of(frame.schedule).ends[:, None, None]
    turns = Turns(num_micro_batches=frame.schedule.num_micro_batches, num_blocks=blocks)
    update = rank_update(frame.question, frame.setting, weights, passes, turns)
    return sum(np.broadcast_to(part, option.shape) for part in update.seconds.values())


def _hops_s(frame: Frame) -> tuple[Column, Column]:
    """Return for how long sending and receiving hold a rank at each F, and at each B: [rank, 1, candidate]."""
    sends, ranks = frame.sends, frame.schedule.num_ranks
    first, last = (np.arange(ranks)[:, None, None] == end for end in (0, ranks - 1))
    receive = np.broadcast_to(sends.receive_s, frame.num_candidates)
    send = np.broadcast_to(sends.held_s, frame.num_candidates) - receive
    return ~first * receive + ~last * send, ~last * receive + ~first * send


def _only_zero(layers: int, count: int) -> Column:
    found = np.full((layers + 1, count), NEVER)
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
