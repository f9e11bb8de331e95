"""What blocks keep for their backward pass, in host memory from the end of their forward until shortly before that.

Memories are copied as they are, not tensors one by one: views of one memory stay views of one memory, with the strides
that functions were compiled for, and not a bit changes. A GPU copies on two streams of its own, one for each way. A
block's memories stay on the device until they are copied, which the next block that is put here waits for; so at most
one block is on its way out, one is being fetched, and one is at work (``cost/stages.py`` counts these three).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.engine.routing import is_counted
from autoshard.engine.torch.execution import Values
from autoshard.engine.torch.formats import memory_of
from autoshard.plan.plan import Plan

Key = tuple[str, int]  # a block by name, and a micro-batch
_GPU = "cuda"
_SPARE = 8  # of this part of a slab no more may be left over
_Memory = torch.Tensor  # bytes, all of what some tensors lie in


def offloaded_blocks(plan: Plan, stages: Mapping[int, Collection[str]]) -> frozenset[str]:
    """Return the blocks of some stages, by name, whose kept tensors go to host memory: layers, as stages say."""
    return frozenset(
        name
        for number, names in stages.items()
        for name in names
        if plan.stages[number].recompute.offload and name.startswith("layer.")
    )


def slab_of(size: int) -> tuple[int, int]:
    """Return the size of a slab, a power of two as torch's allocator of pinned memory hands out, and its parts.

    >>> slab_of(2**20), slab_of(600)
    ((1048576, 1), (2048, 3))
    """
    slab = 1 << max(0, size - 1).bit_length()
    while slab % size > slab // _SPARE:
        slab *= 2
    return slab, slab // size


@dataclass(frozen=True, slots=True, kw_only=True)
class _LyingTensor:
    """A tensor as it lies in one of several memories."""

    memory: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, memories: Sequence[_Memory]) -> torch.Tensor:
        """Return the tensor in these memories."""
        storage = memories[self.memory].untyped_storage()
        like = torch.empty(0, dtype=self.dtype, device=storage.device)
        return like.set_(storage, self.offset, self.size, self.stride)


@dataclass(slots=True, kw_only=True)
class _Resting:
    """What a block keeps of a micro-batch, while it is in host memory."""

    order: tuple[str, ...]  # names of all values
    stays: Values  # what is no memory of its own: counts of rows, weights, inputs
    views: Mapping[str, _LyingTensor]
    memories: Sequence[_Memory]  # of the host
    copied: Any = None  # the event after which the host has them
    here: Sequence[_Memory] | None = None  # on the device again, or still
    arrived: Any = None  # the event after which the device has them

    @property
    def num_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(memory.nbytes for memory in self.memories)


@dataclass(slots=True)
class HostMemory:
    """The host memory of one rank; ``staging`` is the device of its tensors: the host, unless they have no memory."""

    device: torch.device
    staging: torch.device
    most_bytes: int = 0  # that lay here at once
    _resting: dict[Key, _Resting] = field(default_factory=dict[Key, _Resting])
    _leaving: tuple[_Resting, Sequence[_Memory]] | None = None  # whose memories on the device are being copied
    _spare: dict[int, list[tuple[_Memory, Any]]] = field(default_factory=dict[int, list[tuple[_Memory, Any]]])
    _streams: dict[str, Any] = field(default_factory=dict[str, Any])

    def put(self, key: Key, values: Values, remains: Collection[StorageWeakRef]) -> None:
        """Begin to copy to the host what a block keeps, but for memories that remain on the device anyway."""
        self.settle()
        memories, numbers, views, stays = (
            list[_Memory](),
            dict[StorageWeakRef, int](),
            dict[str, _LyingTensor](),
            Values(),
        )
        for name, value in values.items():
            if (
                not isinstance(value, torch.Tensor)
                or not value.numel()
                or is_counted(name)
                or memory_of(value) in remains
            ):
                stays[name] = value
                continue
            number = numbers.setdefault(memory_of(value), len(memories))
            if number == len(memories):
                memories.append(_bytes_of(value))
            views[name] = _LyingTensor(
                memory=number,
                dtype=value.dtype,
                size=value.size(),
                stride=value.stride(),
                offset=int(value.storage_offset()),
            )
        order = tuple(values)
        with self._beside("out") as stream:
            resting = _Resting(order=order, stays=stays, views=views, memories=[*map(self._host_copy, memories)])
            if stream is not None:
                resting.copied = stream.record_event()
                self._leaving = resting, memories
        self._resting[key] = resting
        self.most_bytes = max(self.most_bytes, sum(kept.num_bytes for kept in self._resting.values()))

    def fetch(self, key: Key) -> None:
        """Begin to copy back what a block keeps, if it lies here; what has not left the device is there already."""
        resting = self._resting.get(key)
        if resting is None or resting.here is not None:
            return
        if self._leaving and self._leaving[0] is resting:
            resting.here = self._leaving[1]
            return
        if self._leaving and self._leaving[0].copied.query():
            self._leaving = None
        resting.here = [memory.new_empty(memory.nbytes, device=self.device) for memory in resting.memories]
        with self._beside("back", resting.copied) as stream:
            for memory, on_host in zip(resting.here, resting.memories, strict=True):
                memory.copy_(on_host, non_blocking=stream is not None)
            resting.arrived = stream.record_event() if stream is not None else None

    def take(self, key: Key) -> Values:
        """Return what a block keeps, on the device; the host forgets it."""
        self.fetch(key)
        resting = self._resting.pop(key)
        assert resting.here is not None, "it was fetched"
        if resting.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(resting.arrived)
        free = resting.arrived or resting.copied
        for memory in resting.memories:
            self._spare.setdefault(memory.nbytes, []).append((memory, free))
        tensors = {name: view.of(resting.here) for name, view in resting.views.items()}
        return {name: tensors[name] if name in tensors else resting.stays[name] for name in resting.order}

    def settle(self) -> None:
        """Let the device wait until the last block is copied, and give its memory back."""
        if self._leaving:
            torch.cuda.current_stream(self.device).wait_event(self._leaving[0].copied)
            self._leaving = None

    @contextmanager
    def _beside(self, way: str, after: Any = None) -> Iterator[Any]:
        """Begin what follows on a stream of a GPU's own, after all that was begun so far; elsewhere yield None."""
        if self.device.type != _GPU:
            yield None
            return
        if way not in self._streams:
            self._streams[way] = torch.cuda.Stream(self.device)
        stream = self._streams[way]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield stream

    def _host_copy(self, memory: _Memory) -> _Memory:
        """Copy a memory to a spare one of the host, or to a new one."""
        spare = self._spare.setdefault(memory.nbytes, [])
        if not spare:
            spare += [(part, None) for part in self._new(memory.nbytes)]
        on_host, free = spare.pop()
        if free is not None:
            torch.cuda.current_stream(self.device).wait_event(free)  # which is the stream of copies here
        return on_host.copy_(memory, non_blocking=self.device.type == _GPU)

    def _new(self, size: int) -> Sequence[_Memory]:
        """Return new memories of the host of this size, pinned where a GPU reads them."""
        pins = self.device.type == _GPU
        slab, count = slab_of(size) if pins else (size, 1)
        whole = torch.empty(slab, dtype=torch.uint8, device=self.staging, pin_memory=pins)
        return whole[: count * size].split(size)


def _bytes_of(tensor: torch.Tensor) -> _Memory:
    """Return all bytes of the memory in which a tensor lies."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
