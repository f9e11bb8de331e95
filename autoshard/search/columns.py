"""Many layouts as columns of numbers, for the formulas that price one: sizes, atoms, rings; grouped by lowering."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

from autoshard.cost.block import BlockCost, Setting
from autoshard.cost.collective import Ring, Route, mesh_ring
from autoshard.cost.setting import Question
from autoshard.cost.sharded import CutBlocks, alike_without, atom_groups
from autoshard.layout.cutting import Cutting
from autoshard.plan.build import mesh_of
from autoshard.plan.candidate import Candidate
from autoshard.plan.lowering import split_pending
from autoshard.search.space import Space
from autoshard.spec.mesh import Mesh
from autoshard.spec.model import ModelSpec

Column = Any


def lowered_alike(
    question: Question, space: Space, cutting: Cutting, *, apart: bool
) -> Iterator[tuple[Column, CutBlocks]]:
    """Yield the layouts that one lowering serves, in which a group of one rank sends nothing, with their blocks.

    Slots of experts change their cut by way of both ep and cp, so that it matters which of these cut anything; among
    layouts that are alike in these kv may matter too, and copies of keys may in any model. Where anybody may have
    pinned anything, all atoms matter: ``apart``.
    """
    sizes = atom_columns(question.model, space)
    always = [atom for atom in sizes if apart or (question.model.num_experts and atom in ("ep", "cp"))]
    for alike in _split(np.arange(space.num_layouts), sizes, always):
        whole = _lowered(question, cutting, sizes, alike)
        perhaps = [
            atom
            for atom in (("kv", "rep") if question.model.num_experts else ("rep",))
            if atom not in always and atom in whole.atoms
        ]
        matter = [atom for atom in perhaps if np.any(sizes[atom][alike] == 1) and not alike_without(whole, atom)]
        for mine in _split(alike, sizes, matter):
            yield mine, _lowered(question, cutting, sizes, mine)


def _split(layouts: Column, sizes: Mapping[str, Column], matter: Sequence[str]) -> list[Column]:
    """Part layouts by which of these atoms cut anything."""
    kinds = np.zeros(len(layouts), dtype=np.int64)
    for atom in matter:
        kinds = 2 * kinds + (sizes[atom][layouts] > 1)
    return [layouts[kinds == kind] for kind in sorted(set(kinds.tolist()))]


def _lowered(question: Question, cutting: Cutting, sizes: Mapping[str, Column], layouts: Column) -> CutBlocks:
    atoms = frozenset(atom for atom, column in sizes.items() if np.any(column[layouts] > 1))
    return CutBlocks(step=question.step, cutting=cutting, atoms=atoms)


def atom_columns(model: ModelSpec, space: Space) -> Mapping[str, Column]:
    """Return the sizes of the atoms of all layouts, as ``mesh_of`` gives them to one."""
    tp, ep, dp, cp = (space.rows[key] for key in ("tp", "ep", "dp", "cp"))
    rep = np.maximum(1, tp // model.num_kv_heads)
    return {"edp": dp // ep, "ep": ep, "cp": cp, "kv": tp // rep, "rep": rep}


class Weighs(Protocol):
    """Blocks with weights, by the atoms that their gradients await."""

    @property
    def weights(self) -> Mapping[tuple[str, ...], Column]:
        """Its own."""
        ...

    @property
    def tied_weights(self) -> Mapping[tuple[str, ...], Column]:
        """Those that are another block's as well."""
        ...


def of_step(setting: Setting, costs: Iterable[Weighs]) -> Setting:
    """Return what the step phase asks of a setting: the rings over which sums of gradients are pending."""
    pending = {atoms for cost in costs for atoms in (*cost.weights, *cost.tied_weights)}
    parts = {part for atoms in pending for part in split_pending(atoms)}
    rings = {atoms: ring for atoms, ring in setting.rings.items() if atoms in parts}
    return dataclasses.replace(setting, sizes={}, rings=rings)


class Links:
    """The rings of a question's meshes, each distinct one computed once."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._known: dict[object, Ring] = {}

    def column(self, meshes: Sequence[Mesh], atoms: tuple[str, ...]) -> Ring:
        """Return the rings of many meshes as one."""
        return ring_column([self._ring(mesh, atoms) for mesh in meshes])

    def _ring(self, mesh: Mesh, atoms: tuple[str, ...]) -> Ring:
        key = (atoms, mesh.steps(atoms), mesh.placement)
        if key not in self._known:
            self._known[key] = mesh_ring(self.question.cluster, mesh, atoms, self.question.calibration)
        return self._known[key]


def columns_of(links: Links, space: Space, blocks: CutBlocks, cp_order: Column) -> tuple[Setting, Ring]:
    """Return the numbers of all layouts, each with its order of the sequence, and the links of their pipelines."""
    question = links.question
    rows = {key: column.astype(np.float64) for key, column in space.rows.items()}
    candidates, inverse = distinct(space)
    meshes = [mesh_of(candidate, question.model, question.cluster) for candidate in candidates]
    sizes = question.step.sizes(rows["mbs"] * rows["dp"])
    setting = Setting(
        blocks=blocks,
        sizes=sizes,
        atoms={atom: column.astype(np.float64) for atom, column in atom_columns(question.model, space).items()},
        rings={group: at(links.column(meshes, group), inverse) for group in atom_groups(blocks.every())},
        zero=space.base.zero,
        cp_order=cp_order,
    )
    return setting, at(links.column(meshes, ("pp",)), inverse)


def distinct(space: Space) -> tuple[list[Candidate], Column]:
    """Return a candidate of every division of the ranks, whatever its micro-batch, and the number of each layout's."""
    sizes = np.stack([space.rows[key] for key in ("tp", "pp", "cp", "ep", "dp")])
    _, first, inverse = np.unique(sizes, axis=1, return_index=True, return_inverse=True)
    return [space.at(int(row), 0) for row in first], inverse.reshape(-1)


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
    return (
        None
        if not routes
        else Route(
            seconds_per_byte=np.array([route.seconds_per_byte for route in routes]),
            latency_s=np.array([route.latency_s for route in routes]),
            up_to_bytes=routes[0].up_to_bytes,
        )
    )


def at(value: Any, rows: Column) -> Any:
    """Return some rows of every column inside a value made of dataclasses, dicts and tuples."""
    if isinstance(value, np.ndarray):
        return cast(Any, value)[rows]
    if isinstance(value, dict):
        return {key: at(own, rows) for key, own in cast(dict[Any, Any], value).items()}
    if isinstance(value, tuple):
        return tuple(at(own, rows) for own in cast(tuple[Any, ...], value))
    kind = cast(type[Any], type(value))
    names = _COLUMNS.get(kind)
    return value if names is None else kind(**{name: at(getattr(value, name), rows) for name in names})


_COLUMNS: Mapping[type[Any], tuple[str, ...]] = {
    kind: tuple(one.name for one in dataclasses.fields(kind)) for kind in (BlockCost, Setting, Ring, Route)
}
