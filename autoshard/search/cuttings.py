"""The cuttings that the block solver gave for layouts, and which of them each layout keeps to.

A cutting names atoms, not sizes, so that one serves many layouts. A layout that was solved for keeps to its own.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoshard.blocks.cutting import Cutter, Terms
from autoshard.cost.setting import Question
from autoshard.errors import InputError
from autoshard.layout.pin import Pin
from autoshard.plan.candidate import CpOrder
from autoshard.plan.lowering import ATOMS
from autoshard.schedule.waves import Ints
from autoshard.search.priced_layouts import SolvedCutting, atom_columns
from autoshard.search.rule_filter import LegalSpace
from autoshard.spec.workload import DTYPE_BYTES


class Cuttings:
    """The cuttings solved so far, by the terms under which they were; pinned layouts are added to the terms here."""

    def __init__(self, question: Question, legal: LegalSpace, pins: tuple[Pin, ...]) -> None:
        self._question, self._space, self._variants, self._pins = question, legal.space, legal.variants, pins
        self._cutter = Cutter(question)
        self._exact = frozenset(ATOMS if pins else ("ep", "cp") if question.model.num_experts else ())
        self._known: dict[Terms, list[SolvedCutting]] = defaultdict(list)
        self._own: dict[Terms, dict[int, SolvedCutting]] = defaultdict(dict)
        self._refused: dict[Terms, set[int]] = defaultdict(set)  # layouts that cannot keep to what is pinned
        self.faults: list[InputError] = []
        sizes = atom_columns(question.model, legal.space)
        cut = zip(*((column > 1).tolist() for column in sizes.values()), strict=True)
        self._atoms = [frozenset(atom for atom, cuts in zip(sizes, row, strict=True) if cuts) for row in cut]

    @property
    def num_tables(self) -> int:
        """Count the different cuttings."""
        return sum(len(known) for known in self._known.values())

    def known(self, terms: Terms) -> Sequence[SolvedCutting]:
        """Return the cuttings under some terms."""
        return tuple(self._known[terms])

    def has_own(self, layout: int, terms: Terms) -> bool:
        """Say whether a layout has a cutting of its own."""
        return layout in self._own[terms]

    def may_use(self, layouts: Ints, terms: Terms, cutting: SolvedCutting) -> NDArray[np.bool_]:
        """Say which layouts may keep to a cutting: to their own, or to any other as long as they have none."""
        own, refused, each = self._own[terms], self._refused[terms], layouts.tolist()
        return np.array([one not in refused and own.get(one, cutting) is cutting for one in each], dtype=bool)

    def solve_first(self, layouts: Sequence[int], terms: Terms) -> tuple[int, SolvedCutting, bool] | None:
        """Solve for the first layout that can keep to what is pinned; return it, its cutting, whether that is new."""
        for layout in layouts:
            try:
                cutting = self._cutter.solved(self._space.candidate(layout, 0), replace(terms, pins=self._pins))
            except InputError as fault:
                if not self._pins:
                    raise
                self.faults.append(fault)
                self._refused[terms].add(layout)
                continue
            atoms = self._atoms[layout]
            same = (
                one
                for one in self._known[terms]
                if one.serves(atoms, self._exact) and one.cutting.only(atoms) == cutting.only(atoms)
            )
            found = next(same, None)
            self._own[terms][layout] = found or SolvedCutting(cutting=cutting, atoms=atoms)
            if found is None:
                self._known[terms].append(self._own[terms][layout])
            return layout, self._own[terms][layout], found is None
        return None

    def served(self, cutting: SolvedCutting, terms: Terms) -> Mapping[CpOrder, Ints]:
        """Return the layouts that keep to a cutting, of the variants with each order of the sequence over cp."""
        found: dict[CpOrder, Ints] = {}
        orders: list[CpOrder] = [one.space.base.cp_order for one in self._variants if one.terms == terms]
        for order in dict.fromkeys(orders):
            layouts = self._layouts(terms, order)
            each: list[int] = layouts.tolist()
            served = np.array([cutting.serves(self._atoms[one], self._exact) for one in each], dtype=bool)
            found[order] = layouts[served & self.may_use(layouts, terms, cutting)]
        return {order: layouts for order, layouts in found.items() if len(layouts)}

    def kinds(self, terms: Terms) -> Iterator[list[int]]:
        """Yield the layouts of each kind that no cutting of another kind serves, those with the largest tp first.

        Of these first one that may well come out best, because that one is solved for anyway: with as few stages as
        leave memory for other things than weights and gradients, and small micro-batches.
        """
        layouts = self._layouts(terms)
        rows, precision = self._space.only(layouts).rows, self._question.workload.precision
        per_weight = DTYPE_BYTES[precision.weights] + DTYPE_BYTES[precision.gradients]
        states_bytes = self._question.model.num_parameters * per_weight / (rows["tp"] * rows["pp"])
        full = states_bytes > self._question.cluster.rank_memory_bytes / 2
        order = np.lexsort((rows["mbs"], rows["cp"], rows["pp"], full, -rows["tp"]))
        found: dict[frozenset[str], list[int]] = defaultdict(list)
        ordered: list[int] = layouts[order].tolist()
        for layout in ordered:
            found[self._atoms[layout] & self._exact].append(layout)
        yield from found.values()

    def _layouts(self, terms: Terms, order: CpOrder | None = None) -> Ints:
        """Return the layouts of the variants with these terms."""
        alike = (one for one in self._variants if one.terms == terms)
        some = [one.layouts for one in alike if order in (None, one.space.base.cp_order)]
        return np.flatnonzero(np.bincount(np.concatenate(some))) if some else np.zeros(0, dtype=np.int64)
