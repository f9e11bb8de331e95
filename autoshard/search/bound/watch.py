"""The progress of a search, and its stop: a watching function is called between any two steps of any phase."""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProgress:
    """The progress of a search."""

    num_done: int = 0  # points that need no more work
    num_points: int = 0  # that are known so far
    best: float = math.inf
    bound: float = 0.0


Look = Callable[[], SearchProgress]  # how far the search is now, which takes a moment to count
Watch = Callable[[Look], str]  # returns the reason to stop, or nothing


class SearchStopped(Exception):
    """A watching function has stopped a search, which keeps what it has found. The text is the reason."""


def never_stop(look: Look) -> str:
    """Let a search go on to its end."""
    return ""


def go_on(watch: Watch, look: Look = SearchProgress) -> None:
    """Show a watching function the progress of a search, and raise SearchStopped if it stops the search."""
    reason = watch(look)
    if reason:
        raise SearchStopped(reason)
