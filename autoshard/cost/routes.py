"""Ways for a collective beside the flat ring: inside the nodes of a group, and between them, one after the other."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.cost.calibration import Calibration
from autoshard.spec.algorithm import Algorithm, Hops
from autoshard.spec.cluster import Cluster
from autoshard.spec.link import Domain, Link

_INSIDE: tuple[Domain, ...] = ("chip", "node")
Number = Any  # a number, or a numpy column of one number per candidate
_STEPS: Mapping[Hops, Callable[[int], float]] = {
    "all": lambda ranks: ranks - 1,
    "half": lambda ranks: (ranks - 1) / 2,
    "log": lambda ranks: math.ceil(math.log2(ranks)),
    "one": lambda ranks: min(1, ranks - 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What gathering or scattering over a group costs on one way; summing everywhere does both."""

    seconds_per_byte: Number  # of the whole message
    latency_s: Number
    up_to_bytes: int | None

    def time_s(self, message_bytes: Number) -> Number:
        """Return the time of one round."""
        return self.seconds_per_byte * message_bytes + self.latency_s

    def taken_s(self, own_s: Number, other_s: Number, message_bytes: Number) -> Number:
        """Choose between this way and another: up to its limit this one is taken, without a limit the faster one."""
        if self.up_to_bytes is None:
            return np.minimum(own_s, other_s)
        fits = message_bytes <= self.up_to_bytes
        return own_s * fits + other_s * (1 - fits)


def efficiency(link: Link, calibration: Calibration) -> float:
    """Return which share of its bandwidth a link reaches."""
    return calibration.far_link_efficiency if link.domain == "cluster" else calibration.near_link_efficiency


def group_routes(cluster: Cluster, group: Sequence[int], speeds: Sequence[float]) -> tuple[Route, ...]:
    """Return the hierarchical ways of a group; ``speeds`` is what it gets of every link of the cluster."""
    ways = [way for way in cluster.algorithms if way.kind == "hierarchical"]
    if not ways:
        return ()
    inner = cluster.inside(group)
    num_nodes = len(group) // len(inner)
    reach = {link.domain: speed for link, speed in zip(cluster.links, speeds, strict=True)}
    per_byte = _per_byte(len(inner), [speed for domain, speed in reach.items() if domain in _INSIDE])
    per_byte += _per_byte(num_nodes, [speed for domain, speed in reach.items() if domain not in _INSIDE])
    near_s = cluster.link_of(inner).latency_s if len(inner) > 1 else 0.0
    far_s = (num_nodes - 1) * cluster.link_of(group).latency_s if num_nodes > 1 else 0.0
    return tuple(
        Route(
            seconds_per_byte=per_byte,
            latency_s=_STEPS[way.hops](len(inner)) * near_s + far_s,
            up_to_bytes=way.up_to_bytes,
        )
        for way in sorted(ways, key=_limit, reverse=True)
    )


def _limit(way: Algorithm) -> float:
    return math.inf if way.up_to_bytes is None else way.up_to_bytes


def _per_byte(count: int, speeds: Sequence[float]) -> float:
    """Return the time of a byte of the whole message where so many ranks or nodes each hold an equal part of it."""
    return (count - 1) / count / min(speeds) if count > 1 else 0.0
