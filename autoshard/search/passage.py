"""The way of a tensor through its deliver, from its maker to its readers, and of its gradient back: what it costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.errors import InputError
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.op import Op
from autoshard.layout.layout import Layout
from autoshard.layout.states import LayoutStates
from autoshard.search.factors import Factor
from autoshard.search.neighbours import Neighbours, states_at
from autoshard.search.problem import OpChoice

Ways = dict[
    Layout, set[frozenset[str]]
]  # layouts in which a tensor is read, and what may be pending in what comes back


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A layout that a tensor is delivered in, and the layout of what is sent back for it."""

    taken: Layout
    sent: Layout


class Passage:
    """A deliver between its maker (None: the block before) with its choices, and its readers with theirs."""

    def __init__(self, neighbours: Neighbours, deliver: Op, choices: Sequence[OpChoice]) -> None:
        block = neighbours.problem.block
        self.deliver, self.choices = deliver, choices
        self.tensor = deliver.outputs[0]
        self.source = block.tensors[deliver.inputs[0]]
        self.maker = neighbours.maker.get(self.source.name)
        self.readers = neighbours.readers[self.tensor]
        self._problem, self._neighbours = neighbours.problem, neighbours
        self._later = block.select("micro_batch", "IW")
        self._has_gradient = any(op.source == deliver.name and op.pass_ != "F" for op in block.ops)
        self._read_later = any(self.tensor in op.inputs for op in self._later)
        self.values = self._values()

    def fits(self) -> Iterator[Factor]:
        """Yield which choices of each reader can take what is delivered, and let pass what its maker left pending."""
        for reader in self.readers:
            yield self._fits(reader)
            if self.maker is not None and self._neighbours.rules[reader.name].forward:
                yield self._passes(self.maker, reader)

    def table(self) -> Any:
        """Price the way from each of the maker's choices to each value, and that of the gradient back."""
        forward = self._states.price[np.ix_(states_at(self._states, self._made), states_at(self._states, self._goals))]
        table = forward
        if not self._problem.keeps_gathered and self._read_later:
            table = table + np.where(self._pending[:, None], 0.0, forward)
        if self._has_gradient:
            table = table + self._way_back()
        if self._counts_slots:
            plain = [choice.layout(self.source.dims).dims for choice in self.choices]
            alike = [[goal.dims == dims for goal in self._goals] for dims in plain]
            table = np.where(alike, table, np.inf)
        return table

    def kept(self) -> Any:
        """Return the memory that a tensor needs from forward to backward, as it is made or as it is delivered."""
        saved = [entry for entry in self._problem.block.saved if entry.storage == self.source.name]
        if not saved:
            return None
        dtype = saved[0].tensor.dtype
        here = np.array([self._problem.local_bytes(layout, dtype) for layout in self._made], float)[:, None]
        there = np.array([self._problem.local_bytes(goal, dtype) for goal in self._goals], float)[None]
        stays = ~self._pending[:, None]
        if not (self._problem.keeps_gathered and self._read_later):
            return np.where(stays, here, there)
        twice = [[self._reads_own and layout.dims != goal.dims for goal in self._goals] for layout in self._made]
        return np.where(stays & np.array(twice), here, 0.0) + there

    @cached_property
    def _made(self) -> list[Layout]:
        return [self._neighbours.made(self.maker, self.source.name, choice) for choice in self.choices]

    @cached_property
    def _pending(self) -> Any:
        return np.array([bool(layout.sums or layout.maxima) for layout in self._made])

    @cached_property
    def _goals(self) -> list[Layout]:
        return [_renamed(one.taken, self.deliver) for one in self.values]

    @cached_property
    def _states(self) -> LayoutStates:
        pending = "maxima" if any(layout.maxima for layout in self._made) else "sums"
        return self._neighbours.states(self.source.dims, self.source.dtype, pending)

    @cached_property
    def _reads_own(self) -> bool:
        """Whether a gradient reads what its own forward operation made."""
        maker, name = self.maker, self.source.name
        return maker is not None and any(op.source == maker.name and name in op.inputs for op in self._later)

    @cached_property
    def _counts_slots(self) -> bool:
        """Whether the tensor holds numbers that mean something only under the cut under which they were counted."""
        if self.maker is None or self.source.dtype != "int64":
            return False
        tied = {dim for dim, _ in self.maker.kind.tied_dims()}
        return any(tied & {dim for dim, _ in reader.kind.tied_dims()} for reader in self.readers)

    def _values(self) -> tuple[Delivery, ...]:
        """List what the tensor may be delivered as: what all its readers can take, with all that may be sent back."""
        ways: Ways | None = None
        for reader in self.readers:
            mine: Ways = {}
            for choice in self._neighbours.choices[reader.name]:
                mine.setdefault(self._wanted(reader, choice), set()).add(self._sends(reader, choice))
            ways = mine if ways is None else _both(ways, mine)
        if not ways:
            names = ", ".join(reader.name for reader in self.readers)
            raise InputError.of(
                "pins", f"{names} read {self.tensor} in different layouts; pin them to one, or fewer of them"
            )
        made = (
            Delivery(taken=layout, sent=Layout(dims=layout.dims, sums=tuple(sorted(sent))))
            for layout, all_sent in ways.items()
            for sent in all_sent
        )
        return tuple(sorted(made, key=str))

    def _wanted(self, reader: Op, choice: OpChoice) -> Layout:
        return self._neighbours.wanted(reader, choice, self.tensor)

    def _sends(self, reader: Op, choice: OpChoice) -> frozenset[str]:
        return self._neighbours.sends(reader, choice, self.tensor) if self._has_gradient else frozenset[str]()

    def _way_back(self) -> Any:
        """Price the way of a gradient from how its readers send it to how the maker's own gradient takes it."""
        states = self._neighbours.states(self.source.dims, self.source.dtype)
        sent = [_renamed(one.sent, self.deliver) for one in self.values]
        taken = [choice.layout(self.source.dims, choice.passed_back) for choice in self.choices]
        price = states.price[np.ix_(states_at(states, sent), states_at(states, taken))].T
        if not any(choice.passed_back for choice in self.choices):
            return price
        # What may stay pending does: the program that is lowered knows no other.
        due = [[set(one.sums) - choice.busy == set(choice.passed_back) for one in sent] for choice in self.choices]
        return np.where(due, price, np.inf)

    def _fits(self, reader: Op) -> Factor:
        """Return 0 where a reader can take what is delivered and send back what is waited for, infinity elsewhere."""
        choices = self._neighbours.choices[reader.name]
        number = {layout: index for index, layout in enumerate(dict.fromkeys(one.taken for one in self.values))}
        taken = np.array([number[one.taken] for one in self.values])
        wanted = np.array([number.get(self._wanted(reader, choice), -1) for choice in choices])
        awaited = np.array([self._mask(one.sent.sums) for one in self.values])
        sends = np.array([self._mask(self._sends(reader, choice)) for choice in choices])
        fits = (taken[:, None] == wanted[None]) & ((sends[None] & ~awaited[:, None]) == 0)
        return Factor(variables=(self.deliver.name, reader.name), table=np.where(fits, 0.0, np.inf))

    def _passes(self, maker: Op, reader: Op) -> Factor:
        """Return infinity where a sum that may pass through a reader is not passed: the lowered program always does."""
        takes = self._neighbours.choices[reader.name]
        passes = [[set(layout.sums) - one.busy == set(one.passed) for one in takes] for layout in self._made]
        return Factor(variables=(maker.name, reader.name), table=np.where(passes, 0.0, np.inf))

    def _mask(self, atoms: Sequence[str] | frozenset[str]) -> int:
        return sum(1 << place for place, atom in enumerate(self._problem.real_atoms) if atom in atoms)


def _both(ones: Ways, others: Ways) -> Ways:
    """Return the layouts that two readers can take, with what may be pending in what they send back together."""
    return {
        layout: {mine | its for mine in sent for its in others[layout]}
        for layout, sent in ones.items()
        if layout in others
    }


def _renamed(layout: Layout, deliver: Op) -> Layout:
    """Return a layout in the maker's names of the dims."""
    back = {new: old for old, new in deliver.kind.rename} if isinstance(deliver.kind, Deliver) else {}
    return Layout(dims=tuple((back.get(dim, dim), cut) for dim, cut in layout.dims), sums=layout.sums)
