"""What a Collective costs: bytes over the slowest link of its group, the latency of every hop, and its start."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.cost.calibration import Calibration
from autoshard.cost.dispatch import TokenSends
from autoshard.layout.layout import Collective, CollectiveKind
from autoshard.spec.cluster import Cluster, Domain, Hops, Link
from autoshard.spec.mesh import Mesh, axis_levels_bytes_per_s

Number = Any  # a number, or a numpy column of one number per candidate

_ROUNDS: Mapping[CollectiveKind, int] = {"all_reduce": 2, "all_reduce_max": 2, "slice": 0}  # once, if not named
_ROWS = {"experts", "slots"}  # of experts: the dims between which an all-to-all of tokens moves a cut
_ROUTED: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_reduce_max")
_NEIGHBOUR_AXES = ("cp", "pp")  # ranks send to their neighbours along these; sums over edp as well never go that way
_NEIGHBOURS = 4  # of a chip on a two-dimensional torus: a hop has one of its wires
_INSIDE: tuple[Domain, ...] = ("chip", "node")
_STEPS: Mapping[Hops, Callable[[int], float]] = {
    "all": lambda ranks: ranks - 1,
    "half": lambda ranks: (ranks - 1) / 2,
    "log": lambda ranks: math.ceil(math.log2(ranks)),
    "one": lambda ranks: min(1, ranks - 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One way through a group other than its flat ring; the time of one round: a gather, a scatter, a send."""

    seconds_per_byte: Number  # of the whole message
    latency_s: Number
    up_to_bytes: int | None = None  # the library takes this way up to here; None: wherever it is the fastest
    sent_share: Number | None = None  # of the message, by one rank; None: as around a ring

    def time_s(self, message_bytes: Number) -> Number:
        """Return the time of one round."""
        return self.seconds_per_byte * message_bytes + self.latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A group of ranks as its collectives see it; numbers or columns of numbers."""

    size: Number
    bandwidth_bytes_per_s: Number  # of one direction, when all such groups talk at once
    latency_s: Number  # once around
    start_s: Number = 0.0  # of hosts, for each send or collective
    joining_s: Number = 0.0  # of hosts, beside it, for a collective that all ranks join at once; a send has two ranks
    hop: Route | None = None  # to the next rank; None where it is as fast as the ring
    exchange: Route | None = None  # of each rank with each other, likewise
    tokens: Route | None = None  # of rows of experts by a library that sends tokens; None: as any exchange
    routes: tuple[Route, ...] = ()  # other ways to gather and to sum, those for the smallest messages last
    is_flat: bool = True  # whether the ring itself is a way to gather and to sum

    def time_s(self, collective: Collective, message_bytes: Number) -> Number:
        """Return the time of a Collective with its start; ``message_bytes`` is a rank's buffer where it is largest."""
        return self.starts_s(collective) + self.wire_s(collective, message_bytes)

    def busy_s(self, collective: Collective, message_bytes: Number, *, eager: bool) -> Number:
        """Return for how long a Collective keeps a rank busy; where hosts start kernels, they start it meanwhile."""
        return self.wire_s(collective, message_bytes) + (0.0 if eager else self.starts_s(collective))

    def starts_s(self, collective: Collective) -> Number:
        """Return what hosts take to start it: a send for each hop of a permutation, nothing for a slice, else once."""
        if collective.kind == "permute":
            return (self.size - 1) * self.start_s
        return 0.0 if collective.kind == "slice" else self.start_s + self.joining_s

    def wire_s(self, collective: Collective, message_bytes: Number) -> Number:
        """Return the time of a Collective on its links."""
        kind, rounds = collective.kind, _ROUNDS.get(collective.kind, 1)
        if kind == "permute" and self.hop:
            return (self.size - 1) * self.hop.time_s(message_bytes)
        if exchange := self._exchange(collective):
            return exchange.time_s(message_bytes)
        best_s: Number = self.sent_bytes(collective, message_bytes) / self.bandwidth_bytes_per_s
        best_s = best_s + rounds * self.latency_s
        for number, route in enumerate(self.routes if kind in _ROUTED else ()):
            route_s = rounds * route.time_s(message_bytes)
            if number == 0 and not self.is_flat:
                best_s = route_s
            elif route.up_to_bytes is None:
                best_s = np.minimum(route_s, best_s)
            else:
                fits = message_bytes <= route.up_to_bytes
                best_s = route_s * fits + best_s * (1 - fits)
        return best_s

    def sent_bytes(self, collective: Collective, message_bytes: Number) -> Number:
        """Return the bytes that one rank sends.

        Bandwidth-optimal rings: gather and scatter send (n-1)/n of the whole, all-reduce does both, an all-to-all
        keeps 1/n at home, a permutation in n-1 rounds shows each rank all other parts. A slice sends nothing.
        """
        if (exchange := self._exchange(collective)) and exchange.sent_share is not None:
            return exchange.sent_share * message_bytes
        if collective.kind == "permute":
            return (self.size - 1) * message_bytes
        return _ROUNDS.get(collective.kind, 1) * (self.size - 1) / self.size * message_bytes

    def _exchange(self, collective: Collective) -> Route | None:
        """Return the route of an all-to-all; None for other collectives, and where it goes around the ring."""
        if collective.kind != "all_to_all":
            return None
        return self.tokens if self.tokens and {collective.dim, collective.to_dim} == _ROWS else self.exchange

    def send_s(self, message_bytes: Number) -> Number:
        """Return the time of handing a message to the next rank."""
        if self.hop:
            return self.start_s + self.hop.time_s(message_bytes)
        return self.start_s + message_bytes / self.bandwidth_bytes_per_s + self.latency_s


def mesh_ring(
    cluster: Cluster, mesh: Mesh, atoms: tuple[str, ...], calibration: Calibration, tokens: TokenSends | None = None
) -> Ring:
    """Return the group of ranks along some atoms of a mesh, as the first rank sees it.

    With ``tokens``, rows of experts go by a library that sends a token once to each node.
    """
    cut = tuple(atom for atom in atoms if mesh.atoms_of(atom))
    group = mesh.group_of(0, cut)
    # Over all chips of a node of a torus run two edge-disjoint Hamiltonian cycles in parallel (AWS Neuron docs,
    # neuron-runtime/explore/intranode-collective-comm.rst); a ring over fewer chips is one cycle, half of its wires:
    # derived.
    on_torus = len(group) > 1 and cluster.link_of(group).kind == "torus"
    inner, num_nodes = cluster.inside(group), len({rank // cluster.ranks_per_node for rank in group})
    # As many chips of several nodes as one node has are no whole node.
    num_chips = len({rank // cluster.ranks_per_chip for rank in inner}) if on_torus else 0
    wires = 0.5 if num_chips % cluster.chips_per_node else 1.0
    reached = {link.domain: link_efficiency(link, calibration) for link in cluster.links}
    speeds: dict[Domain, float] = {
        link.domain: speed * reached[link.domain] * (wires if link.kind == "torus" else 1.0)
        for link, speed in zip(cluster.links, axis_levels_bytes_per_s(cluster, mesh, cut), strict=True)
    }
    num_inside = len(group) - num_nodes
    near_s = cluster.link_of(inner).latency_s if num_inside else 0.0
    far_s = (num_nodes - 1) * cluster.link_of(group).latency_s if num_nodes > 1 else 0.0
    return Ring(
        size=len(group),
        bandwidth_bytes_per_s=min(speeds.values()),
        latency_s=num_inside * near_s + far_s,  # a node's members are visited before the next node
        start_s=calibration.collective_s * (len(group) > 1),
        joining_s=_joining_s(cluster, mesh, len(group), calibration),
        hop=_neighbour_route(cluster, mesh, cut, calibration) if to_neighbours(atoms) else None,
        exchange=_exchange_route(cluster, group, calibration),
        tokens=_token_route(cluster, group, tokens) if tokens else None,
        routes=_hierarchical_routes(cluster, group, speeds, near_s, far_s),
        is_flat=not cluster.algorithms or any(algorithm.kind == "ring" for algorithm in cluster.algorithms),
    )


def _exchange_route(cluster: Cluster, group: tuple[int, ...], calibration: Calibration) -> Route:
    """Return what sending a part to each other rank costs: the slower of what stays inside nodes and what leaves them.

    All ranks of a node leave it at once, so that each has its share of the port next to it.
    """
    inner, size = cluster.inside(group), len(group)
    peers = [(cluster.link_of(inner), len(inner) - 1)] if len(inner) > 1 else []
    peers += [(cluster.link_of(group), size - len(inner))] if size > len(inner) else []
    per_byte = [
        count / size * link.ranks_per_port / (link.bandwidth_bytes_per_s * link_efficiency(link, calibration))
        for link, count in peers
    ]
    latencies = [link.latency_s for link, _ in peers]
    return Route(seconds_per_byte=max(per_byte, default=0.0), latency_s=max(latencies, default=0.0))


def _token_route(cluster: Cluster, group: tuple[int, ...], tokens: TokenSends) -> Route:
    """Return what sending tokens once to each node and rank costs; the steps between and inside nodes overlap."""
    inner = cluster.inside(group)
    near, far = tokens.shares(len(group) // len(inner), len(inner))
    steps = [(cluster.link_of(inner), near / tokens.near_efficiency)] if near else []
    steps += [(cluster.link_of(group), far / tokens.far_efficiency)] if far else []
    per_byte = [share * link.ranks_per_port / link.bandwidth_bytes_per_s for link, share in steps]
    return Route(
        seconds_per_byte=max(per_byte, default=0.0),
        latency_s=sum(link.latency_s for link, _ in steps),
        sent_share=near + far,
    )


def _joining_s(cluster: Cluster, mesh: Mesh, size: int, calibration: Calibration) -> float:
    """Return what hosts take to join a collective: for each of its ranks, in a pipeline over several nodes.

    It depends on no axis: gradients are summed along those along which there are replicas, be that cp alone.
    """
    joins = size > 1 and cluster.num_nodes > 1 and mesh.size("pp") > 1
    return calibration.joined_s * size * joins


def to_neighbours(atoms: tuple[str, ...]) -> bool:
    """Say whether ranks along these atoms send to their neighbours, as those of a pipeline and a ring of keys do."""
    return "edp" not in atoms and any(atom in _NEIGHBOUR_AXES for atom in atoms)


def link_efficiency(link: Link, calibration: Calibration) -> float:
    """Return which share of its bandwidth a link reaches."""
    return calibration.far_link_efficiency if link.domain == "cluster" else calibration.near_link_efficiency


def _hierarchical_routes(
    cluster: Cluster, group: tuple[int, ...], speeds: Mapping[Domain, float], near_s: float, far_s: float
) -> tuple[Route, ...]:
    """Return the routes of a group inside its nodes and then between them.

    ``speeds`` is what the group gets of every link of the cluster, ``near_s`` the latency of a hop inside a node, and
    ``far_s`` that of all hops between nodes.
    """
    routed = [algorithm for algorithm in cluster.algorithms if algorithm.kind == "hierarchical"]
    num_inside = len(cluster.inside(group))
    far = [speed for domain, speed in speeds.items() if domain not in _INSIDE]
    near = [speed for domain, speed in speeds.items() if domain in _INSIDE] or far  # a node without a link of its own
    parts = [(count, part) for count, part in ((num_inside, near), (len(group) // num_inside, far)) if count > 1]
    per_byte = sum((count - 1) / count / min(part) for count, part in parts)
    routed.sort(
        key=lambda algorithm: math.inf if algorithm.up_to_bytes is None else algorithm.up_to_bytes, reverse=True
    )
    return tuple(
        Route(
            seconds_per_byte=per_byte,
            latency_s=_STEPS[algorithm.hops](num_inside) * near_s + far_s,
            up_to_bytes=algorithm.up_to_bytes,
        )
        for algorithm in routed
    )


def _neighbour_route(cluster: Cluster, mesh: Mesh, atoms: tuple[str, ...], calibration: Calibration) -> Route:
    """Return what handing a message to the next rank along some atoms costs, while all ranks do: its slowest hop.

    A rank sends through the port nearest to it, which it shares with the ranks there that send over the same link. On
    a torus a message gets the wire to that neighbour, not all wires of the chip.
    """
    groups, _ = mesh.repeated_groups(atoms, cluster.repeat_ranks)
    senders, receivers = groups[:, :-1].reshape(-1), groups[:, 1:].reshape(-1)
    slowest, latency_s = 0.0, 0.0
    for link in cluster.links:  # innermost first: what one joins goes no further
        domain = cluster.domain_ranks(link.domain)
        joins = senders // domain == receivers // domain
        if joins.any():
            wire = link.bandwidth_bytes_per_s / (_NEIGHBOURS if link.kind == "torus" else 1)
            most = int(np.bincount(senders[joins] // link.ranks_per_port).max())
            slowest = max(slowest, most / (wire * link_efficiency(link, calibration)))
            latency_s = max(latency_s, link.latency_s)
        senders, receivers = senders[~joins], receivers[~joins]
    return Route(seconds_per_byte=slowest, latency_s=latency_s)
