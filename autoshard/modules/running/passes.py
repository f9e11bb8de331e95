"""Both passes of a module on one rank, as steps on values by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autoshard.engine.torch.execution import RankStep


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The steps of both passes, and what goes in and out: results, values saved for backward, and gradients."""

    forward: tuple[RankStep, ...]
    results: tuple[str, ...]
    saved: frozenset[str] = frozenset()
    seeds: Mapping[str, str] = field(default_factory=dict[str, str])  # results by gradients with which backward begins
    backward: tuple[RankStep, ...] = ()
    gradients: tuple[str, ...] = ()

    @cached_property
    def read_again(self) -> frozenset[str]:
        """What backward reads from outside, and forward has not saved: parameters among them."""
        written = {name for step in self.backward for name in step.writes}
        return frozenset(name for step in self.backward for name in step.reads) - written - self.saved
