"""Whether all ranks call a sharded module alike: asked before the first collective of a call, so that none waits."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autoshard.errors import InputError, require
from autoshard.modules.state.spaces import is_simple
from autoshard.run.protocol import HOST

_EVERY = 64  # calls: numbers of large inputs are compared again
_SMALL_BYTES = 2**16  # of inputs on hosts, whose numbers are compared at every call: it takes 0.1 ms
_WORDS = 2**20  # that are read at once
_ODD = 0x9E3779B97F4A7C15 - 2**64  # its multiples have all bits mixed


def number_of(*parts: Any) -> int:
    """Return a number of 63 bits that stands for values with a text of their own."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


def sum_of_bits(tensor: torch.Tensor) -> int:
    """Return a number that differs, as good as surely, where any bit of a tensor does."""
    if tensor.is_meta:
        return 0
    packed = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    packed = torch.nn.functional.pad(packed, (0, -len(packed) % 8)).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=packed.device)
    for start in range(0, len(packed), _WORDS):
        words = packed[start : start + _WORDS]
        odd = torch.arange(start, start + len(words), device=words.device) * 2 + 1
        mixed = (words ^ (words >> 29)) * (odd * _ODD)
        total += (mixed ^ (mixed >> 32)).sum()
    return int(total)


def is_small(flat: Sequence[Any]) -> bool:
    """Say whether the numbers of inputs are soon read, without waiting for an accelerator."""
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    on_host = all(tensor.device.type == HOST for tensor in tensors)
    return on_host and sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= _SMALL_BYTES


def shown_input(value: Any, *, is_part: bool = False) -> str:
    """Say what an input is, but for its numbers, and for the number of rows of a part of a batch."""
    if isinstance(value, torch.Tensor):
        sizes = [*map(str, value.shape)]
        sizes[:1] = ["rows"] if is_part else sizes[:1]
        gradient = " with a gradient" if value.requires_grad else ""
        return f"{' x '.join(sizes) or 'one number'} of {str(value.dtype).removeprefix('torch.')}{gradient}"
    return f"{value!r:.60}" if is_simple(value) else type(value).__name__


@dataclass(frozen=True, kw_only=True)
class InputLook:
    """An input as messages show it."""

    name: str
    shown: str
    bits: int


@dataclass(kw_only=True)
class CallAgreement:
    """Compares what the ranks give a module: shapes at every call; numbers too, of large inputs at few of them."""

    group: dist.ProcessGroup | None  # of all ranks, on hosts: no accelerator is waited for, and nobody else uses it
    num_ranks: int
    num_calls: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])

    @classmethod
    def for_all_ranks(cls) -> "CallAgreement":
        """Prepare it for all ranks; every rank asks for it at once."""
        group: Any = dist.new_group(backend="gloo")
        return cls(group=group, num_ranks=dist.get_world_size())

    def headers(
        self, kind: Sequence[int], num_rows: int, numbers: Callable[[], Sequence[int]], *, always: bool
    ) -> list[list[int]]:
        """Return of all ranks what they are about to call: its kind, rows, and what stands for numbers of inputs.

        The latter are 0 where a rank does not compare them, which it does at ``always``.
        """
        is_due = always or tuple(kind) not in self.seen or self.num_calls % _EVERY == 0
        self.num_calls += 1
        self.seen.add(tuple(kind))
        header = [*kind, num_rows, *(numbers() if is_due else (0, 0))]
        headers = torch.empty(self.num_ranks * len(header), dtype=torch.int64)
        try:
            dist.all_gather_single(headers, torch.tensor(header), group=self.group)
        except RuntimeError as error:
            message = f"was called on rank {dist.get_rank()}, and not on all others: {_first_line(error)}"
            raise InputError.of(
                "module", f"{message}; call it on all ranks, and use the results where you like"
            ) from error
        return headers.reshape(self.num_ranks, -1).tolist()

    def exchanged(self, value: Any) -> list[Any]:
        """Return what all ranks say."""
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.group)
        return values


def _first_line(error: Exception) -> str:
    """Return what went wrong, without where in gloo."""
    return str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0]


def refuse_kinds(by_rank: Sequence[Sequence[InputLook]], remedy: str) -> None:
    """Refuse inputs that do not look alike on all ranks."""
    for number, looks in enumerate(by_rank):
        names = {look.name for look in by_rank[0]} ^ {look.name for look in looks}
        message = f"are not the same arguments on ranks 0 and {number}: {', '.join(sorted(names))}; give all the same"
        require((not names, "inputs", message))
        for expected, look in zip(by_rank[0], looks, strict=True):
            message = f"is {expected.shown} on rank 0, and {look.shown} on rank {number}; {remedy}"
            require((expected.shown == look.shown, f"inputs.{look.name}", message))


def refuse_numbers(by_rank: Sequence[Sequence[InputLook]], groups: Sequence[Sequence[int]], remedy: str) -> None:
    """Refuse inputs whose numbers differ between ranks of a group."""
    for group in groups:
        for number in group:
            for expected, look in zip(by_rank[group[0]], by_rank[number], strict=True):
                message = f"has other numbers on rank {number} than on rank {group[0]}; {remedy}"
                require((expected.bits == look.bits, f"inputs.{look.name}", message))
