"""What computes one operation on one rank: made once per operation, called for every micro-batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatch

import numpy as np
import torch

from autoshard.engine.torch.formats import Formats
from autoshard.engine.torch.kernels.rotations import Rotations
from autoshard.graph.op import Call, Dims, OpKind

Kernel = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """What a rank's kernels know beside the operation: formats, and which part of a cut dim the rank holds."""

    formats: Formats
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    rotations: Rotations = field(default_factory=Rotations)


@singledispatch
def kernel(kind: OpKind, call: Call, local: Local) -> Kernel:
    """Return what computes an operation; a kind that nobody has written for torch is evaluated by numpy."""

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arrays = kind.evaluate(call, *(as_array(tensor) for tensor in tensors))
        pairs = zip(arrays, call.outputs, strict=True)
        return tuple(local.formats.tensor(array, output.dtype) for array, output in pairs)

    return run


def as_array(tensor: torch.Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    """Return a tensor's numbers as numpy evaluates them: exactness comes before width."""
    found = tensor.detach().cpu()
    return (found.double() if found.is_floating_point() else found).numpy()


def shape_of(call: Call, dims: Sequence[str]) -> tuple[int, ...]:
    """Return the local sizes of some dims."""
    return tuple(call.sizes[dim] for dim in dims)


def laid_out(dims: Dims, target: Dims) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what lays a tensor out along other dims, with length-1 axes for the dims it lacks: always a view.

    >>> laid_out(("seq", "batch"), ("batch", "seq", "hidden"))(torch.zeros(3, 2)).shape
    torch.Size([2, 3, 1])
    """
    order = [dims.index(dim) for dim in target if dim in dims]
    missing = [axis for axis, dim in enumerate(target) if dim not in dims]
    plain = order == list(range(len(dims)))

    def lay(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor if plain else tensor.permute(order)
        for axis in missing:
            found = found.unsqueeze(axis)
        return found

    return lay
