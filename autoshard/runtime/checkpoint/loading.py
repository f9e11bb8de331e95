"""Loading: boxes of a checkpoint are read into the pieces of a rank's state.

A box is read whole, because its checksum is over all of it. Under the plan that saved it every box is one rank's; under
another one several ranks need parts of it, each replica and often each rank of tp. Where the network is faster than
storage one of them reads it and sends it to the others, so that storage gives every byte once.
"""

import socket
import zlib
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autoshard.cost.storage import storage_of
from autoshard.plan.plan import Plan
from autoshard.run.folder import folder_of
from autoshard.run.placement import StatePiece
from autoshard.runtime.checkpoint.agreed import from_all_ranks
from autoshard.runtime.checkpoint.files import TYPES, CheckpointIndex, StoredBox, overlap
from autoshard.runtime.checkpoint.shelf import Shelf
from autoshard.runtime.checkpoint.storage import Storage, StorageError, persistent
from autoshard.units import format_bytes, format_seconds

_AHEAD = 2  # boxes of up to 64 MiB that a rank reads while it sends others
_GAIN = 1.1  # how many times faster sharing must be by its figures: below that, no rank should wait for another
_Targets = list[tuple[torch.Tensor, tuple[slice, ...]]]  # memory, and the part of a box for it


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRates:
    """How fast storage gives bytes to all ranks together, and how fast all of them send to each other."""

    storage_bytes_per_s: float
    network_bytes_per_s: float

    @classmethod
    def of(cls, plan: Plan) -> "LoadRates":
        """Return the figures of a plan's cluster."""
        link = plan.cluster.links[-1]
        network = link.bandwidth_bytes_per_s * plan.cluster.num_ranks / link.ranks_per_port
        return cls(storage_bytes_per_s=storage_of(plan.cluster).bytes_per_s, network_bytes_per_s=network)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Which boxes every rank needs, by their numbers in the order of files, and on which host it is."""

    num_bytes: tuple[int, ...]  # of every box
    ranks: tuple[frozenset[int], ...]  # of every rank, the boxes that it needs
    hosts: tuple[str, ...]  # of every rank; ranks of a host read a file of a local system once, then its memory

    @property
    def read_bytes(self) -> int:
        """Bytes that storage gives if every rank reads what it needs."""
        boxes_of_host: dict[str, set[int]] = defaultdict(set)
        for host, boxes in zip(self.hosts, self.ranks, strict=True):
            boxes_of_host[host] |= boxes
        return sum(self.num_bytes[box] for boxes in boxes_of_host.values() for box in boxes)

    @property
    def once_bytes(self) -> int:
        """Bytes that storage gives if every box is read once."""
        return sum(self.num_bytes[box] for box in frozenset[int]().union(*self.ranks))

    @property
    def sent_bytes(self) -> int:
        """Bytes that ranks send to each other if every box is read once."""
        return sum(self.num_bytes[box] for boxes in self.ranks for box in boxes) - self.once_bytes

    def readers(self) -> Mapping[int, int]:
        """Return for every box which rank reads it: of those that need it, the one with the least to read so far."""
        readers, load = dict[int, int](), [0] * len(self.ranks)
        for box, size in enumerate(self.num_bytes):
            if needing := [rank for rank, boxes in enumerate(self.ranks) if box in boxes]:
                readers[box] = min(needing, key=lambda rank: (load[rank], rank))
                load[readers[box]] += size
        return readers

    def gain(self, rates: LoadRates) -> tuple[float, float]:
        """Return two durations: every rank reads all its boxes itself; each box is read once and sent."""
        shared_s = self.once_bytes / rates.storage_bytes_per_s + self.sent_bytes / rates.network_bytes_per_s
        return self.read_bytes / rates.storage_bytes_per_s, shared_s


def load_checkpoint(
    shelf: Shelf, index: CheckpointIndex, pieces: Sequence[StatePiece], group: Any, rates: LoadRates
) -> str:
    """Fill pieces from a checkpoint; every rank calls this, and it fails on all of them or on none.

    Return a note if boxes were read once and sent on.
    """
    loading = _Loading(shelf.storage, index, pieces)
    needs = loading.needs(group)
    each_s, shared_s = needs.gain(rates)
    if each_s <= _GAIN * shared_s:
        from_all_ranks(loading.read_all, group)
        return ""
    from_all_ranks(lambda: loading.share(needs, group), group)
    read, once, sent = (format_bytes(size) for size in (needs.read_bytes, needs.once_bytes, needs.sent_bytes))
    times = f"{format_seconds(shared_s)} instead of {format_seconds(each_s)}"
    return f"storage gave {once} instead of {read}, and ranks sent each other {sent} of them (predicted: {times})"


class _Loading:
    """The boxes of a checkpoint that one rank needs, and the memory into which they are copied."""

    def __init__(self, storage: Storage, index: CheckpointIndex, pieces: Sequence[StatePiece]) -> None:
        self._storage, self._folder = storage, folder_of(index.state.step)
        named_boxes = [(name, box) for name, tensor in index.tensors.items() for box in tensor.boxes]
        self._boxes = sorted(named_boxes, key=lambda entry: (entry[1].file, entry[1].start, entry[0]))
        self._dtypes = {name: TYPES[tensor.dtype] for name, tensor in index.tensors.items()}
        targets: dict[tuple[str, StoredBox], _Targets] = defaultdict(list)
        for piece in pieces:
            for box in index.tensors[piece.name].boxes if piece.reads else ():
                if both := overlap(box.place, (piece.offsets, tuple(piece.memory.shape))):
                    targets[piece.name, box].append((piece.memory[both[1]], both[0]))
        self._wanted = {number: targets[entry] for number, entry in enumerate(self._boxes) if entry in targets}

    def needs(self, group: Any) -> Needs:
        """Gather from all ranks which boxes each of them needs."""
        everyone: list[Any] = [None] * dist.get_world_size()
        host = socket.gethostname() if self._storage.is_local else str(dist.get_rank())
        dist.all_gather_object(everyone, (host, np.array(list(self._wanted), dtype=np.int32)), group=group)
        return Needs(
            num_bytes=tuple(box.num_bytes for _, box in self._boxes),
            ranks=tuple(frozenset(boxes.tolist()) for _, boxes in everyone),
            hosts=tuple(host for host, _ in everyone),
        )

    def read_all(self) -> None:
        """Read what this rank needs, file by file, in the order of the file."""
        files: dict[str, list[int]] = defaultdict(list)
        for number in self._wanted:
            files[self._boxes[number][1].file].append(number)

        def read(file: str, numbers: Sequence[int]) -> None:
            with self._storage.reading(f"{self._folder}/{file}") as opened:
                for number in numbers:
                    self._take(number, self._read(opened, number))

        for file, numbers in files.items():
            persistent(partial(read, file, numbers))

    def share(self, needs: Needs, group: Any) -> None:
        """Go through the boxes in one order on all ranks: read and send, or receive, and take the parts wanted.

        Whatever fails on a rank, it goes on to the end, since others wait for it, and raises then. A reader that fails
        says so to those that wait, for this box and all later ones.
        """
        readers, rank, failures = needs.readers(), dist.get_rank(), list[Exception]()
        numbers_of_rank = [number for number in self._wanted if readers[number] == rank]
        with ThreadPoolExecutor(1) as pool:
            ahead = self._ahead(pool, numbers_of_rank, failures)
            for number in self._wanted:
                if readers[number] != rank:
                    numbers = self._received(number, readers[number], group)
                else:
                    numbers = next(ahead)
                    receivers = [
                        receiver for receiver, boxes in enumerate(needs.ranks) if number in boxes and receiver != rank
                    ]
                    _send(numbers, receivers, group)
                try:
                    if numbers is not None:
                        self._take(number, numbers)
                except Exception as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    def _ahead(
        self, pool: ThreadPoolExecutor, numbers: Sequence[int], failures: list[Exception]
    ) -> Iterator[torch.Tensor | None]:
        """Yield boxes that a thread reads ahead; after the first failure, which is noted, yield None for each."""
        rest, reading = iter(numbers), deque[Future[torch.Tensor]]()

        def begin() -> None:
            for number in islice(rest, 1):
                reading.append(pool.submit(persistent, partial(self._read_alone, number)))

        for _ in range(_AHEAD):
            begin()
        failed = False
        for _ in numbers:
            box = None
            if not failed:
                try:
                    box = reading.popleft().result()
                    begin()
                except Exception as error:
                    failed = True
                    failures.append(error)
            yield box

    def _received(self, number: int, reader: int, group: Any) -> torch.Tensor | None:
        """Return a box that another rank has read; None if it could not, of which that rank makes a failure of all."""
        whole = torch.zeros(1, dtype=torch.int64)
        dist.recv(whole, reader, group=group)
        if not whole:
            return None
        numbers = self._empty(number)
        dist.recv(_raw(numbers), reader, group=group)
        return numbers

    def _take(self, number: int, numbers: torch.Tensor) -> None:
        for memory, part in self._wanted[number]:
            memory.copy_(numbers[part])

    def _read_alone(self, number: int) -> torch.Tensor:
        with self._storage.reading(f"{self._folder}/{self._boxes[number][1].file}") as opened:
            return self._read(opened, number)

    def _read(self, opened: Any, number: int) -> torch.Tensor:
        """Read a box, all of it because its checksum is over all of it."""
        name, box = self._boxes[number]
        path, numbers = self._storage.path(f"{self._folder}/{box.file}"), self._empty(number)
        raw = _raw(numbers).numpy().data
        opened.seek(box.start)
        count = opened.readinto(raw)
        if count != box.num_bytes or raw.nbytes != box.num_bytes:
            raise StorageError(f"{path}: ends too early, at {box.start + count} bytes")
        if zlib.crc32(raw) != box.crc32:
            raise StorageError(f"{path}: the checksum of {name} is another than when it was saved")
        return numbers

    def _empty(self, number: int) -> torch.Tensor:
        name, box = self._boxes[number]
        return torch.empty(box.lengths, dtype=self._dtypes[name])


def _send(numbers: torch.Tensor | None, ranks: Sequence[int], group: Any) -> None:
    """Send a box, or that there is none."""
    messages = [torch.tensor([int(numbers is not None)]), *([] if numbers is None else [_raw(numbers)])]
    for message in messages:
        for work in [dist.isend(message, rank, group=group) for rank in ranks]:
            if work:
                work.wait()


def _raw(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.reshape(-1).view(torch.uint8)
