"""The functions that compute operations on one rank: made once per operation, called for every micro-batch."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any

import torch

from autoshard.engine.torch.formats import Formats
from autoshard.errors import InputError
from autoshard.graph.kinds.attention import Rotary
from autoshard.graph.kinds.indexing import document_positions
from autoshard.graph.op import Call, Dims, OpKind
from autoshard.plan.tables import missing_kernel

Kernel = Callable[..., tuple[torch.Tensor, ...]]
Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and sines
_MOST_ANGLES = 8  # micro-batches in flight share their positions, so few are ever needed


@dataclass(frozen=True, slots=True)
class Rotations:
    """Tables of the angles of the first positions, and the last look-up, by the memory of its positions."""

    angles: dict[object, tuple[Angles, Sequence[torch.Tensor]]] = field(default_factory=dict)
    tables: dict[object, Angles] = field(default_factory=dict)

    def of(self, kind: Rotary, where: Sequence[torch.Tensor], head_dim: int, like: torch.Tensor) -> Angles:
        """Return cosines, and the sines that multiply the other half, formatted like ``like``: [position, half, pair].

        ``where`` holds positions; if documents do not see each other, also where each token's document starts. Then
        they are counted from there: [batch, position, half, pair]. Both halves have the same cosines.
        """
        turning = (kind.fraction, kind.theta, kind.scaling, head_dim, like.dtype)
        key = (turning, *((tensor.data_ptr(), tensor.shape) for tensor in where))
        if key not in self.angles:
            if len(self.angles) >= _MOST_ANGLES:
                self.angles.pop(next(iter(self.angles)))
            index: torch.Tensor = document_positions(*where)
            count = 1 << int(index.max()).bit_length() if index.numel() else 1  # few tables serve all documents
            if (turning, count) not in self.tables:
                angles = torch.arange(count).double()[:, None] * torch.from_numpy(kind.frequencies(head_dim))
                sines = torch.stack([-angles.sin(), angles.sin()], 1)
                self.tables[turning, count] = angles.cos().unsqueeze(1).to(like), sines.to(like)
            cos, sin = self.tables[turning, count]
            there = index.to(like.device)
            self.angles[key] = (cos[there], sin[there]), where  # kept, so are the addresses
        return self.angles[key][0]

    def forget(self, tensors: Collection[int]) -> None:
        """Forget the look-ups whose results are among tensors, by their ids; the next of these look up again."""
        for key, (found, _) in [*self.angles.items()]:
            if any(id(tensor) in tensors for tensor in found):
                del self.angles[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelContext:
    """The settings of a kernel beside its operation: formats, and the bounds of the rank's part of each cut dim."""

    formats: Formats
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    rotations: Rotations = field(default_factory=Rotations)
    packed: bool = False  # whether experts have rows one after the other, [1, rows, ...], and no empty slots
    smaller: tuple[torch.dtype, torch.dtype] | None = None  # formats of the factors of a product, where not their own


@singledispatch
def kernel_of(kind: OpKind, call: Call, context: KernelContext) -> Kernel:
    """Return the function that computes an operation; a user's kind brings it (``torch_kernel``)."""
    kernel = kind.torch_kernel(call)
    if kernel is None:
        raise InputError.of("kernels", missing_kernel(kind, "torch"))
    return kernel


def register_kernels(kernels: Mapping[type[OpKind], Callable[[Any, Call, KernelContext], Kernel]]) -> None:
    """Let ``kernel_of`` answer for these kinds."""
    for kind, make in kernels.items():
        kernel_of.register(kind, make)


def shape_of(call: Call, dims: Sequence[str]) -> tuple[int, ...]:
    """Return the local sizes of some dims."""
    return tuple(call.sizes[dim] for dim in dims)


def laid_out(dims: Dims, target: Dims) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that views a tensor along other dims, with axes of length 1 for the dims that it lacks.

    >>> laid_out(("seq", "batch"), ("batch", "seq", "hidden"))(torch.zeros(3, 2)).shape
    torch.Size([2, 3, 1])
    """
    order = [dims.index(dim) for dim in target if dim in dims]
    missing = [axis for axis, dim in enumerate(target) if dim not in dims]
    plain = order == list(range(len(dims)))

    def lay(tensor: torch.Tensor) -> torch.Tensor:
        view = tensor if plain else tensor.permute(order)
        for axis in missing:
            view = view.unsqueeze(axis)
        return view

    return lay
