"""Which layers each stage gets and what it recomputes, for many candidates that share a schedule.

GPipe and 1F1B run one stage per rank: all ranges of layers are searched, by dynamic programming over the ranks, whose
value is a lower bound. Under other schedules paths bound all splits (``split_filling``). Either way each rank has, for
each number of layers, the fastest recompute that fits, and the best filling is timed like every plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from autoshard.cost.stages import PipelineBlocks
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.fill.few_splits import fill_few
from autoshard.search.fill.split_bounds import SplitSearch
from autoshard.search.fill.split_filling import fill_splits, smallest_splits
from autoshard.search.fill.stage_options import (
    ALL_RANGES,
    NEVER,
    SURE,
    ChunkLayers,
    Effort,
    RankOptions,
    Split,
    StageChoices,
    StageFilling,
)

_MORE = 2  # layers beyond an even share that a stage may get at first
PROVEN = Effort(most_splits=100_000, split_s=60.0, tight_s=60.0, most_idle=np.inf, most_changes=20_000, changes_s=2.0)
EVERYTHING = replace(PROVEN, gap=0.0, split_s=np.inf)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PathTables:
    """The least of all fillings, by rank and layers left for it and later ranks: [layers, candidate].

    ``sums`` adds up the ranks. ``longest`` is the longest of some paths through the schedule, which are lower bounds: a
    rank begins when the ranks before it have passed a micro-batch, passes ``weights[..][0]`` of them, and waits
    ``weights[..][1]`` times for one to pass all later ranks.
    """

    weights: Sequence[tuple[Floats, Floats]]
    sums: list[Floats]
    longest: list[Floats]

    @classmethod
    def of(cls, least_s: Floats, ranges: "Ranges", weights: Sequence[tuple[Floats, Floats]]) -> "PathTables":
        """Fill the tables from the last rank to the first, given what each range takes: [rank, division, candidate]."""
        num_layers = ranges.num_layers
        none = np.full((num_layers + 1, least_s.shape[2]), NEVER)
        none[0] = 0.0
        tables = cls(weights=weights, sums=[none], longest=[none])
        for rank in reversed(range(len(least_s))):
            total, path = np.full((2, *none.shape), NEVER)
            for size, divisions in ranges.by_size():  # the more layers are left, the earlier is the first
                stage_s = least_s[rank][divisions[::-1]]
                after, later = tables.sums[0][: num_layers + 1 - size], tables.longest[0][: num_layers + 1 - size]
                np.minimum(total[size:], after + stage_s, out=total[size:])
                np.minimum(path[size:], tables.through(rank, stage_s, after, later), out=path[size:])
            tables.sums.insert(0, total)
            tables.longest.insert(0, path)
        return tables

    def through(self, rank: int, own_s: Floats, after_s: Floats, later_s: Floats) -> Floats:
        """Return the longest path from a rank on, given its time, and the sum and the longest path of later ranks."""
        longest_s = own_s + later_s
        for passes, waits in self.weights:
            longest_s = np.maximum(longest_s, passes[rank] * own_s + waits[rank] * after_s)
        return longest_s


def path_weights(schedule: Schedule) -> list[tuple[Floats, Floats]]:
    """Return how often paths through GPipe and 1F1B pass each rank, and how often they wait for all later ranks.

    GPipe's ranks do all F in a row, then all B. A rank of 1F1B reaches its steady state once all later ranks have
    passed a micro-batch, and leaves it likewise; where there are too few micro-batches for a steady state it does all F
    in a row, then all B, the slower of which are at least half.
    """
    count, later = schedule.num_micro_batches, np.arange(schedule.num_ranks)[::-1].astype(np.float64)
    all_passes, once = np.full(len(later), float(count)), np.ones(len(later))
    if schedule.builder == "gpipe":
        return [(all_passes, once)]
    steady = later < count
    return [(all_passes, 0 * once), (np.where(steady, count - later, (count + 1) / 2), np.where(steady, 2.0, 1.0))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The objective, the memory of a rank, and the effort of the search."""

    objective: Literal["time", "memory"] = "time"
    capacity: Floats | float  # bytes, of all candidates or of each
    effort: Effort = field(default_factory=Effort)

    def value(self, filling: StageFilling) -> Floats:
        """Return the objective of fillings: seconds of a step, or bytes of the fullest rank."""
        return filling.time_s if self.objective == "time" else filling.peak_bytes


def fill_stages(
    blocks: PipelineBlocks,
    choices: StageChoices,
    goal: Goal,
    between: tuple[Floats | float, float],
    rest_s: Floats,
    splits: SplitSearch | None = None,
) -> StageFilling:
    """Return the best filling of each candidate, with a lower bound.

    ``between`` is a known lower bound, and the value below which fillings are searched; ``rest_s`` is the
    least time of a step beside its micro-batches. If memory is the objective, the fastest known of the fillings with
    the least memory is returned.
    """
    least, below = between
    schedule, listed = blocks.schedule, choices.listed_splits(blocks.schedule)
    capacity = np.broadcast_to(goal.capacity, blocks.num_candidates)
    if goal.objective == "memory":
        if not listed and schedule.builder not in ALL_RANGES:
            return smallest_splits(blocks, choices, capacity, below)
        peak = _least_peak(blocks, choices, capacity)
        smallest = Goal(capacity=np.minimum(peak * (1 + SURE), capacity), effort=Effort(gap=1.0))
        return replace(fill_stages(blocks, choices, smallest, (0.0, np.inf), rest_s), bound=peak)
    rest_s = rest_s + blocks.fixed_s
    if schedule.builder in ALL_RANGES and choices.stages is None and schedule.num_ranks > 1:
        filling = _fastest_ranges(blocks, choices, goal, below, rest_s)
        return fill_few(blocks, choices, capacity, goal.effort, (below, rest_s), filling)
    if listed:
        return _fastest_listed(blocks, choices, listed, goal.capacity, (below, rest_s))
    limits = (below, rest_s, np.broadcast_to(least, rest_s.shape))
    filling = fill_splits(blocks, choices, capacity, goal.effort, limits, splits or SplitSearch())
    return fill_few(blocks, choices, capacity, goal.effort, (below, rest_s), filling)


def _fastest_listed(
    blocks: PipelineBlocks,
    choices: StageChoices,
    splits: Sequence[Split],
    capacity: Floats | float,
    limits: tuple[float, Floats],
) -> StageFilling:
    """Return the fastest filling of each candidate with one of these splits.

    ``limits`` are the seconds below which a filling is wanted, and the least time of a step beside its micro-batches.
    """
    schedule, bound = blocks.schedule, np.full(blocks.num_candidates, np.inf)
    options = RankOptions.of(blocks, choices, ChunkLayers.of_splits(blocks, splits), capacity)
    if schedule.num_ranks == 1 and options.fits.any():
        option, number = np.nonzero(options.fits[0])
        return _best_of(options.timed(option[None], number), number, bound)
    slowest_s = options.least_s.max(axis=0)
    # The last message need not be waited for.
    least_s = ((schedule.num_micro_batches - 1) * slowest_s + limits[1]) * (1 - SURE)
    division, number = np.nonzero((slowest_s < NEVER) & (least_s >= limits[0]))
    np.minimum.at(bound, number, least_s[division, number])
    division, number = np.nonzero((slowest_s < NEVER) & (least_s < limits[0]))
    if not len(number):
        return StageFilling.nothing(schedule.num_stages, bound)
    timed = options.fastest(np.broadcast_to(division, (schedule.num_ranks, len(number))), number)
    np.minimum.at(bound, number, timed.bound)
    return _best_of(timed, number, bound)


def _best_of(fillings: StageFilling, candidates: Ints, bound: Floats) -> StageFilling:
    """Return the fastest of each candidate's fillings, among equals the first; infinite where it has none."""
    order = np.lexsort((fillings.time_s, candidates))
    first = order[np.flatnonzero(np.diff(candidates[order], prepend=-1))]
    best = StageFilling.nothing(len(fillings.kind), bound)
    for name in ("time_s", "peak_bytes", "kind", "recomputed", "plain"):
        getattr(best, name)[..., candidates[first]] = getattr(fillings, name)[..., first]
    return replace(best, bound=np.minimum(bound, best.time_s))


def _least_peak(blocks: PipelineBlocks, choices: StageChoices, capacity: Floats) -> Floats:
    """Return the least bytes of the fullest rank of each candidate; infinite where nothing fits."""
    listed = choices.listed_splits(blocks.schedule)
    if listed:
        layers = ChunkLayers.of_splits(blocks, listed)
        return RankOptions.of(blocks, choices, layers, capacity).least_bytes().max(axis=0).min(axis=0)
    ranges = Ranges.of(blocks, range(1, choices.num_layers - blocks.schedule.num_ranks + 2))
    held = RankOptions.of(blocks, choices, ranges.layers, capacity).least_bytes()
    least = np.full((choices.num_layers + 1, held.shape[2]), np.inf)
    least[0] = 0.0
    for rank_bytes in held:
        before, least = least, np.full_like(least, np.inf)
        for size, divisions in ranges.by_size():
            here = np.maximum(before[: choices.num_layers + 1 - size], rank_bytes[divisions])
            np.minimum(least[size:], here, out=least[size:])
    return least[choices.num_layers]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranges:
    """The ranges of layers of some sizes; ranges of the same kinds of layers are one division, in order of size."""

    sizes: Sequence[int]
    num_layers: int
    layers: ChunkLayers  # of each division, on every rank
    numbers: Ints  # [size, place of the first layer]: the division

    @classmethod
    def of(cls, blocks: PipelineBlocks, sizes: Sequence[int]) -> "Ranges":
        """Return the ranges of these sizes of all layers."""
        num_layers, lengths = blocks.order.num_layers, np.array(sizes)[:, None]
        shape = (len(sizes), num_layers)
        if blocks.order.earliest is None:
            kinds, numbers = (
                np.array([sizes, 0 * lengths[:, 0]]),
                np.broadcast_to(np.arange(len(sizes))[:, None], shape),
            )
        else:
            first = np.minimum(np.arange(num_layers), num_layers - lengths)  # none begins behind that
            rows = np.stack([np.broadcast_to(lengths, shape), blocks.order.alike(first, lengths)])
            kinds, numbers = np.unique(rows.reshape(2, -1), axis=1, return_inverse=True)
        wide = np.broadcast_to(kinds[:, None, :, None], (2, blocks.schedule.num_ranks, kinds.shape[1], 1))
        layers = ChunkLayers(count=wide[0], first=wide[1])
        return cls(sizes=sizes, num_layers=num_layers, layers=layers, numbers=numbers.reshape(shape))

    def by_size(self) -> Iterator[tuple[int, Ints]]:
        """Yield each size with the divisions of its ranges, by the place of their first layer."""
        alike = len(self.sizes) == self.layers.count.shape[1]
        for size, numbers in zip(self.sizes, self.numbers, strict=True):
            yield size, numbers[:1] if alike else numbers[: self.num_layers + 1 - size]


def _fastest_ranges(
    blocks: PipelineBlocks, choices: StageChoices, goal: Goal, below_s: float, rest_s: Floats
) -> StageFilling:
    """Bound all ranges of layers, and time the filling of least bound."""
    schedule, num_layers = blocks.schedule, choices.num_layers
    widest = num_layers - schedule.num_ranks + 1
    high = min(widest, -(-num_layers // schedule.num_ranks) + _MORE)
    while True:
        sizes = range(max(1, num_layers - (schedule.num_ranks - 1) * high), high + 1)
        ranges = Ranges.of(blocks, sizes)
        options = RankOptions.of(blocks, choices, ranges.layers, goal.capacity)
        paths = PathTables.of(options.least_s, ranges, path_weights(schedule))
        least = paths.longest[0][num_layers]
        bound = np.where(least < NEVER, (least + rest_s) * (1 - SURE), np.inf)
        near = np.flatnonzero(bound < below_s)
        filling = _best_of(options.timed(_best_path(options, paths, ranges)[:, near], near), near, bound)
        limit = np.minimum(below_s, filling.time_s) - rest_s
        widest_s = options.least_s[:, ranges.numbers[-1].min() :].min(axis=1)
        if high == widest or np.all(schedule.num_micro_batches * widest_s >= limit):
            break
        high = min(widest, 2 * high)
    return filling


def _best_path(options: RankOptions, paths: PathTables, ranges: Ranges) -> Ints:
    """Return each rank's option in a filling of least bound, and of little work among equals: [rank, candidate]."""
    own_s, sizes_of = options.least_s, np.array(ranges.sizes)[:, None]
    columns = np.arange(own_s.shape[2], dtype=np.int64)
    num_left, before_s = np.full(len(columns), len(paths.sums[0]) - 1), np.zeros(len(columns))
    target = paths.longest[0][num_left, columns] * (1 + SURE)
    chosen: list[Ints] = []
    for rank, division_s in enumerate(own_s):
        divisions = ranges.numbers[:, np.minimum(ranges.num_layers - num_left, ranges.num_layers - 1)]
        rank_s = division_s[divisions, columns]
        rest = np.maximum(num_left - sizes_of, 0)
        after, later = paths.sums[rank + 1][rest, columns], paths.longest[rank + 1][rest, columns]
        path = before_s + paths.through(rank, rank_s, after, later)
        number = np.where((path <= target) & (num_left >= sizes_of), rank_s + after, np.inf).argmin(axis=0)
        chosen.append(options.best[rank, divisions[number, columns], columns])
        before_s, num_left = before_s + rank_s[number, columns], rest[number, columns]
    return np.stack(chosen)
