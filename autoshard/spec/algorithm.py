"""How a platform's library sends a collective, as data."""

from dataclasses import dataclass
from typing import Literal

from autoshard.errors import require

Hops = Literal["all", "half", "log", "one"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way to gather and to sum over ranks.

    ``ring`` visits all ranks one after the other, over all nodes. ``hierarchical`` works inside the nodes and between
    them one after the other; ``hops`` says in how many steps inside a node of n ranks: n - 1, half of that, the
    logarithm, or one. The way with the smallest limit that a message keeps is taken; without any, the fastest.
    """

    kind: Literal["ring", "hierarchical"]
    hops: Hops = "all"
    up_to_bytes: int | None = None
    source: str

    def __post_init__(self) -> None:
        """Refuse steps that a ring does not have, and an algorithm without a source."""
        require(
            (self.kind == "hierarchical" or self.hops == "all", "hops", "a ring takes all"),
            (self.up_to_bytes is None or self.up_to_bytes >= 1, "up_to_bytes", "must be at least 1"),
            (bool(self.source.strip()), "source", "say where this is documented"),
        )
