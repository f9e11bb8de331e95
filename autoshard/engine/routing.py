"""Experts that drop nothing: the counts of routed tokens say how many rows a rank holds, sends and receives.

A value of the table with experts and slots is a list of rows on a rank: the rows of its first expert, of the next, and
so on; the rows of one expert are ordered by the parts of the tokens. A part is tokens that are routed together, with
slots of their own in the table. So the table says which rank sends which slots, and counts say how many rows they have.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeGuard

import numpy as np
from numpy.typing import NDArray

from autoshard.graph.kinds.experts import Dispatch
from autoshard.layout.layout import Layout
from autoshard.layout.program import Communicate, Compute, Program, Value, values_written
from autoshard.run.placement import Bounds, MeshRank, dims_of

Numbers = NDArray[np.int64]
_EXPERTS, _SLOTS = 0, 1  # the first dims of what holds rows, before one that both factors of a product may have
_BOX = ("experts", "slots")


@dataclass(frozen=True, slots=True, kw_only=True)
class CountRows:
    """Counts how many rows each part of the tokens has for each expert, or tells other ranks: before any dispatch."""

    reads: Value
    writes: tuple[str, ...]


def holds_rows(value: Value) -> bool:
    """Whether a value has slots of experts."""
    return dims_of(value.layout)[:2] == _BOX


def moves_rows(entry: object) -> TypeGuard[Communicate]:
    """Whether a collective gives a rank other rows than it had."""
    if not isinstance(entry, Communicate) or not holds_rows(entry.reads):
        return False
    return bool({entry.collective.dim, entry.collective.to_dim} & {*_BOX})


def counted_over(program: Program) -> tuple[str, ...]:
    """Return the atoms over which ranks exchange counts: those that cut tokens and along which rows move."""
    moved = {atom for entry in program.collectives() if moves_rows(entry) for atom in entry.collective.atoms}
    sent = next((entry.writes[0].layout for entry in program.instructions if dispatches(entry)), None)
    return tuple(atom for atom in dict(sent.dims)["slots"] if atom in moved) if sent else ()


def works_by_expert(entry: object) -> TypeGuard[Compute]:
    """Whether an instruction computes rows of each expert with numbers of its own: its kernel asks where they end."""
    return isinstance(entry, Compute) and entry.op.kind.by_expert and holds_rows(entry.reads[0])


def is_counted(name: str) -> bool:
    """Whether a value is a result of counting, and no tensor of the table."""
    return name.endswith((".counts", ".ends"))


def dispatches(entry: object) -> TypeGuard[Compute]:
    """Whether an instruction copies tokens to the rows of their experts."""
    return isinstance(entry, Compute) and isinstance(entry.op.kind, Dispatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The cells that a rank sends to each member of a group and receives, in torch's order, each with a range of a dim.

    A cell is one part's rows for one expert. Arriving cells are put together in order, side by side, or added up.
    """

    before: Numbers  # the cells of what a rank has, in order
    sent: tuple[Numbers, ...]
    sent_ranges: tuple[tuple[int, int], ...]
    received: tuple[Numbers, ...]
    received_ranges: tuple[tuple[int, int], ...]
    after: Numbers
    joined: Literal["rows", "ranges", "sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The parts of the tokens of a block, and where their rows lie.

    ``place`` is a rank for which slots are counted in parts: cuts of slots are cuts of parts.
    """

    place: MeshRank
    chosen: Value  # whom tokens chose
    unsent: Layout  # of the rows of a rank's own tokens, before any is sent
    by_expert: tuple[Layout, ...]  # of the rows in products and sums of experts, one for each way in which they lie
    counted: tuple[str, ...]
    exchanges: bool  # else all rows stay where they are, and no number is needed on the host

    @classmethod
    def of(cls, mesh_rank: MeshRank, program: Program) -> "Routing | None":
        """Return the routing of a program; None if no token is routed."""
        first = next((entry for entry in program.instructions if dispatches(entry)), None)
        if first is None:
            return None
        again = [
            entry for entry in program.instructions if dispatches(entry) and entry is not first and not entry.op.again
        ]
        assert not again, "a block routes its tokens once"
        unsent, mesh = first.writes[0].layout, mesh_rank.mesh
        tokens = dict(unsent.dims)["slots"]
        values = (value for entry in program.instructions for value in values_written(entry) if holds_rows(value))
        cutting = {*tokens, *(atom for value in values for atom in dict(value.layout.dims)["slots"])}
        parts = math.prod(mesh.size(atom) for atom in cutting)
        by_expert = {
            entry.reads[0].layout.dims[:2]: entry.reads[0].layout
            for entry in program.instructions
            if works_by_expert(entry)
        }
        return cls(
            place=replace(mesh_rank, sizes={**mesh_rank.sizes, "slots": parts}), chosen=first.reads[1], unsent=unsent,
            by_expert=tuple(by_expert.values()), counted=counted_over(program),
            exchanges=any(map(moves_rows, program.instructions)),
        )  # fmt: skip

    @property
    def counts(self) -> str:
        """The name of the host's value that says how many rows each cell has; only where rows are moved."""
        return f"{self.chosen.name}.counts"

    def ends(self, layout: Layout) -> str:
        """The name of the value that says on the device where each expert's rows end in a product of this layout."""
        fitting = [product.dims[:2] == layout.dims[:2] for product in self.by_expert]
        return f"{self.chosen.name}.{fitting.index(True) or ''}ends"

    @property
    def rows(self) -> str:
        """The name of the value that says on the device how many rows each expert gets of this rank's tokens."""
        return f"{self.chosen.name}.rows"

    @property
    def made(self) -> tuple[str, ...]:
        """The names of the values that the counting makes in the end."""
        return (*([self.counts] if self.exchanges else []), *map(self.ends, self.by_expert))

    def num_rows(self, layout: Layout) -> int | None:
        """Return how many rows a rank has for its own tokens: one for each choice of a token."""
        is_unsent = self.place.bounds(layout)[:2] == self.place.bounds(self.unsent)[:2]
        return math.prod(self.place.shape(self.chosen.layout)) if is_unsent else None

    def table(self, counts: Numbers, members: Sequence[int]) -> Numbers:
        """Return the number of rows of every cell, from the counts that these ranks have; 0 for other cells."""
        table = np.zeros((self.place.sizes["experts"], self.place.sizes["slots"]), dtype=np.int64)
        for rank, counts_of_rank in zip(members, counts, strict=True):
            start, stop = self.place.at(rank).bounds(self.unsent)[_SLOTS]
            edges = np.arange(stop - start + 1) * counts_of_rank[:, None] // (stop - start)
            table[:, start:stop] = np.diff(edges)
        return table

    def of_each(self, table: Numbers, layout: Layout) -> Numbers:
        """Return how many rows this rank has for each of its experts."""
        (first, last), (start, stop) = self.place.bounds(layout)[:2]
        return table[first:last, start:stop].sum(1)

    def cells(self, experts: tuple[int, int], parts: tuple[int, int]) -> Numbers:
        """Return cells by their numbers, in the order in which their rows lie."""
        return (np.arange(*experts)[:, None] * self.place.sizes["slots"] + np.arange(*parts)).reshape(-1)

    def exchange(self, change: Communicate, torch_order: Sequence[int]) -> Exchange:
        """Return the cells, and their ranges, that a collective sends to each member of its group, and receives."""
        collective, before, after = change.collective, change.reads.layout, change.writes.layout
        members = [self.place.at(rank) for rank in torch_order]
        have, want = self.place.bounds(before), self.place.bounds(after)
        sent = [_common(have, member.bounds(after)) for member in members]
        received = [_common(member.bounds(before), want) for member in members]
        joined = "ranges" if collective.kind == "all_to_all" and collective.dim not in _BOX else "rows"
        return Exchange(
            before=self.cells(have[_EXPERTS], have[_SLOTS]),
            sent=tuple(self.cells(*box[:2]) for box in sent),
            sent_ranges=tuple((low - have[2][0], high - have[2][0]) for *_, (low, high) in sent),
            received=tuple(self.cells(*box[:2]) for box in received),
            received_ranges=tuple((low - want[2][0], high - want[2][0]) for *_, (low, high) in received),
            after=self.cells(want[_EXPERTS], want[_SLOTS]),
            joined="sum" if collective.kind == "reduce_scatter" else joined,
        )


def row_order(counts: Numbers, lying: Numbers, cells: Numbers) -> tuple[Numbers, Numbers] | None:
    """Return how far the rows of each of ``cells`` must move to their new place, and how many rows each cell has.

    None where the rows lie in the order of ``cells``.

    >>> row_order(np.array([1, 2, 3]), np.array([0, 1, 2]), np.array([2, 0]))
    (array([ 3, -3]), array([3, 1]))
    """
    if np.array_equal(lying, cells):
        return None
    starts, sizes = np.zeros_like(counts), counts[cells]
    starts[lying] = np.cumsum(counts[lying]) - counts[lying]
    return starts[cells] - (np.cumsum(sizes) - sizes), sizes


def _common(left: Bounds, right: Bounds) -> Bounds:
    """Return the overlap of two boxes."""
    lows = [max(first, second) for (first, _), (second, _) in zip(left, right, strict=True)]
    highs = [min(last, end) for (_, last), (_, end) in zip(left, right, strict=True)]
    return tuple((low, max(low, high)) for low, high in zip(lows, highs, strict=True))
