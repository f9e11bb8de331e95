"""One tensor that goes from part to part: the hidden state, and in more rows all else that later parts read."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from autoshard.errors import require
from autoshard.modules.decoder.segments import Stack, rows_of
from autoshard.modules.dims import Position, factors, fresh, size_of
from autoshard.modules.program import Origin, Read, TensorPlace, Traced, TracedStep


@dataclass(frozen=True, eq=False, kw_only=True)
class Packing:
    """How values are packed: each has rows of the hidden size, behind those of the values before it.

    All are in the widest of their formats, which rounds none. Between all parts there are as many rows as the most
    need. What is the same for all samples, as a weight is, goes with each of them, and is the mean of these copies.
    """

    carried: tuple[Position, Position, Position]  # batch, rows and hidden size of what is packed
    widest: Traced
    num_samples: int  # of a micro-batch
    is_alone: bool  # whether nothing goes beside the hidden state, so that only formats change
    casts: bool  # whether formats are those of the code; else all numbers are in double

    @classmethod
    def of(cls, stack: Stack, num_samples: int, *, casts: bool) -> "Packing | None":
        """Return the packing of what a stack hands on: None where that is a hidden state of one format and one size."""
        values = list(dict.fromkeys(value for part in stack.parts for value in (*part.arriving, *part.handed_on)))
        widest = max(values, key=lambda value: value.format.itemsize)
        for value in values:
            fits = torch.promote_types(value.format, widest.format) == widest.format
            message = f"hands on {value.name} of {value.format} beside {widest.format}, which would round it"
            require((not value.is_index, "module", f"{value.name}, which goes along, holds whole numbers"))
            require((fits, "module", message))
        (batch, _, hidden), num_rows = stack.carried, stack.embed.packed_rows
        if not num_rows and all(value.format == widest.format for value in values):
            return None
        carried = (batch, fresh(num_rows, "rows"), hidden) if num_rows else stack.carried
        return cls(
            carried=carried, widest=widest, num_samples=num_samples, is_alone=not num_rows, casts=casts
        )  # fmt: skip

    def packed(self, name: str, origin: Origin) -> Traced:
        """Return the tensor in which a hidden state goes on."""
        return replace(self.widest, name=name, positions=self.carried, origin=origin, is_index=False)

    def unpacking(self, packed: Traced, slots: Sequence[tuple[Traced, Traced | None]]) -> Iterator[TracedStep]:
        """Yield the steps that take values apart, each into its slot; None is not read."""
        starts = itertools.accumulate((rows_of(value, self.carried) for value, _ in slots), initial=0)
        for (value, slot), start in zip(slots, starts, strict=False):
            if slot:
                is_common, positions = not self._has_batch(value), self.in_rows(value)
                shape = tuple(map(size_of, positions if is_common else positions[1:]))
                rows = functools.partial(
                    _mean_of_copies if is_common else _rows_of, start=start, count=rows_of(value, self.carried),
                    shape=shape, dtype=self._dtype(slot),
                    **({"num_samples": self.num_samples} if is_common else {}),
                )  # fmt: skip
                yield self._step(slot, rows, [packed], is_common=is_common)

    def packing(self, makes: Traced, slots: Sequence[Traced]) -> TracedStep:
        """Return the step that packs all values."""
        pack = functools.partial(
            _packed, rows=size_of(self.carried[1]), width=size_of(self.carried[2]), dtype=self._dtype(makes),
            is_common=tuple(not self._has_batch(value) for value in slots),
        )  # fmt: skip
        return self._step(makes, pack, slots)

    def in_rows(self, value: Traced) -> tuple[Position, ...]:
        """Return the dims of a value as it is packed: the batch first, wherever the code has it, and all others."""
        batch = factors(self.carried[0])
        first = [dim for dim in batch if dim in value.dims]
        return tuple((dim,) for dim in (*first, *(dim for dim in value.dims if dim not in batch)))

    def _has_batch(self, value: Traced) -> bool:
        (batch,) = factors(self.carried[0])
        return batch in value.dims

    def _dtype(self, value: Traced) -> torch.dtype | None:
        return value.format if self.casts else None

    def _step(
        self, makes: Traced, function: Callable[..., torch.Tensor], reads: Sequence[Traced], *, is_common: bool = False
    ) -> TracedStep:
        """Return a step in which all but the batch is whole, or nothing if it only changes the format."""
        batch = factors(self.carried[0])
        dims = {dim for value in (*reads, makes) for dim in value.dims} - {*batch}
        if self.is_alone:
            function = functools.partial(_formatted, dtype=self._dtype(makes))
        return TracedStep(
            name=makes.name, path="", sort="sum" if is_common else "local", function=function,
            arguments=tuple(TensorPlace(number) for number in range(len(reads))), keywords={},
            reads=tuple(Read(value=value, positions=self.in_rows(value)) for value in reads), makes=makes,
            whole=frozenset() if self.is_alone else frozenset(dims), summed=frozenset(batch if is_common else ()),
        )  # fmt: skip


def _rows_of(
    packed: torch.Tensor, *, start: int, count: int, shape: tuple[int, ...], dtype: torch.dtype | None
) -> torch.Tensor:
    """Return one of the values that are packed."""
    numbers = packed[:, start : start + count].flatten(1)[:, : math.prod(shape)]
    return _formatted(numbers.reshape(len(packed), *shape), dtype=dtype)


def _mean_of_copies(
    packed: torch.Tensor,
    *,
    start: int,
    count: int,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    num_samples: int,
) -> torch.Tensor:
    """Return the part of a rank's samples in the mean of all copies of a value."""
    return _rows_of(packed, start=start, count=count, shape=shape, dtype=dtype).sum(0) / num_samples


def _packed(
    *values: torch.Tensor, rows: int, width: int, dtype: torch.dtype | None, is_common: tuple[bool, ...]
) -> torch.Tensor:
    """Return the rows of all values, one behind the other."""
    count = next(len(value) for value, common in zip(values, is_common, strict=True) if not common)
    parts: list[torch.Tensor] = []
    for value, common in zip(values, is_common, strict=True):
        numbers = _formatted(value, dtype=dtype)
        numbers = numbers.reshape(1, -1).expand(count, -1) if common else numbers.reshape(count, -1)
        parts.append(torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % width)))
    together = torch.cat(parts, dim=1)
    return torch.nn.functional.pad(together, (0, rows * width - together.shape[1])).reshape(count, rows, width)


def _formatted(value: torch.Tensor, *, dtype: torch.dtype | None) -> torch.Tensor:
    return value if dtype is None else value.to(dtype)
