"""Layouts that one lowering of a cutting serves, with what their blocks cost: priced once, whatever the pipeline."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.cost.block import Setting
from autoshard.cost.collective import Ring
from autoshard.cost.pipeline import Sends
from autoshard.cost.setting import Question, boundary_bytes, price_block
from autoshard.cost.sharded import CutBlocks
from autoshard.layout.cutting import Cutting
from autoshard.plan.build import buckets_of
from autoshard.plan.candidate import CpOrder, Zero
from autoshard.plan.recompute import Recompute
from autoshard.schedule.schedule import Schedule
from autoshard.search.columns import Links, at, columns_of, distinct, lowered_alike, of_step
from autoshard.search.fillings import Frame, Totals
from autoshard.search.space import Space, terms_s
from autoshard.spec.kernels import load_kernels

Column = Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """A solver's answer: a cutting, and the atoms that cut anything where it was solved."""

    cutting: Cutting
    atoms: frozenset[str]

    def serves(self, atoms: frozenset[str], exact: frozenset[str]) -> bool:
        """Whether it says all about a layout on whose mesh these atoms cut, just like here where they are exact."""
        return atoms & exact == self.atoms & exact and atoms & {"kv", "rep"} <= self.atoms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """Layouts with the blocks of one lowering, each block under every kind of recompute that may be used."""

    question: Question
    asked: Asked
    space: Space
    layouts: Column  # their numbers
    blocks: CutBlocks
    setting: Setting
    sends: Ring
    boundary_bytes: Column
    bucket_bytes: Column
    kinds: tuple[Recompute, ...]
    embed: Totals
    layer: Totals
    head: Totals

    def frame(self, rows: Column, schedule: Schedule, zero: Zero) -> Frame:
        """Return some of its layouts with a schedule."""
        size = self.boundary_bytes[rows]
        send_s = at(self.sends, rows).send_s(size)
        return Frame(
            question=self.question,
            setting=replace(at(self.setting, rows), zero=zero),
            schedule=schedule,
            sends=Sends.of(np.broadcast_to(send_s, len(rows)), schedule, load_kernels(self.question.kernels)),
            boundary_bytes=size,
            bucket_bytes=self.bucket_bytes[rows],
            fixed_s=self.fixed_s(rows, schedule.builder, schedule.num_chunks, zero),
            embed=self.embed.only(rows),
            layer=self.layer.only(rows),
            head=self.head.only(rows),
        )

    def in_order(self, order: CpOrder, rows: Column) -> "Family":
        """Return some of its layouts, which have this order of the sequence over cp."""
        space = self.space.keep(rows)
        return replace(
            self,
            space=replace(space, base=replace(space.base, cp_order=order)),
            layouts=self.layouts[rows],
            setting=replace(at(self.setting, rows), cp_order=order),
            sends=at(self.sends, rows),
            boundary_bytes=self.boundary_bytes[rows],
            bucket_bytes=self.bucket_bytes[rows],
            embed=self.embed.only(rows),
            layer=self.layer.only(rows),
            head=self.head.only(rows),
        )

    @property
    def cp_order(self) -> CpOrder:
        """The order of the sequence over cp."""
        return self.space.base.cp_order

    def fixed_s(self, rows: Column, builder: str, chunks: Any, zero: Zero) -> Column:
        """Return what a step of some of its layouts takes whatever it does, and by the user's own terms."""
        question = self.question
        fixed = np.full(len(rows), question.calibration.step_s)
        if not question.terms:
            return fixed
        own = self.space.keep(rows)
        base = replace(own.base, schedule=builder, zero=zero)
        sizes = {**own.rows, "vp": np.broadcast_to(chunks, len(rows))}
        return fixed + terms_s(question, replace(own, base=base, rows=sizes))


class Prices:
    """What a search has priced already: links, and layers, which many cuttings cut alike."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.links = Links(question)
        self._known: dict[object, tuple[Mapping[object, int], Totals]] = {}

    def layers(self, blocks: CutBlocks, rows: Sequence[object], kinds: Sequence[Recompute], setting: Setting) -> Totals:
        """Return what a layer takes and holds under some kinds of recompute, in rows that say what is priced."""
        key = blocks.cutting.alone("layer").only(blocks.atoms), blocks.atoms
        if key in self._known:
            known, found = self._known[key]
            if known.keys() >= set(rows):
                return found.only(np.array([known[row] for row in rows]))
        costs = [price_block(self.question, setting, "layer", drop) for drop in kinds]
        self._known[key] = {row: number for number, row in enumerate(rows)}, Totals.of(costs, len(rows))
        return self._known[key][1]


def families(
    prices: Prices, space: Space, asked: Asked, layouts: Mapping[CpOrder, Column], *, apart: bool = False
) -> Iterator[Family]:
    """Price the blocks of some layouts as a cutting shards them; ``apart`` as in ``lowered_alike``.

    They are given by the order of the sequence, which tells families apart, but changes little of what is priced.
    """
    question = prices.question
    kinds = kinds_of(space.recomputes)
    numbers = np.concatenate(list(layouts.values()))
    orders = np.repeat(list(layouts), [len(one) for one in layouts.values()])
    some = space.keep(numbers)
    for mine, blocks in lowered_alike(question, some, asked.cutting, apart=apart):
        own = some.keep(mine)
        setting, sends = columns_of(prices.links, own, blocks, orders[mine])
        count = own.num_layouts
        rows = list(zip(numbers[mine].tolist(), orders[mine].tolist(), strict=True))
        layer = prices.layers(blocks, rows, kinds, setting)
        ends = {kind: price_block(question, setting, kind, Recompute()) for kind in ("embed", "head")}
        candidates, inverse = distinct(own)
        buckets = [buckets_of(candidate, space.engine).total_bytes for candidate in candidates]
        whole = Family(
            question=question,
            asked=asked,
            space=own,
            layouts=numbers[mine],
            blocks=blocks,
            setting=of_step(setting, (layer, *ends.values())),
            sends=sends,
            boundary_bytes=np.broadcast_to(boundary_bytes(setting), count),
            bucket_bytes=np.array(buckets, dtype=np.float64)[inverse],
            kinds=kinds,
            embed=Totals.of([ends["embed"]], count),
            layer=layer,
            head=Totals.of([ends["head"]], count),
        )
        for order in layouts:
            ordered = np.flatnonzero(orders[mine] == order)
            if len(ordered):
                yield whole.in_order(order, ordered)


def kinds_of(recomputes: Sequence[tuple[Recompute, ...]]) -> tuple[Recompute, ...]:
    """Return what single layers may do, none among it.

    >>> [str(kind) for kind in kinds_of([(Recompute.parse("full:2"),)])]
    ['none', 'full']
    """
    kinds = {kind: None for stages in recomputes for one in stages for kind in one.kinds}
    return tuple(dict.fromkeys((Recompute(), *kinds)))
