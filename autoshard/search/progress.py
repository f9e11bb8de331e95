"""How far a search has come, and who may stop it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search has come."""

    num_done: int  # points that need no more work
    num_points: int
    best: float
    bound: float


Watch = Callable[[Progress], str]  # asked between any two steps: why to stop, or nothing
