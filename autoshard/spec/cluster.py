"""Hardware as data: chips, links, clusters. No number stands without saying where it comes from.

A rank is one logical NeuronCore or one GPU. Ranks are numbered node by node, chip by chip.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Literal

from autoshard.errors import InputError, nearest, require
from autoshard.spec.placement import Placement, PlacementRule
from autoshard.spec.workload import DTYPE_BYTES

Domain = Literal["chip", "node", "ultraserver", "cluster"]
LinkKind = Literal["chip", "torus", "switch", "network", "memory"]
DOMAINS: tuple[Domain, ...] = ("chip", "node", "ultraserver", "cluster")  # innermost first
Hops = Literal["all", "half", "log", "one"]
EngineName = Literal["nxd", "torch"]
KvOrder = Literal["strided", "adjacent"]
LOCAL = "local"  # the cluster that is the processors of this machine: its rates are declared, not a data sheet's
Check = tuple[bool, str, str]  # for ``errors.require``


def source_checks(numbers: Iterable[str], sources: Mapping[str, str]) -> list[Check]:
    """Make the checks (for ``errors.require``) that each number is covered by a source.

    The number ``matrix_flops_per_s.bf16`` is covered by a source of that name, of the whole field
    ``matrix_flops_per_s``, or by ``default``, which covers everything.

    >>> source_checks(["latency_s"], {"latency_s": "data sheet"})
    [(True, 'sources', "no source for latency_s: add the key 'latency_s' or 'default'")]
    """
    return [
        (
            any(sources.get(key, "").strip() for key in (number, number.partition(".")[0], "default")),
            "sources",
            f"no source for {number}: add the key {number!r} or 'default'",
        )
        for number in numbers
    ]


def named(name: str) -> Check:
    """Make the check that a name is not empty."""
    return bool(name.strip()), "name", "must not be empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One accelerator package, with a source for every number."""

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    matrix_flops_per_s: Mapping[str, float] = field(hash=False)  # dense peak of the whole chip, by dtype
    vector_flops_per_s: float  # elementwise operations
    matrix_tile: int = 1  # rows and columns that the matrix unit works on at once, full or not
    sources: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        numbers: dict[str, float] = {
            "memory_bytes": self.memory_bytes,
            "memory_bandwidth_bytes_per_s": self.memory_bandwidth_bytes_per_s,
            "vector_flops_per_s": self.vector_flops_per_s,
            "matrix_tile": self.matrix_tile,
            **{f"matrix_flops_per_s.{dtype}": rate for dtype, rate in self.matrix_flops_per_s.items()},
        }
        known = list(DTYPE_BYTES)
        require(
            named(self.name),
            (bool(self.matrix_flops_per_s), "matrix_flops_per_s", "must give the rate of at least one dtype"),
            *(
                (dtype in known, f"matrix_flops_per_s.{dtype}", f"not a dtype. {nearest(dtype, known)}")
                for dtype in self.matrix_flops_per_s
            ),
            *((number > 0, name, f"must be positive, not {number}") for name, number in numbers.items()),
            *source_checks([name for name in numbers if name != "matrix_tile" or self.matrix_tile > 1], self.sources),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What ranks talk over within one domain; domains nest (chip, node, ultraserver, cluster)."""

    name: str
    kind: LinkKind
    domain: Domain
    bandwidth_bytes_per_s: float  # per port, one direction
    ranks_per_port: int
    latency_s: float  # of one hop
    sources: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        require(
            named(self.name),
            (self.bandwidth_bytes_per_s > 0, "bandwidth_bytes_per_s", "must be positive"),
            (self.ranks_per_port >= 1, "ranks_per_port", f"must be at least 1, not {self.ranks_per_port}"),
            (self.latency_s >= 0, "latency_s", f"must not be negative, not {self.latency_s}"),
            *source_checks(("bandwidth_bytes_per_s", "ranks_per_port", "latency_s"), self.sources),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way in which a platform's library gathers and sums over ranks.

    ``ring`` visits all ranks one after the other, over all nodes. ``hierarchical`` works inside the nodes and between
    them one after the other; ``hops`` says in how many steps inside a node of n ranks: n - 1, half of that, the
    logarithm, or one. The way with the smallest limit that a message keeps is taken; without any, the fastest.
    """

    kind: Literal["ring", "hierarchical"]
    hops: Hops = "all"
    up_to_bytes: int | None = None
    source: str

    def __post_init__(self) -> None:
        require(
            (self.kind == "hierarchical" or self.hops == "all", "hops", "a ring takes all"),
            (self.up_to_bytes is None or self.up_to_bytes >= 1, "up_to_bytes", "must be at least 1"),
            (bool(self.source.strip()), "source", "say where this is documented"),
        )


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
        counts = ("num_nodes", "chips_per_node", "ranks_per_chip", "nodes_per_ultraserver")
        countable = all(getattr(self, name) >= 1 for name in counts)
        numbers = ["chips_per_node", "ranks_per_chip"]
        numbers += ["nodes_per_ultraserver"] if self.nodes_per_ultraserver != 1 else []
        price, day = self.price_usd_per_node_hour, self.price_date
        numbers += ["price_usd_per_node_hour"] if price is not None else []
        require(
            named(self.name),
            (bool(self.kernels.strip()), "kernels", "must name a Kernels table"),
            *((getattr(self, name) >= 1, name, f"must be at least 1, not {getattr(self, name)}") for name in counts),
            (self.lnc is None or self.lnc >= 1, "lnc", f"must be at least 1, or null, not {self.lnc}"),
            (price is None or price > 0, "price_usd_per_node_hour", "must be positive; null when it is not known"),
            (
                day is None or price is not None,
                "price_date",
                "is the date of a price: give price_usd_per_node_hour as well, or leave it out",
            ),
            (day is None or _is_date(day), "price_date", f"must be a day as YYYY-MM-DD, or null, not {day!r}"),
            *source_checks(numbers, self.sources),
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
        """Return the number of ranks of one chip, node, ultraserver or the cluster."""
        if domain == "cluster":
            return self.num_ranks
        if domain == "ultraserver":
            return self.ranks_per_node * self.nodes_per_ultraserver
        return self.ranks_per_node if domain == "node" else self.ranks_per_chip

    def joined_ranks(self, level: int) -> int:
        """Return the number of ranks of each unit (rank, chip, node ...) that the link of this level joins."""
        if level > 0:
            return self.domain_ranks(self.links[level - 1].domain)
        return 1 if self.links[0].domain == "chip" else self.ranks_per_chip

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
        of_size = (rule.placement for rule in self.placements if rule.tp == tp)
        return next(of_size, None) or Placement.linear(self.ranks_per_node)

    @property
    def repeat_ranks(self) -> int:
        """Ranks after which the hardware repeats: of an ultraserver where there is one, else of a node."""
        return min(self.num_ranks, self.ranks_per_node * self.nodes_per_ultraserver)

    def _known(self, rank: int) -> int:
        assert 0 <= rank < self.num_ranks, f"rank {rank} is not one of the {self.num_ranks} of {self.name}"
        return rank

    def _link_checks(self) -> list[Check]:
        order = [DOMAINS.index(link.domain) for link in self.links]
        if not order or order != sorted(set(order)):
            message = f"must be one link per domain, innermost first: {', '.join(DOMAINS)}"
            return [(False, "links", message)]
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

    def _port_check(self, level: int) -> Check:
        link, unit = self.links[level], self.joined_ranks(level)
        inner = self.ranks_per_node if link.domain == "cluster" else self.domain_ranks(link.domain)
        port = link.ranks_per_port
        return (
            inner % port == 0 and (unit % port == 0 or port % unit == 0),
            f"links[{level}].ranks_per_port",
            f"{port} ranks a port do not divide the {inner} ranks that {link.name} serves evenly",
        )

    def _placement_checks(self) -> list[Check]:
        sizes, total = [rule.tp for rule in self.placements], self.ranks_per_node
        checks: list[Check] = [(len(set(sizes)) == len(sizes), "placements", "two placements for the same tp")]
        for index, rule in enumerate(self.placements):
            where, placed = f"placements[{index}]", len(rule.placement.local_ranks)
            fault = f"places {placed} ranks, but a node has {total}"
            checks.append((placed == total, f"{where}.placement", fault))
            checks.append((total % rule.tp == 0, f"{where}.tp", f"{rule.tp} does not divide {total} ranks a node"))
        return checks


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
