"""The kinds of mesh of a space: their layouts are cut and priced without recompute, one kind after the other."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoshard.blocks.cutting import Terms
from autoshard.errors import InputError
from autoshard.layout.layout import Cutting
from autoshard.layout.pin import Pin
from autoshard.plan.candidate import CpOrder
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.bound.legal_space import LegalSpace, RunVariant
from autoshard.search.bound.priced_layouts import LayoutPricer, PricedLayouts
from autoshard.search.bound.unsolved import PlainPoints
from autoshard.search.fill.stage_filling import Goal


class MeshKinds:
    """The layouts of a space by the kind of their mesh, under each choice of terms; ``unpriced`` kinds wait."""

    def __init__(self, pricer: LayoutPricer, legal: LegalSpace, goal: Goal, pins: tuple[Pin, ...]) -> None:
        self._pricer, self._legal, self._goal, self._pins = pricer, legal, goal, pins
        self.variants: dict[Terms, list[RunVariant]] = defaultdict(list)
        for variant in legal.variants:
            self.variants[variant.terms].append(variant)
        self.cuttings: list[tuple[Terms, Cutting, Ints]] = []  # with the layouts that they serve
        self.refused: list[InputError] = []  # why kinds cannot keep to what is pinned
        self.unpriced: list[tuple[Terms, Ints]] = []

    def queue_all(self, rough_s: Floats) -> None:
        """Let all kinds wait for a price, first the kind of the layout that looks fastest."""
        self.unpriced = [
            (terms, layouts)
            for terms in self.variants
            for layouts in self._pricer.kinds(self.layouts(terms), pinned=bool(self._pins))
        ]
        self.unpriced.sort(key=lambda kind: float(rough_s[kind[1]].min()))

    def price_next(self) -> list[PlainPoints]:
        """Find the cuttings of all layouts of the next kind, and price these."""
        terms, layouts = self.unpriced[0]
        plain: list[PlainPoints] = []
        try:
            cuttings = self._pricer.cuttings(layouts, self.pinned(terms), self._goal.effort.gap)
            plain = self.priced(terms, cuttings)
        except InputError as fault:
            if not self._pins:
                raise
            self.refused.append(fault)
        del self.unpriced[0]
        return plain

    def priced(self, terms: Terms, cuttings: Sequence[tuple[Cutting, Ints]]) -> list[PlainPoints]:
        """Price the blocks of layouts as their cuttings have them, without recompute."""
        self.cuttings += [(terms, cutting, served) for cutting, served in cuttings]
        variants = self.variants[terms]
        base = replace(self._legal.space.base, cp_kind=terms.cp_kind)
        space = replace(self._legal.space, base=base, sp=variants[0].space.sp)
        orders: list[CpOrder] = sorted({variant.space.base.cp_order for variant in variants})
        parts: list[PricedLayouts] = []
        for cutting, layouts in cuttings:
            groups: dict[CpOrder, Ints] = {
                order: np.intersect1d(layouts, self.layouts(terms, order)) for order in orders
            }
            parts += self._pricer.priced(space, cutting, groups, apart=bool(self._pins))
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
        parts = [run.layouts for run in self.variants[terms] if order in (None, run.space.base.cp_order)]
        return np.unique(np.concatenate(parts))
