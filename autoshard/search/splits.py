"""Near-even splits of the layers over stages, for schedules whose best one no closed form would find."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard.plan.recompute import Recompute
from autoshard.plan.stages import even_stages
from autoshard.schedule.schedule import Schedule
from autoshard.search.chosen import SURE, Chosen, Options, best_of
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
    """Try the splits of the list, each rank with the recompute that takes it least time of those that fit it."""
    schedule = frame.schedule
    pinned = None if options.stages is None else (options.stages,)
    found: Chosen | None = None
    for split in pinned or splits(options.num_layers, schedule.num_stages):
        limit = np.full(frame.num_candidates, below_s) if found is None else np.minimum(below_s, found.time_s)
        one = _split(frame, options, split, limit, capacity)
        found = one if found is None else best_of([found, one])
    assert found, "there is a split"
    return found


def quickest_listed_s(frame: Frame, options: Options, capacity: float) -> Column:
    """Return what the micro-batches of every candidate take at least, whichever split of the list they have."""
    pinned = None if options.stages is None else (options.stages,)
    listed = pinned or splits(options.num_layers, frame.schedule.num_stages)
    return np.min([_quickest_s(frame, options, split, capacity) for split in listed], axis=0)


def smallest_listed(frame: Frame, options: Options, capacity: float) -> Chosen:
    """Find for every candidate the split of the list whose fullest rank holds least."""
    pinned = None if options.stages is None else (options.stages,)
    listed = pinned or splits(options.num_layers, frame.schedule.num_stages)
    found = [_smallest_split(frame, options, split, capacity) for split in listed]
    order: list[int] = np.array([one.peak_bytes for one in found]).argmin(axis=0).tolist()
    return Chosen.side_by_side([found[number].only(np.array([place])) for place, number in enumerate(order)])


def _split(frame: Frame, options: Options, split: Sequence[int], below_s: Column, capacity: float) -> Chosen:
    """Time one split, where it may take less; the bound is what it takes at least."""
    quick = _quickest_s(frame, options, split, capacity)
    if np.all(quick >= below_s):
        return Chosen.nothing(frame.schedule, quick)
    fillings, legal = fillings_of(frame.schedule, options, split)
    found = filled(frame, fillings)
    cost = np.where(legal & (found.peak_bytes <= capacity), found.pass_s, np.inf)
    option = cost.argmin(axis=1)
    least = np.where(np.isfinite(cost.min(axis=1)).all(axis=0), _least_s(frame, found, option), np.inf)
    worth = np.flatnonzero(least < below_s)
    nothing = Chosen.nothing(frame.schedule, least)
    if not len(worth):
        return nothing
    done = timed(frame.only(worth), fillings, found.only(worth), option[:, worth], np.ones(len(worth), dtype=bool))
    return nothing.where(worth, done)


def _smallest_split(frame: Frame, options: Options, split: Sequence[int], capacity: float) -> Chosen:
    fillings, legal = fillings_of(frame.schedule, options, split)
    found = filled(frame, fillings)
    least = np.where(legal, found.peak_bytes, np.inf)
    option = least.argmin(axis=1)
    ok = (least.min(axis=1) <= capacity).all(axis=0) & np.isfinite(least.min(axis=1)).all(axis=0)
    done = timed(frame, fillings, found, option, ok)
    return replace(done, bound_s=done.peak_bytes)


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


def _quickest_s(frame: Frame, options: Options, split: Sequence[int], capacity: float) -> Column:
    """Return what the slowest rank takes at least, each with the fastest recompute that may fit.

    Cheaper than to price every option, and never slower: a rank keeps no less than its smallest chunk as often as it
    keeps any.
    """
    schedule, layer = frame.schedule, frame.layer
    ranks, places = schedule.num_ranks, loads_of(schedule).ranks
    layers, least = np.zeros(ranks), np.full(ranks, np.inf)
    np.add.at(layers, places, split)
    np.minimum.at(least, places, split)
    flight, before_last = loads_of(schedule).flight, np.arange(ranks) != places[-1]
    saved = (flight * least)[:, None, None] * layer.saved_bytes
    kept = saved + layers[:, None, None] * states_bytes(frame, layer)
    fits = kept + before_last[:, None, None] * layer.moment_bytes <= capacity
    alike = np.where(fits, layer.pass_s, np.inf).min(axis=1)
    passes = np.minimum(alike, _mixed_s(kept, layer.pass_s, options, capacity))
    busy = layers[:, None] * passes + frame.hop_s
    busy[places[-1]] += frame.head.pass_s[0]
    return schedule.num_micro_batches * busy.max(axis=0) * (1 - SURE)


def _mixed_s(kept: Column, passes: Column, options: Options, capacity: float) -> Column:
    """Return what a layer takes on average if as few as may fit are computed again in full, by rank and candidate."""
    plain, full = options.plain_kind, options.full_kind
    if full is None:
        return np.inf
    over = np.maximum(0.0, kept[:, plain] - capacity)
    share = over / np.maximum(kept[:, plain] - kept[:, full], 1e-9)
    return np.where(share <= 1, passes[plain] + share * np.maximum(0.0, passes[full] - passes[plain]), np.inf)


def _least_s(frame: Frame, found: Filled, option: Column) -> Column:
    """Return what a step takes at least: a rank does all that it has to do after the first F and before the last B."""
    schedule = frame.schedule
    ranks, candidates = np.arange(schedule.num_ranks)[:, None], np.arange(frame.num_candidates)
    busy = found.pass_s[ranks, option, candidates] + frame.hop_s
    chunk = loads_of(schedule).stages.argmin(axis=1)[:, None]  # of the lowest stage
    passes = found.forward_s[ranks, option, chunk, candidates]
    if not schedule.splits_backward:
        passes = passes + (found.input_s + found.weight_s)[ranks, option, chunk, candidates]
    ahead = np.cumsum(passes, axis=0) - passes
    return (ahead + schedule.num_micro_batches * busy).max(axis=0) * (1 - SURE)
