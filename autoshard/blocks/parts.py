"""Parts of block problems with the same operations and choices cost the same, whichever block has them.

The dense and the sparse layers of a mixture share their attention; local and global layers share all but that.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.blocks.choices import OpChoice
from autoshard.blocks.dataflow import ChangesByTensor, Dataflow
from autoshard.blocks.elimination import CostFactor
from autoshard.graph.op import Op

Choices = tuple[tuple[OpChoice, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPart:
    """The variables that a part adds to a problem, each with how many values it has, and its prices."""

    choices: Choices  # of its operations
    sizes: Mapping[str, int]
    factors: Sequence[CostFactor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedParts:
    """What is priced of problems that differ in nothing but their blocks and the choices of operations."""

    parts: dict[Hashable, PricedPart] = field(default_factory=dict[Hashable, PricedPart])
    changes: ChangesByTensor = field(default_factory=ChangesByTensor)

    def get(self, key: Hashable, choices: Choices) -> PricedPart | None:
        """Return a part if it is priced for these choices."""
        part = self.parts.get(key)
        return part if part and part.choices == choices else None


def choices_of(flow: Dataflow, ops: Sequence[Op]) -> Choices:
    """Return the choices of those operations that have any; delivers have none."""
    return tuple(flow.choices[op.name] for op in ops if op.name in flow.choices)


def part_facts(flow: Dataflow, ops: Sequence[Op]) -> Hashable:
    """Return all that the price of a part depends on beside choices.

    These are its operations with their gradients, what they read, make and keep, and whose slots must agree.
    """
    block = flow.problem.block
    steps = tuple(step for op in ops for step in flow.steps[op.name])
    names = dict.fromkeys(name for step in steps for name in (*step.inputs, *step.outputs))
    sums = (block.tensors.get(f"{name}.sum") for name in names)
    sources = {op.name for op in ops}
    saved = tuple(entry for entry in block.saved if entry.storage in names or entry.op in sources)
    delivers = tuple(deliver for deliver in flow.delivers if deliver.inputs[0] in names)
    return (
        steps,
        tuple(block.tensors[name] for name in names),
        tuple(sums),
        tuple((entry, entry.storage in flow.delivered) for entry in saved),
        tuple((deliver, flow.counts_slots(deliver.inputs[0])) for deliver in delivers),
        tuple(flow.rules[op.name] for op in ops if op.name in flow.rules),
    )
