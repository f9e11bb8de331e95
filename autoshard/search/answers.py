"""What the solver said about layouts, and to which of its cuttings each keeps.

A cutting names atoms, not sizes, so that one serves many layouts. A layout that was asked about keeps to its own.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard.blocks.cutting import Cutter, Terms
from autoshard.cost.setting import Question
from autoshard.errors import InputError
from autoshard.layout.pin import Pin
from autoshard.plan.candidate import CpOrder
from autoshard.plan.lowering import ATOMS
from autoshard.search.columns import atom_columns
from autoshard.search.families import Asked
from autoshard.search.points import Legal
from autoshard.search.space import Space
from autoshard.spec.workload import DTYPE_BYTES

Column = Any


class Answers:
    """The solver's answers so far, by the terms under which it was asked; what is pinned is added to them here."""

    def __init__(self, question: Question, space: Space, legal: Sequence[Legal], pins: tuple[Pin, ...]) -> None:
        self._question, self._space, self._legal, self._pins = question, space, legal, pins
        self._cutter = Cutter(question)
        self._exact = frozenset(ATOMS if pins else ("ep", "cp") if question.model.num_experts else ())
        self._known: dict[Terms, list[Asked]] = {}
        self._own: dict[Terms, dict[int, Asked]] = defaultdict(dict)
        self._refused: dict[Terms, set[int]] = defaultdict(set)  # layouts that cannot keep to what is pinned
        self.faults: list[InputError] = []
        sizes = atom_columns(question.model, space)
        cut = zip(*((column > 1).tolist() for column in sizes.values()), strict=True)
        self._cut = [frozenset(atom for atom, cuts in zip(sizes, row, strict=True) if cuts) for row in cut]

    @property
    def num_tables(self) -> int:
        """How many answers differ."""
        return sum(len(known) for known in self._known.values())

    def known(self, terms: Terms) -> Sequence[Asked]:
        """Return what it said so far."""
        return tuple(self._known.get(terms, ()))

    def has_own(self, layout: int, terms: Terms) -> bool:
        """Say whether it was asked about a layout."""
        return layout in self._own[terms]

    def allows(self, layouts: Sequence[int], terms: Terms, asked: Asked) -> Column:
        """Say which layouts may keep to a cutting: to their own, or to any other as long as they have none."""
        own, refused = self._own[terms], self._refused[terms]
        return np.array([one not in refused and own.get(one, asked) is asked for one in layouts], dtype=bool)

    def ask_first(self, layouts: Sequence[int], terms: Terms) -> tuple[int, Asked, bool] | None:
        """Ask about the first layout that can keep to what is pinned; return it, its cutting and if that is new."""
        for layout in layouts:
            try:
                return (layout, *self._ask(layout, terms))
            except InputError as fault:
                if not self._pins:
                    raise
                self.faults.append(fault)
                self._refused[terms].add(layout)
        return None

    def served(self, asked: Asked, terms: Terms) -> Mapping[CpOrder, Column]:
        """Return the layouts that keep to a cutting, of the variants with each order of the sequence over cp."""
        found: dict[CpOrder, Column] = {}
        orders: list[CpOrder] = [one.cp_order for one in self._legal if one.terms == terms]
        for order in dict.fromkeys(orders):
            layouts = self._layouts(terms, order)
            every: list[int] = layouts.tolist()
            served = np.array([asked.serves(self._cut[one], self._exact) for one in every], dtype=bool)
            found[order] = layouts[served & self.allows(every, terms, asked)]
        return {order: layouts for order, layouts in found.items() if len(layouts)}

    def kinds(self, terms: Terms) -> Iterator[list[int]]:
        """Yield the layouts of each kind that no cutting of another kind serves, those with the largest tp first.

        Of these first one that may well come out best, because that one is asked about anyway: with as few stages as
        leave room for other things than weights and gradients, and small micro-batches.
        """
        layouts = self._layouts(terms)
        rows, precision = self._space.keep(layouts).rows, self._question.workload.precision
        per_weight = DTYPE_BYTES[precision.weights] + DTYPE_BYTES[precision.gradients]
        held = self._question.model.num_parameters * per_weight / (rows["tp"] * rows["pp"])
        full = held > self._question.cluster.rank_memory_bytes / 2
        order = np.lexsort((rows["mbs"], rows["cp"], rows["pp"], full, -rows["tp"]))
        found: dict[tuple[str, ...], list[int]] = {}
        ordered: list[int] = layouts[order].tolist()
        for layout in ordered:
            found.setdefault(tuple(sorted(self._cut[layout] & self._exact)), []).append(layout)
        yield from found.values()

    def _ask(self, layout: int, terms: Terms) -> tuple[Asked, bool]:
        atoms = self._cut[layout]
        cutting = self._cutter.solved(self._space.at(layout, 0), replace(terms, pins=self._pins))
        known = self._known.setdefault(terms, [])
        same = [
            one for one in known if one.serves(atoms, self._exact) and one.cutting.only(atoms) == cutting.only(atoms)
        ]
        asked = same[0] if same else Asked(cutting=cutting, atoms=atoms)
        self._own[terms][layout] = asked
        if not same:
            known.append(asked)
        return asked, not same

    def _layouts(self, terms: Terms, order: str | None = None) -> Column:
        """Return the layouts of the variants of a kind."""
        some = [one.variant.layouts for one in self._legal if one.terms == terms and order in (None, one.cp_order)]
        return np.flatnonzero(np.bincount(np.concatenate(some))) if some else np.zeros(0, dtype=np.int64)
