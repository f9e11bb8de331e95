"""Clusters by name or from a user's own file: a node type from JSON or YAML, laid out as so many nodes."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from autoshard.errors import Fault, InputError, nearest, require
from autoshard.spec.cluster import (
    Algorithm,
    Chip,
    Cluster,
    Domain,
    EngineName,
    KvOrder,
    Link,
    LinkKind,
    named,
    source_checks,
)
from autoshard.spec.files import YAML_SUFFIXES, read_data
from autoshard.spec.kernels import kernels_names
from autoshard.spec.placement import PlacementRule
from autoshard.spec.record import decode

_CATALOGUE = Path(__file__).parent / "clusters"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLink:
    """A link as a node type states it: per chip, because the ranks of a chip depend on the LNC."""

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
        require(
            named(self.name),
            (
                inside == (self.chips_per_port is None),
                "chips_per_port",
                "must be left out in domain chip" if inside else "missing",
            ),
            (self.chips_per_port is None or self.chips_per_port >= 1, "chips_per_port", "must be at least 1"),
            (self.bandwidth_bytes_per_s > 0, "bandwidth_bytes_per_s", "must be positive"),
            (self.latency_s >= 0, "latency_s", "must not be negative"),
            *source_checks(numbers, self.sources),
        )

    def with_ranks(self, ranks_per_chip: int) -> Link:
        """Return the link as the ranks of chips divided in this way see it."""
        chips = self.chips_per_port
        ports = "one port a rank" if chips is None else f"{chips} chips a port"
        source = self.sources.get("chips_per_port") or self.sources.get("default") or "an equal share of the chip"
        return Link(
            name=self.name,
            kind=self.kind,
            domain=self.domain,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s / (ranks_per_chip if chips is None else 1),
            ranks_per_port=1 if chips is None else chips * ranks_per_chip,
            latency_s=self.latency_s,
            sources={**self.sources, "ranks_per_port": f"{ports}, {ranks_per_chip} ranks a chip; {source}"},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipDivision:
    """One way in which software may divide the chips of a node type into ranks."""

    ranks_per_chip: int
    lnc: int | None = None
    placements: tuple[PlacementRule, ...] = ()

    def __post_init__(self) -> None:
        require(
            (self.ranks_per_chip >= 1, "ranks_per_chip", f"must be at least 1, not {self.ranks_per_chip}"),
            (self.lnc is None or self.lnc >= 1, "lnc", f"must be at least 1, or null, not {self.lnc}"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """What a cluster file states: one kind of node, from which clusters of any size are made."""

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
    sources: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        choices = [variant.lnc for variant in self.variants]
        most = self.max_chips_per_node
        checks = (
            (bool(choices), "variants", "must hold at least one variant"),
            (
                len(set(choices)) == len(choices) and (None not in choices or len(choices) == 1),
                "variants",
                "several variants must each have an lnc of their own",
            ),
            (
                most is None or most >= self.chips_per_node,
                "max_chips_per_node",
                f"must be at least chips_per_node ({self.chips_per_node}), or null",
            ),
            (
                self.kernels in kernels_names() or not self.kernels.strip(),
                "kernels",
                f"there is no table {self.kernels!r}. {nearest(self.kernels, kernels_names())}",
            ),
            *source_checks(("max_chips_per_node",) if most is not None else (), self.sources),
        )
        faults = [Fault(where=where, message=message) for holds, where, message in checks if not holds]
        for index, variant in enumerate(self.variants):
            try:
                self.cluster(variant, num_nodes=1)
            except InputError as error:
                for fault in error.faults:  # point at where the file states what the cluster complains about
                    where = fault.where.replace("ranks_per_port", "chips_per_port")
                    varies = where.startswith(("placements", "ranks_per_chip", "lnc"))
                    where = f"variants[{index}].{where}" if varies else where
                    faults.append(Fault(where=where, message=fault.message))
        if faults:
            raise InputError(dict.fromkeys(faults))  # variants share most of their faults

    @property
    def max_nodes(self) -> float:
        """The most nodes that the links can join."""
        reach = {"cluster": math.inf, "ultraserver": self.nodes_per_ultraserver}
        return reach.get(self.links[-1].domain, 1)

    def cluster(self, variant: ChipDivision, num_nodes: int, chips_per_node: int | None = None) -> Cluster:
        """Return a cluster of so many nodes whose chips are divided as this variant says."""
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
            **{name: getattr(self, name) for name in same},
        )


@functools.cache
def cluster_names() -> tuple[str, ...]:
    """Return the names that ``load_cluster`` knows."""
    return _names(_CATALOGUE)


def load_node_type(name_or_path: str) -> NodeType:
    """Return the node type of this name, or the one that a JSON or YAML file describes.

    EC2 names may carry the prefix ``ml.``, as SageMaker writes them.
    """
    name = name_or_path.removeprefix("ml.") if name_or_path.count(".") > 1 else name_or_path
    if name in cluster_names():
        return _read_node_type(_CATALOGUE / f"{name}.json")
    path = Path(name_or_path)
    if path.suffix.lower() in (".json", *YAML_SUFFIXES) or path.is_file():
        return _read_node_type.__wrapped__(path)  # anew each time: a user may have edited it
    known = f"{nearest(name, cluster_names())} A path to a cluster file also works"
    raise InputError.of("cluster", f"{name_or_path!r} is not a cluster. {known}")


def load_cluster(name_or_path: str, num_nodes: int = 1, lnc: int | None = None, ranks: int | None = None) -> Cluster:
    """Return a cluster of so many nodes of the type that is named, or described in a file.

    ``lnc`` picks the logical NeuronCore configuration where there is one; ``ranks`` the size of ``local``.

    >>> cluster = load_cluster("ml.trn2.48xlarge", num_nodes=2, lnc=1)
    >>> cluster.name, cluster.num_ranks, cluster.rank_memory_bytes // 2**30
    ('trn2.48xlarge', 256, 12)
    """
    faults = [] if num_nodes >= 1 else [Fault(where="nodes", message=f"must be at least 1, not {num_nodes}")]
    try:
        node_type = load_node_type(name_or_path)
    except InputError as error:
        raise InputError([*error.faults, *faults]) from error
    faults += _misfits(node_type, num_nodes, lnc, ranks)
    if faults:
        raise InputError(faults)
    (variant, *_) = (each for each in node_type.variants if lnc in (None, each.lnc))
    return node_type.cluster(variant, num_nodes, None if ranks is None else ranks // variant.ranks_per_chip)


def other_lnc(name_or_path: str, cluster: Cluster) -> tuple[Cluster, ...]:
    """Return the same nodes under their other logical NeuronCore configurations.

    >>> [other.num_ranks for other in other_lnc("trn2.48xlarge", load_cluster("trn2.48xlarge"))]
    [128]
    """
    offered = [variant.lnc for variant in load_node_type(name_or_path).variants]
    others = [lnc for lnc in offered if lnc is not None and lnc != cluster.lnc]
    return tuple(load_cluster(name_or_path, cluster.num_nodes, lnc=lnc) for lnc in others)


def _misfits(node_type: NodeType, num_nodes: int, lnc: int | None, ranks: int | None) -> list[Fault]:
    """Return what this node type cannot do of what is asked."""
    name, offered = node_type.name, [variant.lnc for variant in node_type.variants]
    per_chip, most = node_type.variants[0].ranks_per_chip, node_type.max_chips_per_node
    faults: list[Fault] = []
    if num_nodes > node_type.max_nodes:
        message = f"{name} has no network that joins {num_nodes} nodes. Use at most {node_type.max_nodes}"
        faults.append(Fault(where="nodes", message=message))
    if lnc is not None and lnc not in offered:
        known = [f"{one}" for one in sorted(filter(None, offered))]
        message = f"{name} has no lnc {lnc}. Use {' or '.join(known)}"
        none = f"{name} has no logical NeuronCore configuration. Leave lnc out"
        faults.append(Fault(where="lnc", message=message if known else none))
    if ranks is not None and most is None:
        message = f"{name} always has {per_chip * node_type.chips_per_node} a node. Leave ranks out"
        faults.append(Fault(where="ranks", message=message))
    elif ranks is not None and not (per_chip <= ranks <= (most or 0) * per_chip and ranks % per_chip == 0):
        faults.append(Fault(where="ranks", message=f"{name} takes {per_chip} to {(most or 0) * per_chip}, not {ranks}"))
    return faults


@functools.cache
def _read_node_type(path: Path) -> NodeType:
    """Read a cluster file; its chip and links may be names of the catalogue, whose faults name their own files."""
    data, faults = read_data(path), list[Fault]()
    if isinstance(data, Mapping):
        whole = dict(cast(Mapping[str, object], data))
        if isinstance(whole.get("chip"), str):
            whole["chip"] = _part(Chip, "chips", cast(str, whole["chip"]), f"{path}: chip", faults)
        if isinstance(whole.get("links"), list):
            whole["links"] = [
                _part(NodeLink, "links", link, f"{path}: links[{index}]", faults) if isinstance(link, str) else link
                for index, link in enumerate(cast(list[object], whole["links"]))
            ]
        data = whole
    unread = {fault.where for fault in faults}
    try:
        node_type = decode(NodeType, data)
    except InputError as error:
        placed = [Fault(where=f"{path}: {fault.where}".rstrip(": "), message=fault.message) for fault in error.faults]
        raise InputError([*faults, *(fault for fault in placed if fault.where not in unread)]) from error
    return node_type


def _part(kind: type[Chip] | type[NodeLink], folder: str, name: str, where: str, faults: list[Fault]) -> object:
    """Return a chip or a link of the catalogue; None, and what is wrong with it, if there is none."""
    known = _names(_CATALOGUE / folder)
    if name not in known:
        faults.append(Fault(where=where, message=f"{name!r} is not in the catalogue. {nearest(name, known)}"))
        return None
    path = _CATALOGUE / folder / f"{name}.json"
    try:
        return decode(kind, read_data(path))
    except InputError as error:
        faults += [Fault(where=where, message=f"{path.name}: {fault}") for fault in error.faults]
        return None


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.json")))
