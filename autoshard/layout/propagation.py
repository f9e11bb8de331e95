"""From a few pinned layouts to the cuts of every operation, forward and backward through named dims to a fixed point.

What an atom cuts spreads from tensor to tensor, one step at a time, until nothing changes:

1. Pins hold, and what they leave out of a pinned tensor stays out of it.
2. Of the atoms that cut a dim, outermost first, the first that a neighbour lacks is offered to it: an inner cut never
   spreads without the outer ones, because its blocks would lie elsewhere.
3. An operation takes first what cuts its own weights, or anything if it has no weights to cut: element-wise operations,
   norms, attention. Only when nothing more spreads so, products take what leaves their weights whole, such as a cut of
   the sequence: one step, then the first rule again.
4. In one step earlier atoms of the mesh go first; one that would cut a dim finer than its size stays away. Of several
   offers for one atom: what moves with its tokens wherever places were counted, what comes with an input before what
   readers want, an earlier input before a later one, the maker of a tensor before its other readers, an earlier dim of
   the tensor before a later one, an outer cut before an inner one.
5. What nothing determines stays whole.

No step looks at names or at the order of operations. An operation uses an atom once, cuts no dim that it needs whole,
and is cut alike wherever places were counted for it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autoshard.errors import InputError, require
from autoshard.graph.block import Block, OpGraph
from autoshard.layout.claims import Claims, claims_of
from autoshard.layout.layout import Cuts, Layout, show_atoms, whole_axes
from autoshard.layout.pin import Pin, pins_of
from autoshard.layout.sites import BOUNDARY, End, Net, Site
from autoshard.spec.mesh import AXIS_ATOMS, Mesh

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Propagation:
    """The cuts of every forward operation, by block kind; how the hidden state passes between blocks; every layout.

    ``layouts`` holds the layout of each tensor of the forward pass, as it is made or else as its readers take it;
    where readers disagree, it is missing. ``atoms`` are those of the mesh; one of size 1 cuts nothing, and only
    ``layouts`` name it, so that an axis is printed whole.
    """

    atoms: Mapping[str, int]
    cuts: Mapping[str, Mapping[str, Cuts]]
    boundary: Cuts
    layouts: Mapping[str, Mapping[str, Layout]]

    def __str__(self) -> str:
        """Print one line per operation that is cut at all."""
        lines: list[str] = []
        for kind, ops in self.cuts.items():
            for name, cuts in ops.items():
                held = [f"{dim}/{show_atoms(whole_axes(cut, self.atoms))}" for dim, cut in cuts.items() if cut]
                lines.extend([f"{kind}.{name}: [{', '.join(held)}]"] if held else [])
        return "\n".join(lines)


def propagate(
    graph: OpGraph | Block, mesh: Mesh | Mapping[str, int], pins: Mapping[str, str | Layout] | Sequence[Pin] = ()
) -> Propagation:
    """Complete pinned layouts to cuts of every operation, as the module says.

    The mesh may name axes whole (``{"dp": 2, "tp": 4}``) or their atoms. Pins name tensors of the forward pass, with
    their block (``layer.q.weight``) or for every block that has one of that name (``q.weight``).
    """
    atoms = _atoms_of(mesh)
    sizes = graph.sizes if isinstance(graph, OpGraph) else None
    wanted = pins_of(pins, "Python") if isinstance(pins, Mapping) else tuple(pins)
    net = Net.of(graph)
    claims = claims_of(net, atoms, sizes, wanted)
    flow = _Flow(net, claims, {atom: size for atom, size in atoms.items() if size > 1}, sizes or {})
    flow.settle()
    found = flow.cuts()
    blocks = [(graph, "")] if isinstance(graph, Block) else [(block, f"{block.kind}.") for block in graph.blocks]
    layouts = _layouts(net, found, atoms)
    return Propagation(
        atoms=atoms,
        cuts={block.kind: _of_block(found, prefix) for block, prefix in blocks},
        boundary=found.get(BOUNDARY, {}),
        layouts={block.kind: _of_block(layouts, prefix) for block, prefix in blocks},
    )


def _atoms_of(mesh: Mesh | Mapping[str, int]) -> Mapping[str, int]:
    """Return the atoms that may cut tensors, whole axes as their atoms: pp cuts layers, not tensors.

    >>> _atoms_of({"pp": 2, "dp": 2, "kv": 4})
    {'edp': 2, 'ep': 1, 'kv': 4, 'rep': 1}
    """
    axes = dict(mesh.axes if isinstance(mesh, Mesh) else mesh)
    require(
        *((size >= 1, f"mesh.{name}", f"must be at least 1, not {size}") for name, size in axes.items()),
        *(
            (axis not in axes or not axes.keys() & set(parts), "mesh", f"{axis} stands whole and in parts")
            for axis, parts in AXIS_ATOMS.items()
        ),
    )
    found: dict[str, int] = {}
    for name, size in axes.items():
        axis = next((parts for parts in AXIS_ATOMS.values() if name in parts), AXIS_ATOMS.get(name, (name,)))
        found[axis[0] if name in AXIS_ATOMS else name] = size
        found |= {part: 1 for part in axis if part not in found}
    return {name: size for name, size in found.items() if name != "pp"}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class _Offer:
    """An atom that may cut a dim of a site: of several the least wins, and names only tell sites apart."""

    leaves_weights: bool
    turn: int
    unlinked: bool
    rank: int
    from_reader: bool
    position: int
    order: int
    site: str
    atom: str
    dim: str


class _Flow:
    """Where each atom cuts, site by site, while it spreads; ``order`` is how far inside a dim it came to cut."""

    def __init__(self, net: Net, claims: Claims, atoms: Mapping[str, int], sizes: Mapping[str, int]) -> None:
        self.net = net
        self.claims = claims
        self.atoms = atoms
        self.sizes = sizes
        self.places: dict[str, dict[str, tuple[str, int]]] = {
            name: {
                atom: (dim, order)
                for dim, claim in claims.cuts.get(name, {}).items()
                for order, atom in enumerate(claim.atoms)
                if dim in site.free
            }
            for name, site in net.sites.items()
        }
        self._turns = {atom: turn for turn, atom in enumerate(atoms)}
        self._neighbours = {
            name: [
                (end, other)
                for ends in net.shared
                for end in ends
                for other in ends
                if end.site == name and other.site != name
            ]
            for name in net.sites
        }

    def settle(self) -> None:
        """Let every atom spread to the fixed point."""
        self._spread()
        if self._leave_sums():
            self._spread()

    def cuts(self) -> Mapping[str, Cuts]:
        """Return the cuts of all sites, tied dims included."""
        return {name: self._site_cuts(site) for name, site in self.net.sites.items()}

    def _spread(self) -> None:
        while offers := sorted(self._offers(self.cuts())):
            for offer in offers:
                if offer.leaves_weights == offers[0].leaves_weights:
                    self._take(offer)

    def _take(self, offer: _Offer) -> None:
        site = self.net.sites[offer.site]
        if offer.dim in self._legal(site, offer.atom):
            for name in site.alike if offer.dim in site.linked else (site.name,):
                self.places[name][offer.atom] = (offer.dim, offer.order)

    def _leave_sums(self) -> bool:
        """Where a pin wants a sum pending and nothing says along which dim, sum along the first."""
        waiting = [
            (self.net.sites[name], atom)
            for name, wanted in self.claims.sums.items()
            for atom in wanted
            if atom not in self.places[name]
        ]
        for site, atom in waiting:
            places = self._legal(site, atom)
            if not places:
                message = f"{site.name} has no dim left along which a sum over {atom} could stay pending"
                raise InputError.of("pins", message)
            self.places[site.name][atom] = (places[0], 0)
        return bool(waiting)

    def _offers(self, cuts: Mapping[str, Cuts]) -> Iterator[_Offer]:
        """Yield, for every tensor that two sites share, the outermost cut that one has and the other lacks."""
        for name, site in self.net.sites.items():
            for end, other in self._neighbours[name]:
                for position, (mine, its) in enumerate(zip(end.names, other.names, strict=True)):
                    offered = cuts[other.site][its]
                    atom = next((atom for atom in offered if atom not in cuts[name][mine]), None)
                    dim = atom and next((dim for dim in self._legal(site, atom) if dim in site.homes(mine)), None)
                    if atom and dim:
                        yield self._offer((site, end, other), (dim, position), (atom, offered.index(atom)))

    def _offer(self, where: tuple[Site, End, End], place: tuple[str, int], what: tuple[str, int]) -> _Offer:
        """Return an offer with its rank by the rules of the module."""
        (site, end, other), (dim, position), (atom, order) = where, place, what
        linked = dim in site.linked
        return _Offer(
            leaves_weights=bool(site.weights) and dim not in site.weights,
            turn=self._turns[atom],
            unlinked=not linked,
            rank=end.rank,
            from_reader=not other.makes,
            position=site.linked.index(dim) if linked else position,
            order=order,
            site=site.name,
            atom=atom,
            dim=dim,
        )

    def _legal(self, site: Site, atom: str) -> tuple[str, ...]:
        """Return the dims of a site that an atom may still cut; none where it cuts one already."""
        return tuple(dim for dim in self._open(site, atom) if self._joined_open(site, atom, dim))

    def _open(self, site: Site, atom: str) -> tuple[str, ...]:
        if atom in self.places[site.name]:
            return ()
        return tuple(dim for dim in self.claims.places(site, atom) if self._has_room(site, atom, dim))

    def _joined_open(self, site: Site, atom: str, dim: str) -> bool:
        """Say whether those that must be cut alike can follow."""
        others = [self.net.sites[name] for name in site.alike if name != site.name] if dim in site.linked else []
        return all(dim in self._open(other, atom) for other in others)

    def _has_room(self, site: Site, atom: str, dim: str) -> bool:
        """Say whether a dim, and every dim tied to it, has enough elements for one more cut."""
        held = self.places[site.name]
        for name in (dim, *(tied for tied, homes in site.tied.items() if dim in homes)):
            inside = [other for other, (place, _) in held.items() if place in site.homes(name)]
            parts = math.prod(self.atoms[each] for each in (atom, *inside))
            if parts > self.sizes.get(name, parts):
                return False
        return True

    def _site_cuts(self, site: Site) -> Cuts:
        cuts = {dim: self._cut(site, dim) for dim in site.dims}
        return cuts | {
            dim: tuple(atom for home in homes for atom in cuts.get(home, ())) for dim, homes in site.tied.items()
        }

    def _cut(self, site: Site, dim: str) -> tuple[str, ...]:
        """Return the atoms of a dim, outermost first: in the order of where they came from, then of the mesh."""
        held = self.places[site.name]
        here = [atom for atom in self.atoms if atom in held and held[atom][0] == dim]
        return tuple(sorted(here, key=lambda atom: held[atom][1]))


def _layouts(net: Net, cuts: Mapping[str, Cuts], atoms: Mapping[str, int]) -> Mapping[str, Layout]:
    """Return the layout of each tensor where all that give it agree."""
    found: dict[str, Layout] = {}
    for name, dims in net.tensors.items():
        made = {tuple((dim, whole_axes(cuts[site][dim], atoms)) for dim in dims): site for site in net.holders[name]}
        if len(made) == 1:
            ((held, holder),) = made.items()
            site = net.sites[holder]
            summed = tuple(atom for dim in site.summed.get(name, ()) for atom in cuts[holder][dim])
            pending = whole_axes(summed, atoms)
            found[name] = Layout(
                dims=held, sums=() if site.maximises else pending, maxima=pending if site.maximises else ()
            )
    return found


def _of_block(found: Mapping[str, _T], prefix: str) -> Mapping[str, _T]:
    return {
        name.removeprefix(prefix): value
        for name, value in found.items()
        if name != BOUNDARY and name.startswith(prefix)
    }
