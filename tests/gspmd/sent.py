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
    """One collective: its kind, the elements of a rank's buffer where that is largest, and the axes of its groups.

    >>> one = Sent.parse("all_gather 2640 /kv.rep")
    >>> one.over, str(one)
    (('kv', 'rep'), 'all_gather 2640 /kv.rep')
    """

    kind: str
    elements: int
    over: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Sent":
        """Read the text form."""
        kind, elements, over = text.split()
        return cls(kind=kind, elements=int(elements), over=tuple(over.removeprefix("/").split(".")))

    def __str__(self) -> str:
        """Print the text form."""
        return f"{self.kind} {self.elements} /{'.'.join(self.over)}"


def sent_bytes(found: Counter[Sent], mesh: Mapping[str, int], dtype_bytes: int) -> float:
    """Return the bytes that a rank sends: the cost model's bandwidth-optimal rings, all elements of one format.

    >>> half = Sent(kind="reduce_scatter", elements=800, over=("kv",))
    >>> sent_bytes(Counter({half: 2}), {"data": 2, "kv": 4}, 2)
    2400.0
    """
    total = 0.0
    for one, count in found.items():
        ring = Ring(size=math.prod(mesh[atom] for atom in one.over), bandwidth_bytes_per_s=1.0, latency_s=0.0)
        collective = Collective(kind=cast(CollectiveKind, one.kind), dim=None, atoms=one.over)
        total += count * float(ring.sent_bytes(collective, one.elements * dtype_bytes))
    return total


def without_weights(found: Counter[Sent]) -> Counter[Sent]:
    """Leave out the sums of weights' gradients: in all cases nothing else is summed over copies of the model."""
    return Counter({one: count for one, count in found.items() if one.kind != "all_reduce" or "data" not in one.over})
