"""The edge of a tensor through its deliver, from its maker to its readers, and of its gradient back: what it costs.

A reader takes the tensor as it was made, or as it is delivered, in one layout for all that do not take it as made.
Where few combinations exist, each reader has a variable of its own; else all readers take the tensor alike.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.blocks.choices import OpChoice
from autoshard.blocks.dataflow import Dataflow, numbered
from autoshard.blocks.elimination import COLUMN, CostFactor, Table
from autoshard.errors import InputError
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.op import Op
from autoshard.layout.layout import Layout
from autoshard.layout.redistribute import only_gathers

Mask = NDArray[np.bool_]
Readers = tuple[str, ...]
_MOST_COMBINATIONS = 1 << 13  # measured: of more, a table takes longer than it saves
_MOST_NAMED = 4  # readers, in a message
_MOST_READERS = 10  # there is a group for each set of readers; experts in a list are dozens of readers


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A layout in which some readers take a tensor, and the one in which they together send back its gradient."""

    taken: Layout
    sent: Layout


class TensorEdge:
    """A deliver between its maker (None: the block before) and its readers, each with its choices.

    ``variables`` are those of what readers take, each with its values.
    """

    def __init__(self, flow: Dataflow, deliver: Op) -> None:
        block = flow.problem.block
        assert isinstance(deliver.kind, Deliver), f"{deliver.name} delivers nothing"
        self.flow, self.kind, self.tensor = flow, deliver.kind, deliver.outputs[0]
        self.source = block.tensors[deliver.inputs[0]]
        self.maker = flow.maker.get(self.source.name)
        self.readers = flow.readers[self.tensor]
        self.made = flow.made(self.maker, self.source.name)
        self.pending = np.array([bool(layout.sums or layout.maxima) for layout in self.made])
        boundary = (OpChoice(cuts=flow.problem.boundary),)
        self._choices = flow.choices[self.maker.name] if self.maker else boundary
        self._names = tuple(reader.name for reader in self.readers)
        later = block.select("micro_batch", "IW")
        self._late = {op.source for op in later if self.tensor in op.inputs} & {*self._names}
        self._maker_reads = any(
            op.source == self.maker.name for op in later if self.maker is not None and self.source.name in op.inputs
        )
        self._counts_slots = flow.counts_slots(self.source.name)
        self._deliveries: dict[Readers, tuple[Delivery, ...]] = {}
        self._joint: dict[Readers, NDArray[np.intp]] = {}
        self._renamed: dict[Layout, Layout] = {}
        self._classes = tuple((name,) for name in self._names)
        if not self._are_few() and not self.deliveries(self._names):  # no layout suits all of them
            self._classes = self._alike()
        self._groups = self._as_made_groups() if self._are_few() else ()
        self.variables = {f"{deliver.name} to {names[0]}": self.deliveries(names) for names in self._classes}
        if not self._groups:
            self.variables = {deliver.name: self.deliveries(self._names)}

    def factors(self) -> Iterator[CostFactor]:
        """Yield the prices of the edge, and infinity where reader and delivery do not fit."""
        table, weight = self._separate() if self._groups else (self._price(())[:, 0], self._weight(()))
        if self.maker is None:
            table, weight = table[0], None if weight is None else weight[0]
        if not np.isfinite(table).any():
            names = f"{', '.join(self._names[:_MOST_NAMED])}{', ...' if len(self._names) > _MOST_NAMED else ''}"
            message = f"{len(self._names)} operations ({names}) read {self.tensor}, and no layout of it suits all"
            raise InputError.of(self.flow.problem.block.kind, f"{message}. Leave out a pin of theirs, or sp")
        maker = () if self.maker is None else (self.maker.name,)
        columns = (COLUMN,) if self.flow.problem.shape else ()
        yield CostFactor(variables=(*maker, *self.variables, *columns), table=table, weight=weight)
        variables = dict(zip(self._classes, self.variables, strict=True)) if self._groups else {}
        by_reader = {name: variable for names, variable in variables.items() for name in names}
        for reader in self.readers:
            name = by_reader.get(reader.name) or next(iter(self.variables))
            fits = self._fitting(reader, self.variables[name])
            yield CostFactor(variables=(name, reader.name), table=np.where(fits, 0.0, np.inf))
            if self.maker and reader.inputs[0] == self.tensor and self.flow.rules[reader.name].forward:
                # A sum that may pass through a reader is passed: the lowered program always does.
                takes = self.flow.choices[reader.name]
                passes = [
                    [set(layout.sums) - choice.busy == set(choice.passed) for choice in takes] for layout in self.made
                ]
                yield CostFactor(variables=(self.maker.name, reader.name), table=np.where(passes, 0.0, np.inf))

    def deliveries(self, readers: Readers) -> tuple[Delivery, ...]:
        """Return the layouts that all readers accept, once for each set of sums that their gradient may await."""
        if readers not in self._deliveries:
            # The sets of sums that may be pending in their joint gradient, by layout.
            layouts: dict[Layout, set[frozenset[str]]] | None = None
            for reader in (op for op in self.readers if op.name in readers):
                reader_layouts: dict[Layout, set[frozenset[str]]] = {}
                for choice in self.flow.choices[reader.name]:
                    accepted = self.flow.wanted(reader, choice, self.tensor)
                    reader_layouts.setdefault(accepted, set()).add(self.flow.sends(reader, choice, self.tensor))
                if layouts is not None:
                    both = [layout for layout in layouts if layout in reader_layouts]
                    reader_layouts = {
                        layout: {sums | more for sums in layouts[layout] for more in reader_layouts[layout]}
                        for layout in both
                    }
                layouts = reader_layouts
            deliveries = [
                Delivery(taken=layout, sent=Layout(dims=layout.dims, sums=tuple(sorted(sent))))
                for layout, all_sent in (layouts or {}).items()
                for sent in all_sent
            ]
            deliveries.sort(key=lambda delivery: (delivery.taken.dims, delivery.taken.sums, delivery.sent.sums))
            self._deliveries[readers] = tuple(deliveries)
        return self._deliveries[readers]

    def _are_few(self) -> bool:
        """Say whether readers are few enough for a variable each, or each class of readers that take it alike."""
        counts = [len(self.deliveries(names)) for names in self._classes]
        return len(counts) <= _MOST_READERS and math.prod(counts) <= _MOST_COMBINATIONS

    def _alike(self) -> tuple[Readers, ...]:
        """Return the classes of readers that accept the same layouts, for the same sums of their gradients."""
        classes: dict[object, list[str]] = {}
        for reader in self.readers:
            accepted = frozenset(
                (self.flow.wanted(reader, choice, self.tensor), self.flow.sends(reader, choice, self.tensor))
                for choice in self.flow.choices[reader.name]
            )
            classes.setdefault(accepted, []).append(reader.name)
        return tuple(map(tuple, classes.values()))

    def _others(self, group: Readers) -> Readers:
        return tuple(name for name in self._names if name not in group)

    def _as_made_groups(self) -> tuple[Readers, ...]:
        """Return the groups of readers that may take the tensor as made; readers that share slot numbers agree."""
        if self._counts_slots:
            return ()
        agree: list[set[str]] = []
        for reader, other_reader in itertools.permutations(self.readers, 2):
            delivered = [op for op in self.flow.delivers if op.inputs[0] in reader.outputs]
            if any(self.flow.counts_slots(op.inputs[0]) and op.outputs[0] in other_reader.inputs for op in delivered):
                agree.append({reader.name, other_reader.name})
        counts = range(1, len(self._classes))
        classes = itertools.chain.from_iterable(itertools.combinations(self._classes, count) for count in counts)
        groups = (tuple(itertools.chain.from_iterable(names)) for names in classes)
        return tuple(group for group in groups if all(len(pair & set(group)) != 1 for pair in agree))

    # prices and memory, where a group of readers takes the tensor as made, and the other readers as delivered

    def _separate(self) -> tuple[Table, Table | None]:
        """Return price and memory with an axis for the maker and one for what each reader takes."""
        price: Table = np.array(np.inf)
        weight: Table | None = None
        for group in ((), *self._groups):
            made_numbers, delivered = self._numbers(group), self._numbers(self._others(group))
            alone = ((0, 0),) * len(self.flow.problem.shape)
            padded = np.pad(self._price(group), ((0, 0), (0, 1), (0, 1), *alone), constant_values=np.inf)
            here = padded[:, made_numbers, delivered]
            price = np.minimum(price, here)
            group_weight = self._weight(group)
            if group_weight is not None:
                more = np.pad(group_weight, ((0, 0), (0, 1), *alone))[:, delivered]
                weight = np.where(np.isfinite(here), more, 0.0 if weight is None else weight)
        return price, weight

    def _numbers(self, group: Readers) -> NDArray[np.intp]:
        """Return the number of the delivery to a group that each of its readers takes, -1 where they differ.

        There is an axis for each class of readers, of length 1 for those that are not of the group.
        """
        if group not in self._joint:
            singles = [self.deliveries(names) if names[0] in group else () for names in self._classes]
            all_deliveries = [*itertools.chain.from_iterable(singles), *(self.deliveries(group) if group else ())]
            layout_numbers, sums = numbered([delivery.taken for delivery in all_deliveries]), self._sums(all_deliveries)
            number = np.full((layout_numbers.max(initial=0) + 1, 1 << len(self.flow.problem.real_atoms)), -1)
            start = sum(map(len, singles))
            number[layout_numbers[start:], sums[start:]] = np.arange(len(all_deliveries) - start)
            layout, pending = None, np.zeros([1] * len(singles), np.intp)
            same, start = np.ones_like(pending, bool), 0
            for axis, single in enumerate(singles):
                if single:
                    shape = [-1 if position == axis else 1 for position in range(len(singles))]
                    axis_layouts = layout_numbers[start : start + len(single)].reshape(shape)
                    pending = pending | sums[start : start + len(single)].reshape(shape)
                    layout = axis_layouts if layout is None else layout
                    same = same & (axis_layouts == layout)
                    start += len(single)
            self._joint[group] = pending if layout is None else np.where(same, number[layout, pending], -1)
        return self._joint[group]

    def _price(self, group: Readers) -> Table:
        """Price the edge: axes for the maker's choices, the group's deliveries (1 if none) and the other readers'."""
        delivered, spread = self.deliveries(self._others(group)), self.flow.problem.spread
        again = spread(self._again(delivered)) if self._late - set(group) else np.False_
        goals = [self._in_maker_dims(delivery.taken) for delivery in delivered]
        pending = "maxima" if any(layout.maxima for layout in self.made) else "sums"
        forward_s = self.flow.change_s(self.source.dims, self.source.dtype, self.made, goals, pending)
        price = (forward_s * (1.0 + again) + self._back(delivered))[:, None]
        sums, as_made = self._sums(delivered), self._as_made(delivered)[:, None]
        if not group:
            allowed = self._due(sums, sums)[:, None] & (as_made if self._counts_slots else np.True_)
            return np.where(spread(allowed), price, np.inf)
        group_deliveries = self.deliveries(group)
        allowed = (
            self._due(sums, self._sums(group_deliveries)[:, None])
            & ~as_made
            & self._as_made(group_deliveries)[:, :, None]
        )
        return np.where(spread(allowed), price + self._back(group_deliveries)[:, :, None], np.inf)

    def _weight(self, group: Readers) -> Table | None:
        """Return the memory of the tensor from forward to backward, if any: as made, as delivered, or both."""
        problem, delivered = self.flow.problem, self.deliveries(self._others(group))
        saved = [entry for entry in problem.block.saved if entry.storage == self.source.name]
        if not saved:
            return None

        def held(layouts: Iterable[Layout]) -> Table:
            return problem.stacked([problem.local_bytes(layout, saved[0].tensor.dtype) for layout in layouts])

        here, there = held(self.made)[:, None], held(delivery.taken for delivery in delivered)
        stays = ~self.pending[:, None]
        if not self._late - set(group):
            return np.where(problem.spread(stays), here, there)
        read_as_made = self._maker_reads or bool(self._late & set(group))
        both = there + np.where(problem.spread(stays & read_as_made & ~self._as_made(delivered)), here, 0.0)
        return np.where(problem.spread(self._again(delivered)), here, both)

    def _again(self, deliveries: Sequence[Delivery]) -> Mask:
        """Return where a gathered tensor is not kept, so that backward gathers it again."""
        gathers_again = np.zeros((len(self.made), len(deliveries)), bool)
        if not self.flow.problem.keeps_gathered:
            goals = [self._in_maker_dims(delivery.taken) for delivery in deliveries]
            gathers_again[:] = [[only_gathers(layout, goal) for goal in goals] for layout in self.made]
        return gathers_again

    def _back(self, deliveries: Sequence[Delivery]) -> Table:
        """Price the way of a gradient from how readers send it to how the maker's own gradient takes it."""
        if not self.flow.has_gradient[self.tensor]:
            return np.zeros((len(self._choices), len(deliveries), *self.flow.problem.shape))
        dims, dtype = self.source.dims, self.source.dtype
        accepted = [choice.layout(dims, choice.passed_back) for choice in self._choices]
        sent = [self._in_maker_dims(delivery.sent) for delivery in deliveries]
        if not self.kind.settles:
            return self.flow.change_s(dims, dtype, sent, accepted).swapaxes(0, 1)
        summed = [Layout(dims=layout.dims) for layout in sent]
        pairs = zip(sent, summed, strict=True)
        at_once = [self.flow.change_s(dims, dtype, [before], [after])[0, 0] for before, after in pairs]
        shape = (len(deliveries), *self.flow.problem.shape)  # of no deliveries, too
        return self.flow.change_s(dims, dtype, summed, accepted).swapaxes(0, 1) + np.array(at_once).reshape(shape)

    # what can be

    def _fitting(self, reader: Op, deliveries: Sequence[Delivery]) -> Mask:
        """Return where a reader's choice can take a delivery, and leaves no other sum pending."""
        choices = self.flow.choices[reader.name]
        layouts = [self.flow.wanted(reader, choice, self.tensor) for choice in choices]
        number = numbered([*layouts, *(delivery.taken for delivery in deliveries)])
        accepted, delivered = number[: len(layouts)], number[len(layouts) :]
        sends = np.array([self.flow.mask(self.flow.sends(reader, choice, self.tensor)) for choice in choices])
        return (delivered[:, None] == accepted) & ((sends & ~self._sums(deliveries)[:, None]) == 0)

    def _due(self, delivered_sums: NDArray[np.intp], made_sums: NDArray[np.intp]) -> Mask:
        """Return where the maker passes back the sums that a lowered program does: those that both gradients await."""
        shape = (-1, *(1 for _ in np.broadcast_shapes(delivered_sums.shape, made_sums.shape)))
        mask, real = self.flow.mask, set(self.flow.problem.real_atoms)
        passed = np.array([mask(choice.passed_back) for choice in self._choices]).reshape(shape)
        idle = np.array([mask(real - choice.busy) for choice in self._choices]).reshape(shape)
        lowered = np.where((delivered_sums & idle) == (made_sums & idle), delivered_sums & idle, 0)
        return (passed == lowered) | (not passed.any())  # a maker that passes no sum back gets a summed gradient

    def _as_made(self, deliveries: Sequence[Delivery]) -> Mask:
        """Return where a delivery is cut as a choice of the maker makes it, with nothing pending."""
        goals = (self._in_maker_dims(delivery.taken).dims for delivery in deliveries)
        number = numbered([*(layout.dims for layout in self.made), *goals])
        made_numbers, delivered = number[: len(self.made)], number[len(self.made) :]
        return (made_numbers[:, None] == delivered) & ~self.pending[:, None]

    def _sums(self, deliveries: Sequence[Delivery]) -> NDArray[np.intp]:
        """Return the sums that are pending in the gradient of each delivery, as numbers."""
        return np.array([self.flow.mask(delivery.sent.sums) for delivery in deliveries], np.intp)

    def _in_maker_dims(self, layout: Layout) -> Layout:
        """Return a layout in the maker's names of the dims."""
        if layout not in self._renamed:
            self._renamed[layout] = layout.named(self.source.dims)
        return self._renamed[layout]
