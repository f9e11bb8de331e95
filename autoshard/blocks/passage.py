"""The way of a tensor through its deliver, from its maker to its readers, and of its gradient back: what it costs."""

import copy
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np

from autoshard.blocks.factors import Factor
from autoshard.blocks.neighbours import Neighbours, numbers
from autoshard.blocks.problem import OpChoice
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.op import Op
from autoshard.layout.layout import Layout
from autoshard.layout.redistribute import only_gathers


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A layout in which some readers take a tensor, and that of what they send back for it together."""

    taken: Layout
    sent: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """How a tensor reaches its readers: in one layout, but for those (``by``) that take it as it was ``made``."""

    delivered: Side
    made: Side | None = None
    by: tuple[str, ...] = ()

    def of(self, reader: str) -> Side:
        """Return what an operation takes."""
        return self.made if self.made is not None and reader in self.by else self.delivered


class Passage:
    """A deliver between its maker (None: the block before) with its choices, and its readers with theirs."""

    def __init__(self, neighbours: Neighbours, deliver: Op, choices: Sequence[OpChoice]) -> None:
        block = neighbours.problem.block
        self.neighbours, self.deliver, self.choices = neighbours, deliver, choices
        self.tensor = deliver.outputs[0]
        self.source = block.tensors[deliver.inputs[0]]
        self.maker = neighbours.maker.get(self.source.name)
        self.readers = neighbours.readers[self.tensor]
        self.made = [neighbours.made(self.maker, self.source.name, choice) for choice in choices]
        self.pending = np.array([bool(layout.sums or layout.maxima) for layout in self.made])
        later = block.select("micro_batch", "IW")
        read_later = {op.source for op in later if self.tensor in op.inputs}
        self._late = {reader.name for reader in self.readers} & read_later
        self._reads_own = any(
            op.source == self.maker.name for op in later if self.maker is not None and self.source.name in op.inputs
        )
        self._counts_slots = neighbours.counts_slots(self.source.name)
        self._sides: dict[tuple[str, ...], tuple[Side, ...]] = {}
        self._renamed: dict[Layout, Layout] = {}
        self._ways = {reader.name: self._ways_of(reader) for reader in self.readers}

    def priced(self, neighbours: Neighbours) -> "Passage":
        """Return the same with the sizes and prices of these neighbours."""
        again = copy.copy(self)
        again.neighbours = neighbours
        return again

    def sides(self, readers: Collection[str]) -> tuple[Side, ...]:
        """List what these readers can all take, with all that may be pending in what they send back."""
        names = tuple(readers)
        if names not in self._sides:
            ways = reduce(_both, (self._ways[reader] for reader in names))
            found = (_side(layout, sent) for layout, all_sent in ways.items() for sent in all_sent)
            order = sorted(found, key=lambda side: (side.taken.dims, side.taken.sums, side.sent.sums))
            self._sides[names] = tuple(order)
        return self._sides[names]

    def others(self, group: Collection[str]) -> tuple[str, ...]:
        """Return the readers that are not of this group."""
        return tuple(reader.name for reader in self.readers if reader.name not in group)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The readers that may take what was made, while others do not; who numbers slots and who reads them agree."""
        if self._counts_slots:
            return ()
        names = [reader.name for reader in self.readers]
        found = (group for count in range(1, len(names)) for group in itertools.combinations(names, count))
        agree = [{one.name, other.name} for one in self.readers for other in self.readers if self._agree(one, other)]
        return tuple(group for group in found if all(len(pair & set(group)) != 1 for pair in agree))

    @property
    def possible(self) -> bool:
        """Whether there is any way to the readers at all."""
        return bool(self.plain) or any(np.isfinite(self.mixed(group)).any() for group in self.groups)

    @cached_property
    def plain(self) -> tuple[Delivery, ...]:
        """What all readers can take alike."""
        return tuple(Delivery(delivered=side) for side in self.sides(self._ways))

    def table(self, values: Sequence[Delivery]) -> Any:
        """Price the way from each of the maker's choices to each value, and that of the gradient back."""
        delivered, made = [one.delivered for one in values], [one.made or one.delivered for one in values]
        mixed = np.array([one.made is not None for one in values], bool)
        price = self._way(delivered, [one.by for one in values])
        price = price + np.where(mixed, self._back(made), 0.0)
        price = np.where(self._due(_sums(self.neighbours, delivered), _sums(self.neighbours, made)), price, np.inf)
        as_made, alike = self._as_made(made), self._as_made(delivered)
        price = np.where(~mixed | as_made, price, np.inf)
        return np.where(alike, price, np.inf) if self._counts_slots else price

    def mixed(self, group: Collection[str]) -> Any:
        """Price every delivery where just these readers take what was made.

        The axes are the maker's choices, the sides that the group can take, and those that the others can.
        """
        made, delivered = self.sides(group), self.sides(self.others(group))
        way = self._forward(delivered) * (1.0 + (self._again(delivered) & self._late_but([group]))) + self._back(
            delivered
        )
        price = way[:, None] + self._back(made)[:, :, None]
        due = self._due(_sums(self.neighbours, delivered), _sums(self.neighbours, made)[:, None])
        differs = ~self._as_made(delivered)[:, None]
        return np.where(due & differs & self._as_made(made)[:, :, None], price, np.inf)

    def kept(self, values: Sequence[Delivery]) -> Any:
        """Return the memory that a tensor needs from forward to backward, if any."""
        return self.kept_by([one.delivered for one in values], [one.by for one in values])

    def kept_by(self, delivered: Sequence[Side], by: Sequence[Collection[str]]) -> Any:
        """Return that memory: as it is made, as it is delivered, or both, depending on what backward reads."""
        problem = self.neighbours.problem
        saved = [entry for entry in problem.block.saved if entry.storage == self.source.name]
        if not saved:
            return None
        here = np.array([problem.local_bytes(layout, saved[0].tensor.dtype) for layout in self.made], float)[:, None]
        there = np.array([problem.local_bytes(one.taken, saved[0].tensor.dtype) for one in delivered], float)
        own = np.array([self._reads_own or bool(self._late & set(readers)) for readers in by], bool)
        stays = ~self.pending[:, None]
        late = there + np.where(stays & own & ~self._as_made(delivered), here, 0.0)
        late = np.where(self._again(delivered), here, late)
        return np.where(self._late_but(by), late, np.where(stays, here, there))

    def fits(self, variable: str, reader: Op, sides: Sequence[Side]) -> Factor:
        """Return which choices of a reader can take what a variable stands for: 0 there, infinity elsewhere."""
        return Factor(variables=(variable, reader.name), table=np.where(self.fitting(reader, sides), 0.0, np.inf))

    def fitting(self, reader: Op, sides: Sequence[Side]) -> Any:
        """Return where a reader's choice can take a side, and sends back no more than is waited for."""
        choices, mask = self.neighbours.choices[reader.name], self.neighbours.mask
        layouts = [self.neighbours.wanted(reader, choice, self.tensor) for choice in choices]
        number = numbers([*layouts, *(side.taken for side in sides)])
        wanted, taken = number[: len(layouts)], number[len(layouts) :]
        sends = np.array([mask(self.neighbours.sends(reader, choice, self.tensor)) for choice in choices])
        awaited = _sums(self.neighbours, sides)
        return (taken[:, None] == wanted) & ((sends & ~awaited[:, None]) == 0)

    def passes(self) -> Iterator[Factor]:
        """Yield infinity where a sum that may pass through a reader is not passed: the lowered program always does."""
        for reader in self.readers:
            first = reader.inputs[0] == self.tensor
            if self.maker is not None and first and self.neighbours.rules[reader.name].forward:
                takes = self.neighbours.choices[reader.name]
                passes = [[set(layout.sums) - one.busy == set(one.passed) for one in takes] for layout in self.made]
                yield Factor(variables=(self.maker.name, reader.name), table=np.where(passes, 0.0, np.inf))

    def renamed(self, layout: Layout) -> Layout:
        """Return a layout in the maker's names of the dims."""
        if layout not in self._renamed:
            rename = self.deliver.kind.rename if isinstance(self.deliver.kind, Deliver) else ()
            back = {new: old for old, new in rename}
            dims = tuple((back.get(dim, dim), cut) for dim, cut in layout.dims)
            self._renamed[layout] = Layout(dims=dims, sums=layout.sums)
        return self._renamed[layout]

    def _agree(self, one: Op, other: Op) -> bool:
        """Whether one of two readers numbers slots and the other reads the numbers."""
        found = self.neighbours.delivered(one.outputs)
        return any(self.neighbours.counts_slots(tensor) and name in other.inputs for tensor, name in found)

    def _ways_of(self, reader: Op) -> Mapping[Layout, set[frozenset[str]]]:
        """Return the layouts in which an operation can read the tensor, and what may be pending in what it sends."""
        ways: dict[Layout, set[frozenset[str]]] = {}
        for choice in self.neighbours.choices[reader.name]:
            wanted = self.neighbours.wanted(reader, choice, self.tensor)
            ways.setdefault(wanted, set()).add(self.neighbours.sends(reader, choice, self.tensor))
        return ways

    def _way(self, delivered: Sequence[Side], by: Sequence[Collection[str]]) -> Any:
        """Price the way to what is delivered, twice if backward gathers it again, and that of its gradient."""
        twice = self._again(delivered) & self._late_but(by)
        return self._forward(delivered) * (1.0 + twice) + self._back(delivered)

    def _forward(self, sides: Sequence[Side]) -> Any:
        """Price the way from each of the maker's choices to each side."""
        pending = "maxima" if any(layout.maxima for layout in self.made) else "sums"
        ways = self.neighbours.ways(self.source.dims, self.source.dtype, pending)
        return ways.between(self.made, [self.renamed(side.taken) for side in sides])

    def _late_but(self, by: Sequence[Collection[str]]) -> Any:
        """Return whether backward reads what is delivered, if these readers take what was made."""
        return np.array([bool(self._late - set(readers)) for readers in by], bool)

    def _again(self, sides: Sequence[Side]) -> Any:
        """Return where what was gathered is not kept, so that backward gathers it again."""
        goals = [self.renamed(side.taken) for side in sides]
        if self.neighbours.problem.keeps_gathered:
            return np.zeros((len(self.made), len(goals)), bool)
        return np.array([[only_gathers(layout, goal) for goal in goals] for layout in self.made], bool).reshape(
            len(self.made), len(goals)
        )

    def _back(self, sides: Sequence[Side]) -> Any:
        """Price the way of a gradient from how readers send it to how the maker's own gradient takes it."""
        if not self.neighbours.has_gradient[self.tensor]:
            return np.zeros((len(self.choices), len(sides)))
        taken = [choice.layout(self.source.dims, choice.passed_back) for choice in self.choices]
        ways = self.neighbours.ways(self.source.dims, self.source.dtype)
        sent = [self.renamed(side.sent) for side in sides]
        if not (isinstance(self.deliver.kind, Deliver) and self.deliver.kind.settles):
            return ways.between(sent, taken).T
        summed = [Layout(dims=layout.dims) for layout in sent]
        at_once = [ways.between([one], [other])[0, 0] for one, other in zip(sent, summed, strict=True)]
        return ways.between(summed, taken).T + np.array(at_once)

    def _due(self, ones: Any, others: Any) -> Any:
        """Return where it lets pass back what a lowered program does: what may stay pending, if both parts await it."""
        shape = (-1, *(1 for _ in np.broadcast_shapes(ones.shape, others.shape)))
        idle, passed = (
            np.array([self.neighbours.mask(atoms) for atoms in found]).reshape(shape)
            for found in (
                [set(self.neighbours.problem.real_atoms) - choice.busy for choice in self.choices],
                [choice.passed_back for choice in self.choices],
            )
        )
        if not passed.any():
            return np.True_
        return passed == np.where((ones & idle) == (others & idle), ones & idle, 0)

    def _as_made(self, sides: Sequence[Side]) -> Any:
        """Return where a side is cut as a choice of the maker makes it, with nothing pending."""
        number = numbers([*(layout.dims for layout in self.made), *(self.renamed(side.taken).dims for side in sides)])
        made, taken = number[: len(self.made)], number[len(self.made) :]
        return (made[:, None] == taken) & ~self.pending[:, None]


def _side(layout: Layout, sent: frozenset[str]) -> Side:
    return Side(taken=layout, sent=Layout(dims=layout.dims, sums=tuple(sorted(sent))))


def _sums(neighbours: Neighbours, sides: Sequence[Side]) -> Any:
    """Return what is pending in what is sent back for each side, as numbers."""
    return np.array([neighbours.mask(side.sent.sums) for side in sides], int)


def _both(
    ones: Mapping[Layout, set[frozenset[str]]], others: Mapping[Layout, set[frozenset[str]]]
) -> Mapping[Layout, set[frozenset[str]]]:
    """Return the layouts that two readers can take, with what may be pending in what they send back together."""
    return {
        layout: {mine | its for mine in sent for its in others[layout]}
        for layout, sent in ones.items()
        if layout in others
    }
