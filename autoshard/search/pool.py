"""Every candidate priced with a few cuttings, which grow until the best candidates' own best ones are among them.

A cutting names atoms, not sizes, so that one serves many candidates. The solver is asked about a candidate of every
kind of mesh, then about those that come out best, until it has been asked about all that stay there; the price of the
others is what they cost at most. Tables are solved for time alone: memory is saved by the outer search, with sp,
recompute, ZeRO and more ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.cost.setting import Question
from autoshard.cost.sharded import CutBlocks
from autoshard.errors import InputError
from autoshard.layout.cutting import Cutting
from autoshard.layout.pin import Pin
from autoshard.plan.lowering import ATOMS, Step
from autoshard.search.columns import Evaluated, atom_columns, evaluate
from autoshard.search.cutting import Cutter, Terms
from autoshard.search.space import Space
from autoshard.spec.workload import DTYPE_BYTES

Column = Any
TIE_DIGITS = 9  # times that agree in so many digits count as equal
_ALWAYS = 3  # of the best layouts are solved for, however few are shown, so that the best one does not depend on that
_TIE = 1e-8  # by how much such times differ at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A cutting, the atoms that cut anything where it was solved, and for which kind of candidates."""

    cutting: Cutting
    atoms: frozenset[str]
    sequence_parallel: bool

    def serves(self, sequence_parallel: bool, atoms: frozenset[str], exact: frozenset[str]) -> bool:
        """Whether it says all about a candidate on whose mesh these atoms cut, just like here where they are exact."""
        same = self.sequence_parallel == sequence_parallel and atoms & exact == self.atoms & exact
        return same and atoms & {"kv", "rep"} <= self.atoms


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Time and peak memory of every candidate with its best cutting: a row per layout, a column per recompute."""

    step: Step
    legal: Column  # who can keep to what is pinned
    time_s: Column
    peak_bytes: Column
    number: Column  # of the cutting, in ``solved``
    solved: tuple[Solved, ...]
    atoms: tuple[frozenset[str], ...]  # that cut anything, by layout

    def blocks(self, layout: int, recompute: int) -> CutBlocks:
        """Return the blocks of a candidate with the cutting that it was priced with, on its own mesh."""
        cutting = self.solved[int(self.number[layout, recompute])].cutting
        return CutBlocks(step=self.step, cutting=cutting, atoms=self.atoms[layout])


class Pool:
    """A space of legal layouts, and what is known of its candidates so far."""

    def __init__(self, question: Question, space: Space, legal: Column, pins: tuple[Pin, ...] = ()) -> None:
        self._question, self._space, self._legal, self._pins = question, space, np.array(legal), pins
        self._capacity = question.cluster.rank_memory_bytes
        self._cutter = Cutter(question)
        self._exact = frozenset(ATOMS if pins else ("ep", "cp") if question.model.num_experts else ())
        self._faults: list[InputError] = []
        self._solved: list[Solved] = []
        self._time_s = np.full(legal.shape, np.inf)
        self._peak_bytes = np.full(legal.shape, np.inf)
        self._number = np.zeros(legal.shape, dtype=np.int64)
        self._asked = np.zeros(space.num_layouts, dtype=bool)
        sizes = atom_columns(question.model, space)
        self._cut = [
            frozenset[str](atom for atom, column in sizes.items() if column[row] > 1)
            for row in range(space.num_layouts)
        ]

    def settled(self, count: int) -> Priced:
        """Price all candidates until so many of the best layouts have their own best cuttings."""
        for layouts in self._kinds():
            self._ask_first(layouts)
        while left := [layout for layout in self._best(max(count, _ALWAYS)) if not self._asked[layout]]:
            self._ask_first(left[:1])
        if self._faults and not self._legal.any():
            raise self._faults[0]
        return Priced(
            step=self._question.step,
            legal=self._legal,
            time_s=self._time_s,
            peak_bytes=self._peak_bytes,
            number=self._number,
            solved=tuple(self._solved),
            atoms=tuple(self._cut),
        )

    def _best(self, count: int) -> list[int]:
        """Return the layouts of the fastest candidates that fit, or of the one that needs least."""
        fits = self._legal & (self._peak_bytes <= self._capacity)
        if fits.any():
            return [layout for layout, _ in fastest(self._space, self._time_s, self._peak_bytes, fits, count)]
        return [int(np.argmin(np.where(self._legal, self._peak_bytes, np.inf)) // fits.shape[1])]

    def _kinds(self) -> Iterator[list[int]]:
        """Yield the layouts of each kind that no cutting of another kind serves, those with the largest tp first.

        Of these first one that may well come out best, because that one is asked about anyway: with as few stages as
        leave room for other things than weights and gradients, and small micro-batches.
        """
        rows, precision = self._space.rows, self._question.workload.precision
        per_weight = DTYPE_BYTES[precision.weights] + DTYPE_BYTES[precision.gradients]
        held = self._question.model.num_parameters * per_weight / (rows["tp"] * rows["pp"])
        order = np.lexsort((rows["mbs"], rows["cp"], rows["pp"], held > self._capacity / 2, -rows["tp"]))
        found: dict[tuple[bool, tuple[str, ...]], list[int]] = {}
        for layout in map(int, order):
            key = bool(self._sequence_parallel[layout]), tuple(sorted(self._cut[layout] & self._exact))
            found.setdefault(key, []).append(layout)
        yield from found.values()

    def _ask_first(self, layouts: Sequence[int]) -> None:
        """Ask about the first of some layouts that can keep to what is pinned; the others before it are no answer."""
        for layout in layouts:
            try:
                self._ask(layout)
                return
            except InputError as fault:
                if not self._pins:
                    raise
                self._faults.append(fault)
                self._legal[layout] = False
                self._asked[layout] = True

    @property
    def _sequence_parallel(self) -> Column:
        """How layouts are priced; with tp 1 it makes no difference, so these go with the larger part."""
        cut = self._space.sequence_parallel
        return cut | ((self._space.rows["tp"] == 1) & bool(np.any(cut)))

    def _ask(self, layout: int) -> None:
        """Solve for a layout, and price with its cutting itself and, if it is new, all whom it serves."""
        candidate, atoms = self._space.at(layout, 0), self._cut[layout]
        cuts = bool(self._sequence_parallel[layout])
        terms = Terms(engine=self._space.engine, sequence_parallel=cuts, pins=self._pins)
        cutting = self._cutter.solved(candidate, terms)
        same = [
            number
            for number, one in enumerate(self._solved)
            if one.serves(cuts, atoms, self._exact) and one.cutting.only(atoms) == cutting.only(atoms)
        ]
        if not same:
            self._solved.append(Solved(cutting=cutting, atoms=atoms, sequence_parallel=cuts))
            self._price(len(self._solved) - 1)
        own = same[0] if same else len(self._solved) - 1
        if np.any(self._number[layout] != own):
            alone = np.array([layout])
            self._keep(own, alone, np.ones((1, self._legal.shape[1]), dtype=bool), self._evaluated(own, alone))
        self._asked[layout] = True

    def _price(self, number: int) -> None:
        """Price with a new cutting, and keep it where it is better: what fits first, then what is faster, or smaller.

        A layout that was solved for keeps its own.
        """
        solved = self._solved[number]
        serves = zip(self._sequence_parallel, self._cut, strict=True)
        rows = np.flatnonzero([solved.serves(bool(cuts), atoms, self._exact) for cuts, atoms in serves] & ~self._asked)
        found = self._evaluated(number, rows)
        peak_bytes, capacity = self._peak_bytes[rows], self._capacity
        fits, fitted = np.less_equal(found.peak_bytes, capacity), np.less_equal(peak_bytes, capacity)
        faster = fits & (~fitted | np.less(found.time_s, self._time_s[rows]))
        self._keep(number, rows, np.where(fits | fitted, faster, found.peak_bytes < peak_bytes), found)

    def _evaluated(self, number: int, rows: Column) -> Evaluated:
        return evaluate(self._question, self._space.keep(rows), self._solved[number].cutting, apart=bool(self._pins))

    def _keep(self, number: int, rows: Column, where: Any, found: Evaluated) -> None:
        self._time_s[rows] = np.where(where, found.time_s, self._time_s[rows])
        self._peak_bytes[rows] = np.where(where, found.peak_bytes, self._peak_bytes[rows])
        self._number[rows] = np.where(where, number, self._number[rows])


def fastest(space: Space, time_s: Column, peak_bytes: Column, fits: Column, count: int) -> list[tuple[int, int]]:
    """Return the fastest layouts that fit, each with its best recompute, by their numbers.

    Among equals the one with less memory goes first, then the first by its sizes.
    """
    least = np.where(fits, time_s, np.inf).min(axis=1)
    slowest = np.partition(least, count - 1)[count - 1] if count < len(least) else np.inf
    flat = np.flatnonzero((fits & (time_s <= slowest * (1 + _TIE))).reshape(-1))
    times = [float(f"{value:.{TIE_DIGITS}g}") for value in time_s.reshape(-1)[flat]]
    rows, recomputes = np.divmod(flat, len(space.recomputes))
    sizes = [space.rows[key][rows] for key in ("mbs", "ep", "cp", "pp", "tp")]
    keys = [recomputes, *sizes, peak_bytes.reshape(-1)[flat], np.array(times)]
    order = np.lexsort(np.stack([key.astype(np.float64) for key in keys]))
    best = {int(rows[index]): int(recomputes[index]) for index in reversed(order)}
    first = dict.fromkeys(int(rows[index]) for index in order)
    return [(row, best[row]) for row in list(first)[:count]]
