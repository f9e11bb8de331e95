"""Which steps of a program its results need, and how far gradients reach."""

from collections.abc import Iterable, Sequence

import torch

from autoshard.modules.program import Result, Traced, TracedStep


def steps_to(steps: Sequence[TracedStep], targets: Iterable[Traced]) -> tuple[TracedStep, ...]:
    """Return the steps that compute the targets, in order."""
    values, needed_steps = {*targets}, list[TracedStep]()
    for step in reversed(steps):
        if step.makes in values:
            values |= {read.value for read in step.reads}
            needed_steps.append(step)
    return tuple(reversed(needed_steps))


def reaching(steps: Sequence[TracedStep], results: Iterable[Result], trained: Iterable[Traced]) -> frozenset[Traced]:
    """Return the trained values that a gradient reaches from the results at which gradients begin."""
    passing = [step for step in steps if _hands_on(step)]
    seeded = steps_to(passing, [result.read.value for result in results if result.read and result.is_seeded])
    read = {read.value for step in seeded for read in step.reads}
    read |= {result.read.value for result in results if result.read and result.is_seeded}
    return frozenset(read & {*trained})


def trained_values(steps: Iterable[TracedStep], trained: Iterable[Traced]) -> set[Traced]:
    """Return the values that depend on a trained value through steps that hand gradients on."""
    values = {*trained}
    for step in steps:
        if _hands_on(step) and values.intersection(read.value for read in step.reads):
            values.add(step.makes)
    return values


def _hands_on(step: TracedStep) -> bool:
    """Say whether a step hands a gradient on."""
    return step.function is not torch.ops.aten.detach.default and not step.makes.is_index
