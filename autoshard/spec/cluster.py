"""Hardware as data: chips, links, clusters.

A rank is one logical NeuronCore or one GPU. Ranks are numbered node by node, chip by chip.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Literal

from autoshard.errors import InputError, nearest, require
from autoshard.spec.algorithm import Algorithm
from autoshard.spec.chip import Chip
from autoshard.spec.link import DOMAINS, Domain, Link
from autoshard.spec.placement import Placement, PlacementRule
from autoshard.spec.sources import source_checks

__all__ = ["LOCAL", "Chip", "Cluster", "Domain", "EngineName", "KvOrder", "Link", "Placement", "PlacementRule"]

EngineName = Literal["nxd", "torch"]
LOCAL = "local"  # the cluster that is the processors of this machine: its rates are declared, not a data sheet's
KvOrder = Literal["strided", "adjacent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A number of equal nodes, and how ranks reach each other on them."""

    name: str
    chip: Chip
    num_nodes: int
    chips_per_node: int
    ranks_per_chip: int
    lnc: int | None  # logical NeuronCore configuration (trn2), else None
    links: tuple[Link, ...]  # innermost domain first
    engine: EngineName
    kernels: str  # default Kernels table: nxd, te, torch_cuda, torch_engine
    nodes_per_ultraserver: int = 1
    kv_order: KvOrder = "adjacent"  # of the atoms of tp on the ranks: strided is (rep, kv), adjacent is (kv, rep)
    placements: tuple[PlacementRule, ...] = ()
    algorithms: tuple[Algorithm, ...] = ()  # of collectives; a ring where none is named
    price_usd_per_node_hour: float | None = None  # on demand
    price_date: str | None = None  # of the price, YYYY-MM-DD; None where its source carries none
    sources: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        """Refuse impossible numbers, links that do not join the ranks, and numbers without a source."""
        counts = ("num_nodes", "chips_per_node", "ranks_per_chip", "nodes_per_ultraserver")
        countable = all(getattr(self, name) >= 1 for name in counts)
        require(
            (bool(self.name.strip()), "name", "must not be empty"),
            (bool(self.kernels.strip()), "kernels", "must name a Kernels table"),
            *((getattr(self, name) >= 1, name, f"must be at least 1, not {getattr(self, name)}") for name in counts),
            (self.lnc is None or self.lnc >= 1, "lnc", f"must be at least 1, or null, not {self.lnc}"),
            (
                self.price_usd_per_node_hour is None or self.price_usd_per_node_hour > 0,
                "price_usd_per_node_hour",
                "must be positive; null when it is not known",
            ),
            (
                self.price_date is None or self.price_usd_per_node_hour is not None,
                "price_date",
                "is the date of a price: give price_usd_per_node_hour as well, or leave it out",
            ),
            (
                self.price_date is None or _is_date(self.price_date),
                "price_date",
                f"must be a day as YYYY-MM-DD, or null, not {self.price_date!r}",
            ),
            *source_checks(self._numbers(), self.sources),
            *(self._link_checks() + self._placement_checks() if countable else []),
        )

    @property
    def ranks_per_node(self) -> int:
        """Ranks on one node."""
        return self.chips_per_node * self.ranks_per_chip

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole cluster."""
        return self.num_nodes * self.ranks_per_node

    @property
    def rank_memory_bytes(self) -> int:
        """Memory of one rank: its equal share of the chip."""
        return self.chip.memory_bytes // self.ranks_per_chip

    @property
    def rank_memory_bandwidth_bytes_per_s(self) -> float:
        """Memory bandwidth of one rank: its equal share of the chip."""
        return self.chip.memory_bandwidth_bytes_per_s / self.ranks_per_chip

    @property
    def rank_vector_flops_per_s(self) -> float:
        """Peak rate of elementwise arithmetic of one rank."""
        return self.chip.vector_flops_per_s / self.ranks_per_chip

    def rank_matrix_flops_per_s(self, dtype: str) -> float:
        """Return the dense peak of one rank in matrix products of this dtype."""
        rates = self.chip.matrix_flops_per_s
        if dtype not in rates:
            raise InputError.of("dtype", f"{self.chip.name} has no {dtype} matrix rate. {nearest(dtype, list(rates))}")
        return rates[dtype] / self.ranks_per_chip

    def node_of(self, rank: int) -> int:
        """Return the node that holds a rank."""
        return self._known(rank) // self.ranks_per_node

    def domain_ranks(self, domain: Domain) -> int:
        """Count the ranks of one chip, node, ultraserver or the cluster."""
        if domain == "cluster":
            return self.num_ranks
        if domain == "ultraserver":
            return self.ranks_per_node * self.nodes_per_ultraserver
        return self.ranks_per_node if domain == "node" else self.ranks_per_chip

    def link_of(self, ranks: Sequence[int]) -> Link:
        """Return the link of the smallest domain that contains all of these ranks."""
        first, last = self._known(min(ranks)), self._known(max(ranks))
        for link in self.links:
            size = self.domain_ranks(link.domain)
            if first // size == last // size:
                return link
        raise AssertionError("the links of a cluster join all of its ranks")

    def inside(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks of a group that lie in the node of its first."""
        size = self.ranks_per_node
        return [rank for rank in ranks if rank // size == ranks[0] // size]

    def default_placement(self, tp: int) -> Placement:
        """Return the placement inside a node that this platform uses for a tensor-parallel size."""
        for rule in self.placements:
            if rule.tp == tp:
                return rule.placement
        return Placement.linear(self.ranks_per_node)

    @property
    def repeat_ranks(self) -> int:
        """Ranks after which the hardware repeats: of an ultraserver where there is one, else of a node."""
        return min(self.num_ranks, self.ranks_per_node * self.nodes_per_ultraserver)

    def level_bandwidths_bytes_per_s(
        self, groups: Sequence[Sequence[int]], judged: int | None = None
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
        Of a link that no group needs each gets infinity. With ``judged`` only the first so many ranks are
        judged; of groups that reach further, one member beyond them is enough.
        """
        limit = self.num_ranks if judged is None else judged
        return tuple(
            link.bandwidth_bytes_per_s * self._share(level, groups, limit) for level, link in enumerate(self.links)
        )

    def _known(self, rank: int) -> int:
        assert 0 <= rank < self.num_ranks, f"rank {rank} is not one of the {self.num_ranks} of {self.name}"
        return rank

    def _unit_ranks(self, level: int) -> int:
        """Count the ranks of the units that the link of this level joins."""
        if level > 0:
            return self.domain_ranks(self.links[level - 1].domain)
        return 1 if self.links[0].domain == "chip" else self.ranks_per_chip

    def _crossings(self, level: int, groups: Sequence[Sequence[int]], judged: int) -> list[set[tuple[int, int]]]:
        """List, for each group that uses this level, the (unit, port) pairs of its judged ranks."""
        unit, port = self._unit_ranks(level), self.links[level].ranks_per_port
        crossings: list[set[tuple[int, int]]] = []
        for group in groups:
            # Below level 0 there is no other link, so there also a group inside one unit uses it.
            if len(group) > 1 and (level == 0 or len({rank // unit for rank in group}) > 1):
                crossings.append({(rank // unit, rank // port) for rank in group if rank < judged})
        return [pairs for pairs in crossings if pairs]

    def _share(self, level: int, groups: Sequence[Sequence[int]], judged: int) -> float:
        """Return how many whole ports the worst-served group has for itself in its worst unit."""
        crossings = self._crossings(level, groups, judged)
        loads = _port_loads(crossings)
        worst = math.inf
        for pairs in crossings:
            shares: dict[int, float] = {}
            for unit, port in pairs:
                shares[unit] = shares.get(unit, 0.0) + 1 / loads[port]
            worst = min(worst, min(shares.values()))
        return worst

    def _numbers(self) -> list[str]:
        numbers = ["chips_per_node", "ranks_per_chip"]
        if self.nodes_per_ultraserver != 1:
            numbers.append("nodes_per_ultraserver")
        if self.price_usd_per_node_hour is not None:
            numbers.append("price_usd_per_node_hour")
        return numbers

    def _link_checks(self) -> list[tuple[bool, str, str]]:
        order = [DOMAINS.index(link.domain) for link in self.links]
        if not order or order != sorted(set(order)):
            return [
                (
                    False,
                    "links",
                    "must be one link per domain, innermost first: chip, node, ultraserver, cluster",
                )
            ]
        joined = self.domain_ranks(self.links[-1].domain)
        has_ultraserver = "ultraserver" in {link.domain for link in self.links}
        return [
            (
                joined >= self.ranks_per_node,
                "links",
                f"no link joins the {self.chips_per_node} chips of a node: add one of domain node",
            ),
            (
                min(joined, self.ranks_per_node) < self.ranks_per_node or joined >= self.num_ranks,
                "num_nodes",
                f"no link joins {self.num_nodes} nodes: use fewer, or add a link of domain cluster",
            ),
            (
                has_ultraserver == (self.nodes_per_ultraserver > 1),
                "nodes_per_ultraserver",
                "must be above 1 when, and only when, there is a link of domain ultraserver",
            ),
            *(self._port_check(level) for level in range(len(self.links))),
        ]

    def _port_check(self, level: int) -> tuple[bool, str, str]:
        link, unit = self.links[level], self._unit_ranks(level)
        inner = self.ranks_per_node if link.domain == "cluster" else self.domain_ranks(link.domain)
        port = link.ranks_per_port
        return (
            inner % port == 0 and (unit % port == 0 or port % unit == 0),
            f"links[{level}].ranks_per_port",
            f"{port} ranks a port do not divide the {inner} ranks that {link.name} serves evenly",
        )

    def _placement_checks(self) -> list[tuple[bool, str, str]]:
        sizes = [rule.tp for rule in self.placements]
        total = self.ranks_per_node
        return [
            (len(set(sizes)) == len(sizes), "placements", "two placements for the same tp"),
            *(
                (
                    len(rule.placement.local_ranks) == total,
                    f"placements[{index}].placement",
                    f"places {len(rule.placement.local_ranks)} ranks, but a node has {total}",
                )
                for index, rule in enumerate(self.placements)
            ),
            *(
                (
                    total % rule.tp == 0,
                    f"placements[{index}].tp",
                    f"{rule.tp} does not divide {total} ranks a node",
                )
                for index, rule in enumerate(self.placements)
            ),
        ]


def _is_date(text: str) -> bool:
    """Tell whether a text is a day of the calendar.

    >>> _is_date("2026-11-09"), _is_date("2026-02-30"), _is_date("20261109")
    (True, False, False)
    """
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _port_loads(crossings: Sequence[set[tuple[int, int]]]) -> Counter[int]:
    """Count how many (group, unit) pairs use each port."""
    return Counter(port for pairs in crossings for _, port in pairs)
