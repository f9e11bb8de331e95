"""The most even of equal splits of layers over stages.

Where ranks have several stages, a step hardly depends on how many layers of a rank each of its stages has, so a search
finds any of many splits that take equally long and hold equally much. Of these the most even one is shown: the least
difference between the largest and the smallest stage, then the least sum of squares, then the first in order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice, product

import numpy as np

from autoshard.plan.recompute import Recompute
from autoshard.schedule.counts import counts_of
from autoshard.schedule.waves import Ints
from autoshard.search.bound.points import Solution
from autoshard.search.fill.stage_filling import Goal
from autoshard.search.fill.stage_options import (
    NEVER,
    SURE,
    ChunkLayers,
    RankOptions,
    Split,
    StageChoices,
    StageFilling,
)

EXACT = 1e-9  # relative: times and bytes that differ by less count as equal
_MOST = 512  # splits that are tried one by one, the most even ones first
_AT_ONCE = 128  # of these are timed together
_ENDS = 3  # largest and smallest stages between which layers are moved
_MOST_MOVES = 64


def unevenness(split: Split) -> tuple[int, int, Split]:
    """Return the place of a split in the order of evenness, the most even first.

    >>> unevenness((7, 8, 9, 8)) < unevenness((7, 6, 11, 8))
    True
    """
    return max(split) - min(split), sum(size * size for size in split), split


def evened(solution: Solution, goal: Goal, slack: float = EXACT) -> Solution:
    """Return a solution with the most even split that takes no longer and holds no more, as far as is looked.

    Times that differ by less than a relative ``slack`` count as equal.
    """
    point, filling, split = solution.point, solution.filling, solution.filling.stages(0)
    choices, schedule = point.choices, point.blocks.schedule
    if choices.listed_splits(schedule) or unevenness(split)[0] == 0:
        return solution
    same_kinds = _kept_choices(choices, filling)
    capacity = min(float(np.min(goal.capacity)), float(filling.peak_bytes[0]) * (1 + EXACT))
    below_s = float(filling.time_s[0]) * (1 + slack)

    def first_of(splits: Sequence[Split]) -> StageFilling | None:
        """Return the first of some splits that is no worse."""
        options = RankOptions.of(
            point.blocks, same_kinds, ChunkLayers.of_splits(point.blocks, splits), capacity * (1 + SURE)
        )
        fits = np.flatnonzero(options.least_s[..., 0].max(axis=0) < NEVER)
        timed = options.timed(options.best[:, fits, 0], np.zeros_like(fits)) if len(fits) else filling
        good = np.flatnonzero(timed.time_s <= below_s)
        return timed.only(good[:1]) if len(fits) and len(good) else None

    stages = counts_of(schedule).stages
    best = _first_even(split, stages, first_of) or filling
    for _ in range(_MOST_MOVES):
        moved = _moves(best.stages(0), stages)
        improved = first_of(moved) if moved else None
        if improved is None:
            break
        best = improved
    if best is filling:
        return solution
    best = replace(best, bound=np.minimum(filling.bound, best.time_s))
    return replace(solution, filling=best, value=float(goal.value(best)[0]))


def _kept_choices(choices: StageChoices, filling: StageFilling) -> StageChoices:
    """Return the choices that keep the kinds of recompute of a filling."""
    used = np.zeros(len(choices.kinds), dtype=bool)
    used[[number for number, kind in enumerate(choices.kinds) if kind == Recompute()]] = True
    used[filling.kind[:, 0][filling.recomputed[:, 0] > 0]] = True
    partly = bool(((filling.recomputed > 0) & (filling.plain > 0)).any())
    allowed = choices.allowed if choices.recompute else choices.allowed & used[:, None]
    return replace(choices, allowed=allowed, partly=choices.partly and partly)


def _first_even(
    split: Split, stages: Ints, first_of: Callable[[Sequence[Split]], StageFilling | None]
) -> StageFilling | None:
    """Try all more even splits of the layers of each rank over its stages, as long as these are few."""
    tried = iter(more_even(split, stages, _MOST))
    while splits := list(islice(tried, _AT_ONCE)):
        filling = first_of(splits)
        if filling:
            return filling
    return None


def more_even(split: Split, stages: Ints, most: int) -> Iterator[Split]:
    """Yield splits that are more even, with as many layers on each rank, the most even first; not many more than most.

    ``stages`` are those of each rank.

    >>> list(more_even((7, 6, 11, 8), np.array([[0, 3], [1, 2]]), 100))[:2]
    [(7, 8, 9, 8), (7, 9, 8, 8)]
    """
    limit, count = unevenness(split), 0
    ranks: list[list[int]] = stages.tolist()
    totals = [sum(split[stage] for stage in rank) for rank in ranks]
    order: list[int] = stages.reshape(-1).argsort().tolist()
    for spread in range(limit[0] + 1) if stages.shape[1] > 1 else ():
        places: list[tuple[int, int, Split]] = []
        for low in range(1, min(totals) // stages.shape[1] + 1):
            parts = [_parts(total, stages.shape[1], low, low + spread) for total in totals]
            count += int(np.prod([float(len(ways)) for ways in parts]))
            if count > most:
                return
            for ways in product(*parts):
                flat = [size for way in ways for size in way]
                if min(flat) == low and max(flat) == low + spread:
                    places.append(unevenness(tuple(flat[place] for place in order)))
        yield from (entry[2] for entry in sorted(places) if entry < limit)


@lru_cache(maxsize=1024)
def _parts(total: int, count: int, low: int, high: int) -> tuple[Split, ...]:
    """List all ways to write a total as so many numbers in a range, at most a little more than are tried.

    >>> _parts(5, 2, 2, 3)
    ((2, 3), (3, 2))
    """
    if count == 1:
        return ((total,),) if low <= total <= high else ()
    if not count * low <= total <= count * high:
        return ()
    ways: list[Split] = []
    for first in range(low, high + 1):
        ways += [(first, *rest) for rest in _parts(total - first, count - 1, low, high)]
        if len(ways) > _MOST:
            break
    return tuple(ways)


def _moves(split: Split, stages: Ints) -> list[Split]:
    """List more even splits in which one stage gives a layer to another, of its rank or among the ends of all."""
    groups: list[list[int]] = [*stages.tolist(), list(range(len(split)))]
    splits: set[Split] = set()
    for group in groups:
        by_size = sorted(group, key=split.__getitem__)
        for target, source in product(by_size[:_ENDS], by_size[-_ENDS:]):
            if split[source] - split[target] > 1:
                moved = list(split)
                moved[source], moved[target] = split[source] - 1, split[target] + 1
                splits.add(tuple(moved))
    return sorted((even_split for even_split in splits if unevenness(even_split) < unevenness(split)), key=unevenness)
