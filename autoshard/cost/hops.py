"""What ranks send to single others: from neighbour to neighbour along a ring or a pipeline, and each to each."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from autoshard.cost.calibration import Calibration
from autoshard.cost.routes import Route, efficiency
from autoshard.spec.cluster import Cluster
from autoshard.spec.link import Domain, Link
from autoshard.spec.mesh import Mesh

_NEIGHBOURS = 4  # of a chip on a two-dimensional torus: a hop has one of its wires


def mesh_hop(cluster: Cluster, mesh: Mesh, held: tuple[str, ...], calibration: Calibration) -> Route:
    """Return what handing a message to the next rank along some atoms costs, while all ranks do: its slowest hop.

    A rank sends through the port nearest to it, which it shares with the ranks there that send over the same link.
    """
    links = {link.domain: link for link in cluster.links}
    senders: dict[Domain, Counter[int]] = {}
    for sender, receiver in _pairs(cluster, mesh, held):
        link = cluster.link_of((sender, receiver))
        senders.setdefault(link.domain, Counter())[sender // link.ranks_per_port] += 1
    used = [(links[domain], max(ports.values())) for domain, ports in senders.items()]
    return Route(
        seconds_per_byte=max((most / _wire(link, calibration) for link, most in used), default=0.0),
        latency_s=max((link.latency_s for link, _ in used), default=0.0),
        up_to_bytes=None,
    )


def _wire(link: Link, calibration: Calibration) -> float:
    """Return what one message gets: on a torus the wire to that neighbour, not all wires of the chip."""
    share = 1 / _NEIGHBOURS if link.kind == "torus" else 1.0
    return link.bandwidth_bytes_per_s * share * efficiency(link, calibration)


def _pairs(cluster: Cluster, mesh: Mesh, held: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Yield every rank, of as many as the hardware repeats after, with the next one of its group."""
    repeat = cluster.repeat_ranks
    groups = mesh.local_groups(held, repeat) if mesh.repeats_every(repeat) else mesh.groups(held)
    for group in groups:
        yield from pairwise(group)


def group_exchange(cluster: Cluster, group: Sequence[int], calibration: Calibration) -> Route:
    """Return what sending a part to each other rank costs: the slower of what stays inside nodes and what leaves them.

    All ranks of a node leave it at once, so that each has its share of the port next to it.
    """
    if len(group) == 1:
        return Route(seconds_per_byte=0.0, latency_s=0.0, up_to_bytes=None)
    inner = cluster.inside(group)
    parts = [(len(inner) - 1, cluster.link_of(inner))] if len(inner) > 1 else []
    parts += [(len(group) - len(inner), cluster.link_of(group))] if len(group) > len(inner) else []
    return Route(
        seconds_per_byte=max(
            count / len(group) * link.ranks_per_port / (link.bandwidth_bytes_per_s * efficiency(link, calibration))
            for count, link in parts
        ),
        latency_s=max(link.latency_s for _, link in parts),
        up_to_bytes=None,
    )
