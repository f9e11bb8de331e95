"""Near-even splits of the layers over stages, for schedules whose best one no closed form would find."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from autoshard.plan.candidate import even_stages
from autoshard.plan.recompute import Recompute
from autoshard.schedule.schedule import Schedule
from autoshard.search.chosen import SURE, Chosen, Options
from autoshard.search.fillings import Filled, Fillings, Frame, filled, states_bytes
from autoshard.search.loads import loads_of
from autoshard.search.timed import timed

Column = Any
_RELIEVED = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2))  # layers that the first and the last stage give away
MOST_RELIEVED = 2


def splits(num_layers: int, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """List near-even splits: the even one, and those whose ends give layers to the stages between.

    >>> splits(8, 4)
    ((2, 2, 2, 2), (2, 3, 2, 1), (1, 3, 2, 2), (1, 3, 3, 1))
    """
    found: dict[tuple[int, ...], None] = {}
    for first, last in _RELIEVED:
        even = even_stages(num_layers, num_stages)
        ends = (even[0] - first, even[-1] - last)
        if not (first or last):
            found[even] = None
        elif num_stages > 2 and min(ends) >= 1:
            between = even_stages(num_layers - sum(ends), num_stages - 2)
            found[(ends[0], *between, ends[1])] = None
        elif num_stages == 2 and min(even[0] - first + last, even[1] - last + first) >= 1:
            found[even[0] - first + last, even[1] - last + first] = None
    return tuple(found)


def listed_ranges(frame: Frame, options: Options, below_s: float, capacity: float) -> Chosen:
    """Try the splits of the list, each rank with the recompute that takes it least time of those that fit it.

    Only what may take less is timed; the bound is what the others take at least.
    """
    listed, schedule = _listed(frame, options), frame.schedule
    bound = _quickest_s(frame, options, listed, capacity)  # [split, candidate]
    near = np.flatnonzero((bound < below_s).any(axis=1))
    if not len(near):
        return Chosen.nothing(schedule, bound.min(axis=0))
    ways = _Ways.of(frame, options, [listed[number] for number in near.tolist()])
    option, fits = ways.quickest(capacity)
    least = np.where(fits, ways.least_s(option), np.inf)
    times = np.full(least.shape, np.inf)
    split, candidate = np.nonzero(least < below_s)
    found = Chosen.nothing(schedule, bound.min(axis=0))
    if len(split):
        done = ways.timed(option[:, split, candidate], candidate)
        times[split, candidate] = least[split, candidate] = done.time_s
        number = np.zeros(least.shape, dtype=np.int64)
        number[split, candidate] = np.arange(len(split))
        best, tried = times.argmin(axis=0), np.flatnonzero(np.isfinite(times).any(axis=0))
        found = found.where(tried, done.only(number[best[tried], tried]))
    bound[near] = least
    return replace(found, bound_s=bound.min(axis=0))


def quickest_listed_s(frame: Frame, options: Options, capacity: float) -> Column:
    """Return what the micro-batches of every candidate take at least, whichever split of the list they have."""
    return _quickest_s(frame, options, _listed(frame, options), capacity).min(axis=0)


def smallest_listed(frame: Frame, options: Options, capacity: float) -> Chosen:
    """Find for every candidate the split of the list whose fullest rank holds least."""
    ways = _Ways.of(frame, options, _listed(frame, options))
    option, peak = ways.smallest(capacity)
    columns = np.arange(frame.num_candidates)
    best = peak.argmin(axis=0)
    done = timed(frame, ways.fillings, ways.filled, option[:, best, columns], np.isfinite(peak[best, columns]))
    return replace(done, bound_s=done.peak_bytes)


def _listed(frame: Frame, options: Options) -> Sequence[Sequence[int]]:
    """Return the splits that are tried."""
    return splits(options.num_layers, frame.schedule.num_stages) if options.stages is None else (options.stages,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ways:
    """The options of all ranks under several splits, priced side by side."""

    frame: Frame
    fillings: Fillings
    filled: Filled
    legal: Column  # [1, option, candidate]
    spans: Sequence[slice]  # the options of each split

    @classmethod
    def of(cls, frame: Frame, options: Options, listed: Sequence[Sequence[int]]) -> "_Ways":
        """Price them."""
        parts = [_legal_only(*fillings_of(frame.schedule, options, split)) for split in listed]
        ends = np.cumsum([legal.shape[1] for _, legal in parts]).tolist()
        fillings = Fillings.side_by_side([one for one, _ in parts])
        return cls(
            frame=frame,
            fillings=fillings,
            filled=filled(frame, fillings),
            legal=np.concatenate([legal for _, legal in parts], axis=1),
            spans=[slice(low, high) for low, high in pairwise((0, *ends))],
        )

    def quickest(self, capacity: float) -> tuple[Column, Column]:
        """Return by rank, split and candidate the fastest option that fits, and where all ranks have one."""
        cost = np.where(self.legal & (self.filled.peak_bytes <= capacity), self.filled.pass_s, np.inf)
        option, least = self._least(cost)
        return option, np.isfinite(least).all(axis=0)

    def smallest(self, capacity: float) -> tuple[Column, Column]:
        """Return likewise the smallest option, and what the fullest rank then holds; infinite where it does not fit."""
        option, least = self._least(np.where(self.legal, self.filled.peak_bytes, np.inf))
        peak = least.max(axis=0)
        return option, np.where(peak <= capacity, peak, np.inf)

    def _least(self, cost: Column) -> tuple[Column, Column]:
        option = np.stack([span.start + cost[:, span].argmin(axis=1) for span in self.spans], axis=1)
        return option, np.take_along_axis(cost, option, axis=1)

    def least_s(self, option: Column) -> Column:
        """Return what a step takes at least: a rank does all that it has to after the first F and before the last B."""
        frame, found, schedule = self.frame, self.filled, self.frame.schedule
        ranks, candidates = np.arange(schedule.num_ranks)[:, None, None], np.arange(frame.num_candidates)
        chunk = loads_of(schedule).stages.argmin(axis=1)[:, None, None]  # of the lowest stage
        passes = found.forward_s[ranks, option, chunk, candidates]
        if not schedule.splits_backward:
            passes = passes + (found.input_s + found.weight_s)[ranks, option, chunk, candidates]
        ahead = np.cumsum(passes, axis=0) - passes
        busy = found.pass_s[ranks, option, candidates] + frame.hop_s[:, None]
        return (ahead + schedule.num_micro_batches * busy).max(axis=0) * (1 - SURE)

    def timed(self, option: Column, candidates: Column) -> Chosen:
        """Time some ways in full."""
        ok = np.ones(len(candidates), dtype=bool)
        return timed(self.frame, self.fillings, self.filled, option, ok, candidates)


def fillings_of(schedule: Schedule, options: Options, split: Sequence[int]) -> tuple[Fillings, Column]:
    """Return the options of all ranks for given stages, and which of them are legal by candidate."""
    layers = np.array(split)[loads_of(schedule).stages]  # [rank, chunk]
    if options.recompute is not None:
        return _pinned_fillings(schedule, options, layers), options.allowed.all(axis=0)[None, None]
    rows = [(kind, layers, 0 * layers) for kind in range(len(options.kinds))]
    legal = [options.allowed[kind] for kind in range(len(options.kinds))]
    full, plain = options.full_kind, options.plain_kind
    if full is not None:
        for count in range(1, int(layers.max())):
            some = np.minimum(count, layers)
            rows.append((full, some, layers - some))
            legal.append(options.allowed[full] & options.allowed[plain])
    kind = np.array([own for own, _, _ in rows])[None, :, None]
    dropped, rest = (np.stack([row[part] for row in rows], axis=1) for part in (1, 2))
    fillings = Fillings(kind=kind, dropped=dropped, plain=rest, plain_kind=plain)
    return fillings, np.array(legal)[None]


def _legal_only(fillings: Fillings, legal: Column) -> tuple[Fillings, Column]:
    """Leave out options that no candidate may use, if any may be used."""
    some = np.flatnonzero(legal.any(axis=(0, 2)))
    return (fillings.only(some), legal[:, some]) if len(some) else (fillings, legal)


def _pinned_fillings(schedule: Schedule, options: Options, layers: Column) -> Fillings:
    """Return the only option that pinned recompute leaves."""
    pinned = options.recompute or (Recompute(),)
    numbers: list[list[int]] = loads_of(schedule).stages.tolist()
    own = [[pinned[0] if len(pinned) == 1 else pinned[number] for number in row] for row in numbers]
    kind = np.array([[options.kinds.index(one.kinds[0]) for one in row] for row in own])
    wanted = np.array([[layers.max() if one.num_layers is None else one.num_layers for one in row] for row in own])
    dropped = np.minimum(wanted, layers)
    return Fillings(
        kind=kind[:, None], dropped=dropped[:, None], plain=(layers - dropped)[:, None], plain_kind=options.plain_kind
    )


def _quickest_s(frame: Frame, options: Options, listed: Sequence[Sequence[int]], capacity: float) -> Column:
    """Return by split and candidate what the slowest rank takes at least, with the fastest recompute that may fit it.

    Cheaper than to price every option, and never slower: a rank keeps no less than its smallest chunk as often as it
    keeps any. It begins when the stages before its first one have passed a micro-batch, and ends before they do.
    """
    schedule, layer = frame.schedule, frame.layer
    places, shape = loads_of(schedule).ranks, (len(listed), schedule.num_ranks)
    layers, least = np.zeros(shape), np.full(shape, np.inf)
    every = np.arange(len(listed))[:, None]
    np.add.at(layers, (every, places), listed)
    np.minimum.at(least, (every, places), listed)
    flight, before_last = loads_of(schedule).flight, np.arange(schedule.num_ranks) != places[-1]
    saved = (flight * least)[:, :, None, None] * layer.saved_bytes
    kept = saved + layers[:, :, None, None] * states_bytes(frame, layer)
    fits = kept + before_last[:, None, None] * layer.moment_bytes <= capacity
    alike = np.where(fits, layer.pass_s, np.inf).min(axis=2)
    passes = np.minimum(alike, _mixed_s(kept, layer.pass_s, options, capacity))
    busy = layers[:, :, None] * passes + frame.hop_s
    busy[:, places[-1]] += frame.head.pass_s[0]
    return (_ahead_s(frame, listed) + schedule.num_micro_batches * busy).max(axis=1) * (1 - SURE)


def _ahead_s(frame: Frame, listed: Sequence[Sequence[int]]) -> Column:
    """Return by split, rank and candidate what one micro-batch takes at least in the stages before its lowest one."""
    name = "forward_s" if frame.schedule.splits_backward else "pass_s"
    layer, embed = (getattr(block, name) for block in (frame.layer, frame.embed))
    before = np.array([np.cumsum([0, *split])[: frame.schedule.num_ranks] for split in listed])
    ahead = before[:, :, None] * layer.min(axis=0)
    ahead[:, 1:] += embed[0]
    return ahead


def _mixed_s(kept: Column, passes: Column, options: Options, capacity: float) -> Column:
    """Return what a layer takes on average, by split, rank and candidate, if as few as may fit are computed again."""
    plain, full = options.plain_kind, options.full_kind
    if full is None:
        return np.inf
    over = np.maximum(0.0, kept[:, :, plain] - capacity)
    share = over / np.maximum(kept[:, :, plain] - kept[:, :, full], 1e-9)
    return np.where(share <= 1, passes[plain] + share * np.maximum(0.0, passes[full] - passes[plain]), np.inf)
