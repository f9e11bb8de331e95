"""Weights of two blocks that share their values: the gradients of both await their sum over the same ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autoshard.graph.block import OpGraph
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.layout.program import Compute, CountOnce, Given, Instruction, Program, Value


def with_tied_sums(graph: OpGraph, programs: Mapping[str, Program]) -> Mapping[str, Program]:
    """Return the programs of a plan's tables, in which the sums of tied gradients await the same atoms.

    Both gradients are added up and then reduced once. One that is the same on the ranks of some atoms, where the other
    is a part on each of them, counts on the first of these ranks alone.
    """
    changed = dict(programs)
    for ends in graph.tied.items():
        tied = [(kind, weight) for kind, _, weight in (end.partition(".") for end in ends)]
        pending = [{*changed[kind].results[f"{weight}.sum"].layout.sums} for kind, weight in tied]
        for (kind, weight), atoms in zip(tied, pending, strict=True):
            if missing := set.union(*pending) - atoms:
                changed[kind] = _counted_once(changed[kind], weight, tuple(sorted(missing)))
    return changed


def _counted_once(program: Program, weight: str, atoms: tuple[str, ...]) -> Program:
    """Let the sum of a weight's gradients await some atoms more."""
    total = program.results[f"{weight}.sum"]
    awaiting = _awaiting(total, atoms)

    def instructions() -> Iterator[Instruction]:
        for entry in program.instructions:
            if isinstance(entry, Given) and entry.value.tensor == f"{weight}.grad":
                yield Given(value=_awaiting(entry.value, atoms))
            elif isinstance(entry, Compute) and isinstance(entry.op.kind, Accumulate) and total in entry.writes:
                before, gradient = entry.reads
                once = replace(_awaiting(gradient, atoms), name=f"{gradient.name}@once")
                yield CountOnce(atoms=atoms, reads=gradient, writes=once)
                yield replace(entry, reads=(_awaiting(before, atoms), once), writes=(awaiting,))
            else:
                yield entry

    return Program(instructions=tuple(instructions()), results={**program.results, f"{weight}.sum": awaiting})


def _awaiting(value: Value, atoms: tuple[str, ...]) -> Value:
    return replace(value, layout=replace(value.layout, sums=tuple(sorted((*value.layout.sums, *atoms)))))
