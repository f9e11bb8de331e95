"""The parts of a decoder as programs of their own, with names that equal layers share."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autoshard.errors import require
from autoshard.modules.capture import Captured
from autoshard.modules.decoder.segments import Segment, Stack
from autoshard.modules.dims import factors
from autoshard.modules.nodes import Node
from autoshard.modules.program import Origin, Read, Result, Traced, TracedProgram, TracedStep, free_name
from autoshard.modules.reach import steps_to
from autoshard.modules.training.packing import Packing

TAKEN, GIVEN = "x", "y"
LOSS_SHARE = "loss_share"  # of a micro-batch in the loss of a step
_NUMBER = re.compile(r"(_\d+)+$")  # of the node, and of one of its results
_DELIVERED = re.compile(r"_out$")  # names of tensors as their readers get them end so
# Of the loss and of the step, in the block of the head.
_USED = (
    TAKEN, "labels", "token_weight", "logits_fp32", "top", "shifted", "power", "total", "log_total", "picked",
    "token_loss", "weighted", "loss", "clip", "learning_rate", "step_number", LOSS_SHARE, "loss_fp32",
)  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class CodePart:
    """A part of a decoder: its program, and where its weights and its other inputs come from, by name."""

    name: str  # of the submodule, or embed and head
    program: TracedProgram
    gives: Traced
    paths: Mapping[str, str]  # of parameters, in the module
    nodes: Mapping[str, Node]  # of the exported graph, which depend on no parameter


def code_parts(captured: Captured, stack: Stack, packing: Packing | None) -> Iterator[CodePart]:
    """Yield embedding, layers and head, which hand a packed tensor on if there is more than a hidden state."""
    yield from (_Copier(captured, segment, packing).part() for segment in stack.parts)


def joining(stack: Stack, logits: Traced) -> Iterator[tuple[str, str]]:
    """Yield the steps up to the logits that do not compute each sequence by itself, with their submodules."""
    (batch,) = factors(stack.carried[0])
    of_head = steps_to(stack.head.steps, [logits])  # what comes behind them is a loss, which joins all sequences
    for steps in (stack.embed.steps, *(layer.steps for layer in stack.layers), of_head):
        for step in steps:
            reads = any(batch in factors(read.dims) for read in step.reads)
            if reads and (batch not in factors(step.makes.dims) or batch in step.whole_leaves()):
                yield step.path or "module", step.name


class _Copier:
    """Copies a segment with names that do not say which layer it is."""

    def __init__(self, captured: Captured, segment: Segment, packing: Packing | None) -> None:
        self.captured, self.segment, self.packing = captured, segment, packing
        self.prefix = f"{segment.name}."
        self.copies: dict[Traced, Traced] = {}
        self.names = {*_USED}
        self.stems: dict[str, str] = {}  # of submodules, in the names of their weights
        self.paths: dict[str, str] = {}
        self.nodes: dict[str, Node] = {}

    def part(self) -> CodePart:
        """Return the copy."""
        steps = tuple(self._step(step) for step in self.segment.steps)
        gives = self.copies[self.segment.gives]
        if self.packing:
            steps, gives = self._packed(self.packing, steps, gives)
        result = Result(
            name=GIVEN, read=Read(value=gives, positions=gives.positions), is_seeded=True, is_trained=True
        )  # fmt: skip
        values = tuple(self.copies.values())
        trained = frozenset(value for value in values if value.origin in ("carried", "parameter"))
        program = TracedProgram(
            values=values, steps=steps, results=(result,), modules={}, trained=trained, kept_whole=()
        )
        return CodePart(name=self.segment.name, program=program, gives=gives, paths=self.paths, nodes=self.nodes)

    def _packed(
        self, packing: Packing, steps: tuple[TracedStep, ...], gives: Traced
    ) -> tuple[tuple[TracedStep, ...], Traced]:
        """Return the steps of a part that takes and gives packed tensors, and what it gives."""
        if self.segment.handed_on:
            slots = [self._value(value) for value in self.segment.handed_on]
            gives = packing.packed(free_name("packed", self.names), "made")
            steps = (*steps, packing.packing(gives, slots))
        if self.segment.arriving:
            packed = packing.packed(TAKEN, "carried")
            slots = [(value, self.copies.get(value)) for value in self.segment.arriving]
            steps = (*packing.unpacking(packed, slots), *steps)
            self.copies[packed] = packed
        self.copies[gives] = gives
        return steps, gives

    def _step(self, step: TracedStep) -> TracedStep:
        reads = tuple(
            Read(value=self._value(read.value), positions=read.positions, renamed=read.renamed) for read in step.reads
        )
        module = self._inside(step.path).replace(".", "_")
        base = module if step.sort in ("product", "rows") and module else _NUMBER.sub("", step.name)
        makes = self._copy(step.makes, free_name(_DELIVERED.sub("_output", base), self.names), "made")
        return replace(step, name=makes.name, path=self._inside(step.path), reads=reads, makes=makes)

    def _value(self, value: Traced) -> Traced:
        """Return the copy of a value that a step reads."""
        if value in self.copies:
            return self.copies[value]
        if value is self.segment.takes and not self.packing:
            return self._copy(value, TAKEN, "carried")
        if self.packing and value in self.segment.arriving:
            name = free_name("state" if value is self.segment.takes else "beside", self.names)
            copy = self._copy(value, name, "made")
            copy.positions = self.packing.in_rows(value)
            return copy
        if value.origin == "parameter":
            path = self.captured.parameters[value.name]
            owner, _, leaf = self._inside(path).rpartition(".")
            if owner not in self.stems:
                self.stems[owner] = free_name(owner.replace(".", "_") or "own", {*self.stems.values()})
            name = f"{self.stems[owner]}.{leaf}"
            self.paths[name] = path
            return self._copy(value, name, "parameter")
        message = f"reads {value.name}, which is made for another layer alone. Make it in each, or before all layers"
        require((value.origin == "input", self.segment.name, message))
        name = f"side_{len(self.nodes)}"
        self.nodes[name] = self.captured.inputs[value.name]
        return self._copy(value, name, "input")

    def _inside(self, path: str) -> str:
        """Return a path as the part itself has it, if it lies in the part."""
        return f"{path}.".removeprefix(self.prefix).removesuffix(".")

    def _copy(self, value: Traced, name: str, origin: Origin) -> Traced:
        self.names.add(name)
        copy = self.copies[value] = replace(value, name=name, origin=origin)
        return copy
