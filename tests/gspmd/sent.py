"""What ranks send to each other, in the same words for autoshard's programs and for XLA's."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from autoshard.cost.collective import Ring
from autoshard.layout.layout import Collective, CollectiveKind


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Sent:
    """One collective: its kind, the elements of a rank's buffer where that is largest, and the atoms of its groups."""

    kind: str
    elements: int
    over: tuple[str, ...]


def sent_bytes(found: Counter[Sent], mesh: Mapping[str, int], dtype_bytes: int) -> float:
    """Return the bytes that a rank sends: the cost model's bandwidth-optimal rings, all elements of one format.

    >>> half = Sent(kind="reduce_scatter", elements=800, over=("kv",))
    >>> sent_bytes(Counter({half: 2}), {"edp": 2, "kv": 4}, 2)
    2400.0
    """
    total = 0.0
    for one, count in found.items():
        ring = Ring(size=math.prod(mesh[atom] for atom in one.over), bandwidth_bytes_per_s=1.0, latency_s=0.0)
        collective = Collective(kind=cast(CollectiveKind, one.kind), dim=None, atoms=one.over)
        total += count * float(ring.sent_bytes(collective, one.elements * dtype_bytes))
    return total
