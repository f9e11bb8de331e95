"""Steps of a traced program that are one operation of the planner's graph, and how steps depend on each other."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from autoshard.modules.decoder.segments import Segment
from autoshard.modules.dims import Dim, Position, factors
from autoshard.modules.program import Read, Traced, TracedStep, name_of
from autoshard.modules.region import expand
from autoshard.spec.model import Activation

PieceKind = Literal[
    "rows", "product", "shift", "norm", "rotary", "attend", "experts", "add", "multiply", "unary", "opaque"
]


@dataclass(frozen=True, eq=False, kw_only=True)
class WeightPart:
    """A parameter, or the part of it that one operation uses, along these dims."""

    value: Traced
    dims: Position


@dataclass(frozen=True, kw_only=True)
class NormDetail:
    """What a norm is, and over which dim."""

    function: Literal["rms", "layer"]
    over: Dim
    eps: float


@dataclass(frozen=True, kw_only=True)
class AttentionDetail:
    """Which dims are a head of queries and keys, and of values; what attention reads beside them and its masks.

    ``beside`` are the tensors that meet its scores, of ``queries`` and ``keys``, on their way to the softmax. An opaque
    piece that has it is attention of which only the work is planned.
    """

    head: Position
    value_head: Position
    extras: tuple[Traced, ...]
    is_causal: bool = False  # without a mask that says so
    is_unfused: bool = False  # two products around a softmax, no function of torch
    beside: tuple[Read, ...] = ()
    queries: Position = ()
    keys: Position = ()


@dataclass(frozen=True, kw_only=True)
class ExpertsDetail:
    """How many experts there are, to how many a token goes, how wide they are, and what they compute."""

    num_experts: int
    choices: int
    width: int
    is_gated: bool
    activation: Activation | None
    is_normalised: bool  # whether the weights of the chosen experts sum to 1
    by_sigmoid: bool  # whether an expert's score does not hang on those of the rest


@dataclass(frozen=True, eq=False, kw_only=True)
class Piece:
    """One operation to be: the steps that it stands for, what it reads in order, and what it makes."""

    kind: PieceKind
    steps: tuple[TracedStep, ...]
    reads: tuple[Traced, ...]
    makes: Traced
    weights: tuple[WeightPart, ...] = ()
    inputs: tuple[Traced, ...] = ()  # of the batch
    dims: Position  # of the result
    norm: NormDetail | None = None
    attention: AttentionDetail | None = None
    experts: ExpertsDetail | None = None
    fraction: float = 1.0  # of a head, that positions turn
    function: Activation | None = None
    whole: frozenset[Dim] = frozenset()  # of an opaque operation

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of its functions, in order."""
        return tuple(name_of(step).lstrip("_") for step in self.steps if not is_same(step))


class SegmentFlow:
    """Who makes and who reads each value of a segment."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.maker = {step.makes: step for step in segment.steps}

    @cached_property
    def readers(self) -> Mapping[Traced, Sequence[TracedStep]]:
        """The steps that read a value, whatever it is copied to before."""
        readers: dict[Traced, list[TracedStep]] = {}
        for step in self.segment.steps:
            for read in step.reads:
                if not is_same(step):
                    readers.setdefault(self.root(read.value), []).append(step)
        return readers

    def root(self, value: Traced) -> Traced:
        """Return the value of which this one is a copy, repeated or rounded."""
        while (step := self.maker.get(value)) and is_same(step):
            value = step.reads[0].value
        return value

    def operands(self, step: TracedStep) -> tuple[Traced, ...]:
        """Return the operands of a step that operations make, in order."""
        roots = (self.root(read.value) for read in step.reads)
        return tuple(root for root in roots if root.origin == "made")

    def exits(self, steps: Iterable[TracedStep]) -> tuple[Traced, ...]:
        """Return the values that some steps make for readers outside of them, or as the segment's result."""
        inside, result = {*steps}, self.root(self.segment.gives)
        values = [
            self.root(step.makes)
            for step in self.segment.steps
            if step in inside
            and (result is step.makes or any(reader not in inside for reader in self.readers.get(step.makes, ())))
        ]
        return tuple(dict.fromkeys(values))

    def entries(self, steps: Iterable[TracedStep]) -> tuple[Traced, ...]:
        """Return what some steps read that they do not make, each once, in order."""
        inside = {step.makes for step in steps}
        reads = (self.root(read.value) for step in steps for read in step.reads)
        return tuple(dict.fromkeys(value for value in reads if value not in inside))

    def closure(self, value: Traced, ends: Iterable[Traced]) -> tuple[TracedStep, ...]:
        """Return the steps that make a value out of some ends, of weights and of the batch."""
        stops, steps, waiting = {*ends}, set[TracedStep](), [value]
        while waiting:
            needed = waiting.pop()
            step = self.maker.get(needed)
            if needed not in stops and step and step not in steps:
                steps.add(step)
                waiting += [read.value for read in step.reads]
        return tuple(step for step in self.segment.steps if step in steps)

    def of_weights(self, value: Traced) -> tuple[TracedStep, ...] | None:
        """Return the steps that make a value of weights and constants; None if it depends on anything else."""
        steps = self.closure(self.root(value), ())
        origins = {entry.origin for entry in self.entries(steps)} if steps else {self.root(value).origin}
        return steps if "parameter" in origins and "made" not in origins else None


def whole_in(steps: Iterable[TracedStep]) -> frozenset[Dim]:
    """Return the dims that some steps need whole, or sum over."""
    return frozenset(dim for step in steps for dim in (*step.whole_leaves(), *step.summed, *_lost(step)))


def _lost(step: TracedStep) -> set[Dim]:
    return {dim for read in step.reads for dim in shape(read.positions)} - {*step.makes.dims}


def is_same(step: TracedStep) -> bool:
    """Say whether a step only repeats or rounds numbers."""
    return step.function in (expand, torch.Tensor.to)


def parameters_of(steps: Sequence[TracedStep]) -> Iterator[Read]:
    """Yield how steps read parameters, each parameter once, in order."""
    reads: dict[Traced, Read] = {}
    for step in steps:
        for read in step.reads:
            if read.value.origin == "parameter":
                reads.setdefault(read.value, read)
    yield from reads.values()


def products_of(step: TracedStep) -> Iterator[Position]:
    """Yield the dims of the products of matrices that a step computes."""
    yield from map(factors, step.products)
    if step.sort == "product":
        dims = (*(dim for read in step.reads for dim in shape(read.positions)), *step.makes.dims)
        yield tuple(dict.fromkeys(dims))


def shape(positions: Iterable[Position]) -> Position:
    """Return the dims of positions, outermost first."""
    return factors(dim for position in positions for dim in position)
