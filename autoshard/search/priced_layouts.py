"""Many layouts priced at once: columns of their sizes, atoms and links, and blocks that one lowering serves."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.collective import Ring, Route, mesh_ring
from autoshard.cost.setting import Question, Setting, boundary_bytes, price_block
from autoshard.cost.sharded import CutBlocks, alike_without, atom_groups
from autoshard.cost.stages import BlockTotals, PerCandidate, PipelineBlocks, Rows, Sends, only
from autoshard.layout.layout import Cutting
from autoshard.plan.build import buckets_of, mesh_of
from autoshard.plan.candidate import Candidate, CpOrder, Zero
from autoshard.plan.lowering import split_pending
from autoshard.plan.recompute import Recompute
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.space import Space, terms_s
from autoshard.spec.kernels import load_kernels
from autoshard.spec.mesh import Mesh
from autoshard.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SolvedCutting:
    """An answer of the block solver: a cutting, and the atoms that cut anything where it was solved."""

    cutting: Cutting
    atoms: frozenset[str]

    def serves(self, atoms: frozenset[str], exact: frozenset[str]) -> bool:
        """Say whether it serves a mesh on which these atoms cut: the same of ``exact``, and no other kv or rep."""
        return atoms & exact == self.atoms & exact and atoms & {"kv", "rep"} <= self.atoms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedLayouts(PerCandidate):
    """Layouts with the blocks of one lowering, each block under every kind of recompute that may be used."""

    question: Question
    cutting: SolvedCutting
    space: Space
    numbers: Ints  # of the layouts in the space of the search
    setting: Setting
    links: Ring  # of the pipelines
    boundary_bytes: Floats
    bucket_bytes: Floats
    kinds: tuple[Recompute, ...]
    embed: BlockTotals
    layer: BlockTotals
    head: BlockTotals

    def pipeline_blocks(self, rows: Rows, schedule: Schedule, zero: Zero) -> PipelineBlocks:
        """Return the blocks of some of its layouts, run with a schedule."""
        boundary_bytes, count = self.boundary_bytes[rows], len(self.numbers[rows])
        time_s = np.broadcast_to(only(self.links, rows).send_s(boundary_bytes), count)
        return PipelineBlocks(
            question=self.question,
            setting=replace(only(self.setting, rows), zero=zero),
            schedule=schedule,
            sends=Sends.of(time_s, schedule.builder, load_kernels(self.question.kernels)),
            boundary_bytes=boundary_bytes,
            bucket_bytes=self.bucket_bytes[rows],
            fixed_s=self.fixed_s(rows, schedule.builder, schedule.num_chunks, zero),
            embed=self.embed.only(rows),
            layer=self.layer.only(rows),
            head=self.head.only(rows),
        )

    def fixed_s(self, rows: Rows, builder: str, chunks: Ints | int, zero: Zero) -> Floats:
        """Return what a step of some of its layouts takes whatever it does, and by the user's own terms."""
        fixed = np.full(len(self.numbers[rows]), self.question.calibration.step_s)
        if not self.question.terms:
            return fixed
        space = self.space.only(rows)
        sizes = {**space.rows, "vp": np.broadcast_to(chunks, len(fixed))}
        base = replace(space.base, schedule=builder, zero=zero)
        return fixed + terms_s(self.question, replace(space, base=base, rows=sizes))


class LayoutPricer:
    """Prices the layouts of a search; links, and layers that several cuttings cut alike, are priced once."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._rings: dict[object, Ring] = {}
        self._layers: dict[object, tuple[Mapping[object, int], BlockTotals]] = {}

    def priced(
        self, space: Space, cutting: SolvedCutting, layouts: Mapping[CpOrder, Ints], *, apart: bool = False
    ) -> Iterator[PricedLayouts]:
        """Price the blocks of some layouts as a cutting shards them; ``apart`` as in ``lowered_alike``.

        They are given by the order of the sequence, which tells priced layouts apart, but changes little of the price.
        """
        question, kinds = self.question, kinds_of(space.recomputes)
        numbers = np.concatenate(list(layouts.values()))
        orders = np.repeat(list(layouts), [len(one) for one in layouts.values()])
        some = space.only(numbers)
        for mine, blocks in lowered_alike(question, some, cutting.cutting, apart=apart):
            own, count = some.only(mine), len(mine)
            setting, links = self._columns(own, blocks, orders[mine])
            layer = self._layer(
                blocks, list(zip(numbers[mine].tolist(), orders[mine].tolist(), strict=True)), kinds, setting
            )
            embed, head = (
                BlockTotals.of([price_block(question, setting, kind, Recompute())], count) for kind in ("embed", "head")
            )
            candidates, inverse = _distinct(own)
            buckets = np.array([buckets_of(one, space.engine).total_bytes for one in candidates], dtype=np.float64)
            whole = PricedLayouts(
                question=question,
                cutting=cutting,
                space=own,
                numbers=numbers[mine],
                setting=_of_step(setting, (layer, embed, head)),
                links=links,
                boundary_bytes=np.broadcast_to(boundary_bytes(setting), count),
                bucket_bytes=buckets[inverse],
                kinds=kinds,
                embed=embed,
                layer=layer,
                head=head,
            )
            for order in layouts:
                found = whole.only(np.flatnonzero(orders[mine] == order))
                if len(found.numbers):
                    base = replace(found.space.base, cp_order=order)
                    setting = replace(found.setting, cp_order=order)
                    yield replace(found, space=replace(found.space, base=base), setting=setting)

    def _layer(
        self, blocks: CutBlocks, rows: Sequence[object], kinds: Sequence[Recompute], setting: Setting
    ) -> BlockTotals:
        """Price a layer under some kinds of recompute; ``rows`` says of which layouts."""
        key = blocks.cutting.alone("layer").only(blocks.atoms), blocks.atoms
        if key in self._layers:
            known, totals = self._layers[key]
            if known.keys() >= set(rows):
                return totals.only(np.array([known[row] for row in rows]))
        costs = [price_block(self.question, setting, "layer", drop) for drop in kinds]
        totals = BlockTotals.of(costs, len(rows))
        self._layers[key] = {row: number for number, row in enumerate(rows)}, totals
        return totals

    def _columns(self, space: Space, blocks: CutBlocks, cp_order: NDArray[np.str_]) -> tuple[Setting, Ring]:
        """Return the numbers of all layouts, each with its order of the sequence, and the links of their pipelines."""
        question = self.question
        candidates, inverse = _distinct(space)
        meshes = [mesh_of(candidate, question.model, question.cluster) for candidate in candidates]

        def ring(atoms: tuple[str, ...]) -> Ring:
            return only(ring_column([self._ring(mesh, atoms) for mesh in meshes]), inverse)

        setting = Setting(
            blocks=blocks,
            sizes=question.step.sizes(cast(Any, (space.rows["mbs"] * space.rows["dp"]).astype(np.float64))),
            atoms={atom: own.astype(np.float64) for atom, own in atom_columns(question.model, space).items()},
            rings={group: ring(group) for group in atom_groups(blocks.every())},
            zero=space.base.zero,
            cp_order=cp_order,
        )
        return setting, ring(("pp",))

    def _ring(self, mesh: Mesh, atoms: tuple[str, ...]) -> Ring:
        key = (atoms, mesh.steps(atoms), mesh.placement)
        if key not in self._rings:
            self._rings[key] = mesh_ring(self.question.cluster, mesh, atoms, self.question.calibration)
        return self._rings[key]


def lowered_alike(
    question: Question, space: Space, cutting: Cutting, *, apart: bool
) -> Iterator[tuple[Ints, CutBlocks]]:
    """Yield the layouts that one lowering serves, in which a group of one rank sends nothing, with their blocks.

    Slots of experts change their cut by way of both ep and cp, so that it matters which of these cut anything; among
    layouts that are alike in these kv may matter too, and copies of keys may in any model. Where anybody may have
    pinned anything, all atoms matter: ``apart``.
    """
    sizes = atom_columns(question.model, space)

    def lowered(layouts: Ints) -> CutBlocks:
        atoms = frozenset(atom for atom, column in sizes.items() if np.any(column[layouts] > 1))
        return CutBlocks(step=question.step, cutting=cutting, atoms=atoms)

    always = [atom for atom in sizes if apart or (question.model.num_experts and atom in ("ep", "cp"))]
    for alike in _split(np.arange(space.num_layouts), sizes, always):
        whole = lowered(alike)
        perhaps = ("kv", "rep") if question.model.num_experts else ("rep",)
        perhaps = [atom for atom in perhaps if atom not in always and atom in whole.atoms]
        matter = [atom for atom in perhaps if np.any(sizes[atom][alike] == 1) and not alike_without(whole, atom)]
        for mine in _split(alike, sizes, matter):
            yield mine, lowered(mine)


def _split(layouts: Ints, sizes: Mapping[str, Ints], matter: Sequence[str]) -> list[Ints]:
    """Part layouts by which of these atoms cut anything."""
    kinds = np.zeros(len(layouts), dtype=np.int64)
    for atom in matter:
        kinds = 2 * kinds + (sizes[atom][layouts] > 1)
    return [layouts[kinds == kind] for kind in sorted(set(kinds.tolist()))]


def atom_columns(model: ModelSpec, space: Space) -> Mapping[str, Ints]:
    """Return the sizes of the atoms of all layouts, as ``mesh_of`` gives them to one."""
    tp, ep, dp, cp = (space.rows[key] for key in ("tp", "ep", "dp", "cp"))
    rep = np.maximum(1, tp // model.num_kv_heads)
    return {"edp": dp // ep, "ep": ep, "cp": cp, "kv": tp // rep, "rep": rep}


def kinds_of(recomputes: Sequence[tuple[Recompute, ...]]) -> tuple[Recompute, ...]:
    """Return what single layers may do, none among it.

    >>> [str(kind) for kind in kinds_of([(Recompute.parse("full:2"),)])]
    ['none', 'full']
    """
    kinds = {kind: None for stages in recomputes for one in stages for kind in one.kinds}
    return tuple(dict.fromkeys((Recompute(), *kinds)))


def _of_step(setting: Setting, blocks: Sequence[BlockTotals]) -> Setting:
    """Return what the step phase asks of a setting: the rings over which sums of gradients are pending."""
    pending = {atoms for block in blocks for atoms in (*block.weights, *block.tied_weights)}
    parts = {part for atoms in pending for part in split_pending(atoms)}
    return replace(setting, sizes={}, rings={atoms: ring for atoms, ring in setting.rings.items() if atoms in parts})


def _distinct(space: Space) -> tuple[list[Candidate], Ints]:
    """Return a candidate of every division of the ranks, whatever its micro-batch, and the number of each layout's."""
    sizes = np.stack([space.rows[key] for key in ("tp", "pp", "cp", "ep", "dp")])
    _, first, inverse = np.unique(sizes, axis=1, return_index=True, return_inverse=True)
    return [space.candidate(int(row), 0) for row in first], inverse.reshape(-1)


def ring_column(rings: Sequence[Ring]) -> Ring:
    """Return many rings of one cluster as one."""
    return Ring(
        size=np.array([ring.size for ring in rings], dtype=np.float64),
        bandwidth_bytes_per_s=np.array([ring.bandwidth_bytes_per_s for ring in rings]),
        latency_s=np.array([ring.latency_s for ring in rings]),
        start_s=np.array([ring.start_s for ring in rings]),
        hop=_route_column([ring.hop for ring in rings if ring.hop]),
        exchange=_route_column([ring.exchange for ring in rings if ring.exchange]),
        routes=tuple(filter(None, map(_route_column, zip(*(ring.routes for ring in rings), strict=True)))),
        is_flat=rings[0].is_flat,
    )


def _route_column(routes: Sequence[Route]) -> Route | None:
    """Return one way of many rings, if they have it."""
    if not routes:
        return None
    return Route(
        seconds_per_byte=np.array([route.seconds_per_byte for route in routes]),
        latency_s=np.array([route.latency_s for route in routes]),
        up_to_bytes=routes[0].up_to_bytes,
    )
