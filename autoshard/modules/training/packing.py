"""One tensor that goes from part to part: the hidden state, and in more rows what goes along beside it."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from autoshard.errors import require
from autoshard.modules.decoder.segments import Stack
from autoshard.modules.dims import Position, factors, fresh, size_of
from autoshard.modules.program import Origin, Read, TensorPlace, Traced, TracedStep


@dataclass(frozen=True, eq=False, kw_only=True)
class Packing:
    """How values are packed: each has rows of the hidden size, behind those of the values before it."""

    carried: tuple[Position, Position, Position]  # batch, rows and hidden size of what is packed
    values: tuple[Traced, ...]  # a hidden state, and what goes along
    counts: tuple[int, ...]  # of the rows of each

    @classmethod
    def of(cls, stack: Stack) -> "Packing | None":
        """Return the packing of a stack's hidden state, if anything goes along."""
        batch, _, hidden = stack.carried
        if not stack.beside:
            return None
        values = (stack.embed.gives, *stack.beside)
        width, state = size_of(hidden), values[0]
        counts: list[int] = []
        for value in values:
            first, *inner = value.positions or ((),)
            name = f"{value.name}, which goes along beside the hidden state,"
            numbers = math.prod(map(size_of, inner))
            rows = f"has {numbers} numbers for a sample, no multiple of the hidden size, {width}"
            require(
                (factors(first) == factors(batch), "module", f"{name} has no batch as its first dim"),
                (value.format == state.format, "module", f"{name} is {value.format}, and that is {state.format}"),
                (numbers % width == 0, "module", f"{name} {rows}"),
            )
            counts.append(numbers // width)
        return cls(carried=(batch, fresh(sum(counts), "rows"), hidden), values=values, counts=tuple(counts))

    def packed(self, state: Traced, name: str, origin: Origin) -> Traced:
        """Return the tensor in which a hidden state goes on."""
        return replace(state, name=name, positions=self.carried, origin=origin)

    def unpacking(self, packed: Traced, slots: Sequence[Traced | None]) -> Iterator[TracedStep]:
        """Yield the steps that take values apart, into as many slots as there are values; None is not read."""
        starts = [0, *itertools.accumulate(self.counts)]
        for slot, start, count in zip(slots, starts, self.counts, strict=False):
            if slot:
                shape = tuple(map(size_of, slot.positions[1:]))
                yield self._step(slot, functools.partial(_rows_of, start=start, count=count, shape=shape), [packed])

    def packing(self, makes: Traced, slots: Sequence[Traced]) -> TracedStep:
        """Return the step that packs all values."""
        return self._step(makes, functools.partial(_packed, width=size_of(self.carried[2])), slots)

    def _step(self, makes: Traced, function: Callable[..., torch.Tensor], reads: Sequence[Traced]) -> TracedStep:
        """Return a step in which all but the batch is whole."""
        dims = {dim for value in (*reads, makes) for dim in value.dims} - {*factors(self.carried[0])}
        return TracedStep(
            name=makes.name, path="", sort="local", function=function,
            arguments=tuple(TensorPlace(number) for number in range(len(reads))), keywords={},
            reads=tuple(Read(value=value, positions=value.positions) for value in reads), makes=makes,
            whole=frozenset(dims),
        )  # fmt: skip


def _rows_of(packed: torch.Tensor, *, start: int, count: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return one of the values that are packed."""
    return packed[:, start : start + count].reshape(len(packed), *shape)


def _packed(*values: torch.Tensor, width: int) -> torch.Tensor:
    """Return the rows of all values, one behind the other."""
    return torch.cat([value.reshape(len(value), -1, width) for value in values], dim=1)
