"""One block on one rank: its program, each instruction prepared once, and the interpreter that runs them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from autoshard.engine.observing import notes_of
from autoshard.engine.programs import BlockProgram
from autoshard.engine.rows import read_whole, runs_of
from autoshard.engine.torch.execution import InputSource, RankStep, Values, run_steps
from autoshard.engine.torch.steps import RankContext, routing_of, steps_of
from autoshard.schedule.builders import ActionKind


class BlockRun(Protocol):
    """Executes a block's program on one rank; a part of it for each kind of action."""

    @property
    def parts(self) -> BlockProgram:
        """The program."""
        ...

    def forward(self, source: InputSource) -> tuple[torch.Tensor, Values]:
        """Run the forward pass; return the block's output, and all values that backward reads or that are noted."""
        ...

    def backward(self, kind: ActionKind, source: InputSource, values: Values) -> torch.Tensor | None:
        """Run B, or a half of it (I, W), which adds to sums of gradients; return the gradient of the block's input.

        If it is I, it leaves in ``values`` only those that W reads.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralRun:
    """Executes the instructions one by one."""

    parts: BlockProgram
    steps: Mapping[str, tuple[RankStep, ...]]  # by kind of action
    waiting: frozenset[str]  # values that I leaves for W
    handed_back: Mapping[str, str | None]  # by kind of action the value that is the gradient of the block's input
    noted: frozenset[str]  # values for reports, which the forward pass leaves beside those that backward reads

    @classmethod
    def of(cls, context: RankContext, parts: BlockProgram) -> "LiteralRun":
        """Prepare the instructions of every action."""
        results = {value.name for value in parts.program.results.values()}
        waiting, backward = (
            frozenset(read_whole(runs_of(entries))) for entries in (parts.instructions("W"), parts.backward)
        )
        if routing := routing_of(context, parts):
            waiting, backward = waiting | {*routing.made}, backward | {*routing.made}
        noted = frozenset(note.value for note in notes_of(parts, context.mesh_rank.sizes, packed=context.packed))
        later = {
            "F": backward | noted | {parts.program.results[parts.handed_on].name},
            "B": results, "I": waiting | results, "W": results,
        }  # fmt: skip
        steps = {kind: tuple(steps_of(context, parts, kind, read_later)) for kind, read_later in later.items()}
        gradients = {kind: parts.results(kind).get(parts.handed_back or "") for kind in later}
        handed_back = {kind: value and value.name for kind, value in gradients.items()}
        return cls(parts=parts, steps=steps, waiting=waiting, handed_back=handed_back, noted=noted)

    def forward(self, source: InputSource) -> tuple[torch.Tensor, Values]:
        """Run the forward pass; return the block's output, and all values that backward reads."""
        values: Values = {}
        run_steps(self.steps["F"], values, source)
        return (values[self.handed_on] if self.hands_on_what_it_keeps else values.pop(self.handed_on)), values

    def backward(self, kind: ActionKind, source: InputSource, values: Values) -> torch.Tensor | None:
        """Run B, or a half of it (I, W); return the gradient of the block's input."""
        run_steps(self.steps[kind], values, source)
        name = self.handed_back[kind]
        result = values[name] if name else None
        if kind == "I":
            for name in values.keys() - self.waiting:
                del values[name]
        return result

    @property
    def handed_on(self) -> str:
        """The value that is the block's output."""
        return self.parts.program.results[self.parts.handed_on].name

    @property
    def hands_on_what_it_keeps(self) -> bool:
        """Whether backward reads the block's output."""
        return any(self.handed_on in step.reads for step in self.steps["B"])
