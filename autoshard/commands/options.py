"""Options of the search, and numbers of tokens."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from autoshard.command_line import Counts
from autoshard.errors import require
from autoshard.search.api import request_of
from autoshard.search.request import Request
from autoshard.search.stage_filling import EVERYTHING, Effort
from autoshard.spec.recipe import QuestionOptions

_LONGEST_S = 10**6
_MOST_TOKENS = 1e18  # ten thousand times what any model has read


def token_total(text: str) -> float:
    """Read a number of tokens.

    >>> token_total("2T"), token_total("1.5e12"), token_total("300b")
    (2000000000000.0, 1500000000000.0, 300000000000.0)
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?(?:e[0-9]{1,2})?)([kmbt]?)", text.strip().lower())
    count = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2]] if match else 0.0
    message = f"{text!r} is not a number of tokens. Write it like 2T, 300B or 1.5e12"
    require((0 < count < _MOST_TOKENS, "--tokens", message))
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What the search minimises, and when it ends.

    Args:
        objective: What is minimised. On one cluster dollars are proportional to time.
        prove: Search until the plan is proven to be the best, instead of within 0.5% of the best.
        exhaustive: Solve every layout, without bounds. Slow; it serves to check that the bounds are right.
        time_limit: Stop after so many seconds with the best plan found, and print how far it may be from the best.
    """

    objective: Literal["time", "dollars", "memory"] = "time"
    prove: bool = False
    exhaustive: bool = False
    time_limit: int | None = None

    def __post_init__(self) -> None:
        """Refuse a time limit that is too long or not positive."""
        limit = self.time_limit
        require((limit is None or 1 <= limit <= _LONGEST_S, "time_limit", f"must be 1 to {_LONGEST_S}, not {limit}"))

    def requests(self, question: QuestionOptions, nodes: Counts) -> list[Request]:
        """Return one request per number of nodes, with model, cluster and calibration looked up."""
        message = "missing. Type a name of autoshard list models, or the path of a config.json"
        require((question.model is not None, "--model", message))
        return [self.applied(request_of(question, number)) for number in nodes or (1,)]

    def applied(self, request: Request) -> Request:
        """Return a request with these options."""
        cluster = request.cluster
        message = (
            f"no price of {cluster.name} is known. Put price_usd_per_node_hour into a cluster file, or minimise time: "
            "on one cluster the fastest plan is the cheapest"
        )
        require((self.objective != "dollars" or cluster.price_usd_per_node_hour is not None, "--objective", message))
        effort = replace(EVERYTHING if self.prove else Effort(), exhaustive=self.exhaustive)
        return replace(request, effort=effort, objective=self.objective)
