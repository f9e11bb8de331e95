"""Many layouts priced at once: columns of their sizes, atoms and links, and blocks that one lowering serves."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.blocks.cutting import Meshes, Terms, shared_cuttings
from autoshard.cost.collective import Ring, Route, to_neighbours
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
from autoshard.cost.sharded import CutBlocks, alike_without, atom_groups
from autoshard.cost.stages import BlockTotals, PipelineBlocks, Sends
from autoshard.cost.update import Weights
from autoshard.graph.layer_order import layer_order
from autoshard.layout.layout import Cutting
from autoshard.plan.build import bucket_sizes, mesh_of
from autoshard.plan.candidate import Candidate, CpOrder
from autoshard.plan.lowering import ATOMS, split_pending
from autoshard.plan.recompute import Recompute
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.bound.least_recompute import LeastRecompute, costs_of
from autoshard.search.bound.space import Space
from autoshard.spec.kernels import load_kernels
from autoshard.spec.mesh import COPIES, PARTS, Mesh, state_groups
from autoshard.spec.model import ModelSpec

Row = tuple[Terms, int]  # a layout, cut under some terms
Groups = tuple[int | None, int | None]  # of ranks over which states and weights are divided


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
    priced_in: Setting | None  # of the blocks, where all are of one lowering
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
        # One candidate of every division of the ranks, whatever its micro-batch.
        sizes = np.stack([space.rows[key] for key in ("tp", "pp", "cp", "ep", "dp")])
        _, first, division = np.unique(sizes, axis=1, return_index=True, return_inverse=True)
        candidates = [space.candidate(int(row), 0) for row in first]
        self._division = division.reshape(-1)
        self._meshes = [mesh_of(candidate, question.model, question.cluster) for candidate in candidates]
        buckets = [bucket_sizes(candidate, space.engine).total_bytes for candidate in candidates]
        self._bucket_bytes = np.array(buckets, dtype=np.float64)[self._division]
        self._known: dict[object, Ring] = {}
        self._rings: dict[tuple[Groups | None, tuple[str, ...]], Ring] = {}  # by ZeRO's groups and by atoms
        self.atoms = atom_columns(question.model, space)

    def kinds(self, layouts: Ints, *, pinned: bool) -> Iterator[Ints]:
        """Yield some layouts by the kind of their mesh: no cutting serves two kinds.

        Slots of experts may be cut otherwise where ep, or cp, cuts something; so may anything where tensors are pinned.
        """
        exact = ATOMS if pinned else ("ep", "cp") if self.question.model.num_experts else ()
        yield from split(layouts, [self.atoms[atom] > 1 for atom in exact])

    def cuttings(self, layouts: Ints, terms: Terms, slack: float) -> list[tuple[Cutting, Ints]]:
        """Return cuttings of some layouts of one kind, each with the layouts that it serves; ``slack`` is of time."""
        key = terms, slack, layouts.tobytes()
        if key not in self._cuttings:
            self._cuttings[key] = self._solved(layouts, terms, slack)
        return self._cuttings[key]

    def _solved(self, layouts: Ints, terms: Terms, slack: float) -> list[tuple[Cutting, Ints]]:
        rows, batch = self.space.only(layouts).rows, self.question.workload.global_batch
        meshes = Meshes(
            atoms={atom: column[layouts] for atom, column in self.atoms.items()},
            num_sequences=rows["mbs"] * rows["dp"],
            num_micro_batches=np.maximum(1, batch // (rows["mbs"] * rows["dp"])),
            ring=lambda atoms: self.ring(atoms, layouts),
        )
        shared = shared_cuttings(self.question, meshes, (terms, slack), self.between)
        return [(cutting, layouts[served]) for cutting, served in shared]

    def priced(
        self, space: Space, cutting: Cutting, layouts: Mapping[CpOrder, Ints], *, apart: bool = False
    ) -> list[PricedLayouts]:
        """Price the blocks of some layouts of a space of the same sizes as a cutting shards them, without recompute.

        The layouts are given by the order of the sequence over cp; ``apart`` as in ``lowered_alike``.
        """
        numbers = ((order, of_order.tobytes()) for order, of_order in layouts.items())
        key = cutting, space.base, space.sp, space.recomputes, apart, *numbers
        if key not in self._priced:
            self._priced[key] = list(self._without_recompute(space, cutting, layouts, apart=apart))
        return self._priced[key]

    def _without_recompute(
        self, space: Space, cutting: Cutting, layouts: Mapping[CpOrder, Ints], *, apart: bool
    ) -> Iterator[PricedLayouts]:
        question, kernels = self.question, load_kernels(self.question.kernels)
        numbers = np.concatenate(list(layouts.values()))
        orders = np.repeat(list(layouts), [len(column) for column in layouts.values()])
        whole = space.only(numbers)
        for indices, blocks in lowered_alike(question, whole, cutting, apart=apart):
            part, count, rows = whole.only(indices), len(indices), numbers[indices]
            self.between()
            groups = atom_groups(blocks.every()) | stage_groups(kernels)
            rings = {atoms: self.ring(atoms, rows) for atoms in groups}
            setting = Setting(
                blocks=blocks,
                sizes=question.sizes((part.rows["mbs"] * part.rows["dp"]).astype(np.float64)),
                atoms={atom: column[rows].astype(np.float64) for atom, column in self.atoms.items()},
                rings=rings,
                zero=part.base.zero,
                cp_order=orders[indices],
            )
            embed, *layers, head = (
                BlockTotals.of([price_block(question, setting, kind, Recompute())], count)
                for kind in question.step.kinds
            )
            send_s, _ = handed_on(setting, kernels)
            weights = (of_block for block in (*layers, embed, head) for of_block in (block.weights, block.tied_weights))
            summed = {part for block_sums in weights for atoms in block_sums for part in split_pending(atoms)}
            yield PricedLayouts(
                question=question,
                cuttings=(cutting,),
                cut_as=np.zeros(count, dtype=np.int64),
                space=part,
                numbers=rows,
                orders=orders[indices],
                # The step phase asks for the rings over which sums of gradients are pending, and for no sizes.
                setting=replace(setting, sizes={}, rings={atoms: rings[atoms] for atoms in rings if atoms in summed}),
                priced_in=setting,
                sends_s=np.broadcast_to(send_s, count),
                boundary_bytes=np.broadcast_to(boundary_bytes(setting), count),
                bucket_bytes=self._bucket_bytes[rows],
                kinds=(Recompute(),),
                embed=embed,
                layers=tuple(layers),
                head=head,
                state_ring=self._state_ring,
            )

    def joined(self, parts: Sequence[PricedLayouts]) -> PricedLayouts:
        """Return the layouts of parts that are cut under the same terms in one piece, whose bounds take one look."""
        first, numbers = parts[0], np.concatenate([part.numbers for part in parts])
        if len(parts) == 1:
            return first
        atoms = {atom: column[numbers].astype(np.float64) for atom, column in self.atoms.items()}
        groups = dict.fromkeys(group for part in parts for group in part.setting.rings)
        rings, orders = {group: self.ring(group, numbers) for group in groups}, [part.orders for part in parts]
        setting = replace(first.setting, atoms=atoms, rings=rings, cp_order=np.concatenate(orders))
        rows = {key: np.concatenate([part.space.rows[key] for part in parts]) for key in first.space.rows}
        before = np.cumsum([0, *(len(part.cuttings) for part in parts)])
        return replace(
            first,
            cuttings=tuple(cutting for part in parts for cutting in part.cuttings),
            cut_as=np.concatenate([part.cut_as + count for part, count in zip(parts, before[:-1], strict=True)]),
            priced_in=None,
            space=replace(first.space, rows=rows),
            numbers=numbers,
            orders=np.concatenate(orders),
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
        return self.joined([self._least_with_recompute(part) for part in parts])

    def _least_with_recompute(self, priced: PricedLayouts) -> PricedLayouts:
        kinds, layers = kinds_of(priced.space.recomputes), list[BlockTotals]()
        assert priced.priced_in, "its layouts are of one lowering"
        for kind in self.question.model.layer_counts:
            self.between()
            least = LeastRecompute.of(self.question, priced.priced_in, kind)
            layers.append(BlockTotals.of(least.costs(kinds), len(priced.numbers)))
        return replace(priced, kinds=kinds, layers=tuple(layers))

    def with_recompute(self, priced: PricedLayouts, rows: Rows | None = None) -> PricedLayouts:
        """Price the layers of such layouts, or of some of them, under every kind of recompute that may be used."""
        if recomputed := self._with_recompute.get(priced):
            return recomputed if rows is None else recomputed.only(rows)
        priced = priced if rows is None else priced.only(rows)
        kinds, setting, question = kinds_of(priced.space.recomputes), priced.priced_in, self.question
        assert setting, "its layouts are of one lowering"
        layers: list[BlockTotals] = []
        for layer in self.question.model.layer_counts:
            price, offload = partial(self._price, Counted(), setting, layer), partial(offloaded, question=question)
            layers.append(BlockTotals.of(costs_of(kinds, price, offload), len(priced.numbers)))
        self._with_recompute[priced] = replace(priced, kinds=kinds, layers=tuple(layers))
        return self._with_recompute[priced]

    def _price(self, counted: Counted, setting: Setting, layer: str, drop: Recompute) -> BlockCost:
        self.between()
        return price_block(self.question, setting, layer, drop, counted)

    def ring(self, atoms: tuple[str, ...], layouts: Ints) -> Ring:
        """Return the groups over some atoms on the meshes of some layouts."""
        return only(self._ring_on((None, atoms), self._meshes), layouts)

    def _state_ring(self, groups: Groups, atoms: tuple[str, ...]) -> Ring:
        """Return the groups over some atoms of the step phase; one rank where ZeRO's groups do not divide a mesh."""
        meshes = (mesh.divided(mesh.num_copies(groups[0]), mesh.num_parts(*groups)) for mesh in self._meshes)
        return self._ring_on((groups, atoms), meshes)

    def _ring_on(self, key: tuple[Groups | None, tuple[str, ...]], meshes: Iterable[Mesh]) -> Ring:
        if key not in self._rings:
            self._rings[key] = only(ring_column([self._one_ring(mesh, key[1]) for mesh in meshes]), self._division)
        return self._rings[key]

    def _one_ring(self, mesh: Mesh, atoms: tuple[str, ...]) -> Ring:
        # Collectives start later where there is a pipeline, whatever ranks a group has.
        key = (to_neighbours(atoms), mesh.steps(atoms), mesh.placement, mesh.size("pp") > 1)
        if key not in self._known:
            self._known[key] = self.question.ring(mesh, atoms)
        return self._known[key]


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


def split(layouts: Ints, cuts: Sequence[NDArray[np.bool_]]) -> Iterator[Ints]:
    """Group layouts by which of some atoms are larger than 1."""
    kinds = sum((is_cut[layouts] << number for number, is_cut in enumerate(reversed(cuts))), 0 * layouts)
    yield from (layouts[kinds == kind] for kind in np.unique(kinds))


def lowered_alike(
    question: Question, space: Space, cutting: Cutting, *, apart: bool
) -> Iterator[tuple[Ints, CutBlocks]]:
    """Yield layouts that share one lowering, in which groups of one rank send nothing, with their blocks.

    Experts and their slots may be cut over all but edp, so it matters which of these exceed 1; in models without
    experts copies of keys may matter. Where tensors may be pinned, all atoms matter: ``apart``.
    """
    cuts = {atom: column > 1 for atom, column in atom_columns(question.model, space).items()}
    mixture = bool(question.model.num_experts)

    def lowered(layouts: Ints) -> CutBlocks:
        atoms = frozenset(atom for atom, column in cuts.items() if column[layouts].any())
        return CutBlocks(step=question.step, cutting=cutting, atoms=atoms)

    always = [atom for atom in cuts if apart or (mixture and atom != "edp")]
    for similar in split(np.arange(space.num_layouts), [cuts[atom] for atom in always]):
        whole = lowered(similar)
        mixed = "rep" not in always and "rep" in whole.atoms and not cuts["rep"][similar].all()
        matter = [cuts["rep"]] if mixed and not alike_without(whole, "rep") else []
        for group in split(similar, matter):
            yield group, lowered(group)


def atom_columns(model: ModelSpec, space: Space) -> Mapping[str, Ints]:
    """Return the sizes of the atoms of all layouts, as ``mesh_of`` gives them to one."""
    tp, ep, dp, cp = (space.rows[key] for key in ("tp", "ep", "dp", "cp"))
    rep = np.maximum(1, tp // model.num_kv_heads)
    return {"edp": dp // ep, "ep": ep, "cp": cp, "kv": tp // rep, "rep": rep}


def kinds_of(recomputes: Sequence[tuple[Recompute, ...]]) -> tuple[Recompute, ...]:
    """Return the kinds of recompute of single layers, ``none`` included.

    >>> [str(kind) for kind in kinds_of([(Recompute.parse("full:2"),)])]
    ['none', 'full']
    """
    kinds = (kind for stages in recomputes for stage in stages for kind in stage.kinds)
    return tuple(dict.fromkeys((Recompute(), *kinds)))


def ring_column(rings: Sequence[Ring]) -> Ring:
    """Return many rings of one cluster as one ring."""

    def column(routes: Sequence[Route | None]) -> Route | None:
        """Return one route of many rings, if they have it."""
        have = [route for route in routes if route]
        if not have:
            return None
        return Route(
            seconds_per_byte=np.array([route.seconds_per_byte for route in have]),
            latency_s=np.array([route.latency_s for route in have]),
            up_to_bytes=have[0].up_to_bytes,
            sent_share=np.array([route.sent_share for route in have]) if have[0].sent_share is not None else None,
        )

    routes = (column(ways) for ways in zip(*(ring.routes for ring in rings), strict=True))
    return Ring(
        size=np.array([ring.size for ring in rings], dtype=np.float64),
        bandwidth_bytes_per_s=np.array([ring.bandwidth_bytes_per_s for ring in rings]),
        latency_s=np.array([ring.latency_s for ring in rings]),
        start_s=np.array([ring.start_s for ring in rings]),
        joining_s=np.array([ring.joining_s for ring in rings]),
        hop=column([ring.hop for ring in rings]),
        exchange=column([ring.exchange for ring in rings]),
        tokens=column([ring.tokens for ring in rings]),
        routes=tuple(route for route in routes if route),
        is_flat=rings[0].is_flat,
    )
