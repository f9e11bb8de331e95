"""Both passes of a module on one rank, as steps on values by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.engine.torch.execution import RankStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The steps of both passes, and what goes in and out: results, values saved for backward, and gradients."""

    forward: tuple[RankStep, ...]
    results: tuple[str, ...]
    saved: frozenset[str] = frozenset()
    seeds: Mapping[str, str] = field(default_factory=dict[str, str])  # results by gradients with which backward begins
    backward: tuple[RankStep, ...] = ()
    gradients: tuple[str, ...] = ()
