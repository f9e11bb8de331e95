"""Candidates whose layers have few splits over their stages: every split is timed, so that none is left open."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np

from autoshard.cost.stages import PipelineBlocks
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.fill.stage_options import (
    NEVER,
    SURE,
    ChunkLayers,
    Effort,
    RankOptions,
    StageChoices,
    StageFilling,
)

_EXACT = 1e-9  # relative: a gap that is no gap


def fill_few(
    blocks: PipelineBlocks,
    choices: StageChoices,
    capacity: Floats,
    effort: Effort,
    limits: tuple[float, Floats],
    filling: StageFilling,
) -> StageFilling:
    """Return fillings in which candidates with few splits and too wide a gap have the fastest split of all.

    ``limits`` are the seconds below which a filling is wanted, and the least time of a step beside its micro-batches.
    """
    num_layers, num_stages = choices.num_layers, blocks.schedule.num_stages
    if effort.gap >= 1.0 or math.comb(num_layers - 1, num_stages - 1) > effort.most_splits:
        return filling
    limits_s = np.minimum(limits[0], filling.time_s)
    wanted_s = np.minimum(limits[0] * (1 - _EXACT), filling.time_s * (1 - max(effort.gap, _EXACT)))
    splits = _all_splits(num_layers, num_stages)
    for number in np.flatnonzero(filling.bound < wanted_s).tolist():
        column, limit_s = np.array([number]), float(limits_s[number])
        options, divisions = _priced(blocks.only(column), choices.only(column), capacity[column], splits)
        best = _fastest(options, divisions, filling.only(column), (limit_s, float(limits[1][number])))
        filling = filling.with_columns(column, best)
    return filling


def _fastest(options: RankOptions, divisions: Ints, filling: StageFilling, limits: tuple[float, float]) -> StageFilling:
    """Return the fastest of a filling and of all splits, with the bound of all; a rank has ``divisions`` in a split."""
    (limit_s, rest_s), schedule = limits, options.blocks.schedule
    slowest_s = np.take_along_axis(options.least_s[..., 0], divisions, axis=1).max(axis=0)
    least_s = (schedule.num_micro_batches - 1) * slowest_s + rest_s  # the last message need not be waited for
    near = np.flatnonzero((slowest_s < NEVER) & (least_s < limit_s))
    bound_s = limit_s
    if len(near):
        timed = options.fastest(divisions[:, near], np.zeros_like(near))
        first = timed.only(np.array([int(timed.time_s.argmin())]))
        filling = replace(first, bound=filling.bound) if first.time_s[0] < filling.time_s[0] else filling
        bound_s = min(limit_s, float(timed.bound.min()))
    return replace(filling, bound=np.minimum(np.maximum(filling.bound, bound_s * (1 - SURE)), filling.time_s))


def _all_splits(num_layers: int, num_stages: int) -> Ints:
    """Return all ways to give each stage a layer or more: [split, stage].

    >>> _all_splits(4, 2).tolist()
    [[1, 3], [2, 2], [3, 1]]
    """
    borders = np.array(list(combinations(range(1, num_layers), num_stages - 1)), dtype=np.int64)
    return np.diff(borders, axis=1, prepend=0, append=num_layers)


def _priced(blocks: PipelineBlocks, choices: StageChoices, capacity: Floats, splits: Ints) -> tuple[RankOptions, Ints]:
    """Price each division of layers over the chunks of a rank once; return also which one each split has by rank."""
    chunks, layers = blocks.schedule.num_chunks, ChunkLayers.of_splits(blocks, splits)
    columns = np.concatenate([layers.count, layers.first], axis=2)
    by_rank = [np.unique(rank_columns, axis=0, return_inverse=True) for rank_columns in columns]
    most = max(len(rows) for rows, _ in by_rank)
    table = np.stack([np.pad(rows, ((0, most - len(rows)), (0, 0)), "edge") for rows, _ in by_rank])
    distinct = ChunkLayers(count=table[..., :chunks], first=table[..., chunks:])
    return RankOptions.of(blocks, choices, distinct, capacity), np.stack([number.reshape(-1) for _, number in by_rank])
