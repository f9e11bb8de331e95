"""Named axes laid on the ranks of a cluster."""

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.errors import Fault, InputError, nearest, require
from autoshard.spec.cluster import Cluster
from autoshard.spec.placement import Placement

# An axis is the product of these atoms wherever the mesh does not hold it whole.
AXIS_ATOMS: Mapping[str, tuple[str, ...]] = {"dp": ("edp", "ep"), "tp": ("kv", "rep")}
ATOMS: tuple[str, ...] = ("pp", "edp", "ep", "cp", "kv", "rep")
_NAMES = (*ATOMS, *AXIS_ATOMS)
_ATOM_TEXT = re.compile(r"([a-z]+)=([0-9]{1,12})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Named atoms, outermost first, over the ranks of whole nodes.

    Counting through the atoms with the last one fastest gives a rank's position; the placement says which
    rank of the node stands there.

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
        """Refuse names that are no atoms, empty axes, and meshes that do not fill whole nodes."""
        names = [name for name, _ in self.axes]
        require(
            *((name in _NAMES, "axes", f"{name!r} is not an axis. {nearest(name, _NAMES)}") for name in names),
            (len(set(names)) == len(names), "axes", "the same axis stands twice"),
            *(
                (
                    axis not in names or not set(atoms) & set(names),
                    "axes",
                    f"{axis} stands whole and in parts",
                )
                for axis, atoms in AXIS_ATOMS.items()
            ),
            *((size >= 1, f"axes.{name}", f"must be at least 1, not {size}") for name, size in self.axes),
            (
                len(self.placement.local_ranks) == self.ranks_per_node,
                "placement",
                f"places {len(self.placement.local_ranks)} ranks, but a node has {self.ranks_per_node}",
            ),
        )
        require(
            (
                self.num_ranks % self.ranks_per_node == 0,
                "axes",
                f"{self.num_ranks} ranks do not fill nodes of {self.ranks_per_node}",
            )
        )

    @classmethod
    def laid_on(cls, cluster: Cluster, sizes: Mapping[str, int], placement: Placement | None = None) -> "Mesh":
        """Lay axes on a cluster in its rank order: pp, dp, cp, tp, with ep inside dp and rep inside tp.

        ``sizes`` gives any of pp, dp, ep, cp, tp and rep; what is left out is 1. Unless a placement is given,
        it is the platform's own for this tp.
        """
        known = ("pp", "dp", "ep", "cp", "tp", "rep")
        size = {name: sizes.get(name, 1) for name in known}
        product = size["pp"] * size["dp"] * size["cp"] * size["tp"]
        require(
            *((name in known, name, f"not the size of an axis. {nearest(name, known)}") for name in sizes),
            *((number >= 1, name, f"must be at least 1, not {number}") for name, number in size.items()),
        )
        require(
            (size["dp"] % size["ep"] == 0, "ep", f"{size['ep']} does not divide dp {size['dp']}"),
            (size["tp"] % size["rep"] == 0, "rep", f"{size['rep']} does not divide tp {size['tp']}"),
            (
                product == cluster.num_ranks,
                "dp",
                f"pp x dp x cp x tp is {product}, but {cluster.num_nodes} x {cluster.name} has "
                f"{cluster.num_ranks} ranks",
            ),
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
    def parse(cls, text: str) -> "Mesh":
        """Read the text form, e.g. ``pp=2,dp=4,tp=4 on 0-31``."""
        axes_text, on, placement_text = text.partition(" on ")
        matches = [_ATOM_TEXT.fullmatch(part) for part in axes_text.split(",")]
        if not on or None in matches:
            raise InputError.of("", f"{text!r} is not a mesh. Write it like 'pp=2,dp=4,tp=4 on 0-31'")
        placement = Placement.parse(placement_text)
        return cls(
            axes=tuple((match[1], int(match[2])) for match in matches if match),
            ranks_per_node=len(placement.local_ranks),
            placement=placement,
        )

    def __str__(self) -> str:
        """Print the text form."""
        return f"{','.join(f'{name}={size}' for name, size in self.axes)} on {self.placement}"

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(size for _, size in self.axes)

    def atoms_of(self, name: str) -> tuple[str, ...]:
        """List the atoms that an atom or axis name stands for; none where the mesh leaves it out."""
        if name not in _NAMES:
            raise InputError.of("axis", f"{name!r} is not an axis. {nearest(name, _NAMES)}")
        wanted = (name, *AXIS_ATOMS.get(name, ()))
        return tuple(atom for atom, _ in self.axes if atom in wanted)

    def size(self, name: str) -> int:
        """Return the size of an atom or of a whole axis."""
        sizes = dict(self.axes)
        return math.prod(sizes[atom] for atom in self.atoms_of(name))

    def steps(self, names: str | Sequence[str]) -> tuple[tuple[int, int], ...]:
        """Return (distance of neighbours in position, size) of each atom that is longer than 1.

        Two meshes of the same ranks and placement with equal steps have groups of the same shape.
        """
        picked, _ = self._divided(names)
        strides, sizes = self._strides(), dict(self.axes)
        return tuple((strides[atom], sizes[atom]) for atom in picked if sizes[atom] > 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return where a rank stands along each atom."""
        assert 0 <= rank < self.num_ranks, f"rank {rank} is not one of the {self.num_ranks} of the mesh"
        local_rank = rank % self.ranks_per_node
        position = rank - local_rank + _positions(self.placement)[local_rank]
        sizes = dict(self.axes)
        return {name: position // stride % sizes[name] for name, stride in self._strides().items()}

    def ranks_of(self, coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """List the ranks that stand at these coordinates of atoms or axes, in order of the remaining ones."""
        fixed: dict[str, int] = {}
        for name, coordinate in coordinates.items():
            assert 0 <= coordinate < self.size(name), f"{name} has no coordinate {coordinate}"
            fixed.update(self._split(name, coordinate))
        strides = self._strides()
        base = sum(strides[atom] * coordinate for atom, coordinate in fixed.items())
        free = tuple(atom for atom, _ in self.axes if atom not in fixed)
        return self._placed([base + offset for offset in self._offsets(free)])

    def groups(self, names: str | Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """List the groups of ranks that differ only along these atoms or axes.

        Members are ordered by their coordinates along the names as listed, outermost first; the groups by the
        coordinates along the other atoms.
        """
        picked, others = self._divided(names)
        return self._groups_at(self._offsets(others), self._offsets(picked))

    def repeats_every(self, num_ranks: int) -> bool:
        """Whether each further stretch of so many ranks, whole nodes, looks like the first for any groups."""
        block, fits = 1, num_ranks % self.ranks_per_node == 0
        for _, size in reversed(self.axes):
            block *= size
            fits = fits and (num_ranks % block == 0 or block % num_ranks == 0)
        return fits

    def local_groups(self, names: str | Sequence[str], num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """List the groups that meet the first ``num_ranks`` ranks, cut to these and one member beyond them.

        Where the mesh repeats every ``num_ranks`` ranks this says all that there is to know about how groups
        share links, at a cost that does not grow with the number of nodes.
        """
        assert self.repeats_every(num_ranks), f"{self} does not repeat every {num_ranks} ranks"
        picked, others = self._divided(names)
        strides, sizes = self._strides(), dict(self.axes)
        reach = sum((sizes[atom] - 1) * strides[atom] for atom in picked)
        inside = self._offsets(picked, below=num_ranks)
        beyond = [reach] if reach >= num_ranks else []
        return self._groups_at(self._offsets(others, below=num_ranks), [*inside, *beyond])

    def group_of(self, rank: int, names: str | Sequence[str]) -> tuple[int, ...]:
        """Return the one group along these atoms or axes that a rank belongs to."""
        picked, others = self._divided(names)
        coordinates, strides = self.coordinates(rank), self._strides()
        base = sum(coordinates[atom] * strides[atom] for atom in others)
        return self._placed([base + offset for offset in self._offsets(picked)])

    def _strides(self) -> dict[str, int]:
        """Return how far apart in position two neighbours along each atom are."""
        strides, stride = dict[str, int](), self.num_ranks
        for name, size in self.axes:
            stride //= size
            strides[name] = stride
        return strides

    def _split(self, name: str, coordinate: int) -> dict[str, int]:
        """Split a coordinate along an axis into coordinates along its atoms."""
        split: dict[str, int] = {}
        for atom in reversed(self.atoms_of(name)):
            coordinate, split[atom] = divmod(coordinate, self.size(atom))
        return split

    def _divided(self, names: str | Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Split the atoms into the named ones, in the order named, and the others."""
        listed = (names,) if isinstance(names, str) else names
        picked = tuple(itertools.chain.from_iterable(self.atoms_of(name) for name in listed))
        twice = sorted({atom for atom in picked if picked.count(atom) > 1})
        if twice:
            raise InputError(Fault(where="axis", message=f"{atom} is named twice") for atom in twice)
        return picked, tuple(atom for atom, _ in self.axes if atom not in picked)

    def _offsets(self, atoms: Sequence[str], below: int | None = None) -> list[int]:
        """List the positions that the atoms span from position 0; optionally only those below a limit."""
        strides, sizes = self._strides(), dict(self.axes)
        limit = self.num_ranks if below is None else below
        offsets = [0]
        for atom in atoms:
            reach = range(0, min(sizes[atom] * strides[atom], limit), strides[atom])
            offsets = [offset + step for offset in offsets for step in reach]
        return offsets if below is None else [offset for offset in offsets if offset < below]

    def _placed(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Turn positions into the ranks that stand there."""
        shift, size = _shifts(self.placement), self.ranks_per_node
        if not shift:
            return tuple(positions)
        return tuple([position + shift[position % size] for position in positions])

    def _groups_at(self, bases: Sequence[int], offsets: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Make one group for each base position."""
        if len(offsets) > len(bases):
            return tuple([self._placed([base + offset for offset in offsets]) for base in bases])
        # Member by member, because many small tuples are slow to make one at a time.
        return tuple(zip(*[self._placed([base + offset for base in bases]) for offset in offsets], strict=True))


@functools.lru_cache(maxsize=64)
def _shifts(placement: Placement) -> tuple[int, ...]:
    """Return how far the rank at each position lies from the rank of the same number; nothing if linear."""
    if placement.is_linear:
        return ()
    return tuple(rank - position for position, rank in enumerate(placement.local_ranks))


@functools.lru_cache(maxsize=64)
def _positions(placement: Placement) -> tuple[int, ...]:
    """Invert a placement: which position each local rank stands at."""
    positions = [0] * len(placement.local_ranks)
    for position, rank in enumerate(placement.local_ranks):
        positions[rank] = position
    return tuple(positions)


def axis_levels_bytes_per_s(cluster: Cluster, mesh: Mesh, names: str | Sequence[str]) -> tuple[float, ...]:
    """Return what each group along these axes gets of every link when all run a ring at once, innermost first.

    The same as ``cluster.level_bandwidths_bytes_per_s(mesh.groups(names))``, at a cost that does not grow.
    """
    assert mesh.num_ranks == cluster.num_ranks, f"{mesh} is not a mesh of {cluster.num_ranks} ranks"
    repeat = cluster.repeat_ranks
    if mesh.repeats_every(repeat):
        return cluster.level_bandwidths_bytes_per_s(mesh.local_groups(names, repeat), judged=repeat)
    return cluster.level_bandwidths_bytes_per_s(mesh.groups(names))


def axis_of_atoms(atoms: tuple[str, ...]) -> str:
    """Return the axis whose traffic a Collective over these atoms is counted as.

    >>> axis_of_atoms(("rep",)), axis_of_atoms(("edp", "ep", "cp"))
    ('tp', 'dp')
    """
    axis: Mapping[str, str] = {"edp": "dp", "ep": "ep", "cp": "cp", "kv": "tp", "rep": "tp", "pp": "pp"}
    return axis[atoms[0]]
