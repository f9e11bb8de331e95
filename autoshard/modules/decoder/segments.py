"""The parts of a traced decoder: what comes before its lists of layers, each layer, and what comes after."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.errors import require
from autoshard.modules.decoder.stack.passing import (
    STATE_DIMS,
    hidden_states,
    live_values,
    read_behind,
    weights_in_common,
)
from autoshard.modules.decoder.stack.splitting import split_steps
from autoshard.modules.dims import Position, factors, size_of
from autoshard.modules.program import Traced, TracedProgram, TracedStep


@dataclass(frozen=True, eq=False, kw_only=True)
class Segment:
    """Steps in order, with the hidden state that they take (the embedding takes none) and what they give.

    With it goes on all else that later parts read: ``arriving`` has all that comes from the part before, and
    ``handed_on`` all that goes to the next one.
    """

    name: str
    steps: tuple[TracedStep, ...]
    takes: Traced | None
    gives: Traced
    arriving: tuple[Traced, ...] = ()
    handed_on: tuple[Traced, ...] = ()
    packed_rows: int = 0  # of the hidden size, in which all goes on; 0 where nothing goes on beside a hidden state

    @property
    def beside(self) -> tuple[Traced, ...]:
        """What arrives beside the hidden state."""
        return tuple(value for value in self.arriving if value is not self.takes)


@dataclass(frozen=True, eq=False, kw_only=True)
class Stack:
    """A decoder in parts; ``carried`` are batch, sequence and hidden size, as dims of what the first layer takes."""

    embed: Segment
    layers: tuple[Segment, ...]
    head: Segment
    carried: tuple[Position, Position, Position]

    @property
    def parts(self) -> tuple[Segment, ...]:
        """All parts in order."""
        return (self.embed, *self.layers, self.head)

    @property
    def beside(self) -> tuple[Traced, ...]:
        """What goes along beside a hidden state, in order."""
        return tuple(dict.fromkeys(value for part in self.parts for value in part.beside))


def stack_of(program: TracedProgram, logits: Traced, samples: Position = ()) -> Stack:
    """Split a program into embedding, layers and head, or say why it is no stack of layers.

    ``samples`` are the dims of a batch: a hidden state is [batch, sequence, hidden] unless they are its second dims.
    """
    names, parts = split_steps(program.steps)
    states = hidden_states(names, parts)
    first, second, hidden = state_shape(states[0], names[0])
    is_swapped = bool(samples) and factors(samples) == second
    shape = [second, first, hidden] if is_swapped else [first, second, hidden]
    message = f"{_takes(shape, names[0])}, and no function of it may split or merge these"
    require((all(len(position) == 1 for position in shape), names[0], message))
    results = [
        state if state in read else read[-1]  # a layer may make more, behind its result
        for state, read in zip(states[1:], read_behind(parts)[1:-1], strict=True)
    ]
    live: list[tuple[Traced, ...]] = [(), *live_values(parts, states, results, weights_in_common(parts)), ()]
    embed, *layers, head = (
        Segment(
            name=name, steps=tuple(steps), takes=takes, gives=gives, arriving=arriving, handed_on=handed_on,
            packed_rows=packed_rows(live, shape),
        )
        for name, steps, takes, gives, (arriving, handed_on) in zip(
            ("embed", *names[:-1], "head"), parts, (None, *states), (states[0], *results, logits),
            itertools.pairwise(live), strict=True,
        )
    )  # fmt: skip
    return Stack(embed=embed, layers=tuple(layers), head=head, carried=(shape[0], shape[1], shape[2]))


def packed_rows(live: Sequence[Sequence[Traced]], shape: Sequence[Position]) -> int:
    """Return how many rows of a hidden size go from part to part; 0 where that is a hidden state of this shape alone.

    Between all parts there are as many as the most need.
    """
    state = {*factors(dim for position in shape for dim in position)}
    if all(len(values) < 2 and all({*value.dims} == state for value in values) for values in live):
        return 0
    return max(sum(rows_of(value, shape) for value in values) for values in live)


def rows_of(value: Traced, shape: Sequence[Position]) -> int:
    """Return how many rows of a hidden size the numbers of a sample take."""
    batch, _, hidden = shape
    numbers = size_of(tuple(dim for dim in value.dims if dim not in factors(batch)))
    return -(-numbers // size_of(hidden))


def with_inputs_beside(stack: Stack) -> Stack:
    """Return a stack whose layers and head read what goes along as if a batch brought it, as plans have it."""

    def part(segment: Segment) -> Segment:
        copies = {value: replace(value, origin="input") for value in segment.beside}
        return replace(segment, steps=tuple(_reading(step, copies) for step in segment.steps))

    return replace(stack, layers=tuple(map(part, stack.layers)), head=part(stack.head)) if stack.beside else stack


def _reading(step: TracedStep, copies: Mapping[Traced, Traced]) -> TracedStep:
    """Return a step that reads copies of some values; the step itself if it reads none of these."""
    reads = tuple(replace(read, value=copies.get(read.value, read.value)) for read in step.reads)
    return replace(step, reads=reads) if any(read.value in copies for read in step.reads) else step


def state_shape(state: Traced, name: str) -> list[Position]:
    """Return the dims of a hidden state: of batch, sequence, and hidden size."""
    shape = [factors(position) for position in state.positions]
    message = _takes(shape, name)
    require((len(shape) == STATE_DIMS, name, message), (all(shape), name, f"{message}, and none may have size 1 here"))
    return shape


def _takes(shape: Sequence[Position], name: str) -> str:
    sizes = ", ".join(str(size_of(position)) for position in shape)
    return f"takes a tensor of [{sizes}]; the hidden state of a stack is [batch, sequence, hidden]"
