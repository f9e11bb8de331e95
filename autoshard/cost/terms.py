"""Terms of a user's own in the time of a step: functions while a plan is searched, numbers in a plan's provenance."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.cost.collective import Number
from autoshard.errors import InputError, require
from autoshard.extensions import EXTENSIONS
from autoshard.plan.candidate import Candidate
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.columns import Columns, Engine
from autoshard.spec.cluster import Cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload

_PREFIX = "cost."  # of its part of the predicted seconds and of its line in a plan's provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTerm:
    """Seconds that every step takes besides, of one candidate or of columns: ``seconds`` reads the same on both.

    It sees everything but layers and recompute of the stages, so that it moves a bound on an outer point by as much as
    the point itself.
    """

    name: str
    seconds: Callable[[Columns], Number]
    source: str

    def __post_init__(self) -> None:
        """Refuse names that are no word, and terms without a source."""
        is_word = bool(re.fullmatch(r"[a-z][a-z0-9_]*", self.name))
        require(
            (is_word, "name", f"must be lower case like my_term, not {self.name!r}"),
            (bool(self.source.strip()), "source", "say where this term is from"),
        )

    @property
    def part(self) -> str:
        """The name of its part of the predicted seconds."""
        return _PREFIX + self.name

    def of(self, columns: Columns) -> Number:
        """Evaluate it; a term is an addition to a step, so that less than nothing is refused."""
        seconds: Any = np.asarray(self.seconds(columns), dtype=np.float64)
        least, most = seconds.min(initial=0.0), seconds.max(initial=0.0)
        message = f"gives {least if least < 0 else most} s; a term gives finite seconds of at least 0"
        require((bool(least >= 0 and most < math.inf), self.part, message))
        return seconds


def user_terms() -> tuple[CostTerm, ...]:
    """List the terms of files that ``--extend`` has loaded."""
    terms = tuple(EXTENSIONS.of(CostTerm).values())
    require((len({term.name for term in terms}) == len(terms), "--extend", "two cost terms have one name"))
    return terms


def term_entries(
    terms: Sequence[CostTerm],
    candidate: Candidate,
    model: ModelSpec,
    cluster: Cluster,
    workload: Workload,
    engine: Engine,
) -> Mapping[str, str]:
    """Return the entries of terms in a plan's provenance: the seconds of its outer point, and their source."""
    point = replace(candidate, stages=None, recompute=(Recompute(),))
    columns = Columns.of(point, model, cluster, workload, engine)
    return {term.part: f"{float(term.of(columns))!r} s, {term.source}" for term in terms}


def term_seconds(provenance: Mapping[str, str]) -> Mapping[str, float]:
    """Return the seconds of the terms that a plan states.

    >>> term_seconds({"model": "a card", "cost.stall": "0.25 s, my own runs"})
    {'cost.stall': 0.25}
    """
    seconds: dict[str, float] = {}
    for key, entry in provenance.items():
        if key.startswith(_PREFIX):
            number, unit, _ = entry.partition(" s, ")
            try:
                seconds[key] = float(number)
            except ValueError:
                seconds[key] = math.nan
            if not unit or not 0 <= seconds[key] < math.inf:
                message = f"must be SECONDS s, SOURCE with at least 0 seconds, not {entry!r}"
                raise InputError.of(f"provenance.{key}", message)
    return seconds
