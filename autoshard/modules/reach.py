"""Which steps of a program its results need, and how far gradients reach."""

from collections.abc import Iterable, Sequence

import torch

from autoshard.modules.program import Result, Traced, TracedStep


def needed(steps: Sequence[TracedStep], wanted: Iterable[Traced]) -> tuple[TracedStep, ...]:
    """Return the steps that some values need."""
    values, found = {*wanted}, list[TracedStep]()
    for step in reversed(steps):
        if step.makes in values:
            values |= {read.value for read in step.reads}
            found.append(step)
    return tuple(reversed(found))


def reaching(steps: Sequence[TracedStep], results: Iterable[Result], trained: Iterable[Traced]) -> frozenset[Traced]:
    """Return which of the trained parameters and of the inputs with a gradient a gradient reaches."""
    passing = [step for step in steps if _hands_on(step)]
    seeded = needed(passing, [one.read.value for one in results if one.read and one.is_seeded])
    read = {read.value for step in seeded for read in step.reads}
    read |= {one.read.value for one in results if one.read and one.is_seeded}
    return frozenset(read & {*trained})


def moved(steps: Iterable[TracedStep], trained: Iterable[Traced]) -> set[Traced]:
    """Return the values that have a gradient with respect to some trained one."""
    found = {*trained}
    for step in steps:
        if _hands_on(step) and found.intersection(read.value for read in step.reads):
            found.add(step.makes)
    return found


def _hands_on(step: TracedStep) -> bool:
    """Say whether a step hands a gradient on."""
    return step.function is not torch.ops.aten.detach.default and not step.makes.is_index
