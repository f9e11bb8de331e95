"""The kinds of mesh of a space: their layouts are cut and priced without recompute, one kind after the other."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from autoshard.blocks.cutting import Terms
from autoshard.errors import InputError
from autoshard.layout.layout import Cutting
from autoshard.layout.pin import Pin
from autoshard.plan.candidate import CpOrder
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.bound.legal_space import LegalSpace, RunVariant
from autoshard.search.bound.priced_layouts import ByOrder, LayoutPricer
from autoshard.search.bound.records import PointRecords
from autoshard.search.bound.uncut import uncut_seconds
from autoshard.search.bound.unsolved import PlainPoints
from autoshard.search.fill.stage_filling import Goal

_FIRST = 64  # layouts of the first kind that are priced before all others, as they give a limit
_FAR = 1.15  # times a limit: further than all that is looked at beside the fastest
_STEP = 0.125  # of powers of two, to which limits are rounded up


class MeshKinds:
    """The layouts of a space by the kind of their mesh, under each choice of terms; ``unpriced`` kinds wait."""

    def __init__(self, pricer: LayoutPricer, legal: LegalSpace, goal: Goal, pins: tuple[Pin, ...]) -> None:
        self._pricer, self._legal, self._goal, self._pins = pricer, legal, goal, pins
        self.variants: dict[Terms, list[RunVariant]] = defaultdict(list)
        for variant in legal.variants:
            self.variants[variant.terms].append(variant)
        self.cuttings: list[tuple[Terms, Cutting, Ints]] = []  # with the layouts that they serve
        self.refused: list[InputError] = []  # why the blocks of kinds cannot be cut
        self.unpriced: list[tuple[Terms, Ints]] = []
        self.least_left = np.inf  # bound of the layouts that were left uncut because they take far too long
        self._layouts: dict[tuple[Terms, CpOrder | None], Ints] = {}

    def queue_all(self, rough_s: Floats) -> None:
        """Let all kinds wait for a price, first the kind of the layout that looks fastest."""
        self.unpriced = [
            (terms, layouts)
            for terms in self.variants
            for layouts in self._pricer.kinds(self.layouts(terms), pinned=bool(self._pins))
        ]
        self.unpriced.sort(key=lambda kind: float(rough_s[kind[1]].min()))
        if self.unpriced and self._leaves_some and self._is_timed and len(self.unpriced[0][1]) > 2 * _FIRST:
            terms, layouts = self.unpriced[0]
            order = layouts[np.argsort(rough_s[layouts], kind="stable")]
            self.unpriced[:1] = [(terms, np.sort(order[:_FIRST])), (terms, np.sort(order[_FIRST:]))]

    @property
    def _leaves_some(self) -> bool:
        return not self._pins and not self._goal.effort.exhaustive

    @property
    def _is_timed(self) -> bool:
        return self._goal.objective == "time"

    def price_next(self, limit_s: float, records: PointRecords) -> list[PlainPoints]:
        """Find the cuttings of the layouts of the next kind, and price these, but those far beyond a limit."""
        terms, layouts = self.unpriced[0]
        plain: list[PlainPoints] = []
        if self._leaves_some:
            layouts = self._near(terms, layouts, limit_s if self._is_timed else math.inf, records)
        try:
            cuttings = self._pricer.cuttings(layouts, self.pinned(terms), self._goal.effort.gap) if len(layouts) else ()
            plain = self.priced(terms, cuttings) if cuttings else []
        except InputError as fault:  # pins, or dims that stay whole, may leave a kind no way to cut its blocks
            if not self._pins and self._pricer.question.model.traced is None:
                raise
            self.refused.append(fault)
            for variant in self.variants[terms]:
                records.bound_layouts(variant, layouts)
        del self.unpriced[0]
        return plain

    def _near(self, terms: Terms, layouts: Ints, limit_s: float, records: PointRecords) -> Ints:
        """Return the layouts that may fit and take less than far beyond a limit, and note that the others were bounded.

        Those without tp and pipeline stay, as one of them is an answer however slow it is. Limits are rounded up, so
        that questions that differ in little have the same layouts, and know their cuttings.
        """
        rows = {key: column[layouts] for key, column in self._legal.space.rows.items()}
        atoms = {atom: column[layouts] for atom, column in self._pricer.meshes.atoms.items()}
        most_s, capacity = _FAR * _rounded_up(limit_s), _rounded_up(float(np.max(self._goal.capacity)))
        meshes = atoms, partial(self._pricer.meshes.ring, layouts=layouts)
        bounds = uncut_seconds(self._pricer.question, terms, rows, meshes, capacity)
        far = (bounds >= most_s) & (np.isinf(bounds) | (rows["tp"] * rows["pp"] > 1))
        beyond = far & np.isfinite(bounds)
        self.least_left = min(self.least_left, float(bounds[beyond].min(initial=np.inf)))
        for variant in self.variants[terms]:
            records.bound_layouts(variant, layouts[beyond])
        return layouts[~far]

    def priced(self, terms: Terms, cuttings: Sequence[tuple[Cutting, Ints]]) -> list[PlainPoints]:
        """Price the blocks of layouts as their cuttings have them, without recompute."""
        self.cuttings += [(terms, cutting, served) for cutting, served in cuttings]
        variants = self.variants[terms]
        base = replace(self._legal.space.base, cp_kind=terms.cp_kind)
        space = replace(self._legal.space, base=base, sp=variants[0].space.sp)
        orders: list[CpOrder] = sorted({variant.space.base.cp_order for variant in variants})
        served: list[tuple[Cutting, ByOrder]] = [
            (cutting, {order: np.intersect1d(layouts, self.layouts(terms, order)) for order in orders})
            for cutting, layouts in cuttings
        ]
        parts = self._pricer.priced(space, served, apart=bool(self._pins))
        return PlainPoints.of(parts, self._pricer.joined(parts), variants, self._goal)

    def priced_as(self, larger: "MeshKinds") -> list[PlainPoints]:
        """Price the layouts of this space with the cuttings that they have in a larger one."""
        plain: list[PlainPoints] = []
        for terms, cutting, layouts in larger.cuttings:
            common = np.intersect1d(layouts, self.layouts(terms)) if terms in self.variants else layouts[:0]
            plain += self.priced(terms, [(cutting, common)]) if len(common) else []
        return plain

    def pinned(self, terms: Terms) -> Terms:
        """Return terms with the layouts that are pinned."""
        return replace(terms, pins=self._pins)

    def layouts(self, terms: Terms, order: CpOrder | None = None) -> Ints:
        """Return the layouts of the variants with these terms, or of those with one order of the sequence over cp."""
        if (terms, order) not in self._layouts:  # asked for each cutting
            parts = [run.layouts for run in self.variants[terms] if order in (None, run.space.base.cp_order)]
            self._layouts[terms, order] = np.unique(np.concatenate(parts))
        return self._layouts[terms, order]


def _rounded_up(limit: float) -> float:
    """Return the next of some numbers that are few.

    >>> [round(_rounded_up(limit), 1) for limit in (70.0, 75.0, float("inf"))]
    [76.1, 76.1, inf]
    """
    return 2.0 ** (math.ceil(math.log2(limit) / _STEP) * _STEP) if 0 < limit < math.inf else limit
