"""What is read: tensors in files that are mapped into memory, and what they hold of ours."""

import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoshard.engine.patches import Patch
from autoshard.errors import Fault, InputError
from autoshard.layout.shards import Box

Shapes = Mapping[str, tuple[int, ...]]


class Once:
    """A check that is made when it is first asked for; threads that ask meanwhile wait."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check, self._lock, self._done = check, threading.Lock(), False

    def __call__(self) -> None:
        """Make the check, unless it was made."""
        with self._lock:
            if not self._done:
                self._check()
                self._done = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """A tensor in a file; ``read`` returns it as a view of the file, ``check`` refuses it if it is damaged."""

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    check: Once | None = None
    odd: str = ""  # its format, where that holds no fractions
    patches: tuple[Patch, ...] = ()

    def holding(self, patches: Sequence[Patch]) -> "Stored":
        """Return the same with what it holds of ours."""
        return replace(self, patches=tuple(patches))


class WeightSource:
    """All that is stored of a model: every number of ours once, however many files repeat it."""

    def __init__(self, stored: Iterable[Stored], wanted: Shapes, where: str, state: Any = None) -> None:
        """Refuse a source in which numbers of tensors of these shapes are missing."""
        self.wanted, self.state = wanted, state  # ``state`` is that of a run, where a checkpoint is read
        self._boxes: dict[str, dict[Box, tuple[Stored, Patch]]] = {name: {} for name in wanted}
        for one in stored:
            for patch in one.patches:
                self._boxes[patch.tensor].setdefault(patch.box, (one, patch))
        faults = [Fault(where=where, message=text) for text in self._missing()]
        if faults:
            raise InputError(faults)
        self.dtypes = {name: next(iter(boxes.values()))[0].dtype for name, boxes in self._boxes.items()}
        self.num_bytes = sum(math.prod(shape) * self.dtypes[name].itemsize for name, shape in wanted.items())
        self.stored = list({id(one): one for boxes in self._boxes.values() for one, _ in boxes.values()}.values())

    def fill(self, memory: torch.Tensor, tensor: str, offsets: Sequence[int]) -> None:
        """Copy a box of one of our tensors into memory of its shape, in the format of the memory."""
        wanted = tuple(offsets), tuple(memory.shape)
        for box, (stored, patch) in self._boxes[tensor].items():
            both = _common(box, wanted)
            if both is None:
                continue
            if stored.check:
                stored.check()
            theirs, mine = both
            memory[mine].copy_(patch.view(stored.read())[theirs])

    def straight(self, wanted: Patch, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return a file's own memory, where it is just what is wanted of a stored tensor of this shape."""
        for box, (stored, patch) in self._boxes[wanted.tensor].items():
            both = _common(box, wanted.box)
            if both is None:
                continue
            view = patch.view(stored.read())[both[0]]
            if view.numel() != math.prod(shape) or view.dtype != dtype or not view.is_contiguous():
                return None
            if not wanted.view(torch.empty(shape, device="meta")).is_contiguous():
                return None
            if stored.check:
                stored.check()
            return view.view(shape)
        return None

    def _missing(self) -> Iterator[str]:
        for name, shape in self.wanted.items():
            found = sum(math.prod(lengths) for _, lengths in self._boxes[name])
            if found != math.prod(shape):
                yield f"{name}: {math.prod(shape) - found} of {math.prod(shape)} numbers are missing"


def _common(box: Box, wanted: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where two boxes of a tensor meet, as seen from each."""
    theirs: list[slice] = []
    mine: list[slice] = []
    for at, length, begin, size in zip(*box, *wanted, strict=True):
        low, high = max(at, begin), min(at + length, begin + size)
        if low >= high:
            return None
        theirs.append(slice(low - at, high - at))
        mine.append(slice(low - begin, high - begin))
    return tuple(theirs), tuple(mine)


def shape_faults(found: Mapping[str, Stored], wanted: Shapes, needless: Collection[str], where: str) -> Iterator[Fault]:
    """Yield what is missing, what has another shape, what holds no fractions, and what nobody knows."""
    for name, shape in wanted.items():
        one = found.get(name)
        if one is None:
            yield Fault(where=f"{where}: {name}", message="missing")
        elif one.shape != shape:
            message = f"has shape {one.shape}, the model asks for {shape}"
            yield Fault(where=f"{one.file}: {name}", message=message)
        elif one.odd:
            message = f"holds {one.odd}, and only F64, F32, F16, BF16 can be read"
            yield Fault(where=f"{one.file}: {name}", message=message)
    for name in found.keys() - wanted.keys():
        if not name.endswith(tuple(needless)):
            yield Fault(where=f"{found[name].file}: {name}", message="is no tensor of this model")
