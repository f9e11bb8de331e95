"""Outer points: layouts with every way of running them, each with a lower bound; a solved point is a candidate."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from autoshard.blocks.cutting import Terms
from autoshard.cost.stages import PipelineBlocks
from autoshard.layout.layout import Cutting
from autoshard.plan.candidate import Candidate, even_stages
from autoshard.plan.recompute import Recompute
from autoshard.schedule.builders import builders
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.bound.bounds import bound_seconds, least_bytes, least_held, least_in_flight, states_of
from autoshard.search.bound.legal_space import RunVariant
from autoshard.search.bound.priced_layouts import PricedLayouts, Row
from autoshard.search.bound.space import SIZES
from autoshard.search.bound.whole_layers import slowest_rank_s
from autoshard.search.fill.split_bounds import SplitSearch
from autoshard.search.fill.split_filling import split_bounds
from autoshard.search.fill.split_times import rank_ways
from autoshard.search.fill.stage_filling import Goal, fill_stages
from autoshard.search.fill.stage_options import (
    ALL_RANGES,
    NEVER,
    SURE,
    ChunkLayers,
    RankOptions,
    RankWays,
    StageChoices,
    StageFilling,
    listed_splits,
    not_dominated,
)

SHARPEST = 2
AT_ONCE = 8  # points of a group that are solved together
_BEYOND = 1.05  # times a limit up to which bounds are raised, for those who ask for more than the best later
_SPLIT = 0.3  # of the bubble of 1F1B, under schedules that fill it with weight gradients
_TIE_DIGITS = 9  # times that agree in so many digits count as equal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Points:
    """Points of one variant whose blocks are priced together; once they share a schedule, they are solved together."""

    priced: PricedLayouts
    variant: RunVariant
    rows: Ints  # of what is priced
    variant_rows: Ints  # in the space of the variant
    bound: Floats  # of what is minimised
    rest_s: Floats  # of a step at least, what is no micro-batch's
    schedule: Schedule | None = None
    sharpness: int = 0  # how often the bound was made sharper
    ways: RankWays | None = None  # of ranks, once they are known

    @classmethod
    def of(cls, priced: PricedLayouts, variant: RunVariant, goal: Goal, limit: float = np.inf) -> "Points":
        """Return the points of a variant whose layouts are priced and may fit in memory, each with its bound.

        Bounds are made no sharper than a limit asks for.
        """
        indices = np.flatnonzero(priced.orders == variant.space.base.cp_order)
        number = np.full(int(max(priced.numbers.max(), variant.layouts.max())) + 1, -1)
        number[priced.numbers[indices]] = indices
        variant_rows = np.flatnonzero(number[variant.layouts] >= 0)
        rows, space = number[variant.layouts[variant_rows]], variant.space.only(variant_rows)
        limit = limit if goal.objective == "time" and not goal.effort.exhaustive else 0.0
        bound, rest_s = bound_seconds(priced, rows, space, cast(float, goal.capacity), limit)
        if goal.effort.exhaustive:
            bound = np.zeros(len(rows))
        elif goal.objective == "memory":
            bound = least_bytes(priced, states_of(space.base))[rows]
        points = cls(priced=priced, variant=variant, rows=rows, variant_rows=variant_rows, bound=bound, rest_s=rest_s)
        return points.only(np.isfinite(bound))

    def only(self, selection: Any) -> "Points":
        """Return some of the points."""
        columns = (self.rows, self.variant_rows, self.bound, self.rest_s)
        rows, variant_rows, bound, rest_s = (column[selection] for column in columns)
        ways = None if self.ways is None else self.ways.only(selection)
        return replace(self, rows=rows, variant_rows=variant_rows, bound=bound, rest_s=rest_s, ways=ways)

    @property
    def terms(self) -> Terms:
        """What their blocks are cut under."""
        return self.variant.terms

    @property
    def layouts(self) -> Ints:
        """The numbers of the layouts in the space of the search."""
        return self.priced.numbers[self.rows]

    def by_schedule(self) -> "Iterator[Points]":
        """Yield the points of each schedule as a group."""
        sizes = self.variant.space.only(self.variant_rows).rows
        counts = self.priced.question.workload.global_batch // (sizes["dp"] * sizes["mbs"])
        shapes = np.stack([sizes["pp"], sizes["vp"], counts], axis=1)
        distinct, shape = np.unique(shapes, axis=0, return_inverse=True)
        for index, (pp, vp, count) in enumerate(distinct.tolist()):
            builder = self.variant.space.base.schedule
            schedule = Schedule(builder=builder, num_ranks=pp, num_chunks=vp, num_micro_batches=count)
            yield replace(self.only(shape.reshape(-1) == index), schedule=schedule)

    @property
    def blocks(self) -> PipelineBlocks:
        """Their blocks in the pipeline that they share."""
        assert self.schedule, "points that are timed share a schedule"
        return self.priced.pipeline_blocks(self.rows, self.schedule, self.variant.space.base)

    @property
    def looks_for_splits(self) -> bool:
        """Say whether splits are looked for point by point: each that is found excludes others."""
        assert self.schedule, "points that are solved share a schedule"
        model, base = self.priced.question.model, self.variant.space.base
        differ, builder = bool(model.order), self.schedule.builder
        return builder not in ALL_RANGES and not listed_splits(self.schedule, model.num_layers, base.stages, differ)

    def num_at_once(self, goal: Goal) -> int:
        """Return how many of these points, those with the best bounds, are solved or get sharper bounds together."""
        if self.sharpness == SHARPEST:
            return 1 if self.looks_for_splits else AT_ONCE
        return len(self.rows) if goal.objective == "memory" else AT_ONCE

    @property
    def choices(self) -> StageChoices:
        """The recompute kinds and the splits of layers that the stages of these points may choose from."""
        space, kinds, allowed = self.variant.space, self.priced.kinds, self.variant.allowed[:, self.variant_rows]
        pinned = space.recomputes[0] if len(space.recomputes) == 1 and space.recomputes[0] != (Recompute(),) else None
        if not pinned:  # a row for every kind that is priced
            by_kind = {stages[0]: is_allowed for stages, is_allowed in zip(space.recomputes, allowed, strict=True)}
            allowed = np.array([by_kind.get(kind, np.zeros(len(self.rows), dtype=bool)) for kind in kinds])
            allowed = not_dominated(self.priced.layers, self.rows, allowed, kinds)
        return StageChoices(
            kinds=kinds,
            allowed=allowed,
            num_layers=self.priced.question.model.num_layers,
            stages=space.base.stages,
            recompute=pinned,
            ways=self.ways,
            differ=bool(self.priced.question.model.order),
        )

    def solved(self, goal: Goal, below: float, splits: SplitSearch | None = None) -> StageFilling:
        """Return the best filling of the stages of each point; only fillings below ``below`` are searched."""
        least = self.bound if goal.objective == "time" else 0.0
        return fill_stages(self.blocks, self.choices, goal, (least, below), self.rest_s, splits)

    def evenly_solved(self, goal: Goal) -> StageFilling:
        """Return the fastest recompute of each point whose stages share the layers evenly; its bound is not one."""
        blocks, choices = self.blocks, self.choices
        even = choices.stages or even_stages(choices.num_layers, blocks.schedule.num_stages)
        options = RankOptions.of(blocks, choices, ChunkLayers.of_splits(blocks, [even]), goal.capacity)
        fits = np.flatnonzero(options.least_s.max(axis=(0, 1)) < NEVER)
        filling = StageFilling.nothing(blocks.schedule.num_stages, np.full(len(self.rows), np.inf))
        return filling.with_columns(fits, options.timed(options.best[:, 0, fits], fits)) if len(fits) else filling

    def sharpened(self, goal: Goal, below: float, splits: SplitSearch) -> "Points":
        """Return the points with bounds that count activations in flight or, the next time, the schedule's waits."""
        if goal.effort.exhaustive:
            return replace(self, sharpness=SHARPEST)
        blocks, choices = self.blocks, self.choices
        if goal.objective == "memory":
            held = least_held(blocks, cast(float, goal.capacity))
            return replace(self, sharpness=SHARPEST, bound=np.maximum(self.bound, held))
        if not self.sharpness:
            capacity, bound = cast(float, goal.capacity), self.bound
            if len(blocks.layers) > 1:  # what any layer takes at least may be little of what most take
                bound = np.maximum(bound, least_in_flight(blocks, self.rest_s, capacity))
            if len(choices.recompute or ()) < 2:
                slowest_s = slowest_rank_s(blocks, choices.kinds, capacity, _BEYOND * below)
                bound = np.maximum(bound, (slowest_s + self.rest_s + blocks.fixed_s) * (1 - SURE))
            found_by_filling = choices.listed_splits(blocks.schedule) or blocks.schedule.builder in ALL_RANGES
            return replace(self, sharpness=SHARPEST if found_by_filling else 1, bound=np.maximum(self.bound, bound))
        if choices.ways is None:
            choices = replace(choices, ways=rank_ways(blocks, choices, np.broadcast_to(goal.capacity, len(self.rows))))
        bound = split_bounds(blocks, choices, (below, self.rest_s + blocks.fixed_s), splits)
        return replace(self, sharpness=SHARPEST, bound=np.maximum(self.bound, bound), ways=choices.ways)


def likely_s(group: Points) -> float:
    """Return the least likely seconds of points that share a schedule."""
    return float(likely_each_s(group).min(initial=np.inf))


def likely_each_s(group: Points) -> Floats:
    """Return the bounds of points that share a schedule, with the bubble that 1F1B would have, or a part of that."""
    schedule = group.schedule
    assert schedule, "the points of a group share a schedule"
    waits = schedule.num_chunks * schedule.num_micro_batches
    bubble = (schedule.num_ranks - 1) / waits * (_SPLIT if builders()[schedule.builder].splits else 1.0)
    return group.bound * (1 + bubble)


def likeliest(points: Iterable[Points]) -> list[tuple[Points, bool]]:
    """Return points in groups that share a schedule, the likeliest first; say if a group is the first of its kind.

    Schedules of the same builder and number of ranks are of the same kind.
    """
    groups = sorted((group for variant in points if len(variant.rows) for group in variant.by_schedule()), key=likely_s)
    kinds = [(group.schedule.builder, group.schedule.num_ranks) for group in groups if group.schedule]
    return [(group, kinds.index(kind) == index) for index, (group, kind) in enumerate(zip(groups, kinds, strict=True))]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """An outer point with the best filling of its stages, and its value."""

    layout: int
    point: Points  # this one alone
    filling: StageFilling
    value: float  # of what is minimised

    @property
    def row(self) -> Row:
        """The layout, and the terms under which it is cut."""
        return self.point.variant.terms, self.layout

    @property
    def cutting(self) -> Cutting:
        """How its blocks are cut."""
        return self.point.priced.cutting(int(self.point.rows[0]))

    @property
    def order(self) -> tuple[float, ...]:
        """Return its sort key: by value and time, then by memory, then by its sizes and choices."""
        space, row = self.point.variant.space, int(self.point.variant_rows[0])
        base = space.base
        values = (float(f"{number:.{_TIE_DIGITS}g}") for number in (self.value, float(self.filling.time_s[0])))
        sizes = (space.rows[key][row] for key in (*SIZES, "vp"))
        sp_off, order, ring = space.sp is False, base.cp_order == "contiguous", base.cp_kind == "ring"
        choices = (sp_off, base.zero != 1, base.zero, base.zero_group or 0, not order, not ring)
        return (*values, float(self.filling.peak_bytes[0]), *map(float, (*sizes, *choices)))

    @property
    def candidate(self) -> Candidate:
        """The point with its stages, in text."""
        candidate = self.point.variant.space.candidate(int(self.point.variant_rows[0]), 0)
        stages = self.filling.stages(0)
        uneven = stages != even_stages(sum(stages), len(stages))
        recompute = self.filling.recompute(0, self.point.priced.kinds)
        return replace(candidate, stages=stages if uneven else None, recompute=recompute)
