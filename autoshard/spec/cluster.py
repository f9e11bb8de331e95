"""Hardware as data: chips, links, clusters, and the order of ranks in a node. Every number has a source.

A rank is one logical NeuronCore or one GPU. Ranks are numbered node by node, chip by chip.
"""

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Literal

from autoshard.errors import Check, InputError, in_range, nearest, require
from autoshard.spec.record import option
from autoshard.spec.workload import DTYPE_BYTES

Domain = Literal["chip", "node", "ultraserver", "cluster"]
LinkKind = Literal["chip", "torus", "switch", "network", "memory"]
DOMAINS: tuple[Domain, ...] = ("chip", "node", "ultraserver", "cluster")  # innermost first
Hops = Literal["all", "half", "log", "one"]
EngineName = Literal["nxd", "torch"]
KvOrder = Literal["strided", "adjacent"]
LOCAL = "local"  # the cluster that is the processors of this machine: its rates are set here, not by a data sheet
# Bytes or operations per second; seconds of a message; bytes. Generous on purpose: the fastest is a thousand exascale
# machines. Beyond them are typing errors, under which a step would take no time, or for ever.
SLOWEST, FASTEST, LONGEST_S, LARGEST_BYTES = 1.0, 1e21, 3600.0, 2**60
MAX_TILE, MAX_PRICE = 2**16, 1e9
# A convention, of a node's host memory: what is left is the system's, and that of loaders and checkpoints on their way.
HOST_SHARE = 0.75
MAX_RANKS_PER_NODE = 4096  # keeps a mistyped placement from filling the memory
_PLATFORMS: Mapping[str, str] = {"trainium1": "trn1", "trainium2": "trn2", "trainium3": "trn3"}  # by chip
_RUN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")


def source_checks(numbers: Iterable[str], sources: Mapping[str, str]) -> list[Check]:
    """Return the checks for ``errors.require`` that each number has a source.

    The source of ``matrix_flops_per_s.bf16`` has that key, the key of the whole field ``matrix_flops_per_s``, or
    ``default``, which covers all numbers.

    >>> source_checks(["latency_s"], {"latency_s": "data sheet"})
    [(True, 'sources', "no source for latency_s: add the key 'latency_s' or 'default'")]
    """
    checks: list[Check] = []
    for number in numbers:
        stated = any(sources.get(key, "").strip() for key in (number, number.partition(".")[0], "default"))
        checks.append((stated, "sources", f"no source for {number}: add the key {number!r} or 'default'"))
    return checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One accelerator package, with a source for every number."""

    name: str
    memory_bytes: int  # that its processes can get, what a runtime keeps for itself included
    memory_bandwidth_bytes_per_s: float
    matrix_flops_per_s: Mapping[str, float] = field(hash=False)  # dense peak of the whole chip, by dtype
    vector_flops_per_s: float  # elementwise operations
    matrix_tile: int = 1  # rows and columns that the matrix unit works on at once, full or not
    sources: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        rate_names = ("memory_bandwidth_bytes_per_s", "vector_flops_per_s")
        numbers = ["memory_bytes", *rate_names]
        stated = [*numbers, *(["matrix_tile"] if self.matrix_tile > 1 else [])]
        rates = {f"matrix_flops_per_s.{dtype}": rate for dtype, rate in self.matrix_flops_per_s.items()}
        dtypes, unknown = list(DTYPE_BYTES), [dtype for dtype in self.matrix_flops_per_s if dtype not in DTYPE_BYTES]
        wrong = {name: rate for name, rate in rates.items() if not SLOWEST <= rate <= FASTEST}
        require(
            (bool(self.name.strip()), "name", "must not be empty"),
            (bool(rates), "matrix_flops_per_s", "must give the rate of at least one dtype"),
            *(
                (False, f"matrix_flops_per_s.{unknown_dtype}", f"not a dtype. {nearest(unknown_dtype, dtypes)}")
                for unknown_dtype in unknown
            ),
            *in_range(self, "memory_bytes", positive=True, high=LARGEST_BYTES),
            *in_range(self, *rate_names, positive=True, low=SLOWEST, high=FASTEST),
            *in_range(self, "matrix_tile", positive=True, high=MAX_TILE),
            *((False, name, f"must lie in [{SLOWEST}, {FASTEST}], not {rate}") for name, rate in wrong.items()),
            *source_checks([*stated, *rates], self.sources),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection between the ranks of one domain; domains are nested (chip, node, ultraserver, cluster)."""

    name: str
    kind: LinkKind
    domain: Domain
    bandwidth_bytes_per_s: float  # per port, one direction
    ranks_per_port: int
    latency_s: float  # of one hop
    sources: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        require(
            (bool(self.name.strip()), "name", "must not be empty"),
            *in_range(self, "bandwidth_bytes_per_s", positive=True, low=SLOWEST, high=FASTEST),
            *in_range(self, "ranks_per_port", low=1),
            *in_range(self, "latency_s", high=LONGEST_S),
            *source_checks(("bandwidth_bytes_per_s", "ranks_per_port", "latency_s"), self.sources),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A permutation of the ranks of one node, the same on every node, e.g. ``0-15/48-63/16-47``.

    Position ``i`` of the mesh inside a node is rank ``local_ranks[i]`` of that node. In text, ``a-b`` runs
    from a to b, up or down, ``a-b:s`` in steps of s, and ``/`` separates runs.

    >>> Placement.parse("0-4:2/1-5:2").local_ranks
    (0, 2, 4, 1, 3, 5)
    >>> str(Placement(local_ranks=(0, 1, 6, 7, 2, 3, 4, 5)))
    '0-1/6-7/2-5'
    """

    local_ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        size = len(self.local_ranks)
        twice = f"not a permutation: the {size} ranks listed must be 0 to {size - 1}, each once"
        require(
            (size > 0, "", "a placement needs at least one rank"),
            (size <= MAX_RANKS_PER_NODE, "", f"a node has at most {MAX_RANKS_PER_NODE} ranks, not {size}"),
            (sorted(self.local_ranks) == list(range(size)), "", twice),
        )

    @classmethod
    def linear(cls, ranks_per_node: int) -> "Placement":
        """Return the placement in which position and rank agree."""
        return cls(local_ranks=tuple(range(ranks_per_node)))

    @classmethod
    def parse(cls, text: str) -> "Placement":
        """Read the text form."""
        ranks: list[int] = []
        for run in text.split("/"):
            match = _RUN.fullmatch(run)
            if match is None:
                raise InputError.of("", f"{run!r} is not a run of ranks. Write 5, 0-15 or 0-24:8, and / between runs")
            first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
            if step == 0 or abs(last - first) % step:
                raise InputError.of("", f"steps of {step} from {first} never reach {last} in {run!r}")
            expanded = range(first, last + 1, step) if last >= first else range(first, last - 1, -step)
            if len(ranks) + len(expanded) > MAX_RANKS_PER_NODE:
                raise InputError.of("", f"a node has at most {MAX_RANKS_PER_NODE} ranks; this placement has more")
            ranks.extend(expanded)
        return cls(local_ranks=tuple(ranks))

    def __str__(self) -> str:
        """Return the canonical text: from left to right, each run as long as possible."""
        return _runs(self.local_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRule:
    """A placement that a platform uses whenever the tensor-parallel axis has this size."""

    name: str
    tp: int
    placement: Placement
    source: str

    def __post_init__(self) -> None:
        require(
            (bool(self.name.strip()), "name", "must not be empty"),
            *in_range(self, "tp", low=1),
            (bool(self.source.strip()), "source", "must say where this placement comes from"),
        )


@functools.lru_cache(maxsize=256)
def _runs(ranks: tuple[int, ...]) -> str:
    runs, start = list[str](), 0
    while start < len(ranks):
        end = start
        step = ranks[start + 1] - ranks[start] if start + 1 < len(ranks) else 0
        while step and end + 1 < len(ranks) and ranks[end + 1] - ranks[end] == step:
            end += 1
        if end == start + 1 and abs(step) > 1:  # two ranks far apart are shorter as two runs
            end = start
        run = f"{ranks[start]}-{ranks[end]}" if end > start else str(ranks[start])
        runs.append(f"{run}:{abs(step)}" if end > start and abs(step) > 1 else run)
        start = end + 1
    return "/".join(runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One algorithm of a platform's library for collectives.

    ``ring`` goes through all ranks of all nodes, one after the other. ``hierarchical`` works first inside the nodes and
    then between them; ``hops`` says how many steps it takes inside a node of n ranks: n - 1 (``all``), half of that,
    the logarithm of n, or one. ``up_to_bytes`` limits the messages that an algorithm is for. A message uses the
    algorithm with the smallest limit that is not below its size; where none has such a limit, the fastest.
    """

    kind: Literal["ring", "hierarchical"]
    hops: Hops = "all"
    up_to_bytes: int | None = None
    source: str

    def __post_init__(self) -> None:
        require(
            (self.kind == "hierarchical" or self.hops == "all", "hops", "a ring takes n - 1 steps; leave hops out"),
            *in_range(self, "up_to_bytes", low=1),
            (bool(self.source.strip()), "source", "say where this is documented"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A number of equal nodes, and the links between their ranks."""

    name: str
    chip: Chip
    num_nodes: int
    chips_per_node: int
    ranks_per_chip: int
    lnc: int | None  # logical NeuronCore configuration (trn2, trn3), else None
    links: tuple[Link, ...]  # innermost domain first
    engine: EngineName
    kernels: str  # default Kernels table: nxd, te, neuron_native, torch_engine
    nodes_per_ultraserver: int = 1
    kv_order: KvOrder = "adjacent"  # of the atoms of tp on the ranks: strided is (rep, kv), adjacent is (kv, rep)
    placements: tuple[PlacementRule, ...] = ()
    algorithms: tuple[Algorithm, ...] = ()  # of collectives; a ring where none is named
    price_usd_per_node_hour: float | None = None  # on demand
    price_date: str | None = None  # of the price, YYYY-MM-DD; None where its source carries none
    host_memory_bytes: int | None = option(None)  # of a node, beside the memory of its chips
    host_bandwidth_bytes_per_s: float | None = option(None)  # of a chip to host memory, one direction, all at once
    sources: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        counts = ("num_nodes", "chips_per_node", "ranks_per_chip", "nodes_per_ultraserver")
        price, day = self.price_usd_per_node_hour, self.price_date
        options = ("price_usd_per_node_hour", "host_memory_bytes", "host_bandwidth_bytes_per_s")
        stated = {name: getattr(self, name) is not None for name in options}
        stated["nodes_per_ultraserver"] = self.nodes_per_ultraserver != 1
        both = "goes with host_bandwidth_bytes_per_s: give both, or leave both out"
        numbers = ["chips_per_node", "ranks_per_chip", *(name for name in stated if stated[name])]
        alone = "is the date of a price: give price_usd_per_node_hour as well, or leave it out"
        require(
            (bool(self.name.strip()), "name", "must not be empty"),
            (bool(self.kernels.strip()), "kernels", "must name a Kernels table"),
            *in_range(self, *counts, "lnc", low=1),
            *in_range(self, "price_usd_per_node_hour", positive=True, high=MAX_PRICE),
            *in_range(self, "host_memory_bytes", positive=True, high=LARGEST_BYTES),
            *in_range(self, "host_bandwidth_bytes_per_s", positive=True, low=SLOWEST, high=FASTEST),
            (stated["host_memory_bytes"] == stated["host_bandwidth_bytes_per_s"], "host_memory_bytes", both),
            (day is None or price is not None, "price_date", alone),
            (day is None or _is_date(day), "price_date", f"must be a day as YYYY-MM-DD, or null, not {day!r}"),
            *source_checks(numbers, self.sources),
            *(self._layout_checks() if min(getattr(self, name) for name in counts) >= 1 else ()),
        )

    def with_network(self, bytes_per_s: float) -> "Cluster":
        """Return the cluster with another network, which gives a node this bandwidth, all of its ports together."""
        per_rank = bytes_per_s / (self.chips_per_node * self.ranks_per_chip)
        links = (
            replace(link, bandwidth_bytes_per_s=per_rank * link.ranks_per_port) if link.domain == "cluster" else link
            for link in self.links
        )
        return replace(self, links=tuple(links))

    @property
    def platform(self) -> str:
        """The Neuron platform; "" elsewhere."""
        return _PLATFORMS.get(self.chip.name, "")

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
    def rank_host_bytes(self) -> float:
        """Host memory that a plan may fill for one rank: its equal share of a node's; infinite where none is stated."""
        return HOST_SHARE * self.host_memory_bytes / self.ranks_per_node if self.host_memory_bytes else math.inf

    def with_local_ranks(self, count: int) -> "Cluster":
        """Return the cluster of this machine with ``count`` ranks, which share its memory."""
        chips = count // self.ranks_per_chip
        memory = self.chip.memory_bytes * self.chips_per_node // max(1, chips)
        return replace(self, chips_per_node=chips, chip=replace(self.chip, memory_bytes=memory))

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
            raise InputError.of(
                "precision", f"{self.chip.name} has no {dtype} matrix rate. {nearest(dtype, list(rates))}"
            )
        return rates[dtype] / self.ranks_per_chip

    def domain_ranks(self, domain: Domain) -> int:
        """Return the number of ranks of one chip, node, ultraserver or the cluster."""
        if domain == "cluster":
            return self.num_ranks
        if domain == "ultraserver":
            return self.ranks_per_node * self.nodes_together
        return self.ranks_per_node if domain == "node" else self.ranks_per_chip

    @property
    def nodes_together(self) -> int:
        """Nodes of a job in an ultraserver: equally many in each, if at least half of it; of 64 in racks of 18: 16."""
        most = self.nodes_per_ultraserver
        shares = range(most, max(1, (most - 1) // 2), -1)
        return next((share for share in shares if self.num_nodes % share == 0), most)

    def joined_ranks(self, level: int) -> int:
        """Return the number of ranks in a unit that the link of this level connects: a rank, a chip, a node ..."""
        if level > 0:
            return self.domain_ranks(self.links[level - 1].domain)
        return 1 if self.links[0].domain == "chip" else self.ranks_per_chip

    def link_of(self, ranks: Sequence[int]) -> Link:
        """Return the link of the smallest domain that all of these ranks are in."""
        first, last = min(ranks), max(ranks)
        for link in self.links:
            size = self.domain_ranks(link.domain)
            if first // size == last // size:
                return link
        raise AssertionError("the links of a cluster join all of its ranks")

    def inside(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks of a group that are on the same node as its first rank."""
        size = self.ranks_per_node
        return [rank for rank in ranks if rank // size == ranks[0] // size]

    def default_placement(self, tp: int) -> Placement:
        """Return the placement inside a node that this platform uses for a tensor-parallel size."""
        of_size = (rule.placement for rule in self.placements if rule.tp == tp)
        return next(of_size, None) or Placement.linear(self.ranks_per_node)

    @property
    def repeat_ranks(self) -> int:
        """Ranks of the unit that the cluster repeats: an ultraserver if the platform has them, else a node."""
        return min(self.num_ranks, self.ranks_per_node * self.nodes_together)

    def _layout_checks(self) -> Iterator[Check]:
        """Return the checks that links connect all ranks, ports serve whole units, and placements fit a node."""
        total = self.ranks_per_node
        order = [DOMAINS.index(link.domain) for link in self.links]
        if not order or order != sorted(set(order)):
            remedy = "" if order else ". Add one of domain node; a node of a single chip sends nothing over it"
            yield False, "links", f"must be one link per domain, innermost first: {', '.join(DOMAINS)}{remedy}"
            return
        joined = self.domain_ranks(self.links[-1].domain)
        unlinked = f"no link joins the {self.chips_per_node} chips of a node: add one of domain node"
        yield joined >= total, "links", unlinked
        few = f"no link joins {self.num_nodes} nodes: use fewer, or add a link of domain cluster"
        yield joined < total or joined >= self.num_ranks, "num_nodes", few
        has_ultraserver = DOMAINS.index("ultraserver") in order
        both = "must be above 1 when, and only when, there is a link of domain ultraserver"
        yield has_ultraserver == (self.nodes_per_ultraserver > 1), "nodes_per_ultraserver", both
        for level, link in enumerate(self.links):
            unit, port = self.joined_ranks(level), link.ranks_per_port
            inner = total if link.domain == "cluster" else self.domain_ranks(link.domain)
            even = inner % port == 0 and (unit % port == 0 or port % unit == 0)
            uneven = f"the {inner} ranks that {link.name} connects cannot share ports of {port} ranks evenly"
            yield even, f"links[{level}].ranks_per_port", uneven
        yield len({rule.tp for rule in self.placements}) == len(self.placements), "placements", "two for the same tp"
        for index, rule in enumerate(self.placements):
            where, placed = f"placements[{index}]", len(rule.placement.local_ranks)
            yield placed == total, f"{where}.placement", f"places {placed} ranks, but a node has {total}"
            yield total % rule.tp == 0, f"{where}.tp", f"{rule.tp} does not divide {total} ranks a node"


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
