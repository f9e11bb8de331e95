"""Many layouts priced at once: their blocks, with and without recompute, in columns that bounds are read off."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.blocks.cutting import Meshes, Terms, shared_cuttings
from autoshard.cost.collective import Ring
from autoshard.cost.setting import (
    BlockCost,
    Counted,
    PerCandidate,
    Question,
    Rows,
    Setting,
    boundary_bytes,
    handed_on,
    offloaded,
    only,
    price_block,
    stage_groups,
)
from autoshard.cost.sharded import atom_groups
from autoshard.cost.stages import BlockTotals, PipelineBlocks, Sends
from autoshard.cost.update import Weights
from autoshard.graph.layer_order import layer_order
from autoshard.layout.layout import Cutting
from autoshard.plan.candidate import Candidate, CpOrder
from autoshard.plan.lowering import ATOMS, split_pending
from autoshard.plan.recompute import Recompute
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.bound.block_prices import LoweredLayouts, block_totals, lowered_alike, split
from autoshard.search.bound.least_recompute import LeastRecompute, costs_of
from autoshard.search.bound.mesh_columns import Groups, MeshColumns
from autoshard.search.bound.space import Space
from autoshard.spec.kernels import load_kernels
from autoshard.spec.mesh import COPIES, PARTS, state_groups

Row = tuple[Terms, int]  # a layout, cut under some terms
ByOrder = Mapping[CpOrder, Ints]  # layouts by the order of the sequence over cp
PriceOf = Callable[[Setting, str], Sequence[BlockCost]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedLayouts(PerCandidate):
    """Layouts with their blocks, each block under every allowed kind of recompute, or only without."""

    question: Question
    cuttings: tuple[Cutting, ...]
    cut_as: Ints  # the number of each layout's cutting
    space: Space
    numbers: Ints  # of the layouts in the space of the search
    orders: NDArray[np.str_]  # of the sequence over cp
    setting: Setting  # of the step phase
    lowered: LoweredLayouts | None  # these layouts, where all are of one lowering
    sends_s: Floats  # of the hidden state of a micro-batch
    boundary_bytes: Floats
    bucket_bytes: Floats
    kinds: tuple[Recompute, ...]
    embed: BlockTotals
    layers: tuple[BlockTotals, ...]  # of each kind of layer
    head: BlockTotals
    state_ring: Callable[[Groups, tuple[str, ...]], Ring]  # of all layouts, where ZeRO has these groups

    def cutting(self, row: int) -> Cutting:
        """Return how the blocks of one of its layouts are cut."""
        return self.cuttings[int(self.cut_as[row])]

    @property
    def at_least(self) -> "PricedLayouts":
        """Lower bounds for any recompute: the time without recompute, and no bytes kept for backward."""
        none = np.zeros((1, len(self.numbers)))
        plain = (replace(layer, saved_bytes=none, moment_bytes=none, waiting_bytes=none) for layer in self.layers)
        return replace(self, layers=tuple(plain))

    def pipeline_blocks(self, rows: Rows, schedule: Schedule, base: Candidate) -> PipelineBlocks:
        """Return the blocks of some of its layouts, run with a schedule and the ZeRO of a candidate."""
        return PipelineBlocks(
            question=self.question,
            setting=self._step_setting(rows, base),
            schedule=schedule,
            sends=Sends.of(self.sends_s[rows], schedule.builder, load_kernels(self.question.kernels)),
            boundary_bytes=self.boundary_bytes[rows],
            bucket_bytes=self.bucket_bytes[rows],
            fixed_s=self.fixed_s(rows, replace(base, schedule=schedule.builder), schedule.num_chunks),
            embed=self.embed.only(rows),
            layers=only(self.layers, rows),
            head=self.head.only(rows),
            order=layer_order(self.question.model.layer_order),
        )

    def _step_setting(self, rows: Rows, base: Candidate) -> Setting:
        """Return the numbers of the step phase; where ZeRO's groups do not divide a layout's ranks, it has one copy."""
        setting = replace(only(self.setting, rows), zero=base.zero)
        if (groups := (base.zero_group, base.weight_group)) == (None, None):
            return setting
        wanted, numbers = state_groups(setting.rings, parted=bool(base.weight_group)), self.numbers[rows]
        rings = {atoms: only(self.state_ring(groups, atoms), numbers) for atoms in wanted}
        parts = rings[PARTS].size if base.weight_group else 1
        return replace(setting, copies=rings[COPIES].size, parts=parts, state_rings=rings)

    def fixed_s(self, rows: Rows, base: Candidate, chunks: Ints | int) -> Floats:
        """Return the fixed seconds of a step of some of its layouts, and those of the user's own terms."""
        fixed = np.full(len(self.numbers[rows]), self.question.calibration.step_s)
        if not self.question.terms:
            return fixed
        question, space = self.question, self.space.only(rows)
        sizes = {**space.rows, "vp": np.broadcast_to(chunks, len(fixed))}
        plain = replace(space, base=replace(base, stages=None), rows=sizes, recomputes=((Recompute(),),))
        columns = plain.columns(question.model, question.cluster, question.workload, 0)
        return fixed + sum(term.of(columns) for term in question.terms)


class LayoutPricer:
    """Prices the layouts of a space, and finds how their blocks are cut; repeated questions are answered from memory.

    ``between`` is called before each block, and may stop the pricing.
    """

    def __init__(self, question: Question, space: Space) -> None:
        self.question, self.space = question, space
        self.between: Callable[[], None] = lambda: None
        self._cuttings: dict[object, list[tuple[Cutting, Ints]]] = {}
        self._priced: dict[object, list[PricedLayouts]] = {}
        self._with_recompute: dict[PricedLayouts, PricedLayouts] = {}
        self.meshes = MeshColumns(question, space)

    def kinds(self, layouts: Ints, *, pinned: bool) -> Iterator[Ints]:
        """Yield some layouts by the kind of their mesh: no cutting serves two kinds.

        Slots of experts may be cut otherwise where ep, or cp, cuts something; so may anything where tensors are pinned.
        """
        exact = ATOMS if pinned else ("ep", "cp") if self.question.model.num_experts else ()
        yield from split(layouts, [self.meshes.atoms[atom] > 1 for atom in exact])

    def cuttings(self, layouts: Ints, terms: Terms, slack: float) -> list[tuple[Cutting, Ints]]:
        """Return cuttings of some layouts of one kind, each with the layouts that it serves; ``slack`` is of time."""
        key = terms, slack, layouts.tobytes()
        if key not in self._cuttings:
            self._cuttings[key] = self._solved(layouts, terms, slack)
        return self._cuttings[key]

    def _solved(self, layouts: Ints, terms: Terms, slack: float) -> list[tuple[Cutting, Ints]]:
        rows, batch = self.space.only(layouts).rows, self.question.workload.global_batch
        meshes = Meshes(
            atoms={atom: column[layouts] for atom, column in self.meshes.atoms.items()},
            num_sequences=rows["mbs"] * rows["dp"],
            num_micro_batches=np.maximum(1, batch // (rows["mbs"] * rows["dp"])),
            ring=lambda atoms: self.meshes.ring(atoms, layouts),
        )
        shared = shared_cuttings(self.question, meshes, (terms, slack), self.between)
        return [(cutting, layouts[served]) for cutting, served in shared]

    def priced(
        self, space: Space, served: Sequence[tuple[Cutting, ByOrder]], *, apart: bool = False
    ) -> list[PricedLayouts]:
        """Price the blocks of some layouts of a space of the same sizes as cuttings shard them, without recompute.

        The layouts of each cutting are given by the order of the sequence over cp; ``apart`` as in ``lowered_alike``.
        """
        about = space.base, space.sp, space.recomputes, apart
        keys = [(about, cutting, *((order, of.tobytes()) for order, of in by.items())) for cutting, by in served]
        new = {key: part for key, part in zip(keys, served, strict=True) if key not in self._priced}
        lowered = {key: list(self._lowered(space, *part, apart=apart)) for key, part in new.items()}
        parts = iter(self._without_recompute([layouts for of_key in lowered.values() for layouts in of_key]))
        self._priced |= {key: [next(parts) for _ in of_key] for key, of_key in lowered.items()}
        return [part for key in keys for part in self._priced[key]]

    def _lowered(self, space: Space, cutting: Cutting, layouts: ByOrder, *, apart: bool) -> Iterator[LoweredLayouts]:
        """Yield the layouts of a cutting by their lowerings."""
        numbers = np.concatenate(list(layouts.values()))
        orders = np.repeat(list(layouts), [len(column) for column in layouts.values()])
        whole = space.only(numbers)
        for rows, blocks in lowered_alike(self.question, whole, cutting, apart=apart):
            self.between()
            yield LoweredLayouts(blocks=blocks, space=whole.only(rows), numbers=numbers[rows], orders=orders[rows])

    def _without_recompute(self, parts: Sequence[LoweredLayouts]) -> Iterator[PricedLayouts]:
        """Price the blocks of layouts of several lowerings, without recompute."""
        plain = partial(self._price, (Recompute(),))
        totals = {kind: self._totals(parts, kind, plain) for kind in self.question.step.kinds}
        for part, (embed, *layers, head) in zip(parts, zip(*totals.values(), strict=True), strict=True):
            count, kernels = len(part.numbers), load_kernels(self.question.kernels)
            weights = (of_block for block in (*layers, embed, head) for of_block in (block.weights, block.tied_weights))
            summed = {part for block_sums in weights for atoms in block_sums for part in split_pending(atoms)}
            groups = atom_groups(part.blocks.every()) | stage_groups(kernels)
            setting = part.setting(self.question, self.meshes, groups)
            send_s, _ = handed_on(setting, kernels)
            rings = {atoms: ring for atoms, ring in setting.rings.items() if atoms in summed}
            yield PricedLayouts(
                question=self.question,
                cuttings=(part.blocks.cutting,),
                cut_as=np.zeros(count, dtype=np.int64),
                space=part.space,
                numbers=part.numbers,
                orders=part.orders,
                # The step phase asks for the rings over which sums of gradients are pending, and for no sizes.
                setting=replace(setting, sizes={}, rings=rings),
                lowered=part,
                sends_s=np.broadcast_to(send_s, count),
                boundary_bytes=np.broadcast_to(boundary_bytes(setting), count),
                bucket_bytes=self.meshes.bucket_bytes[part.numbers],
                kinds=(Recompute(),),
                embed=embed,
                layers=tuple(layers),
                head=head,
                state_ring=self.meshes.state_ring,
            )

    def _totals(self, parts: Sequence[LoweredLayouts], kind: str, price: PriceOf) -> list[BlockTotals]:
        return block_totals(self.question, self.meshes, kind, parts, lambda setting: price(setting, kind))

    def joined(self, parts: Sequence[PricedLayouts]) -> PricedLayouts:
        """Return the layouts of parts that are cut under the same terms in one piece, whose bounds take one look."""
        first, numbers = parts[0], np.concatenate([part.numbers for part in parts])
        if len(parts) == 1:
            return first
        groups = dict.fromkeys(group for part in parts for group in part.setting.rings)
        orders = np.concatenate([part.orders for part in parts])
        rings, atoms = self.meshes.rings(groups, numbers), self.meshes.sizes(numbers)
        setting = replace(first.setting, atoms=atoms, rings=rings, cp_order=orders)
        rows = {key: np.concatenate([part.space.rows[key] for part in parts]) for key in first.space.rows}
        before = np.cumsum([0, *(len(part.cuttings) for part in parts)])
        return replace(
            first,
            cuttings=tuple(cutting for part in parts for cutting in part.cuttings),
            cut_as=np.concatenate([part.cut_as + count for part, count in zip(parts, before[:-1], strict=True)]),
            lowered=None,
            space=replace(first.space, rows=rows),
            numbers=numbers,
            orders=orders,
            setting=setting,
            sends_s=np.concatenate([part.sends_s for part in parts]),
            boundary_bytes=np.concatenate([part.boundary_bytes for part in parts]),
            bucket_bytes=np.concatenate([part.bucket_bytes for part in parts]),
            embed=joined_totals([part.embed for part in parts]),
            layers=tuple(joined_totals(layers) for layers in zip(*(part.layers for part in parts), strict=True)),
            head=joined_totals([part.head for part in parts]),
        )

    def least_with_recompute(self, parts: Sequence[PricedLayouts]) -> PricedLayouts:
        """Return such layouts in one piece, with bounds of their layers under every recompute that may be used."""
        return self.joined(self._repriced(parts, self._least))

    def with_recompute(self, parts: Sequence[PricedLayouts]) -> list[PricedLayouts]:
        """Price the layers of such layouts under every kind of recompute that may be used."""
        new = [part for part in parts if part not in self._with_recompute]
        self._with_recompute |= dict(zip(new, self._repriced(new, self._price), strict=True))
        return [self._with_recompute[part] for part in parts]

    def some_with_recompute(self, chosen: Sequence[tuple[PricedLayouts, Ints]]) -> list[PricedLayouts]:
        """Price some rows of such layouts under every kind of recompute that may be used."""
        new = [priced.only(rows) for priced, rows in chosen if priced not in self._with_recompute]
        repriced = iter(self._repriced(new, self._price))
        whole = self._with_recompute
        return [whole[part].only(rows) if part in whole else next(repriced) for part, rows in chosen]

    def _repriced(
        self, parts: Sequence[PricedLayouts], price: Callable[[Sequence[Recompute], Setting, str], list[BlockCost]]
    ) -> list[PricedLayouts]:
        """Return layouts, each part of one lowering, with other prices of their layers."""
        if not parts:
            return []
        kinds, lowered = kinds_of(parts[0].space.recomputes), [part.lowered for part in parts if part.lowered]
        layers = [self._totals(lowered, kind, partial(price, kinds)) for kind in self.question.model.layer_counts]
        return [
            replace(part, kinds=kinds, layers=of_part)
            for part, of_part in zip(parts, zip(*layers, strict=True), strict=True)
        ]

    def _price(self, kinds: Sequence[Recompute], setting: Setting, block: str) -> list[BlockCost]:
        """Return what a block costs under each of some kinds of recompute."""
        counted, question = Counted(), self.question

        def price(drop: Recompute) -> BlockCost:
            self.between()
            return price_block(question, setting, block, drop, counted)

        return costs_of(kinds, price, partial(offloaded, question=question))

    def _least(self, kinds: Sequence[Recompute], setting: Setting, block: str) -> list[BlockCost]:
        """Return bounds of what a block costs under each of some kinds of recompute."""
        self.between()
        return LeastRecompute.of(self.question, setting, block).costs(kinds)


def joined_totals(parts: Sequence[BlockTotals]) -> BlockTotals:
    """Return the totals of the candidates of all parts, in their order; weights that a part lacks are none."""
    arrays = [column.name for column in fields(BlockTotals) if column.name not in ("weights", "tied_weights")]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in arrays
    }
    none = [np.zeros(part.forward_s.shape[-1]) for part in parts]

    def joined(weights: Sequence[Weights]) -> Weights:
        union = dict.fromkeys(pending for by_pending in weights for pending in by_pending)
        pairs = [*zip(weights, none, strict=True)]
        return {pending: np.concatenate([counts.get(pending, zero) for counts, zero in pairs]) for pending in union}

    weights, tied = joined([part.weights for part in parts]), joined([part.tied_weights for part in parts])
    return BlockTotals(**columns, weights=weights, tied_weights=tied)


def kinds_of(recomputes: Sequence[tuple[Recompute, ...]]) -> tuple[Recompute, ...]:
    """Return the kinds of recompute of single layers, ``none`` included.

    >>> [str(kind) for kind in kinds_of([(Recompute.parse("full:2"),)])]
    ['none', 'full']
    """
    kinds = (kind for stages in recomputes for stage in stages for kind in stage.kinds)
    return tuple(dict.fromkeys((Recompute(), *kinds)))
