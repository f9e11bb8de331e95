"""Many layouts priced at once: columns of their sizes, atoms and links, and blocks that one lowering serves."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from autoshard.blocks.cutting import Terms, solved_cutting
from autoshard.cost.collective import Ring, Route, mesh_ring
from autoshard.cost.setting import Question, Setting, boundary_bytes, price_block
from autoshard.cost.sharded import CutBlocks, alike_without, atom_groups
from autoshard.cost.stages import BlockTotals, PerCandidate, PipelineBlocks, Rows, Sends, only
from autoshard.errors import InputError
from autoshard.layout.layout import Cutting
from autoshard.layout.pin import Pin
from autoshard.plan.build import buckets_of, mesh_of
from autoshard.plan.candidate import Candidate, CpOrder
from autoshard.plan.lowering import ATOMS, split_pending
from autoshard.plan.recompute import Recompute
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.space import Space
from autoshard.spec.kernels import load_kernels
from autoshard.spec.mesh import Mesh
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import DTYPE_BYTES

_TIE = 1e-9  # relative: times that differ by less count as equal

Row = tuple[Terms, int]  # a layout, cut under some terms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SolvedCutting:
    """An answer of the block solver: a cutting, and the atoms that cut anything where it was solved."""

    cutting: Cutting
    atoms: frozenset[str]

    def serves(self, atoms: frozenset[str], exact: frozenset[str]) -> bool:
        """Say whether it serves a mesh on which these atoms cut: the same of ``exact``, and no other kv or rep."""
        return atoms & exact == self.atoms & exact and atoms & {"kv", "rep"} <= self.atoms


class KnownCuttings:
    """The answers of the block solver for the layouts of a space, and which of them each layout uses.

    That is its own, or, as long as it has none, that of others under which a step takes least.
    """

    def __init__(self, question: Question, space: Space, pins: tuple[Pin, ...]) -> None:
        self._question, self._space, self._pins = question, space, pins
        self._exact = frozenset(ATOMS if pins else ("ep", "cp") if question.model.num_experts else ())
        sizes = atom_columns(question.model, space)
        cut = zip(*((column > 1).tolist() for column in sizes.values()), strict=True)
        self._atoms = [frozenset(atom for atom, cuts in zip(sizes, row, strict=True) if cuts) for row in cut]
        self.by_terms: dict[Terms, list[SolvedCutting]] = defaultdict(list)
        self.own: set[Row] = set()
        self.refused: dict[Row, InputError] = {}  # layouts that cannot satisfy the pins
        # By terms: the number of the cutting that each layout uses, and what a step takes with it at least.
        self._used: dict[Terms, tuple[Ints, Floats]] = defaultdict(
            lambda: (np.full(space.num_layouts, -1), np.full(space.num_layouts, np.inf))
        )

    def mesh_kinds(self, layouts: Ints) -> Iterator[list[int]]:
        """Yield the layouts of each kind of mesh, since no cutting serves two kinds."""
        yield from mesh_kinds(self._question, self._space, layouts, [atoms & self._exact for atoms in self._atoms])

    def alike(self, row: Row) -> object:
        """Return what tells apart layouts that are likely to be cut otherwise."""
        return row[0], self._atoms[row[1]] & {*self._exact, "kv", "rep"}

    def solve(self, layout: int, terms: Terms, others: Ints) -> tuple[SolvedCutting, Ints]:
        """Return the own cutting of a layout, which it uses from now on, and the layouts to price with that.

        These are all others that it serves, if it is new, or else this one, unless it used this cutting before.
        """
        candidate = self._space.candidate(layout, 0)
        solved = solved_cutting(self._question, candidate, replace(terms, pins=self._pins))
        atoms, known = self._atoms[layout], self.by_terms[terms]
        used, least_s = self._used[terms]
        same = [
            number
            for number, one in enumerate(known)
            if one.serves(atoms, self._exact) and one.cutting.only(atoms) == solved.only(atoms)
        ]
        if not same:
            known.append(SolvedCutting(cutting=solved, atoms=atoms))
        number = same[0] if same else len(known) - 1
        changed = others if not same else np.array([layout] if used[layout] != number else [], dtype=np.int64)
        self.own.add((terms, layout))
        used[layout], least_s[layout] = number, -np.inf
        return known[number], changed

    def refuse(self, row: Row, fault: InputError) -> None:
        """Keep why a layout cannot satisfy the pins; it uses no cutting."""
        self.refused[row] = fault
        used, least_s = self._used[row[0]]
        used[row[1]], least_s[row[1]] = -1, -np.inf

    def uses(self, terms: Terms, cutting: SolvedCutting, layouts: Ints) -> NDArray[np.bool_]:
        """Say which layouts use a cutting."""
        return self._used[terms][0][layouts] == self.by_terms[terms].index(cutting)

    def served(self, terms: Terms, cutting: SolvedCutting, layouts: Ints) -> Ints:
        """Return the layouts that may use a cutting: all that it serves, but for those that have their own."""
        each: list[int] = layouts.tolist()
        serves = np.array([cutting.serves(self._atoms[one], self._exact) for one in each], dtype=bool)
        return layouts[serves & ((self._used[terms][1][layouts] >= 0) | self.uses(terms, cutting, layouts))]

    def take(self, terms: Terms, cutting: SolvedCutting, layouts: Ints, time_s: Floats) -> NDArray[np.bool_]:
        """Let layouts use a cutting if a step takes less with it; return which use it. A layout may stand twice."""
        used, least_s = self._used[terms]
        here_s = np.full(len(least_s), np.inf)
        np.minimum.at(here_s, layouts, time_s)
        some = np.unique(layouts)
        faster = some[(here_s[some] < least_s[some] * (1 - _TIE)) | ((used[some] < 0) & (least_s[some] >= 0))]
        used[faster], least_s[faster] = self.by_terms[terms].index(cutting), here_s[faster]
        return self.uses(terms, cutting, layouts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedLayouts(PerCandidate):
    """Layouts with the blocks of one lowering, each block under every kind of recompute that may be used, or none."""

    question: Question
    cutting: SolvedCutting
    space: Space
    numbers: Ints  # of the layouts in the space of the search
    orders: NDArray[np.str_]  # of the sequence over cp
    setting: Setting  # of the step phase
    priced_in: Setting  # of the blocks
    links: Ring  # of the pipelines
    boundary_bytes: Floats
    bucket_bytes: Floats
    kinds: tuple[Recompute, ...]
    embed: BlockTotals
    layer: BlockTotals
    head: BlockTotals

    @property
    def at_least(self) -> "PricedLayouts":
        """What any kind of recompute takes and holds at least: the time of none, and nothing for backward."""
        none = np.zeros((1, len(self.numbers)))
        plain = replace(self.layer, saved_bytes=none, moment_bytes=none, waiting_bytes=none)
        return replace(self, layer=plain)

    def pipeline_blocks(self, rows: Rows, schedule: Schedule, base: Candidate) -> PipelineBlocks:
        """Return the blocks of some of its layouts, run with a schedule and the ZeRO of a candidate."""
        boundary_bytes, count = self.boundary_bytes[rows], len(self.numbers[rows])
        time_s = np.broadcast_to(only(self.links, rows).send_s(boundary_bytes), count)
        return PipelineBlocks(
            question=self.question,
            setting=replace(only(self.setting, rows), zero=base.zero),
            schedule=schedule,
            sends=Sends.of(time_s, schedule.builder, load_kernels(self.question.kernels)),
            boundary_bytes=boundary_bytes,
            bucket_bytes=self.bucket_bytes[rows],
            fixed_s=self.fixed_s(rows, replace(base, schedule=schedule.builder), schedule.num_chunks),
            embed=self.embed.only(rows),
            layer=self.layer.only(rows),
            head=self.head.only(rows),
        )

    def fixed_s(self, rows: Rows, base: Candidate, chunks: Ints | int) -> Floats:
        """Return what a step of some of its layouts takes whatever it does, and by the user's own terms."""
        fixed = np.full(len(self.numbers[rows]), self.question.calibration.step_s)
        if not self.question.terms:
            return fixed
        question, space = self.question, self.space.only(rows)
        sizes = {**space.rows, "vp": np.broadcast_to(chunks, len(fixed))}
        plain = replace(space, base=replace(base, stages=None), rows=sizes, recomputes=((Recompute(),),))
        columns = plain.columns(question.model, question.cluster, question.workload, 0)
        return fixed + sum(term.of(columns) for term in question.terms)


class LayoutPricer:
    """Prices the layouts of a search; links, and layers that several cuttings cut alike, are priced once."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._rings: dict[object, Ring] = {}
        self._layers: dict[object, tuple[Mapping[object, int], BlockTotals]] = {}

    def priced(
        self, space: Space, cutting: SolvedCutting, layouts: Mapping[CpOrder, Ints], *, apart: bool = False
    ) -> Iterator[PricedLayouts]:
        """Price the blocks of some layouts as a cutting shards them, without recompute.

        The layouts are given by the order of the sequence over cp; ``apart`` as in ``lowered_alike``.
        """
        question, model = self.question, self.question.model
        numbers = np.concatenate(list(layouts.values()))
        orders = np.repeat(list(layouts), [len(one) for one in layouts.values()])
        some = space.only(numbers)
        for mine, blocks in lowered_alike(question, some, cutting.cutting, apart=apart):
            own, count = some.only(mine), len(mine)
            # One candidate of every division of the ranks, whatever its micro-batch.
            sizes = np.stack([own.rows[key] for key in ("tp", "pp", "cp", "ep", "dp")])
            _, first, inverse = np.unique(sizes, axis=1, return_index=True, return_inverse=True)
            inverse, candidates = inverse.reshape(-1), [own.candidate(int(row), 0) for row in first]
            meshes = [mesh_of(candidate, model, question.cluster) for candidate in candidates]
            groups = (("pp",), *atom_groups(blocks.every()))
            rings = {
                group: only(ring_column([self._ring(mesh, group) for mesh in meshes]), inverse) for group in groups
            }
            setting = Setting(
                blocks=blocks,
                sizes=question.sizes((own.rows["mbs"] * own.rows["dp"]).astype(np.float64), own.rows["ep"]),
                atoms={atom: column.astype(np.float64) for atom, column in atom_columns(model, own).items()},
                rings=rings,
                zero=own.base.zero,
                cp_order=orders[mine],
            )
            layer = self._layer(numbers[mine], orders[mine], (Recompute(),), setting)
            embed, head = (
                BlockTotals.of([price_block(question, setting, kind, Recompute())], count) for kind in ("embed", "head")
            )
            weights = (
                block_weights for block in (layer, embed, head) for block_weights in (block.weights, block.tied_weights)
            )
            summed = {part for each in weights for atoms in each for part in split_pending(atoms)}
            buckets = np.array([buckets_of(one, space.engine).total_bytes for one in candidates], dtype=np.float64)
            yield PricedLayouts(
                question=question,
                cutting=cutting,
                space=own,
                numbers=numbers[mine],
                orders=orders[mine],
                # The step phase asks for the rings over which sums of gradients are pending, and for no sizes.
                setting=replace(setting, sizes={}, rings={atoms: rings[atoms] for atoms in rings if atoms in summed}),
                priced_in=setting,
                links=rings["pp",],
                boundary_bytes=np.broadcast_to(boundary_bytes(setting), count),
                bucket_bytes=buckets[inverse],
                kinds=(Recompute(),),
                embed=embed,
                layer=layer,
                head=head,
            )

    def with_recompute(self, priced: PricedLayouts) -> PricedLayouts:
        """Price the layers of such layouts under every kind of recompute that may be used."""
        kinds = kinds_of(priced.space.recomputes)
        return replace(priced, kinds=kinds, layer=self._layer(priced.numbers, priced.orders, kinds, priced.priced_in))

    def _layer(
        self, numbers: Ints, orders: NDArray[np.str_], kinds: tuple[Recompute, ...], setting: Setting
    ) -> BlockTotals:
        """Price a layer under some kinds of recompute; numbers and orders say of which layouts."""
        blocks, rows = cast(CutBlocks, setting.blocks), list(zip(numbers.tolist(), orders.tolist(), strict=True))
        key = blocks.cutting.alone("layer").only(blocks.atoms), blocks.atoms, kinds
        if key in self._layers and self._layers[key][0].keys() >= set(rows):
            known, totals = self._layers[key]
            return totals.only(np.array([known[row] for row in rows]))
        totals = BlockTotals.of([price_block(self.question, setting, "layer", drop) for drop in kinds], len(rows))
        self._layers[key] = {row: number for number, row in enumerate(rows)}, totals
        return totals

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
    cuts = {atom: column > 1 for atom, column in atom_columns(question.model, space).items()}
    mixture = bool(question.model.num_experts)

    def split(layouts: Ints, atoms: Sequence[str]) -> list[Ints]:
        """Part layouts by which of these atoms cut anything."""
        kinds = sum((cuts[atom][layouts] << number for number, atom in enumerate(reversed(atoms))), 0 * layouts)
        return [layouts[kinds == kind] for kind in np.unique(kinds)]

    def lowered(layouts: Ints) -> CutBlocks:
        atoms = frozenset(atom for atom, column in cuts.items() if column[layouts].any())
        return CutBlocks(step=question.step, cutting=cutting, atoms=atoms)

    always = [atom for atom in cuts if apart or (mixture and atom in ("ep", "cp"))]
    for alike in split(np.arange(space.num_layouts), always):
        whole = lowered(alike)
        matter = [
            atom
            for atom in (("kv", "rep") if mixture else ("rep",))
            if atom not in always
            and atom in whole.atoms
            and not cuts[atom][alike].all()
            and not alike_without(whole, atom)
        ]
        for mine in split(alike, matter):
            yield mine, lowered(mine)


def atom_columns(model: ModelSpec, space: Space) -> Mapping[str, Ints]:
    """Return the sizes of the atoms of all layouts, as ``mesh_of`` gives them to one."""
    tp, ep, dp, cp = (space.rows[key] for key in ("tp", "ep", "dp", "cp"))
    rep = np.maximum(1, tp // model.num_kv_heads)
    return {"edp": dp // ep, "ep": ep, "cp": cp, "kv": tp // rep, "rep": rep}


def mesh_kinds(question: Question, space: Space, layouts: Ints, atoms: Sequence[frozenset[str]]) -> Iterator[list[int]]:
    """Yield the layouts of each kind of mesh, since no cutting serves two kinds; the largest tp comes first.

    ``atoms`` are those that tell the kind of each layout of the space. The first layout of a kind should be a likely
    winner, because a winner needs its own cutting anyway: few stages, as long as weights and gradients fill at most
    half of the memory, and small micro-batches.
    """
    rows, precision = space.only(layouts).rows, question.workload.precision
    per_weight = DTYPE_BYTES[precision.weights] + DTYPE_BYTES[precision.gradients]
    states_bytes = question.model.num_parameters * per_weight / (rows["tp"] * rows["pp"])
    full = states_bytes > question.cluster.rank_memory_bytes / 2
    order = np.lexsort((rows["mbs"], rows["cp"], rows["pp"], full, -rows["tp"]))
    found: dict[frozenset[str], list[int]] = defaultdict(list)
    ordered: list[int] = layouts[order].tolist()
    for layout in ordered:
        found[atoms[layout]].append(layout)
    yield from found.values()


def kinds_of(recomputes: Sequence[tuple[Recompute, ...]]) -> tuple[Recompute, ...]:
    """Return what single layers may do, none among it.

    >>> [str(kind) for kind in kinds_of([(Recompute.parse("full:2"),)])]
    ['none', 'full']
    """
    kinds = (kind for stages in recomputes for one in stages for kind in one.kinds)
    return tuple(dict.fromkeys((Recompute(), *kinds)))


def ring_column(rings: Sequence[Ring]) -> Ring:
    """Return many rings of one cluster as one."""

    def column(routes: Sequence[Route | None]) -> Route | None:
        """Return one way of many rings, if they have it."""
        have = [route for route in routes if route]
        if not have:
            return None
        return Route(
            seconds_per_byte=np.array([route.seconds_per_byte for route in have]),
            latency_s=np.array([route.latency_s for route in have]),
            up_to_bytes=have[0].up_to_bytes,
        )

    routes = (column(ways) for ways in zip(*(ring.routes for ring in rings), strict=True))
    return Ring(
        size=np.array([ring.size for ring in rings], dtype=np.float64),
        bandwidth_bytes_per_s=np.array([ring.bandwidth_bytes_per_s for ring in rings]),
        latency_s=np.array([ring.latency_s for ring in rings]),
        start_s=np.array([ring.start_s for ring in rings]),
        hop=column([ring.hop for ring in rings]),
        exchange=column([ring.exchange for ring in rings]),
        routes=tuple(route for route in routes if route),
        is_flat=rings[0].is_flat,
    )
