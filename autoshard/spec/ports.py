"""What groups of ranks get of each link when all of them communicate at once."""

import math
from collections import Counter
from collections.abc import Sequence

from autoshard.spec.cluster import Cluster
from autoshard.spec.mesh import Mesh


def axis_levels_bytes_per_s(cluster: Cluster, mesh: Mesh, names: str | Sequence[str]) -> tuple[float, ...]:
    """Return what each group along these axes gets of every link when all run a ring at once, innermost first.

    The same as ``level_bandwidths_bytes_per_s(cluster, mesh.groups(names))``, at a cost that does not grow.
    """
    assert mesh.num_ranks == cluster.num_ranks, f"{mesh} is not a mesh of {cluster.num_ranks} ranks"
    repeat = cluster.repeat_ranks
    if mesh.repeats_every(repeat):
        return level_bandwidths_bytes_per_s(cluster, mesh.local_groups(names, repeat), counted=repeat)
    return level_bandwidths_bytes_per_s(cluster, mesh.groups(names))


def level_bandwidths_bytes_per_s(
    cluster: Cluster, groups: Sequence[Sequence[int]], counted: int | None = None
) -> tuple[float, ...]:
    """Return what each group gets of every link in one direction when all run a ring at once, innermost first.

    Let a link join units (the ranks of a chip, the chips of a node, the nodes of a cluster). A ring
    that visits one unit after the other enters and leaves each unit once, cut into as many parallel
    rings as the group has ports there. A port is shared by all groups that leave a unit through it, so
    a group leaves a unit with the sum, over the ports of its ranks there, of the port's bandwidth
    divided by the number of groups that use it. The ring is as fast as the slowest unit of the slowest
    level; the innermost level is each rank's own reach. With equal groups this is the unit's ports
    times their bandwidth, divided by the groups that cross its border.

    On a torus all wires of a chip count as usable, which only the ring over the whole torus achieves.
    Of a link that no group needs each gets infinity. With ``counted`` only the first so many ranks count;
    of groups that reach further, one member beyond them is enough.
    """
    limit = cluster.num_ranks if counted is None else counted
    return tuple(
        link.bandwidth_bytes_per_s * _whole_ports(cluster, level, groups, limit)
        for level, link in enumerate(cluster.links)
    )


def _whole_ports(cluster: Cluster, level: int, groups: Sequence[Sequence[int]], limit: int) -> float:
    """Return how many whole ports the worst-served group has for itself in its worst unit."""
    unit, port = cluster.joined_ranks(level), cluster.links[level].ranks_per_port
    crossings: list[set[tuple[int, int]]] = []  # for each group that uses this level: (unit, port) of its ranks
    for group in groups:
        # Below level 0 there is no other link, so there also a group inside one unit uses it.
        if len(group) > 1 and (level == 0 or len({rank // unit for rank in group}) > 1):
            crossings.append({(rank // unit, rank // port) for rank in group if rank < limit})
    users = Counter(port for pairs in crossings for _, port in pairs)
    worst = math.inf
    for pairs in crossings:
        shares: dict[int, float] = {}
        for unit, port in pairs:
            shares[unit] = shares.get(unit, 0.0) + 1 / users[port]
        worst = min(worst, min(shares.values(), default=math.inf))
    return worst
