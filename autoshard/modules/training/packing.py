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
    """How values are packed: each has rows of the hidden size, behind those of the values before it.

    All are in the widest of their formats, which rounds none.
    """

    carried: tuple[Position, Position, Position]  # batch, rows and hidden size of what is packed
    values: tuple[Traced, ...]  # a hidden state, and what goes along
    counts: tuple[int, ...]  # of the rows of each
    widest: Traced
    casts: bool  # whether formats are those of the code; else all numbers are in double

    @classmethod
    def of(cls, stack: Stack, *, casts: bool) -> "Packing | None":
        """Return the packing of a stack's hidden state, if anything goes along, or layers hand on several formats."""
        values = (stack.embed.gives, *stack.beside)
        states = [*values, *(layer.gives for layer in stack.layers)]
        widest = max(states, key=lambda value: value.format.itemsize)
        if not stack.beside and all(state.format == widest.format for state in states):
            return None
        for state in states:
            fits = torch.promote_types(state.format, widest.format) == widest.format
            message = f"hands on {state.name} of {state.format} beside {widest.format}, which would round it"
            require((fits, "module", message))
        batch, sequence, hidden = stack.carried
        counts = tuple(_num_rows(value, batch, size_of(hidden)) for value in values)
        rows = fresh(sum(counts), "rows") if stack.beside else sequence
        return cls(carried=(batch, rows, hidden), values=values, counts=counts, widest=widest, casts=casts)

    def packed(self, name: str, origin: Origin) -> Traced:
        """Return the tensor in which a hidden state goes on."""
        return replace(self.widest, name=name, positions=self.carried, origin=origin)

    def unpacking(self, packed: Traced, slots: Sequence[Traced | None]) -> Iterator[TracedStep]:
        """Yield the steps that take values apart, into as many slots as there are values; None is not read."""
        starts = [0, *itertools.accumulate(self.counts)]
        for slot, start, count in zip(slots, starts, self.counts, strict=False):
            if slot:
                shape = tuple(map(size_of, slot.positions[1:]))
                rows = functools.partial(_rows_of, start=start, count=count, shape=shape, dtype=self._dtype(slot))
                yield self._step(slot, rows, [packed])

    def packing(self, makes: Traced, slots: Sequence[Traced]) -> TracedStep:
        """Return the step that packs all values."""
        width = size_of(self.carried[2])
        return self._step(makes, functools.partial(_packed, width=width, dtype=self._dtype(makes)), slots)

    def _dtype(self, value: Traced) -> torch.dtype | None:
        return value.format if self.casts else None

    def _step(self, makes: Traced, function: Callable[..., torch.Tensor], reads: Sequence[Traced]) -> TracedStep:
        """Return a step in which all but the batch is whole, or nothing if it only changes the format."""
        dims = {dim for value in (*reads, makes) for dim in value.dims} - {*factors(self.carried[0])}
        alone = len(self.values) == 1
        if alone:
            function = functools.partial(_formatted, dtype=self._dtype(makes))
        return TracedStep(
            name=makes.name, path="", sort="local", function=function,
            arguments=tuple(TensorPlace(number) for number in range(len(reads))), keywords={},
            reads=tuple(Read(value=value, positions=value.positions) for value in reads), makes=makes,
            whole=frozenset() if alone else frozenset(dims),
        )  # fmt: skip


def _num_rows(value: Traced, batch: Position, width: int) -> int:
    """Return how many rows of a width the numbers of a sample are."""
    first, *inner = value.positions or ((),)
    name = f"{value.name}, which goes along beside the hidden state,"
    numbers = math.prod(map(size_of, inner))
    require(
        (factors(first) == factors(batch), "module", f"{name} has no batch as its first dim"),
        (not value.is_index, "module", f"{name} holds whole numbers"),
        (numbers % width == 0, "module", f"{name} has {numbers} numbers for a sample, no multiple of {width}"),
    )
    return numbers // width


def _rows_of(
    packed: torch.Tensor, *, start: int, count: int, shape: tuple[int, ...], dtype: torch.dtype | None
) -> torch.Tensor:
    """Return one of the values that are packed."""
    return _formatted(packed[:, start : start + count].reshape(len(packed), *shape), dtype=dtype)


def _packed(*values: torch.Tensor, width: int, dtype: torch.dtype | None) -> torch.Tensor:
    """Return the rows of all values, one behind the other."""
    return torch.cat([_formatted(value, dtype=dtype).reshape(len(value), -1, width) for value in values], dim=1)


def _formatted(value: torch.Tensor, *, dtype: torch.dtype | None) -> torch.Tensor:
    return value if dtype is None else value.to(dtype)
