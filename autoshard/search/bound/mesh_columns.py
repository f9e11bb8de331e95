"""The meshes of the layouts of a space in columns: their atoms, their links, and the buckets of their gradients."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from autoshard.cost.collective import Ring, Route, to_neighbours
from autoshard.cost.setting import Question, only
from autoshard.plan.build import bucket_sizes, mesh_of
from autoshard.schedule.waves import Ints
from autoshard.search.bound.space import Space
from autoshard.spec.mesh import Mesh
from autoshard.spec.model import ModelSpec

Groups = tuple[int | None, int | None]  # of ranks over which states and weights are divided


class MeshColumns:
    """What the meshes of all layouts of a space have, worked out once for every division of the ranks."""

    def __init__(self, question: Question, space: Space) -> None:
        self._question = question
        # One candidate of every division of the ranks, whatever its micro-batch.
        sizes = np.stack([space.rows[key] for key in ("tp", "pp", "cp", "ep", "dp")])
        _, first, division = np.unique(sizes, axis=1, return_index=True, return_inverse=True)
        candidates = [space.candidate(int(row), 0) for row in first]
        self._division = division.reshape(-1)
        self._meshes = [mesh_of(candidate, question.model, question.cluster) for candidate in candidates]
        buckets = [bucket_sizes(candidate, space.engine).total_bytes for candidate in candidates]
        self.bucket_bytes = np.array(buckets, dtype=np.float64)[self._division]
        self._known: dict[object, Ring] = {}
        self._rings: dict[tuple[Groups | None, tuple[str, ...]], Ring] = {}  # by ZeRO's groups and by atoms
        self.atoms = atom_columns(question.model, space)

    def sizes(self, layouts: Ints) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
        """Return the sizes of the atoms of some layouts."""
        return {atom: column[layouts].astype(np.float64) for atom, column in self.atoms.items()}

    def ring(self, atoms: tuple[str, ...], layouts: Ints) -> Ring:
        """Return the groups over some atoms on the meshes of some layouts."""
        return only(self._ring_on((None, atoms), self._meshes), layouts)

    def rings(self, groups: Iterable[tuple[str, ...]], layouts: Ints) -> Mapping[tuple[str, ...], Ring]:
        """Return the groups over each of several tuples of atoms."""
        return {atoms: self.ring(atoms, layouts) for atoms in groups}

    def state_ring(self, groups: Groups, atoms: tuple[str, ...]) -> Ring:
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
            self._known[key] = self._question.ring(mesh, atoms)
        return self._known[key]


def atom_columns(model: ModelSpec, space: Space) -> Mapping[str, Ints]:
    """Return the sizes of the atoms of all layouts, as ``mesh_of`` gives them to one."""
    tp, ep, dp, cp = (space.rows[key] for key in ("tp", "ep", "dp", "cp"))
    rep = np.maximum(1, tp // model.num_kv_heads)
    return {"edp": dp // ep, "ep": ep, "cp": cp, "kv": tp // rep, "rep": rep}


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
