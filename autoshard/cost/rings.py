"""What one Collective costs: bytes over the slowest link of its ring, the latency of every hop, and its start."""

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.cost.calibration import Calibration
from autoshard.cost.hops import group_exchange, mesh_hop
from autoshard.cost.routes import Number, Route, efficiency, group_routes
from autoshard.layout.collective import Collective, CollectiveKind
from autoshard.spec.cluster import Cluster
from autoshard.spec.mesh import Mesh, axis_levels_bytes_per_s

_ROUNDS: Mapping[CollectiveKind, int] = {"all_reduce": 2, "all_reduce_max": 2, "slice": 0}  # once, if not named
_PASSED_ON = ("cp", "pp")  # ranks send to their neighbours along these; sums over edp as well never go that way
_ROUTED: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_reduce_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A group of ranks as its collectives see it; numbers or columns of numbers."""

    size: Number
    bandwidth_bytes_per_s: Number  # of one direction, when all such groups talk at once
    latency_s: Number  # once around
    start_s: Number = 0.0  # of hosts, for each send or collective
    hop: Route | None = None  # to the next rank; None where it is as fast as the ring
    exchange: Route | None = None  # of each rank with each other, likewise
    routes: tuple[Route, ...] = ()  # other ways to gather and to sum, those for the smallest messages last
    is_flat: bool = True  # whether the ring itself is a way to gather and to sum

    def time_s(self, collective: Collective, message_bytes: Number) -> Number:
        """Return the time of a Collective; ``message_bytes`` is a rank's buffer where it is largest."""
        return self._num_starts(collective.kind) * self.start_s + self._sent_s(collective, message_bytes)

    def _num_starts(self, kind: CollectiveKind) -> Number:
        """Return what hosts start: a send for each hop of a permutation, nothing for a slice, else a collective."""
        return {"permute": self.size - 1, "slice": 0}.get(kind, 1)

    def _sent_s(self, collective: Collective, message_bytes: Number) -> Number:
        rounds = _ROUNDS.get(collective.kind, 1)
        if collective.kind == "permute" and self.hop:
            return (self.size - 1) * self.hop.time_s(message_bytes)
        if collective.kind == "all_to_all" and self.exchange:
            return self.exchange.time_s(message_bytes)
        sent_s = self.sent_bytes(collective, message_bytes) / self.bandwidth_bytes_per_s + rounds * self.latency_s
        if collective.kind not in _ROUTED:
            return sent_s
        for number, route in enumerate(self.routes):
            routed_s = rounds * route.time_s(message_bytes)
            alone = number == 0 and not self.is_flat
            sent_s = routed_s if alone else route.taken_s(routed_s, sent_s, message_bytes)
        return sent_s

    def sent_bytes(self, collective: Collective, message_bytes: Number) -> Number:
        """Return the bytes that one rank sends.

        Bandwidth-optimal rings: gather and scatter send (n-1)/n of the whole, all-reduce does both, an all-to-all
        keeps 1/n at home, a permutation in n-1 rounds shows each rank all other parts. A slice sends nothing.
        """
        if collective.kind == "permute":
            return (self.size - 1) * message_bytes
        return _ROUNDS.get(collective.kind, 1) * (self.size - 1) / self.size * message_bytes

    def send_s(self, message_bytes: Number) -> Number:
        """Return the time of handing a message to the next rank."""
        hop_s = (
            self.hop.time_s(message_bytes) if self.hop else message_bytes / self.bandwidth_bytes_per_s + self.latency_s
        )
        return self.start_s + hop_s


def mesh_ring(cluster: Cluster, mesh: Mesh, atoms: tuple[str, ...], calibration: Calibration) -> Ring:
    """Return the ring along some atoms of a mesh."""
    held = tuple(atom for atom in atoms if mesh.atoms_of(atom))
    group = mesh.group_of(0, held)
    wires = _share_of_wires(cluster, group)
    speeds = [
        speed * efficiency(link, calibration) * (wires if link.kind == "torus" else 1.0)
        for link, speed in zip(cluster.links, axis_levels_bytes_per_s(cluster, mesh, held), strict=True)
    ]
    ways = [way.kind for way in cluster.algorithms]
    passes_on = "edp" not in atoms and any(atom in _PASSED_ON for atom in atoms)
    return Ring(
        size=len(group),
        bandwidth_bytes_per_s=min(speeds),
        latency_s=_latency_s(cluster, group),
        start_s=calibration.collective_s if len(group) > 1 else 0.0,
        hop=mesh_hop(cluster, mesh, held, calibration) if passes_on else None,
        exchange=group_exchange(cluster, group, calibration),
        routes=group_routes(cluster, group, speeds),
        is_flat=not ways or "ring" in ways,
    )


def _share_of_wires(cluster: Cluster, group: tuple[int, ...]) -> float:
    """Return which part of a torus' wires a ring uses: all on the whole torus, half on a part of it.

    A chip has four neighbours. Over all chips of a node run two edge-disjoint Hamiltonian cycles in parallel (AWS
    Neuron docs, neuron-runtime/explore/intranode-collective-comm.rst); a ring over fewer chips is one cycle: derived.
    """
    if len(group) == 1 or cluster.link_of(group).kind != "torus":
        return 1.0
    size = cluster.ranks_per_chip  # not asked rank by rank: searches ask for many large groups
    return 0.5 if len({rank // size for rank in group}) % cluster.chips_per_node else 1.0


def _latency_s(cluster: Cluster, group: tuple[int, ...]) -> float:
    """Add up the hops of a ring that visits a node's members before it goes on to the next node."""
    if len(group) == 1:
        return 0.0
    size = cluster.ranks_per_node
    num_nodes = len({rank // size for rank in group})
    inside = len(group) - num_nodes
    near = cluster.link_of(cluster.inside(group)).latency_s if inside else 0.0
    far = cluster.link_of(group).latency_s if num_nodes > 1 else 0.0
    return inside * near + (num_nodes - 1) * far
