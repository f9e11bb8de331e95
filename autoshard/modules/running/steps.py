"""What a rank runs of a module: steps on values by name, in a forward and a backward pass."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

Values = dict[str, Any]  # tensors, and what torch keeps of regions, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """An instruction that is ready to run, and the values that nobody reads after it.

    Where no compiler may see it, since it talks to other ranks or is the user's own, ``made`` says what it makes.
    """

    run: Callable[..., Sequence[Any]]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    drops: tuple[str, ...] = ()
    layer: str = ""  # for which of several equal submodules it runs
    made: Callable[..., Sequence[torch.Tensor]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The steps of both passes, and what goes in and out: results, what is kept for backward, and gradients."""

    forward: tuple[RankStep, ...]
    results: tuple[str, ...]
    kept: frozenset[str] = frozenset()
    seeds: Mapping[str, str] = field(default_factory=dict[str, str])  # results by gradients with which backward begins
    backward: tuple[RankStep, ...] = ()
    gradients: tuple[str, ...] = ()


def run_steps(steps: Iterable[RankStep], values: Values) -> None:
    """Run one step after the other."""
    for step in steps:
        made = step.run(*[values[name] for name in step.reads])
        values.update(zip(step.writes, made, strict=True))
        for name in step.drops:
            values.pop(name, None)


def dropping(steps: Iterable[RankStep], kept: Collection[str]) -> Iterator[RankStep]:
    """Let go of each value after its last reader, unless it is kept."""
    listed = tuple(steps)
    last = {name: number for number, step in enumerate(listed) for name in (*step.reads, *step.writes)}
    for number, step in enumerate(listed):
        names = dict.fromkeys((*step.reads, *step.writes))
        yield replace(step, drops=tuple(name for name in names if last[name] == number and name not in kept))
