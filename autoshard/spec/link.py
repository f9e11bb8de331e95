"""What ranks talk over, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autoshard.errors import require
from autoshard.spec.sources import source_checks

Domain = Literal["chip", "node", "ultraserver", "cluster"]
LinkKind = Literal["chip", "torus", "switch", "network", "memory"]
DOMAINS: tuple[Domain, ...] = ("chip", "node", "ultraserver", "cluster")  # innermost first


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
        """Refuse impossible numbers and numbers without a source."""
        require(
            (bool(self.name.strip()), "name", "must not be empty"),
            (self.bandwidth_bytes_per_s > 0, "bandwidth_bytes_per_s", "must be positive"),
            (self.ranks_per_port >= 1, "ranks_per_port", f"must be at least 1, not {self.ranks_per_port}"),
            (self.latency_s >= 0, "latency_s", f"must not be negative, not {self.latency_s}"),
            *source_checks(("bandwidth_bytes_per_s", "ranks_per_port", "latency_s"), self.sources),
        )
