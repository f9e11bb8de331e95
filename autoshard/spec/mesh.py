"""Named axes laid on the ranks of a cluster."""

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InputError, nearest, require
from autoshard.spec.cluster import Cluster, Placement

# A mesh has an axis as a whole, or as these atoms, whose product it is.
AXIS_ATOMS: Mapping[str, tuple[str, ...]] = {"dp": ("edp", "ep"), "tp": ("kv", "rep")}
ATOMS: tuple[str, ...] = ("pp", "edp", "ep", "cp", "kv", "rep")
COPIES: tuple[str, ...] = ("copies",)  # the ranks that hold the same piece of the states
PARTS: tuple[str, ...] = ("parts",)  # the ranks that hold the same piece of the weights, and update a part each
Ints = NDArray[np.int64]
_NAMES = (*ATOMS, *AXIS_ATOMS)
_ATOM_TEXT = re.compile(r"([A-Za-z_]\w*)=([0-9]{1,12})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Named atoms, outermost first, over the ranks of whole nodes.

    Plans have the atoms that are listed above; the mesh of a module without a card has axes of any names. A position is
    a count through the atoms, the last one fastest; the placement says which rank of the node has it.

    >>> mesh = Mesh.parse("pp=2,edp=1,ep=1,cp=1,kv=2,rep=2 on 0-6:2/1-7:2")
    >>> mesh.groups("tp")
    ((0, 2, 4, 6), (1, 3, 5, 7))
    >>> mesh.groups("rep")
    ((0, 2), (4, 6), (1, 3), (5, 7))
    >>> mesh.coordinates(6)
    {'pp': 0, 'edp': 0, 'ep': 0, 'cp': 0, 'kv': 1, 'rep': 1}
    """

    axes: tuple[tuple[str, int], ...]
    ranks_per_node: int
    placement: Placement

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        placed = len(self.placement.local_ranks)
        both = [axis for axis, atoms in AXIS_ATOMS.items() if axis in names and {*atoms} & {*names}]
        uneven = f"places {placed} ranks, but a node has {self.ranks_per_node}"
        require(
            *((False, "axes", f"{axis} appears both as a whole and as atoms") for axis in both),
            (len(set(names)) == len(names), "axes", "the same axis appears twice"),
            *((size >= 1, f"axes.{name}", f"must be at least 1, not {size}") for name, size in self.axes),
            (placed == self.ranks_per_node, "placement", uneven),
        )
        unfilled = f"{self.num_ranks} ranks do not fill nodes of {self.ranks_per_node}"
        require((self.num_ranks % self.ranks_per_node == 0, "axes", unfilled))

    @classmethod
    def laid_on(cls, cluster: Cluster, sizes: Mapping[str, int], placement: Placement | None = None) -> "Mesh":
        """Lay axes on a cluster in its rank order: pp, dp, cp, tp, with ep inside dp and rep inside tp.

        ``sizes`` gives any of pp, dp, ep, cp, tp and rep; the default is 1. The default placement is the platform's
        for this tp.
        """
        axis_names = ("pp", "dp", "ep", "cp", "tp", "rep")
        size = {name: sizes.get(name, 1) for name in axis_names}
        product = size["pp"] * size["dp"] * size["cp"] * size["tp"]
        whole = f"{cluster.num_nodes} x {cluster.name} has {cluster.num_ranks}"
        require(
            *((name in axis_names, name, f"not the size of an axis. {nearest(name, axis_names)}") for name in sizes),
            *((number >= 1, name, f"must be at least 1, not {number}") for name, number in size.items()),
        )
        require(
            (size["dp"] % size["ep"] == 0, "ep", f"{size['ep']} does not divide dp {size['dp']}"),
            (size["tp"] % size["rep"] == 0, "rep", f"{size['rep']} does not divide tp {size['tp']}"),
            (product == cluster.num_ranks, "dp", f"pp x dp x cp x tp is {product}, but {whole} ranks"),
        )
        tp_atoms = [("kv", size["tp"] // size["rep"]), ("rep", size["rep"])]
        if cluster.kv_order == "strided":
            tp_atoms.reverse()
        dp_atoms = [("edp", size["dp"] // size["ep"]), ("ep", size["ep"])]
        return cls(
            axes=(("pp", size["pp"]), *dp_atoms, ("cp", size["cp"]), *tp_atoms),
            ranks_per_node=cluster.ranks_per_node,
            placement=placement or cluster.default_placement(size["tp"]),
        )

    @classmethod
    def named(cls, cluster: Cluster, sizes: Mapping[str, int]) -> "Mesh":
        """Lay axes of any names on a cluster in its rank order, the last one on neighbouring ranks."""
        product, text = math.prod(sizes.values()), ",".join(f"{name}={size}" for name, size in sizes.items())
        require(
            *((size >= 1, f"mesh.{name}", f"must be at least 1, not {size}") for name, size in sizes.items()),
            (
                product == cluster.num_ranks,
                "mesh",
                f"{text} is {product} ranks, but {cluster.num_nodes} x {cluster.name} has {cluster.num_ranks}",
            ),
        )
        placement = Placement.linear(cluster.ranks_per_node)
        return cls(axes=tuple(sizes.items()), ranks_per_node=cluster.ranks_per_node, placement=placement)

    @classmethod
    def virtual(cls, **sizes: int) -> "Mesh":
        """Return a mesh on no cluster: ranks numbered through these atoms with the last one fastest."""
        num_ranks = math.prod(sizes.values())
        return cls(axes=tuple(sizes.items()), ranks_per_node=num_ranks, placement=Placement.linear(num_ranks))

    @classmethod
    def parse(cls, text: str) -> "Mesh":
        """Read the text form, e.g. ``pp=2,dp=4,tp=4 on 0-31``."""
        axes_text, on, placement_text = text.partition(" on ")
        matches = [_ATOM_TEXT.fullmatch(part) for part in axes_text.split(",")]
        if not on or None in matches:
            raise InputError.of("", f"{text!r} is not a mesh. Write it like 'pp=2,dp=4,tp=4 on 0-31'")
        placement = Placement.parse(placement_text)
        names = [match[1] for match in matches if match]
        require(*((name in _NAMES, "axes", f"{name!r} is not an axis. {nearest(name, _NAMES)}") for name in names))
        return cls(
            axes=tuple((match[1], int(match[2])) for match in matches if match),
            ranks_per_node=len(placement.local_ranks),
            placement=placement,
        )

    def __str__(self) -> str:
        """Print the text form."""
        return f"{','.join(f'{name}={size}' for name, size in self.axes)} on {self.placement}"

    def num_copies(self, zero_group: int | None) -> int:
        """Return how many copies of the states the ranks of dp and cp hold if ZeRO divides them over so many ranks.

        It is one without groups, and where edp does not divide into such groups, which a Rule refuses.

        >>> mesh = Mesh.parse("pp=1,edp=2,ep=2,cp=1,kv=1,rep=1 on 0-3")
        >>> [mesh.num_copies(group) for group in (None, 4, 2, 1, 3, 8)]
        [1, 1, 2, 1, 1, 1]
        """
        copies, rest = divmod(self.size("dp") * self.size("cp"), zero_group or 1)
        return copies if zero_group and copies and not rest and self.size("edp") % copies == 0 else 1

    def num_parts(self, zero_group: int | None, weight_group: int | None) -> int:
        """Return into how many pieces of the states a piece of the weights falls, which rest over fewer ranks.

        It is one without a group of their own, and where that does not divide ZeRO's, which a Rule refuses.

        >>> mesh = Mesh.parse("pp=1,edp=8,ep=1,cp=1,kv=1,rep=1 on 0-7")
        >>> [mesh.num_parts(*groups) for groups in ((None, 2), (4, 2), (4, None), (2, 4))]
        [4, 2, 1, 1]
        """
        parts, rest = divmod(self.num_copies(weight_group), self.num_copies(zero_group))
        return parts if parts and not rest else 1

    def divided(self, copies: int, parts: int = 1) -> "Mesh":
        """Split edp into copies of the states, outermost, the parts of a piece of the weights, and such pieces.

        >>> mesh = Mesh.parse("pp=2,edp=8,ep=1,cp=1,kv=1,rep=1 on 0-7")
        >>> str(mesh.divided(2)), mesh.divided(2, 4).axes[1:4]
        ('pp=2,copies=2,parts=1,edp=4,ep=1,cp=1,kv=1,rep=1 on 0-7', (('copies', 2), ('parts', 4), ('edp', 1)))
        """
        outer = [(COPIES[0], copies), (PARTS[0], parts)]
        axes: list[tuple[str, int]] = []
        for name, size in self.axes:
            axes += [*outer, (name, size // (copies * parts))] if name == "edp" else [(name, size)]
        return replace(self, axes=tuple(axes))

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(size for _, size in self.axes)

    def atoms_of(self, name: str) -> tuple[str, ...]:
        """Return the atoms of this mesh that the name of an atom or axis means; none if the mesh does not have it."""
        atom_names = (name, *AXIS_ATOMS.get(name, ()))
        atoms = tuple([atom for atom, _ in self.axes if atom in atom_names])
        if not atoms and name not in _NAMES:
            known_names = (*dict(self.axes), *_NAMES)
            raise InputError.of("axis", f"{name!r} is not an axis. {nearest(name, known_names)}")
        return atoms

    def size(self, name: str) -> int:
        """Return the size of an atom or of a whole axis."""
        sizes = dict(self.axes)
        return math.prod(sizes[atom] for atom in self.atoms_of(name))

    def steps(self, names: str | Sequence[str]) -> tuple[tuple[int, int], ...]:
        """Return (distance of neighbours in position, size) of what is longer than 1, outermost first as listed.

        Atoms whose ranks follow each other count as one. Two meshes of the same ranks and placement with equal steps
        have the same groups, their members in the same order.
        """
        sizes = [size for _, size in self.axes]
        steps: list[tuple[int, int]] = []
        for axis in self._order(names)[1]:
            distance, size = math.prod(sizes[axis + 1 :]), sizes[axis]
            if steps and steps[-1][0] == distance * size:
                size *= steps.pop()[1]
            steps += [(distance, size)] if size > 1 else []
        return tuple(steps)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank along each atom."""
        assert 0 <= rank < self.num_ranks, f"rank {rank} is not one of the {self.num_ranks} of the mesh"
        node, local_rank = divmod(rank, self.ranks_per_node)
        position = node * self.ranks_per_node + self.placement.local_ranks.index(local_rank)
        coordinates: dict[str, int] = {}
        for name, size in reversed(self.axes):
            position, coordinates[name] = divmod(position, size)
        return dict(reversed(coordinates.items()))

    def ranks_of(self, coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """Return the ranks with these coordinates of atoms or axes, ordered by their other coordinates."""
        fixed: dict[str, int] = {}
        for name, coordinate in coordinates.items():
            assert 0 <= coordinate < self.size(name), f"{name} has no coordinate {coordinate}"
            for atom in reversed(self.atoms_of(name)):
                coordinate, fixed[atom] = divmod(coordinate, self.size(atom))
        ranks = _grid(self)[tuple(fixed.get(atom, slice(None)) for atom, _ in self.axes)]
        return tuple(ranks.reshape(-1).tolist())

    def groups(self, names: str | Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ only along these atoms or axes.

        Members are in order of their coordinates along the names, outermost first as listed; groups are in order of
        their coordinates along the other atoms.
        """
        return _rows(self._grouped(names, _grid(self)))

    def group_of(self, rank: int, names: str | Sequence[str]) -> tuple[int, ...]:
        """Return the group along these atoms or axes that has this rank."""
        remaining, picked = self._order(names)
        at = list(self.coordinates(rank).values())
        ranks = _grid(self).transpose((*remaining, *picked))[tuple(at[axis] for axis in remaining)]
        return tuple(ranks.reshape(-1).tolist())

    def repeats_every(self, num_ranks: int) -> bool:
        """Return whether every block of ``num_ranks`` ranks (whole nodes) is grouped like the first, for any axes."""
        block, fits = 1, num_ranks % self.ranks_per_node == 0
        for _, size in reversed(self.axes):
            block *= size
            fits = fits and (num_ranks % block == 0 or block % num_ranks == 0)
        return fits

    def repeated_groups(self, names: str | Sequence[str], num_ranks: int) -> tuple[Ints, int]:
        """Return a sample of the groups, one in each row, that shares links as all groups do, and its number of ranks.

        If the mesh repeats every ``num_ranks`` ranks, the sample has the groups with members among the first
        ``num_ranks``: these members, and the last one. Otherwise it has all groups.
        """
        groups = self._grouped(names, _grid(self))
        if not self.repeats_every(num_ranks):
            return groups, self.num_ranks
        positions = self._grouped(names, np.arange(self.num_ranks).reshape([size for _, size in self.axes]))
        near = positions[0] < num_ranks
        near[-1] = True
        return groups[positions[:, 0] < num_ranks][:, near], num_ranks

    def _order(self, names: str | Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the indices of the atoms that are not named, and of those that are, in the order of the names."""
        listed = (names,) if isinstance(names, str) else names
        order = [atom for atom, _ in self.axes]
        picked = [order.index(atom) for name in listed for atom in self.atoms_of(name)]
        twice = sorted({order[axis] for axis in picked if picked.count(axis) > 1})
        require(*((False, "axis", f"{atom} is named twice") for atom in twice))
        return [axis for axis in range(len(order)) if axis not in picked], picked

    def _grouped(self, names: str | Sequence[str], grid: Ints) -> Ints:
        """Return one row for each group."""
        remaining, picked = self._order(names)
        members = math.prod(grid.shape[axis] for axis in picked)
        return grid.transpose((*remaining, *picked)).reshape(-1, members)


@functools.lru_cache(maxsize=64)
def _grid(mesh: Mesh) -> Ints:
    """Return the rank at each combination of coordinates."""
    nodes = np.arange(0, mesh.num_ranks, mesh.ranks_per_node)
    return (nodes[:, None] + mesh.placement.local_ranks).reshape([size for _, size in mesh.axes])


def _rows(ranks: Ints) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, ranks.tolist()))


def state_groups(shared: Iterable[tuple[str, ...]], *, parted: bool) -> tuple[tuple[str, ...], ...]:
    """Return groups of a divided mesh, given the atoms over which ranks share weights.

    They are the ranks that share one copy of the weights; with PARTS before these, if weights are ``parted`` from
    states, those that share one copy of the states; and the ranks that hold the same piece.

    >>> state_groups([("edp", "cp")], parted=True)
    (('edp', 'cp'), ('parts', 'edp', 'cp'), ('copies',), ('parts',))
    """
    over_parts = [(*PARTS, *atoms) for atoms in shared] if parted else []
    return (*shared, *over_parts, COPIES, *([PARTS] if parted else []))


def in_mesh_order(atoms: Iterable[str]) -> tuple[str, ...]:
    """Sort atoms as meshes of plans have them; axes of other names come after these, by name.

    >>> in_mesh_order(("kv", "model", "data", "edp"))
    ('edp', 'kv', 'data', 'model')
    """
    return tuple(sorted(atoms, key=lambda atom: (ATOMS.index(atom) if atom in ATOMS else len(ATOMS), atom)))


def axis_of_atoms(atoms: tuple[str, ...]) -> str:
    """Return the axis whose traffic includes a Collective over these atoms; an axis of another name is its own.

    >>> axis_of_atoms(("rep",)), axis_of_atoms(("edp", "ep", "cp"))
    ('tp', 'dp')
    """
    axis: Mapping[str, str] = {"edp": "dp", "ep": "ep", "cp": "cp", "kv": "tp", "rep": "tp", "pp": "pp"}
    return axis.get(atoms[0], atoms[0])


def axis_levels_bytes_per_s(cluster: Cluster, mesh: Mesh, names: str | Sequence[str]) -> tuple[float, ...]:
    """Return each group's bandwidth on every link, innermost first, while all groups along these axes run a ring.

    Equal to ``level_bandwidths_bytes_per_s(cluster, mesh.groups(names))``, at a cost that does not grow with ranks.
    """
    assert mesh.num_ranks == cluster.num_ranks, f"{mesh} is not a mesh of {cluster.num_ranks} ranks"
    return level_bandwidths_bytes_per_s(cluster, *mesh.repeated_groups(names, cluster.repeat_ranks))


def level_bandwidths_bytes_per_s(
    cluster: Cluster, groups: Ints | Sequence[Sequence[int]], counted: int | None = None
) -> tuple[float, ...]:
    """Return each group's bandwidth on every link in one direction, innermost first, while all groups run a ring.

    Groups have the same number of ranks.

    A link connects units: the ranks of a chip, the chips of a node, the nodes of a cluster. A ring visits one unit
    after the other, so it enters and leaves each unit once, as parallel rings over all ports of the group there. All
    groups that leave a unit through a port share it. A group therefore leaves a unit with the sum, over the ports of
    its ranks there, of the port's bandwidth divided by the number of groups that use the port. The slowest unit limits
    the ring. At the innermost level, the units are single ranks. With equal groups, the result is the bandwidth of all
    ports of a unit, divided by the number of groups that leave it.

    On a torus all wires of a chip count, which only a ring over the whole torus can use. A link that no group needs
    has infinite bandwidth. With ``counted``, only the first ``counted`` ranks count; a group that goes on beyond them
    needs only one member there.
    """
    limit = cluster.num_ranks if counted is None else counted
    return tuple(
        link.bandwidth_bytes_per_s * _whole_ports(cluster, level, np.asarray(groups), limit)
        for level, link in enumerate(cluster.links)
    )


def _whole_ports(cluster: Cluster, level: int, groups: Ints, limit: int) -> float:
    """Return the smallest share that a group has of the ports of a unit, as a number of whole ports."""
    size, per_port = cluster.joined_ranks(level), cluster.links[level].ranks_per_port
    units = groups // size
    # There is no link below level 0, so a group inside one unit uses it as well.
    leaves = np.any(units != units[:, :1], axis=1) if level or groups.shape[1] < 2 else np.ones(len(groups), dtype=bool)
    counted = leaves[:, None] & (groups < limit)
    if not counted.any():
        return math.inf
    group = np.broadcast_to(np.arange(len(groups))[:, None], groups.shape)[counted]
    # Each port of each unit that a group leaves through, once: units have several ports, or ports serve several units.
    small = min(size, per_port)
    group, rank = np.divmod(np.unique(group * limit + groups[counted] // small * small), limit)
    port = rank // per_port
    _, of_unit = np.unique(group * limit + rank // size, return_inverse=True)
    return float(np.bincount(of_unit, weights=1 / np.bincount(port)[port]).min())
