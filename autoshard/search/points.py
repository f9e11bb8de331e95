"""Outer points: layouts with everything that they can be run as, each with a bound on what it takes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.blocks.cutting import Terms
from autoshard.plan.candidate import CpOrder, Zero
from autoshard.plan.recompute import Recompute
from autoshard.schedule.schedule import Schedule
from autoshard.search.bounds import Ideal
from autoshard.search.chosen import Options
from autoshard.search.families import Family
from autoshard.search.fillings import Frame
from autoshard.search.variants import Variant

Column = Any
Bound = Callable[[Ideal, str, Column, Column, Column, float], Column]  # as ``Goal.bound``


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Legal:
    """A variant with what the Rules allow of it: truth values by row and kind of recompute."""

    variant: Variant
    allowed: Column

    @property
    def terms(self) -> Terms:
        """Under what its blocks are cut; with tp 1 it makes no difference whether tp cuts the sequence."""
        space = self.variant.space
        return Terms(
            engine=space.engine,
            sequence_parallel=space.sp is not False,
            cp_kind=space.base.cp_kind,
            between=space.base.boundary,
        )

    @property
    def cp_order(self) -> CpOrder:
        """The order of the sequence over cp."""
        return self.variant.space.base.cp_order

    @property
    def zero(self) -> Zero:
        """Which states are spread over dp."""
        return self.variant.space.base.zero

    @property
    def builder(self) -> str:
        """What makes the schedule."""
        return self.variant.space.base.schedule

    def only(self, rows: Column) -> "Legal":
        """Return some rows."""
        space, layouts = self.variant.space.keep(rows), self.variant.layouts[rows]
        return Legal(variant=Variant(space=space, layouts=layouts), allowed=self.allowed[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Points of one family and variant that share their pipeline: they are priced together."""

    family: Family
    legal: Legal
    schedule: Schedule
    rows: Column  # of the family
    places: Column  # rows of the variant
    allowed: Column  # [kind of recompute, point]: what the Rules allow
    bound: Column  # of what is minimised
    rest_s: Column  # of a step at least, what is no micro-batch's
    sharp: bool = False  # whether each bound is as good as it gets without solving

    def only(self, some: Column) -> "Group":
        """Return some of its points."""
        return replace(
            self,
            rows=self.rows[some],
            places=self.places[some],
            allowed=self.allowed[:, some],
            bound=self.bound[some],
            rest_s=self.rest_s[some],
        )

    @property
    def layouts(self) -> Column:
        """The numbers of the points' layouts."""
        return self.family.layouts[self.rows]

    def frame(self) -> Frame:
        """Return what its points' blocks take and hold."""
        return self.family.frame(self.rows, self.schedule, self.legal.zero)

    def options(self) -> Options:
        """Return what its points' stages may choose from."""
        space, pinned = self.legal.variant.space, _pinned(self.family, self.legal)
        return Options(
            kinds=self.family.kinds,
            allowed=self.allowed,
            num_layers=self.family.question.model.num_layers,
            stages=space.base.stages,
            recompute=pinned,
        )


def groups(ideal: Ideal, legal: Legal, bound: Bound, below: float) -> tuple[list[Group], Column, float]:
    """Part the points of a family and a variant into groups, each point with its bound.

    Beside them return which rows of the variant this is about, and the least bound of those that are no better than
    ``below``, which are left out.
    """
    variant, family = legal.variant, ideal.family
    number = np.full(int(max(family.layouts.max(), variant.layouts.max())) + 1, -1)
    number[family.layouts] = np.arange(len(family.layouts))
    places = np.flatnonzero(number[variant.layouts] >= 0)
    rows, chunks = number[variant.layouts[places]], variant.space.rows["vp"][places]
    allowed = _allowed(family, legal, places)
    least = bound(ideal, legal.builder, rows, chunks, allowed, below)
    left = float(least[np.isfinite(least) & (least >= below)].min(initial=np.inf))
    some = np.flatnonzero(least < below)
    ranks, counts = ideal.num_ranks[rows[some]], ideal.counts[rows[some]]
    shapes, shape = np.unique(np.stack([ranks, chunks[some], counts], axis=1), axis=0, return_inverse=True)
    found: list[Group] = []
    for index, (pp, vp, count) in enumerate(shapes.tolist()):
        own = some[shape.reshape(-1) == index]
        schedule = Schedule(builder=legal.builder, num_ranks=pp, num_chunks=vp, num_micro_batches=count)
        found.append(
            Group(
                family=family,
                legal=legal,
                schedule=schedule,
                rows=rows[own],
                places=places[own],
                allowed=allowed[:, own],
                bound=least[own],
                rest_s=ideal.update_s[rows[own]],
            )
        )
    return found, places[np.isfinite(least)], left


def _pinned(family: Family, legal: Legal) -> tuple[Recompute, ...] | None:
    """Return what every stage has to compute again, if that is pinned."""
    recomputes = legal.variant.space.recomputes
    return recomputes[0] if len(recomputes) == 1 and recomputes[0] != (family.kinds[0],) else None


def _allowed(family: Family, legal: Legal, places: Column) -> Column:
    """Return which kinds of recompute some rows of a variant may use: [kind, row]."""
    allowed = legal.allowed[places].T
    if _pinned(family, legal) is not None:
        return np.repeat(allowed[:1], len(family.kinds), axis=0)
    known = {stages[0]: number for number, stages in enumerate(legal.variant.space.recomputes)}
    found = np.zeros((len(family.kinds), len(places)), dtype=bool)
    for number, kind in enumerate(family.kinds):
        if kind in known:
            found[number] = allowed[known[kind]]
    return found
