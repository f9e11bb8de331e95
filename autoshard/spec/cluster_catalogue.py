"""Load clusters by name or from a user's file, in JSON or YAML, that describes one node."""

import functools
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from autoshard.errors import Check, Fault, InputError, in_range, nearest, require
from autoshard.spec.cluster import (
    FASTEST,
    LOCAL,
    LONGEST_S,
    SLOWEST,
    Algorithm,
    Chip,
    Cluster,
    Domain,
    EngineName,
    KvOrder,
    Link,
    LinkKind,
    PlacementRule,
    source_checks,
)
from autoshard.spec.file_kinds import CLUSTER_FILE, refuse_other_kinds
from autoshard.spec.files import YAML_SUFFIXES, read_data
from autoshard.spec.kernels import kernels_names
from autoshard.spec.record import decode

# Of control groups, version 2 and version 1: docs.kernel.org/admin-guide/cgroup-v2.html, cgroup-v1/memory.html.
_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_LEAST, _LONGEST_HOP_S = 10**6, 0.1  # of all bytes and rates of a file, and of a latency
_CATALOGUE = Path(__file__).parent / "clusters"
ALIASES: Mapping[str, str] = {  # short name -> name; of several machines with a chip, the vendor's own
    "trn1": "trn1.32xlarge", "trn1n": "trn1n.32xlarge", "trn2": "trn2.48xlarge", "trn2u": "trn2u.48xlarge",
    "trn3": "trn3-gen2",
    "a100": "a100-80", "h100": "h100-80", "p4d": "p4d.24xlarge", "p4de": "p4de.24xlarge", "p5": "p5.48xlarge",
    "p5en": "p5en.48xlarge", "p6-b200": "p6-b200.48xlarge", "p6-b300": "p6-b300.48xlarge",
    "p6e-gb200": "p6e-gb200.36xlarge", "gb200": "gb200-nvl72", "gb300": "gb300-nvl72",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLink:
    """A link as a cluster file states it: in chips, because the number of ranks on a chip depends on the LNC."""

    name: str
    kind: LinkKind
    domain: Domain
    bandwidth_bytes_per_s: float  # per port, one direction; in domain chip: of the whole chip, for its ranks to share
    chips_per_port: int | None = None  # None in domain chip, where every rank has a port
    latency_s: float
    sources: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        inside = self.domain == "chip"
        numbers = ("bandwidth_bytes_per_s", "latency_s", *(() if inside else ("chips_per_port",)))
        fault = "must be left out in domain chip" if inside else "missing"
        require(
            (bool(self.name.strip()), "name", "must not be empty"),
            (inside == (self.chips_per_port is None), "chips_per_port", fault),
            *in_range(self, "chips_per_port", low=1),
            *in_range(self, "bandwidth_bytes_per_s", positive=True, low=SLOWEST, high=FASTEST),
            *in_range(self, "latency_s", high=LONGEST_S),
            *source_checks(numbers, self.sources),
        )

    def with_ranks(self, ranks_per_chip: int) -> Link:
        """Return the same link with its ports counted in ranks."""
        chips = self.chips_per_port
        ports = "one port a rank" if chips is None else f"{chips} chips a port"
        source = self.sources.get("chips_per_port") or self.sources.get("default") or "an equal share of the chip"
        return Link(
            **{name: getattr(self, name) for name in ("name", "kind", "domain", "latency_s")},
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s / (ranks_per_chip if chips is None else 1),
            ranks_per_port=1 if chips is None else chips * ranks_per_chip,
            sources={**self.sources, "ranks_per_port": f"{ports}, {ranks_per_chip} ranks a chip; {source}"},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipDivision:
    """One way to divide the chips of a node type into ranks."""

    ranks_per_chip: int
    lnc: int | None = None
    placements: tuple[PlacementRule, ...] = ()

    def __post_init__(self) -> None:
        require(*in_range(self, "ranks_per_chip", "lnc", low=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """The content of a cluster file: one type of node. A cluster is a number of such nodes."""

    name: str
    chip: Chip
    chips_per_node: int
    max_chips_per_node: int | None = None  # given where the user may choose the number of chips
    variants: tuple[ChipDivision, ...]  # the default first; more than one only where there is an LNC to choose
    links: tuple[NodeLink, ...]  # innermost domain first
    nodes_per_ultraserver: int = 1
    engine: EngineName
    kernels: str
    kv_order: KvOrder = "adjacent"
    algorithms: tuple[Algorithm, ...] = ()
    price_usd_per_node_hour: float | None = None
    price_date: str | None = None
    host_memory_bytes: int | None = None
    host_bandwidth_bytes_per_s: float | None = None
    sources: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        choices, most = [variant.lnc for variant in self.variants], self.max_chips_per_node
        distinct = len(set(choices)) == len(choices) and (None not in choices or len(choices) == 1)
        too_few = f"must be at least chips_per_node ({self.chips_per_node}), or null"
        unknown = f"there is no table {self.kernels!r}. {nearest(self.kernels, kernels_names(), 'kernels')}"
        checks = (
            (bool(choices), "variants", "must hold at least one variant"),
            (distinct, "variants", "several variants must each have an lnc of their own"),
            (self.name.isprintable(), "name", "must be one line of text"),
            (most is None or most >= self.chips_per_node, "max_chips_per_node", too_few),
            (self.kernels in kernels_names() or not self.kernels.strip(), "kernels", unknown),
            *source_checks(("max_chips_per_node",) if most is not None else (), self.sources),
        )
        faults = [Fault(where=where, message=message) for holds, where, message in checks if not holds]
        for index, variant in enumerate(self.variants):
            try:
                self.cluster(variant, num_nodes=1)
            except InputError as error:
                for fault in error.faults:  # name the key of the file that caused the fault
                    where = fault.where.replace("ranks_per_port", "chips_per_port")
                    varies = where.startswith(("placements", "ranks_per_chip", "lnc"))
                    where = f"variants[{index}].{where}" if varies else where
                    faults.append(Fault(where=where, message=fault.message))
        if faults:
            raise InputError(dict.fromkeys(faults))  # variants share most of their faults

    @property
    def max_nodes(self) -> float:
        """The largest number of nodes that the links connect."""
        reach = {"cluster": math.inf, "ultraserver": self.nodes_per_ultraserver}
        return reach.get(self.links[-1].domain, 1)

    def cluster(self, variant: ChipDivision, num_nodes: int, chips_per_node: int | None = None) -> Cluster:
        """Return a cluster of ``num_nodes`` nodes; the variant says how their chips are divided into ranks."""
        same = ("name", "chip", "engine", "kernels", "nodes_per_ultraserver", "kv_order", "algorithms", "sources")
        return Cluster(
            num_nodes=num_nodes,
            chips_per_node=self.chips_per_node if chips_per_node is None else chips_per_node,
            ranks_per_chip=variant.ranks_per_chip,
            lnc=variant.lnc,
            links=tuple(link.with_ranks(variant.ranks_per_chip) for link in self.links),
            placements=variant.placements,
            price_usd_per_node_hour=self.price_usd_per_node_hour,
            price_date=self.price_date,
            host_memory_bytes=self.host_memory_bytes,
            host_bandwidth_bytes_per_s=self.host_bandwidth_bytes_per_s,
            **{name: getattr(self, name) for name in same},
        )


@functools.cache
def cluster_names() -> tuple[str, ...]:
    """Return the names of the clusters that come with autoshard."""
    return _names(_CATALOGUE)


def load_node_type(name_or_path: str) -> NodeType:
    """Return a node type by name or alias, or from the path of a JSON or YAML file.

    EC2 names may carry the prefix ``ml.``, as SageMaker writes them.
    """
    name = name_or_path.removeprefix("ml.") if name_or_path.count(".") > 1 else name_or_path
    name = ALIASES.get(name, name)
    if name in cluster_names():
        return _read_node_type(_CATALOGUE / f"{name}.json")
    path = Path(name_or_path)
    if path.suffix.lower() in (".json", *YAML_SUFFIXES) or path.is_file():
        return _read_node_type.__wrapped__(path)  # anew each time: a user may have edited it
    advice = f"{nearest(name, (*cluster_names(), *ALIASES), 'clusters')} A path to a cluster file also works"
    raise InputError.of("cluster", f"{name_or_path!r} is not a cluster. {advice}")


def load_cluster(name_or_path: str, num_nodes: int = 1, lnc: int | None = None, ranks: int | None = None) -> Cluster:
    """Return a cluster of ``num_nodes`` nodes, by the name of their type or the path of a cluster file.

    ``lnc`` selects the logical NeuronCore configuration on platforms that have one, ``ranks`` the size of ``local``,
    whose memory is that of this machine.

    >>> cluster = load_cluster("ml.trn2.48xlarge", num_nodes=2, lnc=1)
    >>> cluster.name, cluster.num_ranks, cluster.rank_memory_bytes // 2**30
    ('trn2.48xlarge', 256, 12)
    """
    few = f"must be at least 1, not {num_nodes}"
    try:
        node_type = load_node_type(name_or_path)
    except InputError as error:
        raise InputError([*error.faults, *([Fault(where="nodes", message=few)] if num_nodes < 1 else [])]) from error
    name, lncs = node_type.name, [variant.lnc for variant in node_type.variants]
    per_chip, most = node_type.variants[0].ranks_per_chip, node_type.max_chips_per_node
    lnc_text = " or ".join(str(choice) for choice in sorted(filter(None, lncs)))
    no_lnc = f"no lnc {lnc}. Use {lnc_text}" if lnc_text else "no logical NeuronCore configuration. Leave lnc out"
    fixed = f"always has {per_chip * node_type.chips_per_node} a node. Leave ranks out"
    sizes = range(per_chip, per_chip * (most or 0) + 1, per_chip)
    odd_ranks = f"takes {sizes[0]} to {sizes[-1]}, not {ranks}" if sizes else fixed
    far = f"{name} has no network that connects {num_nodes} nodes. Use at most {node_type.max_nodes}"
    require(
        (num_nodes >= 1, "nodes", few),
        (num_nodes <= node_type.max_nodes, "nodes", far),
        (lnc is None or lnc in lncs, "lnc", f"{name} has {no_lnc}"),
        (ranks is None or ranks in sizes, "ranks", f"{name} {odd_ranks}"),
    )
    (variant, *_) = (candidate for candidate in node_type.variants if lnc in (None, candidate.lnc))
    cluster = node_type.cluster(variant, num_nodes, None if ranks is None else ranks // variant.ranks_per_chip)
    return cluster if name_or_path != LOCAL else _with_memory(cluster, machine_memory_bytes())


def other_lnc(name_or_path: str, cluster: Cluster) -> tuple[Cluster, ...]:
    """Return the same nodes, at the same price, with each of their other logical NeuronCore configurations.

    >>> [other.num_ranks for other in other_lnc("trn2.48xlarge", load_cluster("trn2.48xlarge"))]
    [128]
    """
    offered = [variant.lnc for variant in load_node_type(name_or_path).variants]
    other_lncs = [lnc for lnc in offered if lnc is not None and lnc != cluster.lnc]
    prices = {key: getattr(cluster, key) for key in ("price_usd_per_node_hour", "price_date", "sources")}
    return tuple(replace(load_cluster(name_or_path, cluster.num_nodes, lnc=lnc), **prices) for lnc in other_lncs)


def machine_memory_bytes() -> int:
    """Return the memory of this machine, or the limit of its control group if that is lower."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # ValueError: max, so no limit
            sizes.append(int(path.read_text("utf-8")))
    return min(sizes)


def _with_memory(cluster: Cluster, memory_bytes: int) -> Cluster:
    """Return the cluster with ranks that share ``memory_bytes``."""
    read = "read: the memory of this machine, or of its control group, in equal shares of its ranks"
    sources = {**cluster.chip.sources, "memory_bytes": read}
    chip = replace(cluster.chip, memory_bytes=memory_bytes // cluster.chips_per_node, sources=sources)
    return replace(cluster, chip=chip)


@functools.cache
def _read_node_type(path: Path) -> NodeType:
    """Read a cluster file."""
    faults = list[Fault]()
    data = _file_data(path, faults)
    try:
        node_type = decode(NodeType, data)
        require(*_unit_checks(node_type))
    except InputError as error:
        unknown = {fault.where for fault in faults}
        placed = [replace(fault, where=_as_written(fault.where, path, data)) for fault in error.faults]
        placed = InputError(placed).under(path).faults
        raise InputError([*faults, *(fault for fault in placed if fault.where not in unknown)]) from error
    return node_type


def _unit_checks(node_type: NodeType) -> Iterator[Check]:
    """Check that numbers of a file are in the units of their names: people think of memory in gigabytes."""
    chip, links = node_type.chip, enumerate(node_type.links)
    sizes = {"chip.memory_bytes": chip.memory_bytes, "host_memory_bytes": node_type.host_memory_bytes}
    flows = {
        "chip.memory_bandwidth_bytes_per_s": chip.memory_bandwidth_bytes_per_s,
        "host_bandwidth_bytes_per_s": node_type.host_bandwidth_bytes_per_s,
        **{f"links[{at}].bandwidth_bytes_per_s": link.bandwidth_bytes_per_s for at, link in links},
    }
    rates = {f"chip.matrix_flops_per_s.{name}": rate for name, rate in chip.matrix_flops_per_s.items()}
    rates |= {"chip.vector_flops_per_s": chip.vector_flops_per_s}
    for numbers, unit in ((sizes, "bytes"), (flows, "bytes a second"), (rates, "operations a second")):
        for where, number in numbers.items():
            if number is not None:
                scaled = f"{number:g}e9 is that many billions, {number:g}e12 trillions"
                yield number >= _LEAST, where, f"{number:g} {unit} is too little. {scaled}"
    for at, link in enumerate(node_type.links):
        message = f"{link.latency_s:g} seconds is too long for one hop. {link.latency_s:g}e-6 is that many microseconds"
        yield link.latency_s <= _LONGEST_HOP_S, f"links[{at}].latency_s", message


def _as_written(where: str, path: Path, data: object) -> str:
    """Return the place of a fault as a file states it: links over those of a base by their domain."""
    stated, match = read_data(path), re.fullmatch(r"links\[(\d+)\](.*)", where)
    by_domain = isinstance(stated, dict) and isinstance(cast(dict[str, Any], stated).get("links"), dict)
    return f"links.{cast(Any, data)['links'][int(match[1])]['domain']}{match[2]}" if match and by_domain else where


def _file_data(path: Path, faults: list[Fault], over: tuple[Path, ...] = ()) -> object:
    """Return the data of a cluster file; chip and links may be names of the catalogue, ``base`` another cluster."""
    data = read_data(path)
    refuse_other_kinds(path, data, CLUSTER_FILE)

    def found(part: object, folder: str, where: str) -> object:
        known_parts = _names(_CATALOGUE / folder)
        if not isinstance(part, str):
            return part
        if part in known_parts:
            return read_data(_CATALOGUE / folder / f"{part}.json")
        message = f"{part!r} is not in the catalogue. {nearest(part, known_parts)}"
        faults.append(Fault(where=f"{path}: {where}", message=message))
        return None

    if not isinstance(data, dict):
        return data
    whole = cast(dict[str, Any], data)
    if "chip" in whole:
        whole["chip"] = found(whole["chip"], "chips", "chip")
    if isinstance(links := whole.get("links"), list):
        whole["links"] = [found(link, "links", f"links[{at}]") for at, link in enumerate(cast(list[Any], links))]
    if "base" not in whole:
        return whole
    base, source = whole.pop("base"), whole.pop("source", None)
    name = ALIASES.get(str(base), str(base))
    beside = _CATALOGUE / f"{name}.json" if name in cluster_names() else path.parent / name
    near = nearest(name, (*cluster_names(), *ALIASES), "clusters")
    unknown = f"{base!r} is not a cluster. {near} A path from this file also works"
    origin = "say where these numbers are from, for example source: our contract of 2026"
    require(
        (beside.is_file(), f"{path}: base", unknown),
        (beside.resolve() not in over, f"{path}: base", "the file is its own base"),
        (isinstance(source, str) and bool(source.strip()), f"{path}: source", origin),
    )
    if "price_usd_per_node_hour" in whole:
        whole.setdefault("price_date", None)
    below = _file_data(beside, faults, (*over, path.resolve()))
    decode(NodeType, below, beside)  # what is wrong below is not a fault of this file
    return _overlaid(cast(dict[str, Any], below), whole, source, f"{path}: ")


def _overlaid(base: Mapping[str, Any], overlay: Mapping[str, Any], source: str, where: str) -> dict[str, Any]:
    """Return data with some of its values replaced, and ``source`` as the source of each."""
    merged, sources = dict(base), dict[str, Any](base.get("sources") or {})
    for key, value in overlay.items():
        before: Any = base.get(key)
        if key == "links" and isinstance(value, dict):
            merged[key] = _overlaid_links(before, cast(dict[str, Any], value), source, f"{where}{key}")
        elif key == "chip" and isinstance(value, dict) and isinstance(before, dict):
            merged[key] = _overlaid(cast(Any, before), cast(Any, value), source, f"{where}{key}.")
        elif isinstance(value, dict) and isinstance(before, dict) and key != "sources":
            merged[key] = {**before, **value}
            sources |= {f"{key}.{name}": source for name in cast(Any, value)}
        elif key != "sources":
            merged[key] = value
            sources[key] = source
    stated: Any = overlay.get("sources", {})
    return {**merged, "sources": {**sources, **stated} if isinstance(stated, dict) else stated}


def _overlaid_links(base: list[dict[str, Any]], overlay: Mapping[str, Any], source: str, where: str) -> list[Any]:
    """Return links in which an overlay replaces the values of some domains."""
    links: dict[str, Any] = {link["domain"]: link for link in base}
    require(
        *((domain in links, f"{where}.{domain}", f"the base has no link of this domain. {nearest(domain, [*links])}")
          for domain in overlay),
        *((isinstance(value, dict), f"{where}.{domain}", "expected an object") for domain, value in overlay.items()),
    )  # fmt: skip
    changed = {
        domain: _overlaid(links[domain], value, source, f"{where}.{domain}.") for domain, value in overlay.items()
    }
    return [changed.get(domain, link) for domain, link in links.items()]


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.json")))
